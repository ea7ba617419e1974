"""Decisions on partitions: who leads, and which ISR changes are accepted. Pure functions.

Rule 36: the leader is the first live member of the ISR in replica order; outside of the ISR only
where unclean election is allowed, and then the partition stays marked until its leader has
published a base generation (rule 19). Rule 35: ISR changes are compare-and-set on the partition
epoch. A new leader means a new leader epoch, a new record a new partition epoch
(``PartitionChangeBuilder``). Who leads when a whole ISR restarted unclean: ``unclean_recovery``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.controller.heartbeats import PartitionKey, ReplicaLog
from kept.cluster.controller.unclean_recovery import longest_log
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NO_LEADER, MetadataRecord, PartitionRecord, ResourceType
from kept.storage.errors import (
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidRequest,
    InvalidUpdateVersion,
    KeptError,
    NotLeaderOrFollower,
    PeerError,
    PreferredLeaderNotAvailable,
    RetriableError,
    StaleBrokerEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from kept.storage.types import MAX_INT32

UNCLEAN_ELECTION: Final = "unclean.leader.election.enable"

UncleanAllowed = Callable[[str], bool]
"""Whether a topic, by name, may elect a leader outside of the ISR."""


def never_unclean(_topic: str) -> bool:
    """The default: an acknowledged record is never given up."""
    return False


def unclean_allowed_by(image: Image, default: bool) -> UncleanAllowed:
    """``unclean.leader.election.enable`` of topics; ``default``: the broker's, for all others."""

    def allowed(topic: str) -> bool:
        given = image.config(ResourceType.TOPIC, topic).get(UNCLEAN_ELECTION)
        return default if given is None else given == "true"

    return allowed


