"""The record kernel in plain Python: the specification of ``_kernel.pyx``, and what serves where it
was not compiled. Both pass the same suite.

A record in a batch (varints are zig-zag)::

    length: varint           bytes after this field
    attributes: int8         unused
    timestampDelta: varlong  timestamp - baseTimestamp
    offsetDelta: varint      offset - baseOffset
    keyLength: varint        -1: null
    key
    valueLength: varint      -1: null
    value
    headerCount: varint
    headers                  keyLength: varint, key, valueLength: varint (-1: null), value

Every read is checked against the end of its record, and that against the end of its batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kept.storage.errors import CorruptMessage, InflatesBeyondLimit, InvalidRecord, MessageTooLarge
from kept.storage.records.build import read_headers, read_varint, rewritten, wrap64
from kept.storage.records.checksum import package_crc32c
from kept.storage.records.codecs import decompress
from kept.storage.records.columns import (
    DEFAULT_INFLATE_LIMIT,
    MAX_RECORD_ERRORS,
    CheckRules,
    Record,
    RecordColumns,
)
from kept.storage.records.faults import Fault, refusal
from kept.storage.records.header import (
    CRC_START,
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    MAGIC_POSITION,
    MIN_RECORD_BYTES,
    BatchHeader,
    Buffer,
    ReplicaBatch,
    codec_of,
    read_header,
)
from kept.storage.types import MAX_INT64, NO_PRODUCER_ID, NO_TIMESTAMP, Codec, TimestampType

KERNEL: Final = "python"
MIN_INT64: Final = -(2**63)


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """See :class:`kept.storage.records.columns.CheckedBatch`."""

    data: memoryview
    size_bytes: int
    record_count: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    codec: Codec
    rewritten: bool
    area_bytes: int = 0


class _BadRecord(Exception):
    """The walk cannot go on: the framing of a record is wrong."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of ``data``, continuing ``crc``."""
    return package_crc32c(data, crc)


def check_replica(buf: Buffer, position: int = 0) -> BatchHeader:
    """Header of the whole batch at ``position``, CRC checked. Raises CorruptMessage."""
    header = _whole_batch(buf, position)
    crc = package_crc32c(memoryview(buf)[position + CRC_START : position + header.size_bytes])
    if crc != header.crc:
        raise CorruptMessage(f"CRC is {crc:#010x}, the header says {header.crc:#010x}")
    return header


def check_replicas(buf: Buffer) -> list[ReplicaBatch]:
    """The batches of what a leader answered, framing and CRC of every one checked.

    A batch that is cut off at the end is left out, unless it is the first. Raises CorruptMessage;
    then none of them may be used.
    """
    batches: list[ReplicaBatch] = []
    position, end = 0, len(buf)
    while position < end:
        left = end - position
        if batches and left < LENGTH_PREFIX_BYTES:
            break
        if batches:
            size = int.from_bytes(buf[position + 8 : position + 12], "big", signed=True) + 12
            if size >= HEADER_BYTES and size > left:
                break
        header = check_replica(buf, position)
        batches.append(
            (
                position,
                header.size_bytes,
                header.base_offset,
                header.last_offset,
                header.max_timestamp,
                header.partition_leader_epoch,
                header.producer_id,
            )
        )
        position += header.size_bytes
    return batches


def _whole_batch(buf: Buffer, position: int) -> BatchHeader:
    header = read_header(buf, position)
    if header.size_bytes > len(buf) - position:
        raise CorruptMessage(
            f"a batch of {header.size_bytes} bytes is cut off after {len(buf) - position}"
        )
    return header


def check(batch: Buffer, rules: CheckRules, now_ms: int) -> CheckedBatch:
    """Check one batch as a producer sent it (rule 37) and make of it what the log will hold.

    Raises CorruptMessage (framing, magic, CRC), MessageTooLarge, and InvalidRecord or
    InvalidTimestamp with ``record_errors``.
    """
    header = check_header(batch, rules.max_batch_bytes)
    view = memoryview(batch)
    codec = codec_of(header.attributes)
    stored = view[HEADER_BYTES:]
    area = decompress(codec, stored, rules.max_inflated_bytes) if codec else stored
    check_area(len(area), rules.max_inflated_bytes)
    max_timestamp = _check_records(area, header, rules, now_ms)
    if rules.timestamp_type == TimestampType.LOG_APPEND_TIME:
        max_timestamp = now_ms
    wanted = rules.codec
    if wanted is None:
        wanted = codec
    change = (
        wanted != codec
        or rules.timestamp_type == TimestampType.LOG_APPEND_TIME
        or max_timestamp != header.max_timestamp
    )
    if change:
        view = memoryview(
            rewritten(
                header,
                stored,
                area,
                codec=wanted,
                timestamp_type=rules.timestamp_type,
                max_timestamp=max_timestamp,
            )
        )
        check_size(len(view), rules.max_batch_bytes)
    return CheckedBatch(
        view,
        len(view),
        header.record_count,
        max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.is_transactional,
        wanted,
        change,
        len(area),
    )


