"""What a partition shows of itself: plain values for handlers, metrics and tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kept.storage.disk import FileSlice
from kept.storage.errors import KeptError
from kept.storage.log.log import Log
from kept.storage.types import NO_OFFSET

Waiter = Callable[[], None]
"""Called when a partition's HW, LEO, LSO, log start or leadership moved. Must not raise."""

CommitCallback = Callable[[KeptError | None], None]
"""Called once: committed (None), or why it is not known to be. Must not raise."""


class PartitionFetch(NamedTuple):
    """The answer to a fetch. ``diverging``: (epoch, end offset) of rule 26, then there is no data.

    ``aborted`` is None unless the reader is read_committed.
    """

    slice: FileSlice | None
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]] | None
    diverging: tuple[int, int] | None


class ListedOffset(NamedTuple):
    """The answer to ListOffsets; -1 where there is none."""

    timestamp: int
    offset: int
    leader_epoch: int


class SegmentView(NamedTuple):
    """One segment of a log; ``next_offset`` is exclusive."""

    base_offset: int
    next_offset: int
    size_bytes: int
    largest_timestamp: int
    active: bool


class ProducerView(NamedTuple):
    """One producer, as DescribeProducers shows it; -1 where there is none."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int


def segment_views(log: Log) -> list[SegmentView]:
    """The segments of a log, ascending."""
    segments = log.segments
    last = len(segments) - 1
    return [
        SegmentView(
            segment.base_offset,
            segments[i + 1].base_offset if i < last else log.written_end_offset,
            segment.size_bytes,
            segment.largest_timestamp,
            i == last,
        )
        for i, segment in enumerate(segments)
    ]


def producer_views(log: Log) -> list[ProducerView]:
    """The producers that a log knows, by id."""
    return [
        ProducerView(
            producer_id,
            state.epoch,
            state.last_sequence,
            state.last_timestamp,
            log.producers.coordinator_epoch(producer_id),
            NO_OFFSET if state.txn_first_offset is None else state.txn_first_offset,
        )
        for producer_id, state in sorted(log.producers.items())
    ]
