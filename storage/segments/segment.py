"""One segment: a ``.log`` file with its offset, time and transaction index.

A segment knows no policy. The log appends through its public fields (the hot path, see
``kept.storage.log.log``); closed segments are immutable until they are replaced or deleted. Their
indexes and open files come when first asked for.

Positions are bytes in the file, ends are exclusive, ``size_bytes`` is what is written (not staged).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Final

from kept.storage import layout
from kept.storage.disk import Disk, File
from kept.storage.errors import DamagedData
from kept.storage.records.header import HEADER_BYTES, LENGTH_PREFIX_BYTES, holds_batch, size_at
from kept.storage.segments import txn_index
from kept.storage.segments.offset_index import OffsetIndex
from kept.storage.segments.time_index import TimeIndex
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import NO_TIMESTAMP

_PREFIX: Final = Struct(">qi4xb4x2xi8xq")
"""Base offset, length, magic, last offset delta, max timestamp: a header's first 43 bytes."""
_MAGIC: Final = 2
WALK_BYTES: Final = 8192
"""Read at once by :meth:`Segment.walk` for a look-up: two index intervals by default."""
SCAN_BYTES: Final = 1 << 20
"""Read at once when all of a segment is looked at."""

logger = logging.getLogger(__name__)

Batch = tuple[int, int, int, int, int]
"""(position, size in bytes, base offset, last offset, max timestamp) of a batch in a segment."""


