"""Moving replicas: KIP-455. Pure functions of the image.

A reassignment goes in steps that are all in the partition's record. It begins with the target and
the replicas that shall go, together, as ``replicas``; ``adding`` and ``removing`` say which is
which. The new ones fetch. When all of them are in the ISR, the record without ``removing``
replaces it (:func:`.partition_election.complete_reassignment`: in the very decision that lets the
last one in), and the lead leaves a removed replica. Cancelling takes the added ones out again.
Whoever is not in ``replicas`` any more deletes its files.

After ``PartitionReassignmentReplicas`` and ``PartitionReassignmentRevert``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.controller.partition_election import complete_reassignment, with_leader
from kept.cluster.controller.topics import check_assignment
from kept.cluster.controller.unclean_recovery import candidates
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NO_LEADER, MetadataRecord, PartitionRecord, ResourceType
from kept.storage.errors import (
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from kept.storage.types import TopicPartition


class OngoingReassignment(Struct, frozen=True):
    """A reassignment in progress. ``replicas`` holds the added and the removed ones, too."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


def reassign(
    image: Image,
    topic: str,
    partition: int,
    replicas: Sequence[int] | None,
    *,
    allow_replication_factor_change: bool = True,
) -> list[MetadataRecord]:
    """Give a partition these replicas, in order of preference; None cancels what is in progress.

    Another reassignment in progress is replaced. Raises UnknownTopicOrPartition,
    InvalidReplicaAssignment (none, twice, not registered), InvalidReplicationFactor,
    NoReassignmentInProgress.
    """
    state = image.partition(topic, partition)
    if state is None:
        raise UnknownTopicOrPartition(f"no partition {topic}:{partition}")
    if replicas is None:
        return _cancel(image, topic, state)
    target = tuple(replicas)
    check_assignment(image, target, prefix="The reassignment includes")
    current = tuple(b for b in state.replicas if b not in state.adding)
    if len(target) != len(current) and not allow_replication_factor_change:
        raise InvalidReplicationFactor(
            f"The replication factor is changed from {len(current)} to {len(target)}"
        )
    removing = tuple(b for b in current if b not in target)
    adding = tuple(b for b in target if b not in current)
    members = (*target, *sorted(removing))
    after = replace(
        state,
        replicas=members,
        isr=tuple(b for b in members if b in state.isr),
        elr=tuple(b for b in members if b in state.elr),
        adding=adding,
        removing=removing,
    )
    return _step(image, topic, state, after)


def _cancel(image: Image, topic: str, state: PartitionRecord) -> list[MetadataRecord]:
    """Back to the replicas before. An ISR of added ones only cannot be left: the data is theirs."""
    if not state.reassigning:
        raise NoReassignmentInProgress(f"{topic}:{state.partition} is not being reassigned")
    replicas = tuple(b for b in state.replicas if b not in state.adding)
    after = replace(
        state,
        replicas=replicas,
        isr=tuple(b for b in state.isr if b not in state.adding),
        elr=tuple(b for b in state.elr if b not in state.adding),
        adding=(),
        removing=(),
    )
    return _step(image, topic, state, after)


def _step(
    image: Image, topic: str, state: PartitionRecord, after: PartitionRecord
) -> list[MetadataRecord]:
    needed = candidates(state) if state.leader == NO_LEADER else ()
    if not after.isr or not set(needed) <= set(after.replicas):
        raise InvalidReplicaAssignment(
            f"{topic}:{state.partition}: replicas that would go may be the only ones to have what "
            f"is acknowledged (ISR {list(state.isr)}); wait until it has a leader and others are "
            "in sync"
        )
    after = complete_reassignment(after)
    return [] if after == state else [with_leader(image, state, after)]


def list_reassignments(
    image: Image, partitions: Collection[TopicPartition] | None = None
) -> tuple[OngoingReassignment, ...]:
    """The reassignments in progress, of all partitions or of these; in order of names."""
    ongoing: list[OngoingReassignment] = []
    for topic_id, number in image.pending:
        state = image.partition(topic_id, number)
        topic = image.topics_by_id[topic_id].name
        if state is None or not state.reassigning:
            continue
        if partitions is None or TopicPartition(topic, number) in partitions:
            ongoing.append(
                OngoingReassignment(topic, number, state.replicas, state.adding, state.removing)
            )
    return tuple(sorted(ongoing, key=lambda r: (r.topic, r.partition)))


def finish_reassignments(image: Image, *, limit: int | None = None) -> list[MetadataRecord]:
    """Complete what could be completed: where the ISR has all it takes but its leader has not
    asked for a change since.
    """
    records: list[MetadataRecord] = []
    for key in sorted(image.pending):
        state = image.partition(*key)
        if state is None or not state.reassigning:
            continue
        after = complete_reassignment(state)
        if after != state:
            records.append(with_leader(image, state, after))
            if len(records) == limit:
                break
    return records


LEADER_REPLICAS = "leader.replication.throttled.replicas"
FOLLOWER_REPLICAS = "follower.replication.throttled.replicas"


def throttled(image: Image, topic: str, setting: str) -> Collection[tuple[int, int]] | None:
    """The (partition, broker) pairs that a topic's throttle names; None means all of them (``*``).

    ``setting`` is :data:`LEADER_REPLICAS` or :data:`FOLLOWER_REPLICAS`.
    """
    value = image.config(ResourceType.TOPIC, topic).get(setting, "")
    if value.strip() == "*":
        return None
    pairs = (part.split(":") for part in value.split(",") if part.strip())
    return frozenset((int(partition), int(broker)) for partition, broker in pairs)
