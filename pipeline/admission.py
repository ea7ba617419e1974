"""How much of what is there a trigger takes: pure decisions over offsets.

Counts are differences of offsets, as in Spark's Kafka connector: an upper bound of the records, so
a limit is never exceeded, and a trigger over a heavily compacted range brings fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

from kept.storage.types import TopicPartition

Offsets = Mapping[TopicPartition, int]


def available(start: Offsets, end: Offsets) -> int:
    """How many offsets lie between; a partition absent from ``start`` counts nothing."""
    return sum(max(0, end[tp] - start[tp]) for tp in end.keys() & start.keys())


def limited(start: Offsets, end: Offsets, most: int) -> dict[TopicPartition, int]:
    """The end of a trigger that takes ``most`` offsets: each partition in proportion to what waits
    there, and at least one wherever something waits, as far as ``most`` goes.
    """
    waiting = {tp: end[tp] - start[tp] for tp in sorted(end) if end[tp] > start[tp]}
    total = sum(waiting.values())
    if total <= most:
        return dict(end)
    few = dict(sorted(waiting.items(), key=lambda one: one[1], reverse=True)[:most])
    shares = dict.fromkeys(few, 1)
    left, rest = most - len(few), sum(few.values()) - len(few)
    if left and rest:
        for tp, size in few.items():
            shares[tp] += (size - 1) * left // rest
        for tp in sorted(few, key=lambda tp: shares[tp] - few[tp]):
            if sum(shares.values()) >= most:
                break
            shares[tp] += 1
    return {tp: start.get(tp, end[tp]) + shares.get(tp, 0) for tp in end}


def to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    """Offsets as a checkpoint holds them, in the form of Spark's Kafka connector."""
    found: dict[str, dict[str, int]] = {}
    for tp in sorted(offsets):
        found.setdefault(tp.topic, {})[str(tp.partition)] = offsets[tp]
    return found


def from_json(checkpoint: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    """The offsets in a checkpoint."""
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in checkpoint.items()
        for partition, offset in partitions.items()
    }
