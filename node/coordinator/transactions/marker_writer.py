"""Writes transaction markers into the partitions that this node leads.

A marker is appended as with acks=all; it is known to be written once it is committed: its
coordinator forgets the partition then. What this node refuses for the epochs of its log is final to
a coordinator, so it is said once it is proven that this node leads. Markers of
``__consumer_offsets`` go through the group coordinator, which keeps the offsets that they decide
on.

A marker may come late: its coordinator gave the connection up, wrote the marker at another node
that led meanwhile, and the producer began its next transaction, of the same epoch. No later
connection of that coordinator has come here, so :mod:`kept.node.kafka.marker_connections` knows of
none, and the epoch of the coordinator may still be the newest that the log knows. But this node
has begun to lead since that connection was made. So markers over a connection that is older than
this node's leadership of one of their partitions are not written, and the connection is closed: a
coordinator that still waits for them sends them over a new one. Kafka writes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from kept.node.metadata.internal_topics import CONSUMER_OFFSETS
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.error_codes import code_for
from kept.storage.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidRequest,
    KeptError,
    NetworkException,
    NotCoordinator,
    NotLeaderOrFollower,
    RequestTimedOut,
    TransactionCoordinatorFenced,
    UnknownTopicOrPartition,
)
from kept.storage.records import EndTxnMarker
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta
    from kept.node.coordinator.common.events import EndMarker
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.transactions.connection_order import ConnectionOrdinals
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps

TIMEOUT_S: Final = 30.0
"""``request.timeout.ms`` of Apache Kafka: not committed for so long is REQUEST_TIMED_OUT."""
_FINAL: Final = (InvalidProducerEpoch, TransactionCoordinatorFenced)
"""True only of the log of whoever leads now."""
_REFUSALS: Final = {code_for(kind()): kind for kind in _FINAL}
_NOT_COORDINATOR: Final = frozenset(
    map(code_for, (NotCoordinator(), CoordinatorLoadInProgress(), CoordinatorNotAvailable()))
)

Marks = Iterable[tuple["EndMarker", Iterable[TopicPartition]]]
"""Markers, and the partitions that each goes to."""
Marked = list[tuple["EndMarker", list[tuple[TopicPartition, ErrorCode]]]]
"""What has become of them, in their order."""


class _Write:
    """One marker in one partition: ``error`` is known when it is committed, or refused."""

    __slots__ = ("_on_known", "_waits", "error", "hosted", "leader_epoch", "tp")

    def __init__(self, tp: TopicPartition, on_known: Callable[[], None]) -> None:
        self.tp = tp
        self.error: ErrorCode | None = None
        self.hosted: LocalReplica | None = None
        self.leader_epoch = -1
        """In which it was staged."""
        self._on_known = on_known
        self._waits = 0

    def resolve(self, error: BaseException | int) -> None:
        """It is committed (0), or refused, unless that is known already."""
        if self.error is None:
            self.error = ErrorCode(error if isinstance(error, int) else code_for(error))
            self._on_known()

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
            self.resolve(0)


class _Request:
    """Markers that are written together, and known together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._entries: list[tuple[EndMarker, list[_Write]]] = []
        self._missing = 0
        self._marked: CompletableFuture[Marked] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, marker: EndMarker) -> None:
        """Partitions of this marker follow."""
        self._entries.append((marker, []))

    def add(self, tp: TopicPartition) -> _Write:
        """A partition of the marker begun last."""
        write = _Write(tp, self._one_known)
        self._entries[-1][1].append(write)
        self._missing += 1
        return write

    def marked(self) -> CompletableFuture[Marked]:
        """All are staged or refused: what becomes of them, within :data:`TIMEOUT_S`."""
        marked = self._marked = CompletableFuture()
        if self._missing:
            self._timer = self._loop.call_later(TIMEOUT_S, self._expire)
        else:
            self._finish()
        return marked

    def _one_known(self) -> None:
        self._missing -= 1
        if not self._missing and self._marked is not None:
            self._finish()

    def _expire(self) -> None:
        for _, writes in self._entries:
            for write in writes:
                write.resolve(RequestTimedOut(f"{write.tp.place}: not committed in time"))

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        marked: Marked = [
            (marker, [(w.tp, w.error) for w in writes if w.error is not None])
            for marker, writes in self._entries
        ]
        self._entries.clear()  # each would hold this: only the collector of garbage freed them
        assert self._marked is not None
        self._marked.set_result(marked)