class Segment:
    """A segment of a log; see the module. ``next_offset`` is the end of its last batch."""

    __slots__ = (
        "_aborted",
        "_disk",
        "_file",
        "_first_timestamp",
        "aborted_dirty",
        "base_offset",
        "bytes_since_index",
        "created_ms",
        "directory",
        "first_append_ms",
        "flushed",
        "index",
        "index_interval_bytes",
        "max_timestamp",
        "max_timestamp_offset",
        "mtime_ms",
        "next_offset",
        "size_bytes",
        "time_index",
    )

    def __init__(
        self,
        disk: Disk,
        directory: str,
        base_offset: int,
        *,
        size_bytes: int,
        mtime_ms: int,
        index_interval_bytes: int = 4096,
        loaded: bool = False,
        state: str = "",
    ) -> None:
        self._disk = disk
        self.directory = directory
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size_bytes = size_bytes
        self.mtime_ms = mtime_ms
        self.created_ms = mtime_ms
        self.first_append_ms: int | None = mtime_ms if size_bytes else None
        self.index_interval_bytes = index_interval_bytes
        self.index = OffsetIndex(disk, self.path(layout.INDEX, state), base_offset, loaded=loaded)
        self.time_index = TimeIndex(
            disk, self.path(layout.TIME_INDEX, state), base_offset, loaded=loaded
        )
        self.max_timestamp = NO_TIMESTAMP
        self.max_timestamp_offset = base_offset
        self.bytes_since_index = 0
        self.flushed = False
        self._first_timestamp: int | None = None
        self._file: File | None = None
        self._aborted: list[AbortedTxn] | None = None
        self.aborted_dirty = False

    def __repr__(self) -> str:
        return f"Segment({self.base_offset}..{self.next_offset}, {self.size_bytes} bytes)"

    def path(self, kind: str, state: str = "") -> str:
        """Path of one of its files."""
        return layout.segment_file(self.directory, self.base_offset, kind, state)

    @property
    def file(self) -> File:
        """The open ``.log``. Raises MachineError when it is not there any more."""
        file = self._file
        if file is None:
            file = self._file = self._disk.open_existing(self.path(layout.LOG))
            self._disk.can_close(self)
        return file

    @file.setter
    def file(self, file: File) -> None:
        """Whoever sets it closes it: :meth:`Disk.can_close` does not hear of it here."""
        self._file = file

    def close_file(self, *, deleted: bool = False) -> None:
        """Give the descriptor up; the next use opens the file again, and slices keep theirs. Not
        before all is durable, unless the log is ``deleted``: what the kernel could not write back
        it says to open files only.
        """
        if self.flushed or deleted:
            self._file = None

    @property
    def is_in_place(self) -> bool:
        """Whether the open ``.log`` is what its name stands for, and holds all that is written;
        see :meth:`Disk.is_at`. In another thread than the log's a cut meanwhile looks as if not.
        """
        return self._disk.is_at(self.file, self.path(layout.LOG), self.size_bytes)

    @property
    def largest_timestamp(self) -> int:
        """Largest timestamp of its records; the file's modification time when they have none."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.mtime_ms

    @property
    def first_timestamp(self) -> int:
        """Max timestamp of the first batch (Kafka's basis for rolling by age); -1 when empty."""
        if self._first_timestamp is None:
            for batch in self.walk(0, self.size_bytes):
                self._first_timestamp = batch[4]
                return batch[4]
            return NO_TIMESTAMP
        return self._first_timestamp

    @first_timestamp.setter
    def first_timestamp(self, timestamp: int | None) -> None:
        self._first_timestamp = timestamp

    # Looking at batches.

    def chunks(self, position: int) -> Iterator[bytes]:
        """The whole batches from ``position`` on, in pieces. Raises DamagedData."""
        wanted = SCAN_BYTES
        while (left := self.size_bytes - position) > 0:
            data = self.read(position, wanted)
            end = 0
            while holds_batch(data, end):
                end += size_at(data, end)
            if end:
                position += end
                yield data[:end] if end < len(data) else data
                continue
            size = size_at(data, 0)
            if size <= len(data) or size > left or len(data) < min(wanted, left):
                raise DamagedData(self.file.path, position, -1, "no whole batch")
            wanted = size

    def walk(self, position: int, end: int, chunk_bytes: int = WALK_BYTES) -> Iterator[Batch]:
        """The batches whose start is in ``position..end``, from their headers only.

        ``position`` must be the start of a batch. Raises DamagedData where a header is impossible
        or a batch is cut off by the end of the file.
        """
        file, disk, limit = self.file, self._disk, self.size_bytes
        chunk, start = b"", position
        while position < end:
            at = position - start
            if at + HEADER_BYTES > len(chunk):
                chunk = disk.pread(file, position, min(chunk_bytes, limit - position))
                start, at = position, 0
                if len(chunk) < HEADER_BYTES:
                    raise DamagedData(file.path, position, -1, "no room for a batch header")
            base, length, magic, delta, timestamp = _PREFIX.unpack_from(chunk, at)
            size = length + LENGTH_PREFIX_BYTES
            if magic != _MAGIC:
                raise DamagedData(file.path, position, base, f"batch of magic {magic}, not 2")
            if size < HEADER_BYTES or position + size > limit or delta < 0:
                raise DamagedData(
                    file.path, position, base, f"batch of {size} bytes in a log of {limit}"
                )
            yield position, size, base, base + delta, timestamp
            position += size

    def locate(self, offset: int, end: int | None = None) -> Batch | None:
        """The first batch whose last offset is >= ``offset``; None when there is none.

        An index entry that does not lead to the batch it names has the index rebuilt (rule 23).
        """
        limit = self.size_bytes if end is None else end
        self.load_index()
        entry = self.index.floor_entry(offset)
        located = self._at_next_entry(offset, 0 if entry is None else entry[1], limit)
        if located is not None:
            return located
        batches = self.walk(0 if entry is None else entry[1], limit)
        if entry is not None:
            last_offset = entry[0]
            try:
                first = next(batches, None)
                honest = first is None or first[3] == last_offset
            except DamagedData:
                first, honest = None, False
            if not honest:
                self.rebuild_indexes("an entry does not lead to its batch")
                batches = self.walk(self.index.floor(offset), limit)
            elif first is not None and last_offset == offset:
                return first
        for batch in batches:
            if batch[3] >= offset:
                return batch
        return None

    def _at_next_entry(self, offset: int, floor: int, limit: int) -> Batch | None:
        """The batch with ``offset``, if the entry after it leads there: large ones have their own.

        Only where a walk from ``floor`` would read more than once. None says nothing.
        """
        entry = self.index.ceiling_entry(offset)
        if entry is None or not floor + WALK_BYTES <= entry[1] < limit:
            return None
        try:
            batch = next(self.walk(entry[1], limit))
        except DamagedData:  # the walk says what is wrong
            return None
        return batch if batch[2] <= offset and batch[3] == entry[0] else None

    # Indexes.

    def load_index(self) -> None:
        """Have the entries of the offset index in memory, rebuilt when the file is no good."""
        if not self.index.loaded:
            try:
                self.index.load()
            except (FileNotFoundError, DamagedData) as error:
                self.rebuild_indexes(str(error))

    def load_time_index(self) -> None:
        """Have the entries of the time index in memory, rebuilt when the file is no good."""
        if not self.time_index.loaded:
            try:
                self.time_index.load()
            except (FileNotFoundError, DamagedData) as error:
                self.rebuild_indexes(str(error))

    def rebuild_indexes(self, why: str, *, save: bool = True) -> None:
        """Make both indexes anew from the batches' headers, with a log line."""
        logger.warning("%s: rebuilding the indexes: %s", self.path(layout.LOG), why)
        self.file  # noqa: B018 (without a descriptor for it nothing is forgotten)
        self.reset_indexes()
        for batch in self.walk(0, self.size_bytes, SCAN_BYTES):
            self.index_batch(batch)
        if save:
            self.close_indexes()

    def reset_indexes(self) -> None:
        """Forget all that follows from the batches; :meth:`index_batch` builds it up again."""
        self.index.unload()
        self.time_index.unload()
        self.index.loaded = self.time_index.loaded = True
        self.max_timestamp, self.max_timestamp_offset = NO_TIMESTAMP, self.base_offset
        self.bytes_since_index = 0
        self.next_offset = self.base_offset
        self._first_timestamp = None

    def index_batch(self, batch: Batch) -> None:
        """A batch is the segment's next one: index entries as ``LogSegment.append`` makes them."""
        position, size, _, last_offset, timestamp = batch
        if not position:
            self._first_timestamp = timestamp
        if timestamp > self.max_timestamp:
            self.max_timestamp, self.max_timestamp_offset = timestamp, last_offset
        if self.bytes_since_index > self.index_interval_bytes:
            self.index.offsets.append(last_offset - self.base_offset)
            self.index.positions.append(position)
            self.time_index.append(self.max_timestamp, self.max_timestamp_offset)
            self.bytes_since_index = 0
        self.bytes_since_index += size
        self.next_offset = last_offset + 1

    def cut(self, size_bytes: int) -> bool:
        """Cut the file where a batch begins (not durably): the segment is active then. Returns
        whether aborted transactions went, which :meth:`save_aborted` is to forget. Where all of it
        goes, nothing is read, and no damage matters; else DamagedData may be raised, also when the
        file is cut already: :attr:`aborted` tells before.

        What follows from the batches is derived from the last entry of the offset index below the
        cut on; from all of them where there is none, or it does not lead to its batch (rule 23).
        The index files are stale from now on.
        """
        if size_bytes:
            self.load_index()
            self.load_time_index()
        else:  # nothing of them is needed, and damage may keep them from being made anew
            self.reset_indexes()
        self._disk.truncate(self.file, size_bytes)
        self.size_bytes = size_bytes
        self.flushed = False
        self.index.truncate(size_bytes)
        if not self._resume_at_last_entry():
            self.reset_indexes()
            for batch in self.walk(0, size_bytes, SCAN_BYTES):
                self.index_batch(batch)
        if not size_bytes:
            self.reset_aborted([])
            return self._disk.exists(self.path(layout.TXN_INDEX))
        left = [entry for entry in self.aborted if entry.last_offset < self.next_offset]
        if len(left) == len(self.aborted):
            return False
        self.reset_aborted(left)
        return True

    def _resume_at_last_entry(self) -> bool:
        """Be as if the batches were noted one by one, from the indexes and the batches after the
        last entry; False: they do not tell. Entries of the time index are of batches up to those
        that the offset index's are of, and the last one has the largest timestamp up to there.
        """
        if not self.index.positions:
            return False
        batches = self.walk(self.index.positions[-1], self.size_bytes)
        last_offset = self.base_offset + self.index.offsets[-1]
        try:
            _, size, _, found, _ = next(batches)
        except DamagedData:
            return False
        if found != last_offset:
            return False
        self.time_index.truncate(last_offset + 1)
        self.max_timestamp, self.max_timestamp_offset = self.time_index.last_entry
        self.bytes_since_index = size
        self.next_offset = last_offset + 1
        for batch in batches:
            self.index_batch(batch)
        return True

    def close_indexes(self) -> None:
        """Write the indexes as they are left on disk: the time index ends with the maximum."""
        self.load_time_index()
        self.time_index.append(self.max_timestamp, self.max_timestamp_offset)
        self.index.save()
        self._disk.reach("index.saved")
        self.time_index.save()
        self.save_aborted()

    def open_closed(self) -> int:
        """Check the indexes of a segment that was not written since a clean close (rule 23).

        Takes the largest timestamp from the time index; returns the position of the last entry of
        the offset index, 0 without one. Raises DamagedData or FileNotFoundError where they must be
        rebuilt.
        """
        last_position = self.index.check(self.size_bytes)
        self.max_timestamp, self.max_timestamp_offset = self.time_index.check()
        if self.max_timestamp < 0 and self.size_bytes:
            for batch in self.walk(0, 1):
                if batch[4] >= 0:
                    raise DamagedData(self.time_index.path, 0, self.base_offset, "no entry")
        return last_position

    def end_below(self, position: int) -> int:
        """Where the log ends once the file is cut at ``position``, where a batch begins. Reads what
        :meth:`cut` will, and raises DamagedData where that would.
        """
        end = self.base_offset
        if not position:
            return end
        self.load_index()
        self.load_time_index()
        start = self.index.position_floor(position - 1)
        try:
            for batch in self.walk(start, position):
                end = batch[3] + 1
        except DamagedData:
            if not start:
                raise
            # Only that entry may be wrong.
            for batch in self.walk(self.index.position_floor(start - 1), position):
                end = batch[3] + 1
        return end

    def end_of_file_offset(self, position: int) -> int:
        """The end of the last whole batch, walked to from ``position``. Raises DamagedData."""
        end = self.base_offset
        for batch in self.walk(position, self.size_bytes):
            end = batch[3] + 1
        return end

    # Aborted transactions.

    @property
    def aborted(self) -> list[AbortedTxn]:
        """Aborted transactions whose markers are here. Raises DamagedData."""
        if self._aborted is None:
            path = self.path(layout.TXN_INDEX)
            data = b""
            with suppress(FileNotFoundError):
                data = self._disk.read(path)
            self._aborted = txn_index.decode(path, data, self.base_offset)
        return self._aborted

    def reset_aborted(self, entries: list[AbortedTxn]) -> None:
        """Replace the aborted transactions; :meth:`save_aborted` writes them."""
        self._aborted = entries
        self.aborted_dirty = True

    def note_aborted(self, entry: AbortedTxn) -> None:
        """A marker here aborted a transaction; known ones are not added again."""
        entries = self.aborted
        if not entries or entries[-1].last_offset < entry.last_offset:
            entries.append(entry)
            self.aborted_dirty = True

    def save_aborted(self, *, durably: bool = False) -> None:
        """Write the transaction index when it changed; without entries there is no file."""
        if not self.aborted_dirty:
            return
        path, data = self.path(layout.TXN_INDEX), txn_index.encode(self.aborted)
        if not self.aborted:
            self._disk.unlink(path)
            if durably:
                self._disk.fsync_dir(self.directory)
        elif durably:
            self._disk.write_atomic(path, data)
        else:
            self._disk.write_file(path, data)
        self.aborted_dirty = False

    # Durability and removal.

    def fsync(self) -> None:
        """Make the log and what is on disk of its indexes durable; any thread, blocks."""
        self._disk.fsync(self.file)
        for kind in (layout.INDEX, layout.TIME_INDEX, layout.TXN_INDEX):
            with suppress(FileNotFoundError):
                self._disk.fsync(self._disk.open_read(self.path(kind)))

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the ``.log``."""
        return self._disk.pread(self.file, position, min(size, self.size_bytes - position))

    def rename(self, old_state: str, new_state: str) -> None:
        """Change the state suffix of all its files, the ``.log`` first."""
        for kind in layout.SEGMENT_SUFFIXES:
            with suppress(FileNotFoundError):
                self._disk.rename(self.path(kind, old_state), self.path(kind, new_state))