def check_size(size_bytes: int, max_batch_bytes: int) -> None:
    """Raise MessageTooLarge for a batch above ``max.message.bytes``."""
    if size_bytes > max_batch_bytes:
        raise MessageTooLarge(
            f"a batch of {size_bytes} bytes, max.message.bytes is {max_batch_bytes}"
        )


def check_area(size_bytes: int, max_inflated_bytes: int) -> None:
    """Raise InflatesBeyondLimit for a record area above the limit."""
    if size_bytes > max_inflated_bytes:
        raise InflatesBeyondLimit(
            f"the records inflate to more than the limit of {max_inflated_bytes} bytes", size_bytes
        )


def check_header(batch: Buffer, max_batch_bytes: int) -> BatchHeader:
    """The header of a batch that a producer may send: one, whole, its CRC right."""
    check_size(len(batch), max_batch_bytes)
    if len(batch) > MAGIC_POSITION and batch[MAGIC_POSITION] < 2:
        raise InvalidRecord(
            f"magic is {batch[MAGIC_POSITION]}: only version 2 batches are accepted"
        )
    try:
        header = check_replica(batch)
    except CorruptMessage:
        _refuse_what_was_sent_so(batch)
        raise
    if header.size_bytes != len(batch):
        raise InvalidRecord("exactly one batch per partition is accepted, and nothing after it")
    if header.base_offset != 0:
        raise InvalidRecord(f"producers start at base offset 0, not {header.base_offset}")
    if header.record_count == 0:
        raise InvalidRecord("the batch holds no records")
    if header.record_count != header.last_offset_delta + 1:
        raise InvalidRecord(
            f"{header.record_count} records do not match "
            f"the last offset delta {header.last_offset_delta}"
        )
    if header.is_control:
        raise InvalidRecord("clients must not write control batches")
    if header.timestamp_type == TimestampType.LOG_APPEND_TIME:
        raise InvalidRecord("producers must not set the timestamp type to LogAppendTime")
    if header.has_delete_horizon:
        raise InvalidRecord("producers must not set a delete horizon")
    try:
        codec_of(header.attributes)
    except CorruptMessage as error:
        raise InvalidRecord(str(error)) from None
    if header.producer_id != NO_PRODUCER_ID and header.base_sequence < 0:
        raise InvalidRecord(
            f"producer id {header.producer_id} with the sequence {header.base_sequence}"
        )
    return header


def _refuse_what_was_sent_so(batch: Buffer) -> None:
    """InvalidRecord, as Apache Kafka says, where a bad batch is no damage on the way: after
    CorruptMessage producers would send it again.
    """
    size = len(batch) + 1
    if len(batch) >= LENGTH_PREFIX_BYTES:
        size = LENGTH_PREFIX_BYTES + int.from_bytes(batch[8:12], "big", signed=True)
    if size > len(batch):
        raise InvalidRecord(f"a batch is cut off after {len(batch)} bytes")
    if size >= HEADER_BYTES:
        header = BatchHeader(*HEADER.unpack_from(batch))
        negative = header.record_count < 0 or header.last_offset_delta < 0
        if negative and header.crc == package_crc32c(memoryview(batch)[CRC_START:size]):
            raise InvalidRecord(
                f"negative record count {header.record_count} or "
                f"last offset delta {header.last_offset_delta}"
            )


def timestamp_window(rules: CheckRules, now_ms: int) -> tuple[int, int]:
    """Earliest and latest timestamp that are accepted."""
    if rules.timestamp_type == TimestampType.LOG_APPEND_TIME:
        return MIN_INT64, MAX_INT64
    return (
        max(now_ms - rules.timestamp_before_max_ms, MIN_INT64),
        min(now_ms + rules.timestamp_after_max_ms, MAX_INT64),
    )


