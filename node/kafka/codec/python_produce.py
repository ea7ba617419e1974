"""Produce requests (v3-13) parsed in place, and their responses written by hand.

A batch is handed on as (start, end) in the connection's buffer; no byte of it is copied. Layout:
ProduceRequest.json and ProduceResponse.json of Apache Kafka 4.3; flexible from v9, topic ids from
v13.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from mmap import mmap
from typing import Any, Final, NamedTuple

from kept.client.protocol.wire import uvarint
from kept.node.kafka.codec.endpoints import Endpoint, endpoint_tags
from kept.node.kafka.codec.request_reader import RequestReader
from kept.steps import Steps, finished
from kept.storage.errors import CorruptMessage

FLEXIBLE: Final = 9
TOPIC_IDS: Final = 13
MIN_VERSION: Final = 3
MAX_VERSION: Final = 13

ZSTD_SINCE: Final = 7
"""Produce batches in zstd are refused before (KIP-110): their clients could not read them."""

IN_THREAD_BYTES: Final = 256 * 1024
"""Compressed batches above this are checked in a thread: inflating 1 MiB holds the loop for ms."""
LONGEST_SHORT_NAME: Final = 126
"""Topic names whose length is one byte as a varint: what the short encoder writes."""

_PRODUCE: Final = 0
_HEADER: Final = struct.Struct(">hhih").unpack_from
_BATCH_HEADER_BYTES: Final = 61
_ATTRIBUTES_AT: Final = 22
_COMPRESSED: Final = 7
_ZSTD: Final = 4
_TRANSACTIONAL: Final = 16
_SIZE_BYTES: Final = 4
_NO_TAGS: Final = 3
"""Bytes after the records of the only batch: no tags of partition, topic, request."""
_I: Final = struct.Struct(">i").unpack_from
_PARTITION: Final = struct.Struct(">ihqqq").pack
"""partition, error_code, base_offset, log_append_time, log_start_offset"""


class PartitionData(NamedTuple):
    """One partition's batch: ``buffer[start:end]``; start is -1 where records are null."""

    partition: int
    start: int
    end: int


class ProduceRequest(NamedTuple):
    """A parsed request. ``topics`` pairs the name's UTF-8 (v13: the id's 16 bytes) with
    partitions.
    """

    transactional_id: bytes | None
    acks: int
    timeout_ms: int
    topics: list[tuple[bytes, list[PartitionData]]]


PlainRequest = tuple[int, int, int, int, bytes, int, int, int]
"""A request of one plain batch: version, correlation id, acks (1 or -1), timeout_ms, topic (as in
:class:`ProduceRequest`), partition, start and end of the batch in the buffer."""


class PartitionResult(NamedTuple):
    """What became of one partition's batch."""

    partition: int
    error_code: int
    base_offset: int = -1
    log_append_time: int = -1
    log_start_offset: int = -1
    record_errors: tuple[tuple[int, str], ...] = ()
    error_message: str | None = None
    current_leader: tuple[int, int] | None = None
    """(leader id, leader epoch), where it is known to be another (KIP-951)."""


def parse(buffer: memoryview, position: int, version: int) -> ProduceRequest:
    """The request whose body starts at ``position`` and ends with the buffer.

    Raises CorruptMessage for anything that is not exactly one request.
    """
    try:
        return _parse(RequestReader(buffer, position, version >= FLEXIBLE), version)
    except (struct.error, IndexError) as error:
        raise CorruptMessage(f"Produce v{version} ends early") from error


def parse_plain(
    buffer: bytearray | memoryview | mmap, start: int, stop: int
) -> PlainRequest | None:
    """The request in ``buffer[start:stop]``, its header included, if it is of the common kind.

    That is: a Produce request that this codec knows, acks 1 or -1, of one batch that belongs to no
    transaction and is not checked in a thread. None for anything else, wrong or right: the long way
    serves, or refuses, it.
    """
    if stop - start < 10:
        return None
    key, version, correlation_id, client = _HEADER(buffer, start)
    position = start + 10 + max(client, 0)
    if key != _PRODUCE or not MIN_VERSION <= version <= MAX_VERSION or position >= stop:
        return None
    flexible = version >= FLEXIBLE
    if flexible and buffer[position]:
        return None
    try:
        request = parse(memoryview(buffer)[:stop], position + flexible, version)
    except CorruptMessage:
        return None
    if request.transactional_id is not None or request.acks not in (-1, 1):
        return None
    if len(request.topics) != 1 or len(request.topics[0][1]) != 1:
        return None
    name, ((index, at, end),) = request.topics[0]
    size = end - at
    if at < 0 or size < _BATCH_HEADER_BYTES or stop - end != (_NO_TAGS if flexible else 0):
        return None
    attributes = buffer[at + _ATTRIBUTES_AT]
    if attributes & _TRANSACTIONAL or (attributes & _COMPRESSED and size > IN_THREAD_BYTES):
        return None
    if version < ZSTD_SINCE and attributes & _COMPRESSED == _ZSTD:
        return None
    if not 0 < len(name) <= LONGEST_SHORT_NAME:
        return None
    return version, correlation_id, request.acks, request.timeout_ms, name, index, at, end


