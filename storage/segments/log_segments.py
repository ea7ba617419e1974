"""The segments of one log, ascending; the last one is active, the others never change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, overload

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import InvariantViolation
from kept.storage.segments.segment import Segment

LOADED_INDEXES: Final = 4
"""Closed segments of a log whose indexes stay in memory: up to 2 MB each at Kafka's defaults."""


class Segments(Sequence[Segment]):
    """Segments by base offset. Never empty once the log is open. ``directory`` is the log's."""

    def __init__(self, disk: Disk, directory: str, segments: list[Segment]) -> None:
        self._disk = disk
        self.directory = directory
        self._segments = segments
        self._loaded: list[Segment] = []
        self.bases = [segment.base_offset for segment in segments]

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        return self._segments[index]

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    @property
    def active(self) -> Segment:
        """The segment that is appended to."""
        return self._segments[-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of all ``.log`` files."""
        return sum(segment.size_bytes for segment in self._segments)

    def moved_to(self, directory: str) -> None:
        """The log's directory was renamed; readers that hold a segment find it there."""
        self.directory = directory
        for segment in self._segments:
            segment.directory = directory

    def floor(self, offset: int) -> int:
        """Index of the segment that may hold ``offset``: the last whose base is <= it (or 0)."""
        return max(0, bisect_right(self.bases, offset) - 1)

    def next_base(self, index: int, log_end_offset: int) -> int:
        """Where the range of a segment ends."""
        return self.bases[index + 1] if index + 1 < len(self.bases) else log_end_offset

    def loaded(self, segment: Segment) -> Segment:
        """The segment with its offset index in memory; few closed ones keep theirs (an LRU)."""
        if segment is self._segments[-1]:
            return segment
        if segment in self._loaded:
            self._loaded.remove(segment)
        self._loaded.append(segment)
        if len(self._loaded) > LOADED_INDEXES:
            oldest = self._loaded.pop(0)
            if oldest is not self._segments[-1]:
                oldest.index.unload()
                oldest.time_index.unload()
        segment.load_index()
        return segment

    def create(self, base_offset: int, index_interval_bytes: int, now_ms: int) -> Segment:
        """Add an empty active segment; its file exists when this returns (not durably)."""
        if self.bases and base_offset <= self.bases[-1]:
            raise InvariantViolation(f"segment {base_offset} after {self.bases[-1]}")
        segment = Segment(
            self._disk,
            self.directory,
            base_offset,
            size_bytes=0,
            mtime_ms=now_ms,
            index_interval_bytes=index_interval_bytes,
            loaded=True,
        )
        for kind in (layout.INDEX, layout.TIME_INDEX, layout.TXN_INDEX):
            self._disk.unlink(segment.path(kind))
        segment.file = self._disk.open_append(segment.path(layout.LOG))
        if self._disk.size(segment.file):
            self._disk.truncate(segment.file, 0)
        self._segments.append(segment)
        self.bases.append(base_offset)
        return segment

    def remove(self, segments: Sequence[Segment]) -> None:
        """Take segments out of the list; their files are the caller's."""
        gone = set(map(id, segments))
        self._segments = [s for s in self._segments if id(s) not in gone]
        self._loaded = [s for s in self._loaded if id(s) not in gone]
        self.bases = [segment.base_offset for segment in self._segments]

    def replace(self, old: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Put closed segments in the place of others, at once for every reader."""
        gone = set(map(id, old))
        kept = [s for s in self._segments if id(s) not in gone]
        self._loaded = [s for s in self._loaded if id(s) not in gone]
        self._segments = sorted([*kept, *new], key=lambda s: s.base_offset)
        self.bases = [segment.base_offset for segment in self._segments]

    def check_invariants(self) -> None:
        """Raises InvariantViolation."""
        if self.bases != [s.base_offset for s in self._segments]:
            raise InvariantViolation("bases and segments disagree")
        for lower, upper in zip(self._segments, self._segments[1:], strict=False):
            if lower.base_offset >= upper.base_offset:
                raise InvariantViolation(f"{lower} is not below {upper}")