class AlterIsr(Struct, frozen=True):
    """A leader asks for another ISR. ``base_published``: an unclean leader has published its base
    generation, which takes the mark off. ``last_epoch``: its log has batches of this epoch, which
    is above ``leader_epoch``: it cannot lead before the partition has a later one; else 0.
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
    last_epoch: int = 0


def leader_of(image: Image, state: PartitionRecord) -> int:
    """The first live member of the ISR in replica order, or NO_LEADER.

    A member of the ELR is not eligible: it restarted unclean
    (``kept.cluster.controller.unclean_recovery``).
    """
    for broker_id in state.replicas:
        if broker_id in state.isr and broker_id not in state.elr and is_active(image, broker_id):
            return broker_id
    return NO_LEADER


def is_active(image: Image, broker_id: int) -> bool:
    """The broker is registered, unfenced and does not shut down."""
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.active


def next_record(
    state: PartitionRecord, *, new_epoch: bool = False, **fields: Any
) -> PartitionRecord | None:
    """The partition's next record, with these fields changed; None when nothing changes.

    The leader epoch grows when the leader changes, or when ``new_epoch`` asks for it.
    """
    after = replace(state, **fields)
    new_epoch = new_epoch or after.leader != state.leader
    if not new_epoch and after == state:
        return None
    return replace(
        after,
        leader_epoch=state.leader_epoch + new_epoch,
        partition_epoch=state.partition_epoch + 1,
    )


def partitions_on_broker(image: Image, broker_id: int) -> Iterator[tuple[str, PartitionRecord]]:
    """(topic, state) of each partition with a replica there, in order of topics and numbers."""
    topics = [image.topics_by_id[topic_id] for topic_id in image.hosted.get(broker_id, ())]
    for topic in sorted(topics, key=lambda topic: topic.name):
        for number in sorted(image.hosted[broker_id][topic.topic_id]):
            yield topic.name, topic.partitions[number]


def without_broker(
    image: Image,
    broker_id: int,
    unclean_allowed: UncleanAllowed = never_unclean,
    *,
    unclean_restart: bool = False,
) -> list[PartitionRecord]:
    """What changes when a broker stops taking part: it leaves every ISR for the ELR, and others
    lead. Where none of the others takes part either, the ISR stays as it is: all of it has what is
    acknowledged, and nothing more is, so whoever is back first may lead.

    ``image`` already has the broker inactive. With ``unclean_restart`` it came back, and may have
    lost what it had written: it leaves those ISRs, too; where it is the last member and the ELR has
    others, nobody leads until all of them have reported.
    """
    records: list[PartitionRecord] = []
    for topic, state in partitions_on_broker(image, broker_id):
        if broker_id not in state.isr:
            continue
        isr = tuple(member for member in state.isr if member != broker_id)
        if not isr or not (unclean_restart or any(is_active(image, member) for member in isr)):
            isr = state.isr
        elr = state.elr
        if isr != state.isr or (unclean_restart and set(elr) - {broker_id}):
            elr = tuple(b for b in state.replicas if b in elr or b == broker_id)
        after = replace(state, isr=isr, elr=elr)
        leader = state.leader
        if leader == broker_id or leader not in isr:
            leader = leader_of(image, after)
        record = next_record(after, leader=leader) if leader != state.leader else None
        if leader == NO_LEADER and not after.recovering and unclean_allowed(topic):
            record = _unclean(image, after, {}) or record
        record = record or (next_record(state, isr=isr, elr=elr))
        if record is not None:
            records.append(record)
    return records


def with_broker(
    image: Image, broker_id: int, unclean_allowed: UncleanAllowed = never_unclean
) -> list[PartitionRecord]:
    """What changes when a broker, active in ``image``, takes part again: partitions get leaders."""
    records: list[PartitionRecord] = []
    for topic, state in partitions_on_broker(image, broker_id):
        if state.leader == NO_LEADER:
            record = _elected(image, state, unclean_allowed(topic))
            if record is not None:
                records.append(record)
    return records


def _elected(image: Image, state: PartitionRecord, unclean: bool) -> PartitionRecord | None:
    """A partition without a leader gets one, if there is one to be had."""
    leader = leader_of(image, state)
    if leader != NO_LEADER:
        return _led(image, state, leader)
    if unclean and not state.recovering:
        return _unclean(image, state, {})
    return None


def _led(image: Image, state: PartitionRecord, leader: int) -> PartitionRecord | None:
    """A partition without a leader gets this member of its ISR, and goes on with those members
    that take part: the others would hold back its high watermark.
    """
    isr = tuple(member for member in state.isr if member == leader or is_active(image, member))
    elr = tuple(b for b in state.replicas if b in state.elr or (b in state.isr and b not in isr))
    return next_record(state, leader=leader, isr=isr, elr=elr)


def _unclean(
    image: Image, state: PartitionRecord, logs: Mapping[int, ReplicaLog]
) -> PartitionRecord | None:
    """Any live replica leads: the longest of the logs known, else the first in replica order."""
    live = [broker_id for broker_id in state.replicas if is_active(image, broker_id)]
    if not live:
        return None
    best = longest_log(state, {b: log for b, log in logs.items() if b in live})
    leader = live[0] if best == NO_LEADER else best
    return next_record(state, new_epoch=True, leader=leader, isr=(leader,), unclean=True, elr=())


def elect_offline(
    image: Image, unclean_allowed: UncleanAllowed = never_unclean, *, limit: int | None = None
) -> list[MetadataRecord]:
    """Leaders for partitions without one: from their ISRs, or any live replica where that is
    allowed (it may have been configured after the partition went offline).
    """
    records: list[MetadataRecord] = []
    for key in sorted(image.pending):
        state = image.partition(*key)
        if state is None or state.leader != NO_LEADER:
            continue
        record = _elected(image, state, unclean_allowed(image.topics_by_id[key[0]].name))
        if record is not None:
            records.append(record)
            if len(records) == limit:
                break
    return records


def elect_preferred(image: Image, topic: str, partition: int) -> list[MetadataRecord]:
    """Make the first replica the leader.

    Raises UnknownTopicOrPartition, ElectionNotNeeded, PreferredLeaderNotAvailable.
    """
    state = _state(image, topic, partition)
    preferred = state.replicas[0]
    if state.leader == preferred:
        raise ElectionNotNeeded(f"{topic}:{partition} is led by its preferred replica")
    if not _electable(image, state, preferred):
        raise PreferredLeaderNotAvailable(
            f"{topic}:{partition}: replica {preferred} is not alive and in the ISR {state.isr}"
        )
    record = next_record(state, leader=preferred)
    return [] if record is None else [record]


def _electable(image: Image, state: PartitionRecord, broker_id: int) -> bool:
    return broker_id in state.isr and broker_id not in state.elr and is_active(image, broker_id)


def balance_preferred(
    image: Image, *, percentage: int = 10, limit: int | None = None
) -> list[MetadataRecord]:
    """Preferred leaders back to work, for brokers that lead too little of what they should.

    A broker is out of balance when more than ``percentage`` % of the partitions that prefer it are
    led by others (``leader.imbalance.per.broker.percentage``); at most ``limit`` elections.
    """
    prefer: dict[int, int] = {}
    strayed: dict[int, list[PartitionRecord]] = {}
    for topic in image.topics.values():
        for state in topic.partitions:
            preferred = state.replicas[0]
            prefer[preferred] = prefer.get(preferred, 0) + 1
            if state.leader not in (preferred, NO_LEADER):
                strayed.setdefault(preferred, []).append(state)
    records: list[MetadataRecord] = []
    for broker_id in sorted(strayed):
        states = strayed[broker_id]
        if len(states) * 100 <= percentage * prefer[broker_id]:
            continue
        for state in sorted(states, key=lambda state: state.key):
            if len(records) == limit:
                return records
            if _electable(image, state, broker_id):
                record = next_record(state, leader=broker_id)
                records += [record] if record is not None else []
    return records


def elect_unclean(
    image: Image, topic: str, partition: int, logs: Mapping[int, ReplicaLog] | None = None
) -> list[MetadataRecord]:
    """Give a partition without a leader one, from the ISR if possible, else any live replica.

    ``logs``: what replicas have reported
    (:func:`kept.cluster.controller.unclean_recovery.current_reports`): the longest one leads.
    Raises UnknownTopicOrPartition, ElectionNotNeeded, EligibleLeadersNotAvailable.
    """
    state = _state(image, topic, partition)
    if state.leader != NO_LEADER:
        raise ElectionNotNeeded(f"{topic}:{partition} has leader {state.leader}")
    leader = leader_of(image, state)
    if leader != NO_LEADER:
        record = _led(image, state, leader)
    else:
        record = _unclean(image, state, logs or {})
    if record is None:
        raise EligibleLeadersNotAvailable(
            f"{topic}:{partition}: none of the replicas {state.replicas} is alive"
        )
    return [record]


def alter_isr(image: Image, request: AlterIsr) -> list[MetadataRecord]:
    """A leader's ISR change, accepted only on the partition epoch that the leader knows.

    It proves that the leader lives, so it clears the ELR; it completes a reassignment whose
    replicas are all in sync now, and takes the lead from a broker that shuts down as soon as
    another can have it. A leader whose own replica is lost (its log directory failed) leaves itself
    out, and another member leads; a follower may ask for that, too, and for nothing else: it proves
    nothing about the leader. A leader whose log is of a later epoch than the image knows (entries
    of the metadata were lost) gets an epoch above that, and nothing else changes. Raises
    UnknownTopicId, UnknownTopicOrPartition, StaleBrokerEpoch, FencedLeaderEpoch,
    NotLeaderOrFollower, InvalidUpdateVersion, InvalidRequest, IneligibleReplica.
    """
    state = _checked_state(image, request)
    if _leaves_alone(state, request):
        rest = tuple(broker_id for broker_id in state.isr if broker_id != request.broker_id)
        return [with_leader(image, state, replace(state, isr=rest))]
    if request.last_epoch > state.leader_epoch:
        if request.last_epoch >= MAX_INT32:
            raise InvalidRequest(f"there is no leader epoch above {request.last_epoch}")
        epoch, version = request.last_epoch + 1, state.partition_epoch + 1
        return [replace(state, leader_epoch=epoch, partition_epoch=version)]
    members = [broker_id for broker_id, _ in request.isr]
    gives_up = bool(members) and set(members) <= set(state.isr)
    if (
        (request.broker_id not in members and not gives_up)
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
    after = complete_reassignment(replace(state, isr=isr, unclean=unclean, elr=()))
    return [] if after == state else [with_leader(image, state, after)]


def with_leader(image: Image, state: PartitionRecord, after: PartitionRecord) -> PartitionRecord:
    """``after`` as the partition's next record: with a leader of its ISR, and its epochs.

    A leader stays while it is in the ISR and active, or while nobody else could lead. A replica
    that is gone means a new leader epoch: it must not go on as a follower.
    """
    leader = after.leader
    if leader not in after.isr or not is_active(image, leader):
        leader = leader_of(image, after)
        if leader == NO_LEADER and after.leader in after.isr:
            leader = after.leader
        elif NO_LEADER not in (leader, after.leader):
            isr = tuple(b for b in after.isr if b != after.leader)
            if len(isr) < len(after.isr):  # it shuts down
                elr = tuple(b for b in after.replicas if b not in isr and b == after.leader)
                after = replace(after, isr=isr, elr=elr)
    gone = not set(state.replicas) <= set(after.replicas)
    return replace(
        after,
        leader=leader,
        leader_epoch=state.leader_epoch + (gone or leader != state.leader),
        partition_epoch=state.partition_epoch + 1,
    )


def complete_reassignment(state: PartitionRecord) -> PartitionRecord:
    """The state without its reassignment, if that is complete; else the state itself.

    Complete: all that were added are in sync; and when more go than come, all that stay are, lest
    the ISR shrinks for nothing (``PartitionReassignmentReplicas.maybeCompleteReassignment``). Not
    while nobody leads: who goes might have what the others lack.
    """
    if not state.reassigning or state.leader == NO_LEADER:
        return state
    isr = tuple(b for b in state.isr if b not in state.removing)
    replicas = tuple(b for b in state.replicas if b not in state.removing)
    if not isr or not set(state.adding) <= set(isr):
        return state
    if len(state.adding) < len(state.removing) and set(isr) != set(replicas):
        return state
    elr = tuple(b for b in state.elr if b in replicas)
    return replace(state, replicas=replicas, isr=isr, elr=elr, adding=(), removing=())


class Batch(NamedTuple):
    """What a request for many partitions came to: the records, and an error for what failed."""

    records: list[MetadataRecord]
    errors: dict[PartitionKey, KeptError]


def alter_isrs(image: Image, requests: Iterable[AlterIsr]) -> Batch:
    """The ISR changes of one AlterPartition, each on its own; see :func:`alter_isr`. Of a partition
    that is named twice the second change is an InvalidUpdateVersion.
    """
    records: dict[PartitionKey, MetadataRecord] = {}
    errors: dict[PartitionKey, KeptError] = {}
    for request in requests:
        key = (request.topic_id, request.partition)
        try:
            if key in records:
                raise InvalidUpdateVersion("the same partition twice in one request")
            for record in alter_isr(image, request):
                records[key] = record
        except (PeerError, RetriableError) as error:
            errors[key] = error.without_frames()
    return Batch(list(records.values()), errors)


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
    leads = state.leader == request.broker_id or _leaves_alone(state, request)
    if request.leader_epoch > state.leader_epoch or not leads:
        raise NotLeaderOrFollower(
            f"broker {request.broker_id} does not lead in epoch {request.leader_epoch}"
        )
    if request.partition_epoch != state.partition_epoch:
        raise InvalidUpdateVersion(
            f"partition epoch {request.partition_epoch}, now {state.partition_epoch}"
        )
    return state


def _leaves_alone(state: PartitionRecord, request: AlterIsr) -> bool:
    """A follower asks for the ISR as it is, without itself; while nobody leads all are needed."""
    proposed = {broker_id for broker_id, _ in request.isr}
    return (
        bool(proposed)
        and state.leader not in (NO_LEADER, request.broker_id)
        and request.broker_id in state.isr
        and proposed == set(state.isr) - {request.broker_id}
    )


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
        raise UnknownTopicOrPartition(f"no partition {topic}:{partition}")
    return state