def _check_records(area: Buffer, header: BatchHeader, rules: CheckRules, now_ms: int) -> int:
    """Walk all records; returns the largest timestamp."""
    earliest, latest = timestamp_window(rules, now_ms)
    faults: list[tuple[int, int, int]] = []
    max_timestamp = NO_TIMESTAMP
    position = 0
    for index in range(header.record_count):
        try:
            record = _read_record(area, position, len(area), strict=True)
        except _BadRecord as bad:
            faults.append((index, bad.fault, 0))
            break
        position = record.end
        timestamp = wrap64(header.base_timestamp + record.timestamp_delta)
        max_timestamp = max(max_timestamp, timestamp)
        if record.offset_delta != index:
            faults.append((index, Fault.OFFSET_DELTA, 0))
        elif rules.compacted and record.key_length < 0:
            faults.append((index, Fault.NO_KEY, 0))
        elif timestamp != NO_TIMESTAMP and not earliest <= timestamp <= latest:
            faults.append((index, Fault.TIMESTAMP, timestamp))
        if len(faults) == MAX_RECORD_ERRORS:
            break
    else:
        if position != len(area):
            faults.append((header.record_count - 1, Fault.TRAILING, 0))
    if faults:
        raise refusal(faults, earliest, latest)
    return max_timestamp


@dataclass(slots=True)
class _RecordSpan:
    """Where the parts of one record lie in their buffer."""

    timestamp_delta: int
    offset_delta: int
    key_start: int
    key_length: int
    value_start: int
    value_length: int
    headers_start: int
    end: int


def _read_record(data: Buffer, position: int, end: int, *, strict: bool) -> _RecordSpan:
    """The record at ``position``, which must end at or before ``end``.

    Reading, like Java, takes any negative length for null; ``strict`` knows only -1, because
    other clients stumble over the rest.
    """
    if position >= end:
        raise _BadRecord(Fault.MISSING)
    length, position = _varint(data, position, end)
    if length < MIN_RECORD_BYTES - 1 or length > end - position:
        raise _BadRecord(Fault.LENGTH)
    end = position + length
    timestamp_delta, position = _varint(data, position + 1, end, 64)
    offset_delta, position = _varint(data, position, end)
    key_length, key_start = _field(data, position, end, strict)
    value_length, value_start = _field(data, key_start + max(key_length, 0), end, strict)
    headers_start = value_start + max(value_length, 0)
    _skip_headers(data, headers_start, end, strict)
    return _RecordSpan(
        timestamp_delta,
        offset_delta,
        key_start,
        key_length,
        value_start,
        value_length,
        headers_start,
        end,
    )


def _varint(data: Buffer, position: int, end: int, bits: int = 32) -> tuple[int, int]:
    try:
        return read_varint(data, position, end, bits)
    except CorruptMessage:
        raise _BadRecord(Fault.VARINT) from None


def _field(data: Buffer, position: int, end: int, strict: bool) -> tuple[int, int]:
    """Length (-1: null) and start of a key or value."""
    length, position = _varint(data, position, end)
    if length > end - position or (strict and length < -1):
        raise _BadRecord(Fault.FIELD)
    return max(length, -1), position


def _skip_headers(data: Buffer, position: int, end: int, strict: bool) -> None:
    count, position = _varint(data, position, end)
    if count < 0 or count > end - position:
        raise _BadRecord(Fault.HEADERS)
    for _ in range(count):
        length, position = _varint(data, position, end)
        if length < 0 or length > end - position:
            raise _BadRecord(Fault.HEADERS)
        length, position = _varint(data, position + length, end)
        if length > end - position or (strict and length < -1):
            raise _BadRecord(Fault.HEADERS)
        position += max(length, 0)
    if position != end:
        raise _BadRecord(Fault.SIZE)


