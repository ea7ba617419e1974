"""Why nobody can be asked about a partition, from what Metadata told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kept.client.core.broker_errors import failure
from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection

    from kept.client.core.metadata import ClusterMetadata

GRACE_MS: Final = 1_000
"""So long a partition may be offline with its log directory before that is taken for final."""
LINGERING_MS: Final = 6_000
"""The same where another node may have told: of one whose process died, too, it says for some
seconds that it is there and its replicas are offline."""


def offline_grace_ms(nodes: int) -> int:
    """How long KafkaStorageError is worth another try in a cluster of so many nodes."""
    return GRACE_MS if nodes == 1 else LINGERING_MS


def why_no_leader(view: ClusterMetadata, tp: TopicPartition, what: str) -> KeptError:
    """The error for a partition whose leader is not known; ``what`` was to be done.

    KafkaStorageError: nodes are there, and the log directories of all replicas are offline. An
    election does not mend that, and a node does not before it is started anew.
    """
    topic = view.topics.get(tp.topic)
    error = failure(3 if topic is None else topic.error_code, what)
    if topic is None or error is not None:
        assert error is not None
        return error
    partition = topic.partitions.get(tp.partition)
    if partition is None:
        count = len(topic.partitions)
        return UnknownTopicOrPartition(
            f"{what}: topic {tp.topic} has {count} partition{'s'[: count != 1]}, "
            f"there is no partition {tp.partition}"
        )
    away = [n for n in partition.replicas if n not in view.nodes]
    failed = [n for n in partition.offline_replicas if n not in away]
    if failed and len(failed) == len(partition.replicas):
        return KafkaStorageError(
            f"{what}: {tp.place} has no leader: it is offline on {_nodes(failed)}, its only "
            f"{'replica' if len(failed) == 1 else 'replicas'}"
        )
    states = [
        f"{_nodes(nodes)} {'is' if len(nodes) == 1 else 'are'} {state}"
        for nodes, state in ((away, "away"), (failed, "offline"))
        if nodes
    ]
    if partition.isr and set(partition.isr) != set(partition.replicas):
        states.append(f"in sync: {_nodes(partition.isr)}")
    said = f": {'; '.join(states)}" if states else ""
    return NotLeaderOrFollower(f"{what}: {tp.place} has no leader now{said}")


def _nodes(ids: Collection[int]) -> str:
    return f"node{'s'[: len(ids) != 1]} {', '.join(map(str, ids))}"
