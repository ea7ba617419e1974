"""Produce requests (v3-13) parsed in place, and their responses written by hand.

A batch is handed on as (start, end) in the connection's buffer; no byte of it is copied. Layout:
ProduceRequest.json and ProduceResponse.json of Apache Kafka 4.3; flexible from v9, topic ids from
v13.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kept.node.kafka.codec.wire import (
    Endpoint,
    RequestReader,
    encode_count,
    encode_name,
    encode_text,
    endpoint_tags,
)
from kept.steps import Steps
from kept.storage.errors import CorruptMessage

FLEXIBLE: Final = 9
TOPIC_IDS: Final = 13
MIN_VERSION: Final = 3
MAX_VERSION: Final = 13

ZSTD_SINCE: Final = 7
"""Produce batches in zstd are refused before (KIP-110): their clients could not read them."""

IN_THREAD_BYTES: Final = 256 * 1024
"""Compressed batches above this are checked in a thread: inflating 1 MiB holds the loop for ms."""

_ATTRIBUTES_AT: Final = 22
_COMPRESSED: Final = 7
_ZSTD: Final = 4
_NO_TAGS: Final = 3
"""Bytes after the records of the only batch: no tags of partition, topic, request."""
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
:class:`ProduceRequest`), partition, start and end of the batch in the buffer. The kernel makes
plain tuples, which are unpacked where a field is needed."""


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


def is_zstd(batch: memoryview) -> bool:
    """Whether a batch says that its records are compressed by zstd."""
    return len(batch) > _ATTRIBUTES_AT and batch[_ATTRIBUTES_AT] & _COMPRESSED == _ZSTD


def frame_end(request: PlainRequest) -> int:
    """Where the frame of a request of one plain batch ends in its buffer."""
    version, _, _, _, _, _, _, end = request
    return end + _NO_TAGS if version >= FLEXIBLE else end


def _parse(reader: RequestReader, version: int) -> ProduceRequest:
    size = reader.length(wide=False)
    if size < -1:
        raise CorruptMessage("a string of negative length")
    transactional_id = None if size < 0 else reader.read(size)
    acks, timeout_ms = reader.int16(), reader.int32()
    topics = []
    for _ in range(_counted(reader)):
        name = reader.read(16 if version >= TOPIC_IDS else reader.length(wide=False))
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


def encode_steps(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionResult]]],
    endpoints: Sequence[Endpoint] = (),
    throttle_ms: int = 0,
) -> Steps[bytes]:
    """A whole response frame. Yields after each 64 results and after each topic."""
    out: list[bytes] = []
    flexible = version >= FLEXIBLE
    out.append(encode_count(len(topics), flexible))
    for name, results in topics:
        out.append(name if version >= TOPIC_IDS else encode_name(name, flexible))
        out.append(encode_count(len(results), flexible))
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
    out.append(struct.pack(">i", throttle_ms) + (endpoint_tags(endpoints) if flexible else b""))
    body = b"".join(out)
    if flexible:
        return struct.pack(">iib", len(body) + 5, correlation_id, 0) + body
    return struct.pack(">ii", len(body) + 4, correlation_id) + body


def _errors(result: PartitionResult, flexible: bool) -> bytes:
    """record_errors and error_message."""
    out = bytearray(encode_count(len(result.record_errors), flexible))
    for index, message in result.record_errors:
        out += struct.pack(">i", index) + encode_text(message, flexible)
        if flexible:
            out += b"\0"
    return bytes(out) + encode_text(result.error_message, flexible)
