"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments.

Decisions are those of ``kept.cluster.controller.reassignment``. All partitions of one request are
decided one after the other, each refused on its own, and go into one entry of the metadata log. The
active controller answers, whoever was asked (``api.FORWARDED``): a list is as new as the change
before it.
Shapes and order of checks after ``ReplicationControlManager``. Ours: an election for all partitions
leaves out the topics without a result, and an unclean election is logged with what it gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kept.client.protocol.messages import Values
from kept.cluster.controller import partition_election, reassignment, unclean_recovery
from kept.cluster.controller.topics import MAX_PARTITIONS_PER_REQUEST
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import MetadataRecord
from kept.node.kafka.metadata_changes import Decided
from kept.node.runtime.error_codes import error_values
from kept.node.runtime.fd_quota import FdQuota
from kept.node.runtime.time_slices import checkpoint
from kept.steps import Steps
from kept.storage.errors import (
    ElectionNotNeeded,
    InvalidRequest,
    KeptError,
    PeerError,
    PolicyViolation,
    RetriableError,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.controller.controller import Controller
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import MetadataChanges
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.fd_quota import OpenFiles

PREFERRED: Final = 0
UNCLEAN: Final = 1

Wish = TypeVar("Wish")
Decision = Callable[[Image, TopicPartition, Wish], Sequence[MetadataRecord]]


@dataclass(slots=True)
class _Decided:
    """What a request for many partitions came to."""

    outcomes: list[tuple[TopicPartition, KeptError | None]] = field(default_factory=list)
    records: list[MetadataRecord] = field(default_factory=list)
    refused: KeptError | None = None
    """Why nothing of the request is done."""

    def add(
        self,
        image: Image,
        tp: TopicPartition,
        wish: Wish,
        decision: Decision[Wish],
    ) -> Image:
        """Decide on one partition; the image for the next one. Raises PolicyViolation."""
        try:
            records = decision(image, tp, wish)
        except (PeerError, RetriableError) as error:
            # Without its frames: thousands of them keep the collector of garbage busy.
            self.outcomes.append((tp, error.without_frames()))
            return image
        self.outcomes.append((tp, None))
        if records:
            self.records.extend(records)
            if len(self.records) > MAX_PARTITIONS_PER_REQUEST:
                raise PolicyViolation(
                    f"The request changes more than {MAX_PARTITIONS_PER_REQUEST} partitions: "
                    "ask for fewer at a time."
                )
            image, _ = image.apply(records)
        return image


def _each(
    image: Image,
    wanted: Iterable[tuple[TopicPartition, Wish]],
    decision: Decision[Wish],
) -> Steps[_Decided]:
    """Decide one after the other, each on the image that those before it leave."""
    decided = _Decided()
    wanted = list(wanted)
    try:
        for tp, wish in wanted:
            yield
            image = decided.add(image, tp, wish, decision)
    except PolicyViolation as error:
        return _refused(error, (tp for tp, _ in wanted))
    return decided


def _refused(error: KeptError, partitions: Iterable[TopicPartition]) -> _Decided:
    return _Decided([(tp, error) for tp in partitions], refused=error)


async def _by_topic(
    outcomes: Iterable[tuple[TopicPartition, KeptError | None]], topic: str, results: str, key: str
) -> list[Values]:
    """Outcomes as the response has them: the names of its fields are ``topic``, ``results``,
    ``key``.
    """
    by_topic: dict[str, list[Values]] = {}
    for number, (tp, error) in enumerate(outcomes):
        await checkpoint(number)
        by_topic.setdefault(tp.topic, []).append({key: tp.partition, **error_values(error)})
    return [{topic: name, results: values} for name, values in by_topic.items()]


@dataclass(frozen=True, slots=True)
class ReassignmentHandler:
    """Elections and moves of replicas."""

    metadata: MetadataLog
    controller: Controller
    open_files: OpenFiles
    metadata_changes: MetadataChanges

    async def elect_leaders(self, _ctx: RequestContext, request: Any) -> Values:
        """ElectLeaders v0-2: the preferred replica, or any live one if nobody leads (unclean)."""
        kind = getattr(request, "election_type", PREFERRED)
        named = request.topic_partitions

        def decision(image: Image) -> Steps[Decided[_Decided]]:
            if named is None:
                wanted = [
                    TopicPartition(name, partition)
                    for name in sorted(image.topics)
                    for partition in range(len(image.topics[name].partitions))
                ]
            else:
                wanted = [TopicPartition(t.topic, number) for t in named for number in t.partitions]
            if kind not in (PREFERRED, UNCLEAN):
                error = InvalidRequest(
                    f"Unknown election type {kind}: {PREFERRED} is preferred, {UNCLEAN} is unclean"
                )
                return _refused(error, wanted if named is not None else ()), ()
            elect = _preferred if kind == PREFERRED else _unclean
            decided = yield from _each(
                image, ((tp, self.controller.log_reports) for tp in wanted), elect
            )
            return decided, decided.records

        decided = await self.metadata_changes.decide(decision)
        outcomes = decided.outcomes
        if named is None:
            outcomes = [(tp, error) for tp, error in outcomes if not _needless(error)]
        return {
            "error_code": error_values(decided.refused)["error_code"],
            "replica_election_results": await _by_topic(
                outcomes, "topic", "partition_result", "partition_id"
            ),
        }

    async def alter_partition_reassignments(self, _ctx: RequestContext, request: Any) -> Values:
        """AlterPartitionReassignments v0-1: begin moves of replicas; null replicas cancel one."""
        may_change = getattr(request, "allow_replication_factor_change", True)

        def decision(image: Image) -> Steps[Decided[_Decided]]:
            room = FdQuota(self.open_files, image)

            def move(image: Image, tp: TopicPartition, replicas: Any) -> list[MetadataRecord]:
                records = reassignment.reassign(
                    image,
                    tp.topic,
                    tp.partition,
                    replicas,
                    allow_replication_factor_change=may_change,
                )
                room.reserve(records)
                return records

            wanted = (
                (TopicPartition(topic.name, entry.partition_index), entry.replicas)
                for topic in request.topics
                for entry in topic.partitions
            )
            decided = yield from _each(image, wanted, move)
            return decided, decided.records

        decided = await self.metadata_changes.decide(decision)
        return {
            **error_values(decided.refused),
            "allow_replication_factor_change": may_change,
            "responses": await _by_topic(decided.outcomes, "name", "partitions", "partition_index"),
        }

    def list_partition_reassignments(self, _ctx: RequestContext, request: Any) -> Values:
        """ListPartitionReassignments v0: the moves in progress; of what does not move nothing."""
        wanted = None
        if request.topics is not None:
            wanted = {
                TopicPartition(topic.name, number)
                for topic in request.topics
                for number in topic.partition_indexes
            }
        by_topic: dict[str, list[Mapping[str, Any]]] = {}
        for moving in reassignment.list_reassignments(self.metadata.image, wanted):
            by_topic.setdefault(moving.topic, []).append(
                {
                    "partition_index": moving.partition,
                    "replicas": moving.replicas,
                    "adding_replicas": moving.adding,
                    "removing_replicas": moving.removing,
                }
            )
        topics = [{"name": name, "partitions": partitions} for name, partitions in by_topic.items()]
        return {"error_code": 0, "error_message": None, "topics": topics}


def _needless(error: KeptError | None) -> bool:
    return isinstance(error, ElectionNotNeeded)


def _preferred(
    image: Image, tp: TopicPartition, _: unclean_recovery.Reports
) -> list[MetadataRecord]:
    return partition_election.elect_preferred(image, tp.topic, tp.partition)


def _unclean(
    image: Image, tp: TopicPartition, reports: unclean_recovery.Reports
) -> list[MetadataRecord]:
    state = image.partition(tp.topic, tp.partition)
    logs = {} if state is None else unclean_recovery.current_reports(image, state, reports)
    return partition_election.elect_unclean(image, tp.topic, tp.partition, logs)
