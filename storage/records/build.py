"""Making batches: from records, from a record area, and reading single records back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kept.storage.errors import CorruptMessage
from kept.storage.records.checksum import crc32c
from kept.storage.records.codecs import compress
from kept.storage.records.columns import Record, RecordColumns
from kept.storage.records.header import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    MAGIC,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
)
from kept.storage.types import NO_TIMESTAMP, Codec, TimestampType

RecordFields = tuple[int, bytes | None, bytes | None, Iterable[tuple[str, bytes | None]]]
"""timestamp, key, value, headers."""

_CRC: Final = slice(17, 21)


def build_batch(
    records: Iterable[RecordFields],
    *,
    base_offset: int = 0,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    is_transactional: bool = False,
    is_control: bool = False,
    leader_epoch: int = -1,
    offsets: Sequence[int] | None = None,
    last_offset: int | None = None,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """One whole batch.

    Offsets run from ``base_offset`` unless ``offsets`` names that of each record (as compaction
    leaves them). ``last_offset`` extends the batch past its last record, and is needed for one
    without records. ``delete_horizon_ms`` sets the horizon of KIP-534.
    """
    fields = list(records)
    if offsets is None:
        offsets = range(base_offset, base_offset + len(fields))
    if last_offset is None:
        last_offset = max(offsets) if offsets else base_offset
    timestamps = [timestamp for timestamp, _, _, _ in fields]
    base_timestamp = timestamps[0] if timestamps else NO_TIMESTAMP
    attributes = (
        codec
        | (TIMESTAMP_TYPE_BIT if timestamp_type else 0)
        | (TRANSACTIONAL_BIT if is_transactional else 0)
        | (CONTROL_BIT if is_control else 0)
    )
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON_BIT
        base_timestamp = delete_horizon_ms
    area = bytearray()
    for (timestamp, key, value, headers), offset in zip(fields, offsets, strict=True):
        append_record(
            area, (wrap64(timestamp - base_timestamp), key, value, headers), offset - base_offset
        )
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=0,
        partition_leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=last_offset - base_offset,
        base_timestamp=base_timestamp,
        max_timestamp=max(timestamps, default=NO_TIMESTAMP),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(fields),
    )
    return bytes(seal(header, compress(codec, area) if codec else area))


def seal(header: BatchHeader, body: Buffer) -> bytearray:
    """A batch of ``header`` and the record area ``body``; length and CRC are computed."""
    batch = bytearray(HEADER_BYTES + len(body))
    HEADER.pack_into(
        batch,
        0,
        header.base_offset,
        len(batch) - LENGTH_PREFIX_BYTES,
        header.partition_leader_epoch,
        MAGIC,
        0,
        header.attributes,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )
    batch[HEADER_BYTES:] = body
    batch[_CRC] = crc32c(memoryview(batch)[CRC_START:]).to_bytes(4, "big")
    return batch


def rewritten(
    header: BatchHeader,
    stored: Buffer,
    inflated: Buffer,
    *,
    codec: Codec,
    timestamp_type: TimestampType,
    max_timestamp: int,
) -> bytearray:
    """The batch of ``header`` with another codec, timestamp type or max timestamp.

    ``stored`` is its record area as it came, ``inflated`` the same decompressed.
    """
    body = stored if codec == header.codec else compress(codec, inflated)
    header.attributes &= ~(CODEC_MASK | TIMESTAMP_TYPE_BIT)
    header.attributes |= codec | (TIMESTAMP_TYPE_BIT if timestamp_type else 0)
    header.max_timestamp = max_timestamp
    return seal(header, body)


def wrap64(number: int) -> int:
    """As 64-bit arithmetic would have it, Java's and C's."""
    return (number + 2**63) % 2**64 - 2**63


def append_record(area: bytearray, fields: RecordFields, offset_delta: int) -> None:
    """Append one record to a record area; its timestamp is a delta already."""
    timestamp_delta, key, value, headers = fields
    body = bytearray(1)
    append_varint(body, timestamp_delta)
    append_varint(body, offset_delta)
    _append_bytes(body, key)
    _append_bytes(body, value)
    pairs = tuple(headers)
    append_varint(body, len(pairs))
    for name, content in pairs:
        _append_bytes(body, name.encode())
        _append_bytes(body, content)
    append_varint(area, len(body))
    area += body


def append_varint(out: bytearray, number: int) -> None:
    """Append a zig-zag varint of at most 64 bits."""
    number = (number << 1) ^ (number >> 63)
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _append_bytes(out: bytearray, content: bytes | None) -> None:
    if content is None:
        out.append(1)
    else:
        append_varint(out, len(content))
        out += content


def read_varint(data: Buffer, position: int, end: int, bits: int = 32) -> tuple[int, int]:
    """(number, next position) of a zig-zag varint of at most ``bits``. Raises CorruptMessage."""
    number = 0
    for shift in range(0, bits, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> bits:
                break
            return (number >> 1) ^ -(number & 1), position
    raise CorruptMessage("a variable-length number is cut off or too long")


def iterate(columns: RecordColumns) -> Iterator[Record]:
    """The data records of a scan as objects; control batches are skipped."""
    data = columns.data.tobytes()
    control = [batch.is_control for batch in columns.batches]
    rows = zip(
        columns.offsets,
        columns.timestamps,
        columns.key_start,
        columns.key_length,
        columns.value_start,
        columns.value_length,
        columns.headers_start,
        columns.headers_length,
        columns.batch_index,
        strict=True,
    )
    for offset, timestamp, key, key_length, value, value_length, start, length, batch in rows:
        if control[batch]:
            continue
        yield Record(
            offset,
            timestamp,
            None if key_length < 0 else data[key : key + key_length],
            None if value_length < 0 else data[value : value + value_length],
            () if length == 1 else read_headers(data, start, length),
        )


def read_headers(data: Buffer, position: int, length: int) -> tuple[tuple[str, bytes | None], ...]:
    """The headers in a header area that a scan has found to be whole."""
    end = position + length
    count, position = read_varint(data, position, end)
    headers = []
    for _ in range(count):
        size, position = read_varint(data, position, end)
        name = str(data[position : position + size], "utf-8", "replace")
        position += size
        size, position = read_varint(data, position, end)
        content = None if size < 0 else bytes(data[position : position + size])
        position += max(size, 0)
        headers.append((name, content))
    return tuple(headers)