def parse_run(  # noqa: PLR0917
    buffer: bytearray | mmap, start: int, end: int, frames: int, size: int, longest: int
) -> list[PlainRequest]:
    """Whole frames from ``buffer[start:end]`` on that :func:`parse_plain` reads, one after another.

    At most ``frames``, none longer than ``longest`` bytes, and none after ``size`` bytes; the first
    of another kind ends the run.
    """
    found: list[PlainRequest] = []
    stop_at = start + size
    while len(found) < frames and start < stop_at and end - start > _SIZE_BYTES:
        (length,) = _I(buffer, start)
        start += _SIZE_BYTES
        if not 0 <= length <= min(longest, end - start):
            break
        one = parse_plain(buffer, start, start + length)
        if one is None:
            break
        found.append(one)
        start += length
    return found


def is_zstd(batch: memoryview) -> bool:
    """Whether a batch says that its records are compressed by zstd."""
    return len(batch) > _ATTRIBUTES_AT and batch[_ATTRIBUTES_AT] & _COMPRESSED == _ZSTD


def frame_end(one: PlainRequest) -> int:
    """Where the frame of a request that :func:`parse_plain` read ends in its buffer."""
    return one[7] + _NO_TAGS if one[0] >= FLEXIBLE else one[7]


def _parse(reader: RequestReader, version: int) -> ProduceRequest:
    size = reader.length(wide=False)
    if size < -1:
        raise CorruptMessage("a string of negative length")
    transactional_id = None if size < 0 else reader.take(size)
    acks, timeout_ms = reader.int16(), reader.int32()
    topics = []
    for _ in range(_counted(reader)):
        name = reader.take(16 if version >= TOPIC_IDS else reader.length(wide=False))
        partitions = []
        for _ in range(_counted(reader)):
            index, size = reader.int32(), reader.length(wide=True)
            start = end = -1
            if size >= 0:
                start = reader.position
                reader.skip(size)
                end = reader.position
            partitions.append(PartitionData(index, start, end))
            reader.skip_tags()
        reader.skip_tags()
        topics.append((name, partitions))
    reader.skip_tags()
    reader.expect_end("Produce")
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _counted(reader: RequestReader) -> int:
    """The length of an array, which Produce does not let be null."""
    count = reader.count()
    if count < 0:
        raise CorruptMessage("an array that is null")
    return count


def encode(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionResult]]],
    endpoints: Sequence[Endpoint] = (),
) -> bytes:
    """A whole response frame."""
    return finished(encode_steps(version, correlation_id, topics, endpoints))


def encode_steps(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionResult]]],
    endpoints: Sequence[Endpoint] = (),
) -> Steps[bytes]:
    """:func:`encode` for whoever has other things to do: yields after each 64 results."""
    out: list[bytes] = []
    flexible = version >= FLEXIBLE
    out.append(uvarint(len(topics) + 1) if flexible else struct.pack(">i", len(topics)))
    for name, results in topics:
        if version >= TOPIC_IDS:
            out.append(name)
        elif flexible:
            out.append(uvarint(len(name) + 1) + name)
        else:
            out.append(struct.pack(">h", len(name)) + name)
        out.append(uvarint(len(results) + 1) if flexible else struct.pack(">i", len(results)))
        for place, result in enumerate(results):
            if place & 63 == 63:
                yield
            fixed = _PARTITION(*result[:5])
            out.append(fixed if version >= 5 else fixed[:22])
            if version >= 8:
                if result.record_errors or result.error_message is not None:
                    out.append(_errors(result, flexible))
                else:
                    out.append(b"\x01\x00" if flexible else b"\0\0\0\0\xff\xff")
            if result.current_leader is not None:
                out.append(b"\x01\x00\x09" + struct.pack(">iib", *result.current_leader, 0))
            elif flexible:
                out.append(b"\0")
        if flexible:
            out.append(b"\0")
        yield
    out.append(b"\0\0\0\0" + (endpoint_tags(endpoints) if flexible else b""))
    body = b"".join(out)
    if flexible:
        return struct.pack(">iib", len(body) + 5, correlation_id, 0) + body
    return struct.pack(">ii", len(body) + 4, correlation_id) + body


def _errors(result: PartitionResult, flexible: bool) -> bytes:
    """record_errors and error_message."""
    out = bytearray()
    count = len(result.record_errors)
    out += uvarint(count + 1) if flexible else struct.pack(">i", count)
    for index, message in result.record_errors:
        out += struct.pack(">i", index) + _string(message, flexible)
        if flexible:
            out += b"\0"
    out += _string(result.error_message, flexible)
    return bytes(out)


def _string(text: str | None, flexible: bool) -> bytes:
    if text is None:
        return b"\0" if flexible else b"\xff\xff"
    data = text.encode()[:32767]
    return (uvarint(len(data) + 1) if flexible else struct.pack(">h", len(data))) + data


def encode_run(entries: Sequence[tuple[PlainRequest, Any, Sequence[int]]]) -> bytes:
    """The frames of responses to requests that :func:`parse_plain` read, one after another.

    An entry is (request, anything, (base offset, last offset, append time, log start offset, ...)).
    """
    frames = []
    for one, _, info in entries:
        result = PartitionResult(one[5], 0, info[0], info[2], info[3])
        frames.append(encode(one[0], one[1], [(one[4], [result])]))
    return b"".join(frames)


KERNEL: Final = "python"
