"""The end of a log that is being written: its active segment, and the batches staged after it.

A batch is indexed (offsets, index entries, positions) when it is staged, and is in the file once
:meth:`Tail.write` has written all that is staged with one ``writev``. Always
``written_end_offset <= end_offset``; they are equal when nothing is staged.

The tail knows no producers and no leader epochs, and never begins a segment by itself: where
:meth:`Tail.index_batch` refuses a batch, :class:`~kept.storage.log.log.Log` rolls. Index entries go
to arrays in memory that are written when a segment is rolled or the log is closed.
"""

from __future__ import annotations

import zlib
from typing import Final

from kept.storage import layout
from kept.storage.disk import Bytes, Disk, FileSlice
from kept.storage.errors import vanished
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import Segment
from kept.storage.types import MAX_INT32, MAX_INT64, LogConfig, TopicPartition

POSITIONS: Final = 1024
"""Batches whose positions are remembered, so that a read at the tail needs no look-up."""
MIN_INDEX_ENTRIES: Final = 2


class Tail:
    """The active segment, and the batches that are staged after it. ``active`` is the last of
    ``segments``.
    """

    __slots__ = (
        "_disk",
        "_interval",
        "_max_index_entries",
        "_positions",
        "_segments",
        "_staged",
        "active",
        "end_offset",
        "roll_age_ms",
        "segment_bytes",
        "staged_bytes",
        "written_end_offset",
    )

    def __init__(self, disk: Disk, segments: Segments) -> None:
        self._disk = disk
        self._segments = segments
        self._staged: list[Bytes] = []
        self._positions: dict[int, int] = {}
        self.staged_bytes = 0
        self.active: Segment = segments.active
        self.end_offset = self.written_end_offset = self.active.next_offset

    def configure(self, config: LogConfig, tp: TopicPartition) -> None:
        """Take new settings; they hold from the next batch on. ``tp`` seeds the roll jitter."""
        age = min(config.segment_ms, config.max_compaction_lag_ms if config.compact else MAX_INT64)
        if config.segment_jitter_ms:
            seed = zlib.crc32(str(tp).encode())
            age -= seed % min(config.segment_jitter_ms + 1, max(age, 1))
        self.roll_age_ms = max(age, 0)
        self.segment_bytes = config.segment_bytes
        self._max_index_entries = max(config.segment_index_bytes // 12 - 1, MIN_INDEX_ENTRIES)
        self._interval = config.index_interval_bytes
        self.active.index_interval_bytes = self._interval

    # Staging.

    def index_batch(  # noqa: PLR0917
        self, ahead: int, size: int, base: int, last: int, timestamp: int, now_ms: int
    ) -> bool:
        """A batch of ``size`` bytes is staged next, ``ahead`` bytes after what is written. False:
        the active segment does not take it, and nothing changed. An empty segment takes any whose
        offset fits.

        ``Segment.index_batch``, inlined: this runs for every batch.
        """
        active = self.active
        index = active.index
        relative = last - active.base_offset
        if relative > MAX_INT32:
            return False
        position = active.size_bytes + ahead
        if position:
            if (
                position + size > self.segment_bytes
                or len(index.offsets) >= self._max_index_entries
            ):
                return False
            first = active.first_timestamp
            waited = timestamp - first if first >= 0 else now_ms - active.created_ms
            if waited > self.roll_age_ms:
                return False
        else:
            active.first_timestamp = timestamp
            active.first_append_ms = now_ms
        if timestamp > active.max_timestamp:
            active.max_timestamp, active.max_timestamp_offset = timestamp, last
        if active.bytes_since_index > self._interval:
            index.offsets.append(relative)
            index.positions.append(position)
            active.time_index.append(active.max_timestamp, active.max_timestamp_offset)
            active.bytes_since_index = size
        else:
            active.bytes_since_index += size
        positions = self._positions
        if len(positions) >= POSITIONS:
            positions.clear()
        positions[base] = position
        self.end_offset = last + 1
        return True

    def stage(self, data: Bytes, size: int) -> None:
        """Have indexed batches of ``size`` bytes written by :meth:`write`."""
        if size:
            self._staged.append(data)
            self.staged_bytes += size

    def write(self) -> None:
        """Write what is staged. Raises MachineError; then part of it may be in the file. None is
        where somebody truncated that: zeros would be before it.
        """
        staged = self._staged
        if not staged:
            return
        active, disk = self.active, self._disk
        if disk.fail_points:
            disk.reach("append.write")
        if disk.size(active.file) < active.size_bytes:
            raise vanished(active.path(layout.LOG))
        disk.writev(active.file, staged, active.size_bytes)
        if disk.fail_points:
            disk.reach("append.written")
        active.size_bytes += self.staged_bytes
        active.flushed = False
        self.staged_bytes = 0
        self._staged = []
        active.next_offset = self.written_end_offset = self.end_offset

    # Moving its end.

    def drop_staged(self) -> None:
        """Forget what is staged. The active segment's indexes are stale then."""
        self._staged = []
        self.staged_bytes = 0
        self.end_offset = self.written_end_offset
        self._positions.clear()

    def begin_segment(self, base_offset: int, now_ms: int) -> None:
        """Add an active segment (its file exists then, not durably); the log ends there at least.

        Nothing may be staged. Raises MachineError; then all is as it was.
        """
        self.active = self._segments.create(base_offset, self._interval, now_ms)
        self.end_offset = self.written_end_offset = max(base_offset, self.end_offset)
        self.active.next_offset = base_offset
        self._positions.clear()

    def reset(self, end_offset: int) -> None:
        """The last segment is another one, or was cut: the log ends at ``end_offset``."""
        self.active = self._segments.active
        self.active.index_interval_bytes = self._interval
        self.end_offset = self.written_end_offset = end_offset
        self.drop_staged()

    # Reading.

    def slice(self, offset: int, max_bytes: int, end_offset: int) -> FileSlice | None:
        """Written batches from the one that begins at ``offset`` up to ``end_offset``, if both ends
        are remembered and ``max_bytes`` is enough. None says nothing.
        """
        position = self._positions.get(offset)
        if position is None or offset >= end_offset:
            return None
        active = self.active
        if end_offset == self.written_end_offset:
            end = active.size_bytes
        else:
            end = self._positions.get(end_offset, -1)
        if 0 < end - position <= max_bytes:
            return FileSlice(active.file, position, end - position)
        return None
