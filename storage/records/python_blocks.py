"""Reading batches into columns: the specification of ``_blocks.pyx``, and its fallback.

With it Spark reads by a kept that is sent along as a zip, which cannot hold a compiled kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final

from kept.storage.records.blocks import Block, Field, HeaderLists, StringsBuilder, bitmap
from kept.storage.records.build import read_headers
from kept.storage.records.columns import DEFAULT_INFLATE_LIMIT, RecordColumns
from kept.storage.records.header import LENGTH_PREFIX_BYTES, BatchHeader, Buffer, codec_of
from kept.storage.records.python import check_replica, scan
from kept.storage.types import MAX_INT64

MIN_INT64: Final = -(2**63)
MICROSECONDS: Final = 1000
"""In a millisecond: Kafka's timestamps are in one, those of a block in the other."""
PER_RECORD: Final = Field.KEY | Field.VALUE | Field.OFFSET | Field.TIMESTAMP | Field.HEADERS
"""Fields that differ from record to record; the timestamp type is the batch's."""


def read_block(
    buf: Buffer,
    position: int,
    first: int,
    end: int,
    wanted: int,
    *,
    hidden: Collection[int] = (),
    min_timestamp: int = MIN_INT64,
    max_rows: int = 65536,
    max_bytes: int = 16 << 20,
    inflate_limit: int = DEFAULT_INFLATE_LIMIT,
) -> Block:
    """The data records with ``first <= offset < end`` of the batches from ``position`` on.

    Stops at ``end``, at the end of ``buf``, before a last batch that is cut off there (unless it is
    the only one), and after the batch that reaches ``max_rows`` or ``max_bytes`` (inflated).
    Batches that begin at a position in ``hidden`` (aborted transactions) are left out, and those
    whose newest record is older than ``min_timestamp`` (ms); control batches always.

    Raises CorruptMessage for a damaged batch, or when ``buf`` has not one whole batch;
    InvalidRecord for damaged records or a batch that inflates above ``inflate_limit``.
    """
    view = memoryview(buf)
    columns = _Columns(wanted)
    next_offset, size = first, 0
    while position < len(view):
        if position > 0 and _is_cut_off(view, position):
            break
        header = check_replica(view, position)
        codec_of(header.attributes)
        if header.base_offset >= end:
            next_offset = max(next_offset, header.base_offset)
            position = len(view)
            break
        start, position = position, position + header.size_bytes
        next_offset = max(next_offset, header.next_offset)
        if header.is_control or start in hidden or header.last_offset < first:
            continue
        if header.max_timestamp < min_timestamp:
            continue
        if not wanted & PER_RECORD and first <= header.base_offset and header.next_offset <= end:
            columns.count(header)
        else:
            scanned = scan(view[start:position], inflate_limit=inflate_limit, check_crc=False)
            size += len(scanned.data)
            columns.append(scanned, header, first, end)
        if columns.rows >= max_rows or size >= max_bytes:
            break
    return columns.block(position, next_offset)


def _is_cut_off(view: memoryview, position: int) -> bool:
    left = len(view) - position
    if left < LENGTH_PREFIX_BYTES:
        return True
    return int.from_bytes(view[position + 8 : position + 12], "big", signed=True) + 12 > left


class _Columns:
    """A Block in the making."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.rows = 0
        self.offsets, self.timestamps = array("q"), array("q")
        self.types, self.lists = array("i"), array("i", [0])
        self.key, self.value = StringsBuilder(), StringsBuilder()
        self.names, self.values = StringsBuilder(), StringsBuilder()
        self.listed: list[bool] = []

    def count(self, header: BatchHeader) -> None:
        self.rows += header.record_count
        self.types.extend([int(header.timestamp_type)] * header.record_count)

    def append(self, columns: RecordColumns, header: BatchHeader, first: int, end: int) -> None:
        """The records of one batch that are in the range."""
        for i in range(columns.count):
            if not first <= columns.offsets[i] < end:
                continue
            self.rows += 1
            self.offsets.append(columns.offsets[i])
            self.timestamps.append(microseconds(columns.timestamps[i]))
            self.types.append(int(header.timestamp_type))
            self.key.add(columns.key(i))
            self.value.add(columns.value(i))
            if self.wanted & Field.HEADERS:
                self._headers(columns, i)

    def _headers(self, columns: RecordColumns, i: int) -> None:
        pairs = read_headers(
            columns.data.tobytes(), columns.headers_start[i], columns.headers_length[i]
        )
        for name, value in pairs:
            self.names.add(name.encode())
            self.values.add(value)
        self.lists.append(len(self.names.valid))
        self.listed.append(bool(pairs))

    def block(self, position: int, next_offset: int) -> Block:
        wanted = self.wanted
        headers = None
        if wanted & Field.HEADERS:
            nulls = self.listed.count(False)
            validity = bitmap(self.listed) if nulls else None
            names, values = self.names.binary(), self.values.binary()
            count = len(self.names.valid)
            headers = HeaderLists(self.lists.tobytes(), validity, nulls, names, values, count)
        return Block(
            self.rows,
            position,
            next_offset,
            self.offsets.tobytes() if wanted & Field.OFFSET else None,
            self.timestamps.tobytes() if wanted & Field.TIMESTAMP else None,
            self.types.tobytes() if wanted & Field.TIMESTAMP_TYPE else None,
            self.key.binary() if wanted & Field.KEY else None,
            self.value.binary() if wanted & Field.VALUE else None,
            headers,
        )


def microseconds(milliseconds: int) -> int:
    """A timestamp of Kafka's in microseconds; what does not fit becomes the nearest that does."""
    return max(MIN_INT64, min(MAX_INT64, milliseconds * MICROSECONDS))
