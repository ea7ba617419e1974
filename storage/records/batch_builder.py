"""Rows in columns become record areas, one for each partition.

A ``BatchBuilder`` (``_batch_builder.pyx``) takes rows as Arrow lays them out
(:class:`Rows`), chooses the partition of each as Java's client does (murmur2 of the key; rows
without one share ``sticky``) and appends it to that partition's area. When an area is full the
caller drains them all, and :func:`build_area_batch` makes batches of them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kept.storage.records.blocks import Binary, HeaderLists
from kept.storage.records.build import seal
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


def build_area_batch(
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