def scan(
    buf: Buffer, *, inflate_limit: int = DEFAULT_INFLATE_LIMIT, check_crc: bool = True
) -> RecordColumns:
    """The records of the whole batches that ``buf`` consists of, as columns.

    ``inflate_limit`` bounds the inflated size of all batches together. Control batches are
    included. Raises CorruptMessage when a batch is damaged or cut off, InvalidRecord when its
    records are.
    """
    batches, areas, data = _open_batches(buf, inflate_limit, check_crc)
    longs = [array("q") for _ in range(5)]
    ints = [array("i") for _ in range(4)]
    for number, (header, (start, end)) in enumerate(zip(batches, areas, strict=True)):
        position = start
        appended = header.timestamp_type == TimestampType.LOG_APPEND_TIME
        for index in range(header.record_count):
            try:
                record = _read_record(data, position, end, strict=False)
            except _BadRecord as bad:
                raise refusal([(index, bad.fault, 0)], 0, 0) from None
            position = record.end
            row = (
                wrap64(header.base_offset + record.offset_delta),
                header.max_timestamp
                if appended
                else wrap64(header.base_timestamp + record.timestamp_delta),
                record.key_start,
                record.value_start,
                record.headers_start,
            )
            for column, number64 in zip(longs, row, strict=True):
                column.append(number64)
            ints[0].append(record.key_length)
            ints[1].append(record.value_length)
            ints[2].append(record.end - record.headers_start)
            ints[3].append(number)
        if position != end:
            raise refusal([(header.record_count - 1, Fault.TRAILING, 0)], 0, 0)
    offsets, timestamps, keys, values, headers = (memoryview(column) for column in longs)
    key_lengths, value_lengths, header_lengths, numbers = (memoryview(column) for column in ints)
    return RecordColumns(
        len(offsets),
        data,
        batches,
        offsets,
        timestamps,
        keys,
        key_lengths,
        values,
        value_lengths,
        headers,
        header_lengths,
        numbers,
    )


def find_records(  # noqa: PLR0917
    area: Buffer, count: int, base_offset: int, first: int, max_records: int, max_bytes: int
) -> tuple[int, int, int]:
    """(start, end, number) of the records from offset ``first`` on, in an area of ``count``.

    At most ``max_records``, and ``max_bytes`` unless the first is larger. Raises InvalidRecord for
    a damaged record up to there.
    """
    position = start = number = 0
    for index in range(count):
        try:
            record = _read_record(area, position, len(area), strict=False)
        except _BadRecord as bad:
            raise refusal([(index, bad.fault, 0)], 0, 0) from None
        if number and (number >= max_records or record.end - start > max_bytes):
            break
        if number or wrap64(base_offset + record.offset_delta) >= first:
            if not number:
                start = position
            number += 1
        position = record.end
    return (start, position, number) if number else (position, position, 0)


def iterate_area(area: Buffer, header: BatchHeader) -> Iterator[Record]:
    """The records of an inflated area, or of whole records out of one, as objects."""
    position = 0
    appended = header.timestamp_type == TimestampType.LOG_APPEND_TIME
    while position < len(area):
        record = _read_record(area, position, len(area), strict=False)
        key, value = record.key_start, record.value_start
        yield Record(
            wrap64(header.base_offset + record.offset_delta),
            header.max_timestamp
            if appended
            else wrap64(header.base_timestamp + record.timestamp_delta),
            None if record.key_length < 0 else bytes(area[key : key + record.key_length]),
            None if record.value_length < 0 else bytes(area[value : value + record.value_length]),
            read_headers(area, record.headers_start, record.end - record.headers_start),
        )
        position = record.end


def _open_batches(
    buf: Buffer, inflate_limit: int, check_crc: bool
) -> tuple[list[BatchHeader], list[tuple[int, int]], memoryview]:
    """Headers of all batches, and where each one's inflated records are in the buffer returned."""
    view = memoryview(buf)
    batches, areas = open_frames(view, check_crc)
    if all(header.codec == Codec.NONE for header in batches):
        return batches, areas, view
    parts: list[Buffer] = []
    size = 0
    for i, (header, (start, end)) in enumerate(zip(batches, areas, strict=True)):
        part: Buffer = view[start:end]
        if header.codec and header.record_count:
            part = decompress(header.codec, part, inflate_limit - size)
        parts.append(part)
        areas[i] = (size, size + len(part))
        size += len(part)
    return batches, areas, memoryview(b"".join(parts))


def open_frames(
    view: memoryview, check_crc: bool
) -> tuple[list[BatchHeader], list[tuple[int, int]]]:
    """Headers of all batches, and start and end of each one's record area as it is stored."""
    batches: list[BatchHeader] = []
    areas: list[tuple[int, int]] = []
    position = 0
    while position < len(view):
        header = check_replica(view, position) if check_crc else _whole_batch(view, position)
        codec_of(header.attributes)
        after = position + header.size_bytes
        batches.append(header)
        areas.append((position + HEADER_BYTES, after))
        position = after
    return batches, areas
