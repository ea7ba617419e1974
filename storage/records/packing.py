"""Rows in columns become record areas, one for each partition: the specification of
``_packing.pyx``, in plain Python.

A :class:`Packer` takes rows as Arrow lays them out (:class:`Rows`), chooses the partition of each
as Java's client does (murmur2 of the key; rows without one share ``sticky``) and appends it to that
partition's area. When an area is full the caller takes them all, and :func:`pack_batch` makes
batches of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kept.storage.errors import InvalidRecord
from kept.storage.records.blocks import Binary, HeaderLists
from kept.storage.records.build import append_record, seal, wrap64
from kept.storage.records.codecs import compress
from kept.storage.records.header import MAGIC, BatchHeader, Buffer
from kept.storage.types import Codec

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


class Rows(NamedTuple):
    """Rows to be written: ``timestamps`` are int64 milliseconds, ``partitions`` int32, -1 where the
    key decides. None for ``key`` or ``headers`` means null in every row, for ``partitions`` -1.
    """

    total: int
    key: Binary | None
    value: Binary
    headers: HeaderLists | None
    partitions: Buffer | None
    timestamps: Buffer


class Area(NamedTuple):
    """The records of one batch, not compressed: offset deltas from 0, timestamps from the base."""

    records: bytes
    total: int
    base_timestamp: int
    max_timestamp: int


def murmur2(data: Buffer) -> int:
    """Java's murmur2 as an unsigned 32-bit number (``org.apache.kafka.common.utils.Utils``)."""
    length = len(data)
    whole = length & ~3
    h = (_SEED ^ length) & _MASK
    for (k,) in struct.iter_unpack("<I", memoryview(data)[:whole]):
        k = (k * _M) & _MASK  # noqa: PLW2901
        k ^= k >> 24  # noqa: PLW2901
        h = ((h * _M) & _MASK) ^ ((k * _M) & _MASK)
    rest = length - whole
    if rest >= 3:
        h ^= data[whole + 2] << 16
    if rest >= 2:
        h ^= data[whole + 1] << 8
    if rest >= 1:
        h = ((h ^ data[whole]) * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


class _Growing:
    """An Area in the making."""

    def __init__(self, timestamp: int) -> None:
        self.records = bytearray()
        self.count = 0
        self.base_timestamp = self.max_timestamp = timestamp


class Packer:
    """Areas of ``partitions`` partitions, each of ``limit_bytes`` at most: a record larger than
    that has an area of its own. What is in an area depends on the rows alone, not on how they come.
    """

    def __init__(self, partitions: int, limit_bytes: int) -> None:
        self.partitions = partitions
        self.limit_bytes = limit_bytes
        self._areas: dict[int, _Growing] = {}

    def feed(self, rows: Rows, start: int, sticky: int) -> int:
        """Append rows from ``start`` on; where it stopped: at the end, or at a row that no longer
        fits into its area.

        Raises InvalidRecord for a partition that is not there or a header without a name.
        """
        timestamps = memoryview(rows.timestamps).cast("B").cast("q")
        keys, values = _strings(rows.key, rows.total), _strings(rows.value, rows.total)
        partitions = memoryview(rows.partitions or b"").cast("B").cast("i")
        for row in range(start, rows.total):
            where = partitions[row] if rows.partitions is not None else -1
            key = keys[row]
            if where == -1:
                hashed = sticky if key is None else murmur2(key)
                where = (hashed & 0x7FFFFFFF) % self.partitions
            elif not 0 <= where < self.partitions:
                raise InvalidRecord(f"partition {where}: the topic has {self.partitions}")
            headers = () if rows.headers is None else tuple(_headers(rows.headers, row))
            area = self._areas.setdefault(where, _Growing(timestamps[row]))
            delta = wrap64(timestamps[row] - area.base_timestamp)
            record = bytearray()
            append_record(record, (delta, key, values[row], headers), area.count)
            if area.count and len(area.records) + len(record) > self.limit_bytes:
                return row
            area.records += record
            area.count += 1
            area.max_timestamp = max(area.max_timestamp, timestamps[row])
        return rows.total

    def take(self) -> dict[int, Area]:
        """The areas with records, by partition; the packer is empty then."""
        found = {
            where: Area(bytes(a.records), a.count, a.base_timestamp, a.max_timestamp)
            for where, a in sorted(self._areas.items())
        }
        self._areas.clear()
        return found


def _strings(binary: Binary | None, count: int) -> list[bytes | None]:
    if binary is None:
        return [None] * count
    at = memoryview(binary.offsets).cast("B").cast("i")
    data, valid = memoryview(binary.data), binary.validity
    return [
        bytes(data[at[i] : at[i + 1]]) if valid is None or valid[i >> 3] >> (i & 7) & 1 else None
        for i in range(count)
    ]


def _headers(headers: HeaderLists, row: int) -> Iterator[tuple[str, bytes | None]]:
    at = memoryview(headers.offsets).cast("B").cast("i")
    if headers.validity is not None and not headers.validity[row >> 3] >> (row & 7) & 1:
        return
    names, values = _strings(headers.names, headers.total), _strings(headers.values, headers.total)
    for i in range(at[row], at[row + 1]):
        name = names[i]
        if name is None:
            raise InvalidRecord(f"row {row}: a header without a name")
        yield name.decode(), values[i]


def pack_batch(
    area: Area, *, codec: Codec, producer_id: int, producer_epoch: int, base_sequence: int
) -> bytes:
    """One whole batch of an area, as an idempotent producer sends it."""
    header = BatchHeader(
        base_offset=0,
        batch_length=0,
        partition_leader_epoch=-1,
        magic=MAGIC,
        crc=0,
        attributes=int(codec),
        last_offset_delta=area.total - 1,
        base_timestamp=area.base_timestamp,
        max_timestamp=area.max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=area.total,
    )
    return bytes(seal(header, compress(codec, area.records) if codec else area.records))
