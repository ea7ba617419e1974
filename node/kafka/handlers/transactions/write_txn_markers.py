"""WriteTxnMarkers: coordinators, and operators who end a hanging transaction, write its markers.

A marker is appended as with acks=all, and answered when it is committed: its coordinator forgets
the partition then. What this node refuses for the epochs of its log is final to a coordinator, so
it is said once it is proven that this node leads. Markers of ``__consumer_offsets`` go through the
group coordinator, which keeps the offsets that they decide on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.node.coordinator.common.events import EndMarker
from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime import error_codes
from kept.node.runtime.time_slices import Pace
from kept.storage.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    KeptError,
    NotCoordinator,
    NotLeaderOrFollower,
    RequestTimedOut,
    TransactionCoordinatorFenced,
    UnknownTopicOrPartition,
)
from kept.storage.records import EndTxnMarker
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kio.schema.errors import ErrorCode

    from kept.client.protocol.messages import Values
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.kafka.api import Answer, RequestContext
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps

TIMEOUT_S: Final = 30.0
"""``request.timeout.ms`` of Apache Kafka: not committed for so long is REQUEST_TIMED_OUT."""
_FINAL: Final = (InvalidProducerEpoch, TransactionCoordinatorFenced)
"""True only of the log of whoever leads now."""
_REFUSALS: Final = {error_codes.code_for(kind()): kind for kind in _FINAL}
_NOT_COORDINATOR: Final = frozenset(
    map(
        error_codes.code_for,
        (NotCoordinator(), CoordinatorLoadInProgress(), CoordinatorNotAvailable()),
    )
)


class _Write:
    """One marker in one partition: ``done`` is its error code."""

    __slots__ = ("_waits", "done", "hosted", "leader_epoch", "tp")

    def __init__(self, tp: TopicPartition, done: asyncio.Future[int]) -> None:
        self.tp = tp
        self.done = done
        self.hosted: LocalReplica | None = None
        self.leader_epoch = -1
        """In which it was staged."""
        self._waits = 0

    def resolve(self, result: BaseException | int) -> None:
        """It is committed (0), or refused, unless that is known already."""
        if not self.done.done():
            code = result if isinstance(result, int) else error_codes.code_for(result)
            self.done.set_result(code)

    def wait(self, end_offset: int) -> None:
        """Resolve when all below ``end_offset`` is committed, and durable where it has to be."""
        hosted = self.hosted
        assert hosted is not None
        self._waits = 2 if hosted.sync else 1
        hosted.partition.when_committed(end_offset, self._step_done)
        if hosted.sync:
            hosted.flush(end_offset, self._step_done)

    def _step_done(self, error: BaseException | None) -> None:
        self._waits -= 1
        if error is not None:
            self.resolve(error)
        elif self._waits == 0:
            self.resolve(error_codes.NONE)


@dataclass(frozen=True, slots=True)
class WriteTxnMarkersHandler:
    """Writes the markers of transactions."""

    runtime: Runtime
    table: ReplicaTable
    barrier: LeadershipBarrier
    groups: GroupCoordinator

    def write_txn_markers(self, _ctx: RequestContext, request: Any) -> Steps[Answer]:
        """WriteTxnMarkers v1-2. A marker of v1 is of a transaction of version 0 or 1."""
        markers: list[tuple[int, list[_Write]]] = []
        staged: list[tuple[_Write, int]] = []
        for entry in request.markers:
            marker = EndMarker(
                entry.producer_id, entry.producer_epoch, entry.coordinator_epoch,
                entry.transaction_result, getattr(entry, "transaction_version", 0),
            )  # fmt: skip
            writes = []
            for topic in entry.topics:
                for index in topic.partition_indexes:
                    tp = TopicPartition(topic.name, index)
                    write = _Write(tp, self.runtime.loop.create_future())
                    writes.append(write)
                    if topic.name == CONSUMER_OFFSETS:
                        self._end_offsets(write, marker)
                    else:
                        self._stage(write, marker, staged)
                    yield
            markers.append((entry.producer_id, writes))
        _write(staged)
        return self._respond(markers)

    def _end_offsets(self, write: _Write, marker: EndMarker) -> None:
        """Pending offsets become offsets, or are forgotten."""
        hosted = self.table.hosted.get(write.tp)
        leader_epoch = -1 if hosted is None else hosted.partition.leader_epoch

        def done(ended: asyncio.Future[ErrorCode]) -> None:
            code = int(ended.result())
            kind = _REFUSALS.get(code)
            if code in _NOT_COORDINATOR:
                write.resolve(NotLeaderOrFollower(f"{write.tp} is not coordinated here"))
            elif kind is not None and hosted is not None:
                error = kind(f"{write.tp}: its coordinator answered {code}")
                self._refuse(write, hosted, leader_epoch, error)
            else:
                write.resolve(code)

        self.groups.end_transaction(write.tp.partition, marker).add_done_callback(done)

    def _stage(self, write: _Write, marker: EndMarker, staged: list[tuple[_Write, int]]) -> None:
        hosted = write.hosted = self.table.hosted.get(write.tp)
        if hosted is None:
            write.resolve(UnknownTopicOrPartition(f"{write.tp} is not online on this node"))
            return
        partition = hosted.partition
        try:
            info = partition.append_marker(
                EndTxnMarker(marker.is_commit, marker.coordinator_epoch), marker.producer_id,
                marker.epoch, self.runtime.now_ms(), is_tv2=marker.is_tv2,
            )  # fmt: skip
        except KeptError as error:
            self._refuse(write, hosted, partition.leader_epoch, error)
        else:
            write.leader_epoch = partition.leader_epoch
            staged.append((write, info.last_offset + 1))

    def _refuse(
        self, write: _Write, hosted: LocalReplica, leader_epoch: int, error: KeptError
    ) -> None:
        """Say what is final only when it is proven that ``hosted`` leads in ``leader_epoch``."""
        partition = hosted.partition

        def confirmed(is_confirmed: bool) -> None:
            leads = partition.is_leader and partition.leader_epoch == leader_epoch
            if is_confirmed and leads:
                write.resolve(error)
            else:
                write.resolve(NotLeaderOrFollower(f"{write.tp}: another one may lead; {error}"))

        if isinstance(error, _FINAL) and partition.replicated:
            self.barrier.confirm(confirmed)
        else:
            write.resolve(error)

    async def _respond(self, markers: list[tuple[int, list[_Write]]]) -> Values:
        waiting = [w.done for _, writes in markers for w in writes if not w.done.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=TIMEOUT_S)
        results: list[Values] = []
        pace = Pace()
        for producer_id, writes in markers:
            topics: dict[str, list[Values]] = {}
            for write in writes:
                if not write.done.done():
                    write.resolve(RequestTimedOut(f"{write.tp}: not committed in time"))
                topics.setdefault(write.tp.topic, []).append(
                    {"partition_index": write.tp.partition, "error_code": write.done.result()}
                )
                await pace.checkpoint()
            named = [{"name": name, "partitions": each} for name, each in topics.items()]
            results.append({"producer_id": producer_id, "topics": named})
            await pace.checkpoint()
        return {"markers": results}


def _write(staged: list[tuple[_Write, int]]) -> None:
    """Write what was staged, once a partition, and wait for it to be committed."""
    failed: dict[LocalReplica, KeptError] = {}
    for hosted in dict.fromkeys(write.hosted for write, _ in staged):
        assert hosted is not None
        try:
            hosted.partition.write()
        except KeptError as error:
            failed[hosted] = error
    for write, end_offset in staged:
        assert write.hosted is not None
        if write.hosted in failed:
            write.resolve(failed[write.hosted])
        elif write.leader_epoch != write.hosted.partition.leader_epoch:  # others may be there now
            write.resolve(NotLeaderOrFollower(f"{write.tp}: its leader changed meanwhile"))
        else:
            write.wait(end_offset)
