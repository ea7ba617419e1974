"""Fetch requests (v4-18) parsed by hand, and their responses laid out around file slices.

A response is a list of segments, bytes and :class:`FileSlice`: the records themselves are not read
here. Layout: FetchRequest.json and FetchResponse.json of Apache Kafka 4.3; sessions from v7
(KIP-227), flexible from v12, topic ids from v13, replica state as a tag from v15.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kept.client.protocol.wire import tags
from kept.node.kafka.codec.wire import (
    Endpoint,
    RequestReader,
    encode_count,
    encode_name,
    endpoint_tags,
)
from kept.replication.fetch_messages import FetchPartition
from kept.steps import Steps, run_to_end
from kept.storage.disk import FileSlice
from kept.storage.errors import CorruptMessage

SESSIONS: Final = 7
FLEXIBLE: Final = 12
TOPIC_IDS: Final = 13
MIN_VERSION: Final = 4
MAX_VERSION: Final = 18

Segment = bytes | FileSlice

_HEAD: Final = struct.Struct(">iiib").unpack_from
_REPLICA_STATE: Final = struct.Struct(">iq").unpack_from
_SESSION: Final = struct.Struct(">ii").unpack_from
_PARTITION: Final = struct.Struct(">ihqqq").pack
"""partition_index, error_code, high_watermark, last_stable_offset, log_start_offset"""


class FetchRequest(NamedTuple):
    """A parsed request. Topics are named by UTF-8 (v13 on: by the id's 16 bytes)."""

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[tuple[bytes, list[FetchPartition]]]
    forgotten: list[tuple[bytes, list[int]]]
    rack_id: bytes
    broker_epoch: int = -1
    """Of the process that asks as a replica (v15 on), -1: not said."""


class PartitionData(NamedTuple):
    """One partition of a response; ``records`` is whole batches in a file, in memory, or none."""

    partition: int
    error_code: int
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    records: Segment | None = None
    diverging: tuple[int, int] | None = None
    current_leader: tuple[int, int] | None = None
    preferred_replica: int = -1
    """Where to fetch this from instead (KIP-392)."""


def parse(buffer: memoryview, position: int, version: int) -> FetchRequest:
    """The request whose body starts at ``position`` and ends with the buffer.

    Raises CorruptMessage for anything that is not exactly one request.
    """
    try:
        return _parse(RequestReader(buffer, position, version >= FLEXIBLE), version)
    except (struct.error, IndexError) as error:
        raise CorruptMessage(f"Fetch v{version} ends early") from error


def _parse(reader: RequestReader, version: int) -> FetchRequest:
    replica_id = reader.int32() if version < 15 else -1
    max_wait_ms, min_bytes, max_bytes, isolation = _HEAD(reader.data, reader.position)
    reader.position += 13
    session_id, session_epoch = 0, -1
    if version >= SESSIONS:
        session_id, session_epoch = _SESSION(reader.data, reader.position)
        reader.position += 8
    topics = []
    for _ in range(reader.count()):
        name = _topic(reader, version)
        partitions = [_partition(reader, version) for _ in range(reader.count())]
        reader.skip_tags()
        topics.append((name, partitions))
    forgotten = []
    if version >= SESSIONS:
        for _ in range(reader.count()):
            name = _topic(reader, version)
            forgotten.append((name, [reader.int32() for _ in range(reader.count())]))
            reader.skip_tags()
    rack_id = reader.read(max(reader.length(wide=False), 0)) if version >= 11 else b""
    broker_epoch = -1
    if reader.flexible:
        sections, reader.position = tags(reader.data, reader.position)
        for tag, start, _ in sections:
            if tag == 1 and version >= 15:
                replica_id, broker_epoch = _REPLICA_STATE(reader.data, start)
    reader.expect_end("Fetch")
    return FetchRequest(
        replica_id,
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation,
        session_id,
        session_epoch,
        topics,
        forgotten,
        rack_id,
        broker_epoch,
    )


def _topic(reader: RequestReader, version: int) -> bytes:
    return reader.read(16 if version >= TOPIC_IDS else max(reader.length(wide=False), 0))


def _partition(reader: RequestReader, version: int) -> FetchPartition:
    partition = reader.int32()
    current_leader_epoch = reader.int32() if version >= 9 else -1
    fetch_offset = reader.int64()
    last_fetched_epoch = reader.int32() if version >= 12 else -1
    log_start_offset = reader.int64() if version >= 5 else -1
    max_bytes = reader.int32()
    reader.skip_tags()
    return FetchPartition(
        partition,
        fetch_offset,
        max_bytes,
        current_leader_epoch,
        last_fetched_epoch,
        log_start_offset,
    )


def encode(
    version: int,
    correlation_id: int,
    error_code: int,
    session_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionData]]],
) -> list[Segment]:
    """A whole response frame, as segments to send in order; it sends nobody elsewhere: neither a
    preferred replica nor an endpoint is in it.
    """
    return run_to_end(encode_steps(version, correlation_id, error_code, session_id, topics))


def encode_steps(  # noqa: PLR0917
    version: int,
    correlation_id: int,
    error_code: int,
    session_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionData]]],
    endpoints: Sequence[Endpoint] = (),
) -> Steps[list[Segment]]:
    """A whole response frame. Yields after each 16 partitions and after each topic."""
    flexible = version >= FLEXIBLE
    head = bytearray(8)
    if flexible:
        head += b"\0"
    head += b"\0\0\0\0"
    if version >= SESSIONS:
        head += struct.pack(">hi", error_code, session_id)
    head += encode_count(len(topics), flexible)
    segments: list[Segment] = []
    total = 0
    for name, partitions in topics:
        head += name if version >= TOPIC_IDS else encode_name(name, flexible)
        head += encode_count(len(partitions), flexible)
        for place, data in enumerate(partitions):
            if place & 15 == 15:
                yield
            head += _PARTITION(*data[:5]) if version >= 5 else _PARTITION(*data[:5])[:22]
            head += _aborted(data.aborted, flexible)
            if version >= 11:
                head += struct.pack(">i", data.preferred_replica)
            size = 0
            records = data.records
            if records is not None:
                size = records.size_bytes if type(records) is FileSlice else len(records)
            head += encode_count(size, flexible)
            if size and records is not None:
                segments.append(bytes(head))
                total += len(head) + size
                segments.append(records)
                head.clear()
            if flexible:
                head += _partition_tags(data)
        if flexible:
            head += b"\0"
        yield
    if flexible:
        head += endpoint_tags(endpoints)
    if head:
        segments.append(bytes(head))
        total += len(head)
    first = segments[0]
    assert isinstance(first, bytes)
    segments[0] = struct.pack(">ii", total - 4, correlation_id) + first[8:]
    return segments


def _aborted(aborted: Sequence[tuple[int, int]] | None, flexible: bool) -> bytes:
    if aborted is None:
        return b"\0" if flexible else b"\xff\xff\xff\xff"
    out = bytearray(encode_count(len(aborted), flexible))
    for producer_id, first_offset in aborted:
        out += struct.pack(">qq", producer_id, first_offset)
        if flexible:
            out += b"\0"
    return bytes(out)


def _partition_tags(data: PartitionData) -> bytes:
    """diverging_epoch (0) and current_leader (1), each where it says something."""
    out = b""
    count = 0
    if data.diverging is not None:
        count += 1
        out += b"\x00\x0d" + struct.pack(">iq", *data.diverging) + b"\0"
    if data.current_leader is not None:
        count += 1
        out += b"\x01\x09" + struct.pack(">ii", *data.current_leader) + b"\0"
    return bytes((count,)) + out
