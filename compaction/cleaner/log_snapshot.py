"""A log as the planner sees it: plain values, taken from a :class:`~kept.storage.log.log.Log`."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kept.compaction.manifest.apply import CompactionState
from kept.storage.errors import DamagedData
from kept.storage.types import NO_TIMESTAMP, LogConfig, TopicPartition

if TYPE_CHECKING:
    from kept.storage.log.log import Log
    from kept.storage.segments.segment import Segment


@dataclass(frozen=True, slots=True)
class SegmentSnapshot:
    """A segment: ``end_offset`` is the next segment's base (the log's end for the active one).

    ``largest_timestamp`` is the file's mtime where there is no timestamp; ``first_timestamp`` is
    that of the first batch, -1 without one or where it is damaged.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    largest_timestamp: int
    first_timestamp: int
    mtime_ms: int


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """A log; the last of ``segments`` is the active one. ``last_stable_offset`` <= high
    watermark.
    """

    topic_partition: TopicPartition
    topic_id: uuid.UUID
    directory: str
    segments: tuple[SegmentSnapshot, ...]
    log_start_offset: int
    log_end_offset: int
    last_stable_offset: int
    config: LogConfig
    state: CompactionState
    uncleanable: str | None = None

    @property
    def active(self) -> SegmentSnapshot:
        """The segment that is appended to."""
        return self.segments[-1]


def view(
    log: Log, state: CompactionState, last_stable_offset: int, uncleanable: str | None = None
) -> LogSnapshot:
    """A log's view, cheap. ``uncleanable``: why no pass may touch it."""
    segments = log.segments
    ends = [segment.base_offset for segment in segments[1:]] + [log.log_end_offset]
    return LogSnapshot(
        log.topic_partition,
        log.topic_id,
        log.directory,
        tuple(_segment(s, end) for s, end in zip(segments, ends, strict=True)),
        log.log_start_offset,
        log.log_end_offset,
        last_stable_offset,
        log.config,
        state,
        uncleanable,
    )


def _segment(segment: Segment, end_offset: int) -> SegmentSnapshot:
    try:
        first_timestamp = segment.first_timestamp
    except DamagedData:  # a pass says so; others look at logs on a clock
        first_timestamp = NO_TIMESTAMP
    return SegmentSnapshot(
        segment.base_offset,
        end_offset,
        segment.size_bytes,
        segment.largest_timestamp,
        first_timestamp,
        segment.mtime_ms,
    )
