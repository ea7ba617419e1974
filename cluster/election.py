"""Decisions on partitions: who leads, and which ISR changes are accepted. Pure functions.

Rule 36: the leader is the first live member of the ISR in replica order; outside of the ISR only
where unclean election is allowed, and then the partition stays marked until its leader has
published a base generation (rule 19). Rule 35: ISR changes are compare-and-set on the partition
epoch. A new leader means a new leader epoch, a new record a new partition epoch
(``PartitionChangeBuilder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from uuid import UUID

from kept.cluster.image import Image
from kept.cluster.records import NO_LEADER, MetadataRecord, PartitionRecord
from kept.storage.errors import (
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidRequest,
    InvalidUpdateVersion,
    NotLeaderOrFollower,
    PreferredLeaderNotAvailable,
    StaleBrokerEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

UncleanAllowed = Callable[[str], bool]
"""Whether a topic, by name, may elect a leader outside of the ISR."""


def never_unclean(_topic: str) -> bool:
    """The default: an acknowledged record is never given up."""
    return False


@dataclass(frozen=True, slots=True)
class AlterIsr:
    """A leader asks for another ISR. ``base_published``: an unclean leader has published its base
    generation, which takes the mark off.
    """

    topic_id: UUID
    partition: int
    broker_id: int
    broker_epoch: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    """(broker id, broker epoch as the leader knows it; -1: unknown), in any order."""
    base_published: bool = False


def leader_of(image: Image, state: PartitionRecord, isr: tuple[int, ...]) -> int:
    """The first live member of ``isr`` in replica order, or NO_LEADER."""
    for broker_id in state.replicas:
        if broker_id in isr and _live(image, broker_id):
            return broker_id
    return NO_LEADER


def _live(image: Image, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.active


def changed(
    state: PartitionRecord,
    *,
    leader: int,
    isr: tuple[int, ...],
    unclean: bool,
    new_epoch: bool = False,
) -> PartitionRecord | None:
    """The partition's next record; None when nothing changes.

    The leader epoch grows when the leader changes, or when ``new_epoch`` asks for it.
    """
    new_epoch = new_epoch or leader != state.leader
    if not new_epoch and isr == state.isr and unclean == state.unclean:
        return None
    return replace(
        state,
        leader=leader,
        isr=isr,
        unclean=unclean,
        leader_epoch=state.leader_epoch + new_epoch,
        partition_epoch=state.partition_epoch + 1,
    )


def hosted(image: Image, broker_id: int) -> Iterator[tuple[str, PartitionRecord]]:
    """(topic, state) of each partition with a replica there."""
    for topic in image.topics.values():
        for state in topic.partitions:
            if broker_id in state.replicas:
                yield topic.name, state


def without_broker(image: Image, broker_id: int) -> list[PartitionRecord]:
    """What changes when a broker stops taking part: it leaves every ISR unless it is the last
    member, and others lead. ``image`` already has the broker inactive.
    """
    records: list[PartitionRecord] = []
    for _, state in hosted(image, broker_id):
        if broker_id not in state.isr:
            continue
        isr = tuple(member for member in state.isr if member != broker_id) or state.isr
        leader = state.leader
        if leader == broker_id or leader not in isr:
            leader = leader_of(image, state, isr)
        record = changed(state, leader=leader, isr=isr, unclean=state.unclean)
        if record is not None:
            records.append(record)
    return records


def with_broker(
    image: Image, broker_id: int, unclean_allowed: UncleanAllowed = never_unclean
) -> list[PartitionRecord]:
    """What changes when a broker takes part again: partitions without a leader get one.

    ``image`` already has the broker active.
    """
    records: list[PartitionRecord] = []
    for topic, state in hosted(image, broker_id):
        if state.leader != NO_LEADER:
            continue
        leader, isr, unclean = leader_of(image, state, state.isr), state.isr, state.unclean
        if leader == NO_LEADER and unclean_allowed(topic):
            leader, isr, unclean = broker_id, (broker_id,), True
        record = changed(state, leader=leader, isr=isr, unclean=unclean)
        if record is not None:
            records.append(record)
    return records


def elect_preferred(image: Image, topic: str, partition: int) -> list[MetadataRecord]:
    """Make the first replica the leader.

    Raises UnknownTopicOrPartition, ElectionNotNeeded, PreferredLeaderNotAvailable.
    """
    state = _state(image, topic, partition)
    preferred = state.replicas[0]
    if state.leader == preferred:
        raise ElectionNotNeeded(f"{topic}-{partition} is led by its preferred replica")
    if preferred not in state.isr or not _live(image, preferred):
        raise PreferredLeaderNotAvailable(
            f"{topic}-{partition}: replica {preferred} is not alive and in the ISR {state.isr}"
        )
    record = changed(state, leader=preferred, isr=state.isr, unclean=state.unclean)
    return [] if record is None else [record]


def elect_unclean(image: Image, topic: str, partition: int) -> list[MetadataRecord]:
    """Give a partition without a leader one, from the ISR if possible, else any live replica.

    Raises UnknownTopicOrPartition, ElectionNotNeeded, EligibleLeadersNotAvailable.
    """
    state = _state(image, topic, partition)
    if state.leader != NO_LEADER:
        raise ElectionNotNeeded(f"{topic}-{partition} has leader {state.leader}")
    isr, unclean = state.isr, state.unclean
    leader = leader_of(image, state, isr)
    if leader == NO_LEADER:
        leader = leader_of(image, state, state.replicas)
        isr, unclean = (leader,), True
    if leader == NO_LEADER:
        raise EligibleLeadersNotAvailable(
            f"{topic}-{partition}: none of the replicas {state.replicas} is alive"
        )
    record = changed(state, leader=leader, isr=isr, unclean=unclean)
    return [] if record is None else [record]


def alter_isr(image: Image, request: AlterIsr) -> list[MetadataRecord]:
    """A leader's ISR change, accepted only on the partition epoch that the leader knows.

    Raises UnknownTopicId, UnknownTopicOrPartition, StaleBrokerEpoch, FencedLeaderEpoch,
    NotLeaderOrFollower, InvalidUpdateVersion, InvalidRequest, IneligibleReplica.
    """
    state = _checked_state(image, request)
    members = [broker_id for broker_id, _ in request.isr]
    if (
        request.broker_id not in members
        or len(set(members)) != len(members)
        or not set(members) <= set(state.replicas)
    ):
        raise InvalidRequest(
            f"ISR {members} of replicas {state.replicas} led by {request.broker_id}"
        )
    isr = tuple(broker_id for broker_id in state.replicas if broker_id in members)
    unclean = state.unclean and not request.base_published
    for broker_id, broker_epoch in request.isr:
        if broker_id in state.isr:
            continue
        _check_eligible(image, broker_id, broker_epoch)
        if unclean:
            raise IneligibleReplica(
                "elected uncleanly: the ISR grows after the leader has published its base"
            )
    record = changed(state, leader=state.leader, isr=isr, unclean=unclean)
    return [] if record is None else [record]


def _checked_state(image: Image, request: AlterIsr) -> PartitionRecord:
    broker = image.brokers.get(request.broker_id)
    if broker is None or broker.broker_epoch != request.broker_epoch:
        raise StaleBrokerEpoch(f"broker {request.broker_id} epoch {request.broker_epoch}")
    if request.topic_id not in image.topics_by_id:
        raise UnknownTopicId(f"no topic has id {request.topic_id}")
    state = image.partition(request.topic_id, request.partition)
    if state is None:
        raise UnknownTopicOrPartition(f"no partition {request.partition}")
    if request.leader_epoch < state.leader_epoch:
        raise FencedLeaderEpoch(f"leader epoch {request.leader_epoch}, now {state.leader_epoch}")
    if request.leader_epoch > state.leader_epoch or state.leader != request.broker_id:
        raise NotLeaderOrFollower(
            f"broker {request.broker_id} does not lead in epoch {request.leader_epoch}"
        )
    if request.partition_epoch != state.partition_epoch:
        raise InvalidUpdateVersion(
            f"partition epoch {request.partition_epoch}, now {state.partition_epoch}"
        )
    return state


def _check_eligible(image: Image, broker_id: int, broker_epoch: int) -> None:
    broker = image.brokers.get(broker_id)
    if broker is None or not broker.active:
        raise IneligibleReplica(f"broker {broker_id} is fenced, shutting down or gone")
    if broker_epoch not in (-1, broker.broker_epoch):
        raise IneligibleReplica(
            f"broker {broker_id} has epoch {broker.broker_epoch}, not {broker_epoch}"
        )


def _state(image: Image, topic: str, partition: int) -> PartitionRecord:
    state = image.partition(topic, partition)
    if state is None:
        raise UnknownTopicOrPartition(f"no partition {topic}-{partition}")
    return state