@dataclass(frozen=True, slots=True)
class MarkerWriter:
    """Appends transaction markers to the partitions that this node leads."""

    runtime: Runtime
    identity: NodeIdentity
    table: ReplicaTable
    barrier: LeadershipBarrier
    groups: GroupCoordinator
    ordinals: ConnectionOrdinals
    _newest_before: dict[TopicPartition, int] = field(default_factory=dict)
    """Which connection was the newest when this node heard that it leads: of partitions for which
    it has heard so since there were any."""

    def metadata_changed(self, delta: Delta) -> None:
        """Connections are older than the leaderships of which this node hears now."""
        newest_before, newest = self._newest_before, self.ordinals.newest
        for topic in delta.topics_deleted:
            for number in range(len(topic.partitions)):
                newest_before.pop(TopicPartition(topic.name, number), None)
        for change in delta.partitions:
            before, after = change.before, change.after
            if after.leader != self.identity.node_id:
                newest_before.pop(change.topic_partition, None)
            elif newest >= 0 and (before is None or before.leader_epoch != after.leader_epoch):
                newest_before[change.topic_partition] = newest

    def is_stale(self, tp: TopicPartition, connection: int) -> bool:
        """Whether a connection, by its ordinal, is older than this node's leadership."""
        return connection <= self._newest_before.get(tp, -1)

    def write_for_node(self, marks: Marks, connection: int) -> Steps[CompletableFuture[Marked]]:
        """As :meth:`write`, for a coordinator that sent them over ``connection``.

        Raises NetworkException, and writes nothing, where that is older than this node's leadership
        of one of the partitions: it is to be closed. A partition whose leadership came back only
        while others were staged is refused alone; the connection is closed if it comes again.
        """
        every = [(marker, tuple(partitions)) for marker, partitions in marks]
        for _, partitions in every:
            for tp in partitions:
                if self.is_stale(tp, connection):
                    raise NetworkException(f"{tp.place} is led here since the connection was made")
                yield
        return (yield from self.write(every, connection))

    def write(
        self, marks: Marks, connection: int | None = None
    ) -> Steps[CompletableFuture[Marked]]:
        """Append markers, one partition a step, then write them, once a partition."""
        request = _Request(self.runtime.loop)
        staged: list[tuple[_Write, int]] = []
        for marker, partitions in marks:
            request.begin(marker)
            for tp in partitions:
                write = request.add(tp)
                if connection is not None and self.is_stale(tp, connection):
                    write.resolve(NotLeaderOrFollower(f"{tp.place}: its leader changed meanwhile"))
                elif marker.producer_id < 0 or marker.epoch < 0:
                    write.resolve(InvalidRequest(f"{tp.place}: a marker of no producer"))
                elif tp.topic == CONSUMER_OFFSETS:
                    self._end_offsets(write, marker)
                else:
                    self._stage(write, marker, staged)
                yield
        _write(staged)
        return request.marked()

    def _end_offsets(self, write: _Write, marker: EndMarker) -> None:
        """Pending offsets become offsets, or are forgotten."""
        hosted = self.table.replicas.get(write.tp)
        leader_epoch = -1 if hosted is None else hosted.partition.leader_epoch

        def done(ended: asyncio.Future[ErrorCode]) -> None:
            code = int(ended.result())
            kind = _REFUSALS.get(code)
            if code in _NOT_COORDINATOR:
                write.resolve(NotLeaderOrFollower(f"{write.tp.place} is not coordinated here"))
            elif kind is not None and hosted is not None:
                error = kind(f"{write.tp.place}: its coordinator answered {code}")
                self._refuse(write, hosted, leader_epoch, error)
            else:
                write.resolve(code)

        self.groups.end_transaction(write.tp.partition, marker).add_done_callback(done)

    def _stage(self, write: _Write, marker: EndMarker, staged: list[tuple[_Write, int]]) -> None:
        hosted = write.hosted = self.table.replicas.get(write.tp)
        if hosted is None:
            write.resolve(UnknownTopicOrPartition(f"{write.tp.place} is not online on this node"))
            return
        partition = hosted.partition
        try:
            info = partition.append_marker(
                EndTxnMarker(marker.is_commit, marker.coordinator_epoch),
                marker.producer_id,
                marker.epoch,
                self.runtime.now_ms(),
                is_tv2=marker.is_tv2,
            )
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
                why = f"{write.tp.place}: another one may lead; {error.client_message}"
                write.resolve(NotLeaderOrFollower(why))

        if isinstance(error, _FINAL) and partition.replicated:
            self.barrier.confirm(confirmed)
        else:
            write.resolve(error)


def _write(staged: list[tuple[_Write, int]]) -> None:
    """Write what was staged, once a partition, and wait for it to be committed."""
    failed: dict[Any, KeptError] = {}
    for hosted in dict.fromkeys(write.hosted for write, _ in staged):
        assert hosted is not None
        try:
            hosted.partition.write()
        except KeptError as error:
            failed[hosted] = error.without_frames()
    for write, end_offset in staged:
        assert write.hosted is not None
        if write.hosted in failed:
            write.resolve(failed[write.hosted])
        elif write.leader_epoch != write.hosted.partition.leader_epoch:  # others may be there now
            write.resolve(NotLeaderOrFollower(f"{write.tp.place}: its leader changed meanwhile"))
        else:
            write.wait(end_offset)
