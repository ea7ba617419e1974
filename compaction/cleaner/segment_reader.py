"""Single records of a segment that is at rest, by offset or by position, through its index.

For the check of a pass (``self_check.py``): it shares nothing with the scan and the copy that it is
to judge. The index is not trusted: where it leads nowhere, the segment is read from its start.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kept.compaction.cleaner.job import INFLATE_LIMIT
from kept.storage.disk import Disk, File
from kept.storage.errors import CorruptMessage, DamagedData, PeerError
from kept.storage.records import (
    HEADER_BYTES,
    BatchHeader,
    Record,
    RecordColumns,
    crc32c,
    headers,
    read_header,
    scan,
)
from kept.storage.records.build import read_headers
from kept.storage.records.header import CRC_START

READ_BYTES: Final = 32 << 10
MAX_WALK_BYTES: Final = 1 << 20
"""Without an index no record is drawn from beyond."""
_ENTRY: Final = struct.Struct(">ii")


class Batch(NamedTuple):
    """A batch and its records as columns."""

    header: BatchHeader
    columns: RecordColumns

    def record(self, i: int) -> Record:
        """Record ``i`` of it."""
        columns = self.columns
        key, value = columns.key(i), columns.value(i)
        start, length = columns.headers_start[i], columns.headers_length[i]
        return Record(
            columns.offsets[i],
            columns.timestamps[i],
            None if key is None else bytes(key),
            None if value is None else bytes(value),
            () if length == 1 else read_headers(columns.data, start, length),
        )

    def find(self, offset: int) -> Record | None:
        """Its record at an offset."""
        offsets = self.columns.offsets
        low, high = 0, len(offsets)
        while low < high:
            middle = (low + high) // 2
            if offsets[middle] < offset:
                low = middle + 1
            else:
                high = middle
        return self.record(low) if low < len(offsets) and offsets[low] == offset else None


@dataclass(frozen=True, slots=True)
class Extent:
    """A segment's files, and which part of the log file belongs to it."""

    log_path: str
    index_path: str
    base_offset: int
    start_bytes: int
    end_bytes: int


class SegmentReader:
    """Reads one extent. ``read_bytes`` counts what was read and inflated."""

    def __init__(self, disk: Disk, extent: Extent) -> None:
        self._disk, self._extent = disk, extent
        self._file = disk.open_read(extent.log_path)
        self._index: File | None = None
        self._entries = -1
        self._last: tuple[int, Batch] | None = None
        self.read_bytes = 0

    def at_offset(self, offset: int) -> Batch | None:
        """The batch whose range an offset is in. Raises DamagedData."""
        relative = offset - self._extent.base_offset

        def stops(at: int, header: BatchHeader) -> bool:
            del at
            return header.last_offset >= offset

        batch_at = self._from(self._indexed(0, relative), stops)
        if batch_at is None or batch_at.header.base_offset > offset:
            batch_at = self._from(self._extent.start_bytes, stops)
        return batch_at if batch_at is not None and batch_at.header.base_offset <= offset else None

    def at_position(self, position: int) -> Batch | None:
        """The batch that a byte of the file is in; None where no index leads near it."""
        if not self._count() and position - self._extent.start_bytes > MAX_WALK_BYTES:
            return None
        try:
            return self._from(
                self._indexed(1, position), lambda at, header: at + header.size_bytes > position
            )
        except DamagedData:
            return None

    def _from(self, start: int, stops: Callable[[int, BatchHeader], bool]) -> Batch | None:
        """The first batch from a position on at which ``stops``."""
        at, end, want = start, self._extent.end_bytes, READ_BYTES
        while at < end:
            data = self._disk.pread(self._file, at, min(want, end - at))
            used = 0
            self.read_bytes += len(data)
            try:
                for place, header in headers(data):
                    if stops(at + place, header):
                        whole = memoryview(data)[place : place + header.size_bytes]
                        return self._batch(at + place, header, whole)
                    used = place + header.size_bytes
                if not used:
                    if len(data) < HEADER_BYTES or want > len(data):
                        return None
                    want = read_header(data).size_bytes
                    continue
            except CorruptMessage as error:
                raise DamagedData(self._extent.log_path, at + used, -1, str(error)) from error
            at, want = at + used, READ_BYTES
        return None

    def _batch(self, at: int, header: BatchHeader, data: memoryview) -> Batch:
        if self._last is not None and self._last[0] == at:
            return self._last[1]
        where = (self._extent.log_path, at, header.base_offset)
        if crc32c(data[CRC_START:]) != header.crc:
            raise DamagedData(*where, "CRC does not match")
        try:
            columns = scan(data, inflate_limit=INFLATE_LIMIT)
        except (PeerError, ValueError) as error:
            raise DamagedData(*where, str(error)) from error
        self.read_bytes += len(columns.data)
        batch = Batch(header, columns)
        self._last = (at, batch)
        return batch

    def _indexed(self, field: int, value: int) -> int:
        """Position of the last entry that is not above ``value`` in a field; else the start."""
        low, high = 0, self._count()
        position = self._extent.start_bytes
        while low < high:
            middle = (low + high) // 2
            entry = self._entry(middle)
            if entry is not None and entry[field] <= value:
                position, low = entry[1], middle + 1
            else:
                high = middle
        return position if self._extent.start_bytes <= position else self._extent.start_bytes

    def _count(self) -> int:
        if self._entries < 0:
            path = self._extent.index_path
            self._entries = 0
            if self._disk.exists(path):
                self._index = self._disk.open_read(path)
                self._entries = self._disk.stat(path).size_bytes // _ENTRY.size
        return self._entries

    def _entry(self, number: int) -> tuple[int, int] | None:
        """An entry (relative offset, position); None where the file was made longer than it is."""
        assert self._index is not None
        data = self._disk.pread(self._index, number * _ENTRY.size, _ENTRY.size)
        relative, position = _ENTRY.unpack(data)
        return (relative, position) if position > 0 or number == 0 else None
