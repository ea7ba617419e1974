"""Which ranges of offsets a read consists of: pure decisions.

A range belongs to one partition and becomes one task. Sizes are differences of offsets: an upper
bound of the records, since compaction leaves gaps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from kept.storage.types import MAX_INT64, TopicPartition

_T = TypeVar("_T")

MIN_INT64: Final = -(2**63)


class Range(NamedTuple):
    """Offsets ``start`` to ``end`` (exclusive) of a partition of the topic with that id."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str | None = None

    @property
    def size(self) -> int:
        """How many offsets."""
        return self.end - self.start

    @property
    def topic_partition(self) -> TopicPartition:
        """Its partition."""
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """What filters leave of a read. None stands for all; ``min_timestamp`` is in milliseconds."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first: int = 0
    end: int = MAX_INT64
    min_timestamp: int = MIN_INT64

    def narrowed(
        self,
        *,
        topics: Iterable[str] | None = None,
        partitions: Iterable[int] | None = None,
        first: int = 0,
        end: int = MAX_INT64,
        min_timestamp: int = MIN_INT64,
    ) -> ReadBounds:
        """These bounds and those."""
        return ReadBounds(
            _both(self.topics, topics),
            _both(self.partitions, partitions),
            max(self.first, first),
            min(self.end, end),
            max(self.min_timestamp, min_timestamp),
        )

    def admits(self, tp: TopicPartition) -> bool:
        """Whether a partition can have rows."""
        return (self.topics is None or tp.topic in self.topics) and (
            self.partitions is None or tp.partition in self.partitions
        )

    def of(self, one: Range) -> Range:
        """The part of a range that is within the offsets."""
        return one._replace(start=max(one.start, self.first), end=min(one.end, self.end))


def _both(ours: frozenset[_T] | None, theirs: Iterable[_T] | None) -> frozenset[_T] | None:
    if theirs is None:
        return ours
    return frozenset(theirs) if ours is None else ours & frozenset(theirs)


def plan(
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    topic_ids: Mapping[str, str | None],
    bounds: ReadBounds,
) -> list[Range]:
    """One range for every partition that has offsets within the bounds."""
    ranges = []
    for tp in sorted(ends):
        range_ = bounds.of(Range(tp.topic, tp.partition, starts[tp], ends[tp], topic_ids[tp.topic]))
        if range_.size > 0 and bounds.admits(tp):
            ranges.append(range_)
    return ranges


def split(
    ranges: Sequence[Range], min_partitions: int | None, max_records: int | None
) -> list[Range]:
    """Cut ranges so that none has more offsets than ``max_records`` and that there are
    ``min_partitions`` of them (as far as there are offsets), large ones first, in order.
    """
    parts = dict.fromkeys(ranges, 1)
    if max_records is not None:
        parts = {range_: -(-range_.size // max_records) for range_ in ranges}
    missing = (min_partitions or 0) - sum(parts.values())
    largest = [(-range_.size / count, range_) for range_, count in parts.items()]
    heapq.heapify(largest)
    while missing > 0 and largest:
        _, range_ = heapq.heappop(largest)
        if parts[range_] < range_.size:
            parts[range_] += 1
            missing -= 1
            heapq.heappush(largest, (-range_.size / parts[range_], range_))
    return [piece for range_ in ranges for piece in cut(range_, parts[range_])]


def split_by_bytes(
    ranges: Sequence[Range], bytes_each: Mapping[TopicPartition, float], most: int
) -> list[Range]:
    """Cut ranges so that none has more than about ``most`` bytes, at so many an offset."""
    return [
        piece
        for range_ in ranges
        for piece in cut(
            range_,
            min(
                range_.size,
                max(1, math.ceil(range_.size * bytes_each[range_.topic_partition] / most)),
            ),
        )
    ]


def cut(one: Range, count: int) -> list[Range]:
    """A range in ``count`` pieces of about the same size."""
    at = [one.start + one.size * i // count for i in range(count + 1)]
    return [one._replace(start=at[i], end=at[i + 1]) for i in range(count)]
