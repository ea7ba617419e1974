"""How much of what is there a trigger takes: pure decisions over offsets.

Counts are differences of offsets, as in Spark's Kafka connector: an upper bound of the records, so
a limit is never exceeded, and a trigger over a heavily compacted range brings fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kept.storage.types import TopicPartition

Offsets = Mapping[TopicPartition, int]

TOPIC_ID: Final = "topicId"
LEADER_EPOCHS: Final = "leaderEpochs"
"""Beside the partitions of a topic in a checkpoint."""

Checkpoint = dict[str, dict[str, Any]]


def available(start: Offsets, end: Offsets) -> int:
    """How many offsets lie between; a partition absent from ``start`` counts nothing."""
    return sum(max(0, end[tp] - start[tp]) for tp in end.keys() & start.keys())


def limited(start: Offsets, end: Offsets, most: int) -> dict[TopicPartition, int]:
    """The end of a trigger that takes ``most`` offsets: each partition in proportion to what waits
    there, and at least one wherever something waits. Where ``most`` does not go that far the
    partitions take turns: what they have taken together says whose turn it is.
    """
    waiting = {tp: end[tp] - start[tp] for tp in sorted(end) if end[tp] > start[tp]}
    total = sum(waiting.values())
    if total <= most:
        return dict(end)
    turn = sum(start[tp] for tp in waiting) % len(waiting) if most < len(waiting) else 0
    queue = [*waiting.items()]
    few = dict((queue[turn:] + queue[:turn])[:most])
    shares = dict.fromkeys(few, 1)
    left, rest = most - len(few), sum(few.values()) - len(few)
    if left and rest:
        for tp, size in few.items():
            shares[tp] += (size - 1) * left // rest
        over = most - sum(shares.values())
        for tp in sorted(few, key=lambda tp: shares[tp] - few[tp])[:over]:
            shares[tp] += 1
    return {tp: start.get(tp, end[tp]) + shares.get(tp, 0) for tp in end}


def to_json(
    offsets: Offsets,
    topic_ids: Mapping[str, str | None] | None = None,
    leader_epochs: Mapping[TopicPartition, int] | None = None,
) -> Checkpoint:
    """Offsets as a checkpoint holds them: in the form of Spark's Kafka connector, and which topic
    of that name they belong to, and who led it when they were there.
    """
    checkpoint: Checkpoint = {}
    for tp in sorted(offsets):
        checkpoint.setdefault(tp.topic, {})[str(tp.partition)] = offsets[tp]
    for topic, number in (topic_ids or {}).items():
        if number is not None and topic in checkpoint:
            checkpoint[topic][TOPIC_ID] = number
    for tp, epoch in sorted((leader_epochs or {}).items()):
        if tp in offsets and epoch >= 0:
            checkpoint[tp.topic].setdefault(LEADER_EPOCHS, {})[str(tp.partition)] = epoch
    return checkpoint


def from_json(checkpoint: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, int]:
    """The offsets in a checkpoint."""
    return {
        TopicPartition(topic, int(partition)): int(offset)
        for topic, partitions in checkpoint.items()
        for partition, offset in partitions.items()
        if partition not in (TOPIC_ID, LEADER_EPOCHS)
    }


def topic_ids_in(checkpoint: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Topic -> its id, as far as the checkpoint says: the connector's does not."""
    return {
        topic: str(partitions[TOPIC_ID])
        for topic, partitions in checkpoint.items()
        if TOPIC_ID in partitions
    }


def leader_epochs_in(checkpoint: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, int]:
    """The leader epoch in which each offset was there, as far as the checkpoint says."""
    return {
        TopicPartition(topic, int(partition)): int(epoch)
        for topic, partitions in checkpoint.items()
        for partition, epoch in partitions.get(LEADER_EPOCHS, {}).items()
    }
