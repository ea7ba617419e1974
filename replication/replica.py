"""One replica of a partition on this node: its log, its leader core, and what happens to both.

Here are leadership, ISR changes, offline logs and waiting; ``follower_replica.py`` is what a
follower does to its log, ``partition.py`` adds reading, writing and maintenance.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NoReturn, Protocol
from uuid import UUID

from kept.replication.events import (
    Acknowledge,
    BecameLeader,
    CommitAdvanced,
    IsrChanged,
    IsrProposalRejected,
    ProposeIsr,
    Token,
)
from kept.replication.follower import NO_LEADER
from kept.replication.follower_replica import FollowerReplica
from kept.replication.isr import OVERTAKEN, REFUSED, REFUSED_PAUSE_MS, AlterIsrItem
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import (
    BaseGenerationCreated,
    PassCompleted,
    PullResponseReceived,
)
from kept.replication.partition_core import (
    HIGH_WATERMARK_MOVED,
    Effect,
    Effects,
    Event,
    PartitionCore,
)
from kept.replication.partition_views import (
    CommitCallback,
    ProducerView,
    SegmentView,
    Waiter,
    producer_views,
    segment_views,
)
from kept.replication.replica_effects import AcknowledgementsLeft, Report
from kept.storage.errors import (
    FencedLeaderEpoch,
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    ResourceExhausted,
    UnknownLeaderEpoch,
)
from kept.storage.log.log import Log
from kept.storage.producers.cut_preparation import CutPreparation
from kept.storage.types import LogConfig, TopicPartition

ACKNOWLEDGED_AT_ONCE: Final = 64
"""Of thousands that wait for one follower's fetch each takes 15 us to be answered."""


def committed_by(event: Event, core: PartitionCore) -> int:
    """Up to which offset all records are committed if ``event`` counts; 0: it says nothing of it,
    or comes too late to count.
    """
    match event:
        case CommitAdvanced(offset):
            return offset
        case BaseGenerationCreated(manifest):
            return manifest.end_offset
        case PassCompleted(manifest) if core.leading and event.leader_epoch == core.leader_epoch:
            return manifest.end_offset
        case PullResponseReceived(request, response) if request == core.manifests.in_flight:
            published = response.published
            if published is not None and published.end_offset <= request.log_end_offset:
                return published.end_offset
    return 0


class EpochTicket:
    """Durability of a leader epoch (rule 24): :meth:`run` in any thread, then :meth:`done`."""

    __slots__ = ("_partition", "leader_epoch")

    def __init__(self, partition: Replica, leader_epoch: int) -> None:
        self._partition = partition
        self.leader_epoch = leader_epoch

    @property
    def is_due(self) -> bool:
        """The partition is still led in this epoch."""
        core = self._partition.core
        return core.leading and core.leader_epoch == self.leader_epoch

    def run(self) -> None:
        """Write the epoch cache; blocks. Raises MachineError: the directory is to go offline, but
        for ResourceExhausted: it may run again.
        """
        self._partition.log.leader_epochs.save()

    def done(self) -> None:
        """On the loop, after :meth:`run` returned: the partition takes appends."""
        self._partition.epoch_is_durable(self.leader_epoch)


class PartitionListener(Protocol):
    """Whoever does for a partition what concerns more than its log: the node."""

    def perform(self, effect: Effect | Report) -> None:
        """Do what a core decided, or act on a report; within the call that caused it."""

    def machine_failed(self, error: MachineError) -> None:
        """An error takes the partition offline, said once: so is its whole directory to be."""

    def check_cut(self) -> None:
        """Raises ReplicaNotAvailable while the log must not be cut; the fetcher then retries."""

    def prepare_cut(self, preparation: CutPreparation) -> None:
        """Run it in a thread: a cut waits for it, and is tried again."""


class Replica:
    """One replica of a partition: its log, its core, and who waits for them. One thread; what the
    machine does wrong takes it offline.

    ``high_watermark``: what the checkpoint says; ``applied_end``: b of the manifest applied or
    being applied (rule 12). ``listener`` gets what goes to others: the core's effects,
    RecordsLost and LogTruncated; None: nobody does.

    ``core`` keeps epochs, ISR, the high watermark and manifests in either role; ``suspended``: the
    node may have slept through a change of leadership, so nothing is served.
    """

    _acknowledged: OrderedDict[Token, tuple[CommitCallback, KeptError | None]] | None = None
    """Those that :class:`AcknowledgementsLeft` is about, in their order, until nobody is left."""

    def __init__(
        self,
        log: Log,
        node_id: int = 0,
        *,
        high_watermark: int = 0,
        applied_end: int = 0,
        lag_time_max_ms: int = 30_000,
        manifests: ManifestCore | None = None,
        listener: PartitionListener | None = None,
    ) -> None:
        self.log = log
        self.node_id = node_id
        self.topic_partition: TopicPartition = log.topic_partition
        self.topic_id: UUID = log.topic_id
        self.offline: str | None = None
        self._epoch_durable = False
        self.core = PartitionCore(node_id, lag_time_max_ms, log.config.min_insync_replicas)
        if manifests is not None:
            self.core.manifests = manifests
        restored = max(high_watermark, applied_end, log.log_start_offset)
        self.core.high_watermark = min(restored, log.log_end_offset)
        self.applied_end = applied_end
        self.leader_id = NO_LEADER
        self.unclean_epoch = -1
        """Leader epoch of the last unclean election since this replica was in the ISR, or of one
        that may have been unclean, as far as the node knows."""
        self.suspended = False
        self._leading = False
        self._appendable = False
        self.follower = FollowerReplica(self)
        self._decided: tuple[int, int] | None = None
        """(leader epoch, partition epoch) of the proposal that the controller has answered."""
        self._waiters: dict[Waiter, None] = {}
        self._end_waiters: dict[Waiter, None] = {}
        self._commits: dict[Token, CommitCallback] = {}
        self._last_token = 0
        self.listener = listener

    def __repr__(self) -> str:
        role = f"leads in epoch {self.leader_epoch}" if self._leading else "does not lead"
        return f"{type(self).__name__}({self.topic_partition}, {role})"

    # What it is.

    @property
    def is_leader(self) -> bool:
        """This node leads the partition, and may act on it."""
        return self._leading

    @property
    def is_follower(self) -> bool:
        """This node has been told to follow, though there may be no leader."""
        return not self.core.leading and self.core.leader_epoch >= 0

    @property
    def replicated(self) -> bool:
        """There are other replicas."""
        return len(self.core.replicas) > 1

    @property
    def leader_epoch(self) -> int:
        """Epoch of the leader, here or elsewhere; -1 before the first."""
        return self.core.leader_epoch

    @property
    def epoch_start_offset(self) -> int:
        """Where the log ended when this node was elected: all committed before is below."""
        return self.core.epoch_start_offset

    @property
    def partition_epoch(self) -> int:
        """Version of the ISR that is in force here."""
        return self.core.partition_epoch

    @property
    def isr(self) -> tuple[int, ...]:
        """The confirmed in-sync replicas."""
        return self.core.isr

    @property
    def high_watermark(self) -> int:
        """What is committed; consumers read below it."""
        return self.core.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """What read_committed consumers read below: HW, or the first transaction that is open, or
        whose end is not committed. Never below the log start.
        """
        committed = self.core.high_watermark
        log = self.log
        unstable = log.producers.first_undecided_offset(committed, log.log_start_offset)
        return committed if unstable is None else min(unstable, committed)

    @property
    def log_start_offset(self) -> int:
        """First offset that may be read."""
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Where the next record goes."""
        return self.log.log_end_offset

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self.log.size_bytes

    @property
    def latest_epoch(self) -> int:
        """Leader epoch of the last batch; -1 when none is known."""
        latest = self.log.leader_epochs.latest
        return -1 if latest is None else latest

    @property
    def may_lose(self) -> bool:
        """What it cuts may have been acknowledged: there was an unclean election since the last
        batch here. Once there is a batch of that leader's, the logs had agreed up to there.
        """
        return self.unclean_epoch > self.latest_epoch

    @property
    def config(self) -> LogConfig:
        """The topic's settings."""
        return self.log.config

    def segments(self) -> list[SegmentView]:
        """The log's segments, ascending."""
        return segment_views(self.log)

    def producers(self) -> list[ProducerView]:
        """The producers known here (DescribeProducers). Raises NotLeaderOrFollower."""
        self._check_leader()
        return producer_views(self.log)

    # Leadership.

    def become_leader(
        self,
        leader_epoch: int,
        partition_epoch: int,
        isr: tuple[int, ...],
        replicas: tuple[int, ...],
        now_ms: int,
        *,
        awaits_offer: bool = False,
    ) -> EpochTicket | None:
        """Lead in that epoch (or take a new ISR in the current one).

        ``awaits_offer``: ManifestOffered follows; nobody may join the ISR before.

        Returns a ticket when the epoch must become durable before the first append: until it is
        done, appends raise NotLeaderOrFollower, reads are answered.
        """
        self.check_online()
        core = self.core
        if core.leading and leader_epoch == core.leader_epoch:
            self.step(IsrChanged(partition_epoch, replicas, isr), now_ms)
            self._wake_all()
            return None
        log = self.log
        log.preparation = None
        log.leader_epochs.assign(leader_epoch, log.log_end_offset)
        effects = core.become_leader(
            BecameLeader(
                leader_epoch,
                partition_epoch,
                replicas,
                isr,
                log.log_end_offset,
                awaits_offer,
            ),
            now_ms,
        )
        self.leader_id = self.node_id
        self._epoch_durable = not log.leader_epochs.dirty
        self._serve()
        self._perform(effects)
        self._wake_all()
        return None if self._epoch_durable else EpochTicket(self, leader_epoch)

    def become_follower(  # noqa: PLR0917 (as become_leader)
        self,
        leader_id: int,
        leader_epoch: int,
        partition_epoch: int,
        isr: tuple[int, ...],
        replicas: tuple[int, ...],
        now_ms: int,  # noqa: ARG002
    ) -> bool:
        """Follow ``leader_id`` (NO_LEADER: wait for one) in that epoch.

        Who waits for a commit here is told NotLeaderOrFollower. True when leader or epoch are news,
        so that the fetcher must be told; otherwise only the ISR may have changed. Raises
        KafkaStorageError where what was staged cannot be written; it leads no more then, either.
        """
        self.check_online()
        core = self.core
        if leader_epoch < core.leader_epoch:
            raise InvariantViolation(
                f"{self}: leader epoch {leader_epoch} after {core.leader_epoch}"
            )
        news = core.leading or leader_epoch != core.leader_epoch or leader_id != self.leader_id
        if core.leading:
            try:
                self.log.write()
            except MachineError as error:
                self.failed(error)
            finally:
                self.resign()
        if news:
            self.log.preparation = None
        self.leader_id = leader_id
        core.follow(leader_epoch, partition_epoch, replicas, isr)
        self._wake_all()
        return news

    @property
    def in_sync(self) -> bool:
        """The image has this node in the ISR."""
        return self.node_id in self.core.isr

    def _serve(self) -> None:
        """What may be done follows from the role, the epoch's durability and the suspension."""
        self._leading = self.core.leading and not self.suspended
        self._appendable = self._leading and self._epoch_durable

    def epoch_is_durable(self, leader_epoch: int) -> None:
        """The epoch cache is on disk: appends are taken, if it is still that epoch."""
        if self.core.leading and leader_epoch == self.core.leader_epoch:
            self._epoch_durable = True
            self._serve()

    def resign(self) -> None:
        """Lead no more: those who wait are told so."""
        self._stop_leading(NotLeaderOrFollower)

    def _stop_leading(self, error: type[KeptError]) -> None:
        self._epoch_durable = False
        self.log.producers.guards.clear()
        if self.leader_id == self.node_id:
            self.leader_id = NO_LEADER
        effects = self.core.resigned(error)
        self._serve()
        self._perform(effects)
        self._wake_all()

    def suspend(self) -> None:
        """Serve nobody until :meth:`resume`: all hear NotLeaderOrFollower, nothing is proposed.

        Who waits for a commit goes on waiting: what the replicas have does not change.
        """
        if not self.suspended:
            self.suspended = True
            self._serve()
            self._wake_all()

    def resume(self) -> None:
        """The image is known to be current again; roles are as it says. An ISR that was proposed
        meanwhile, and not requested, is proposed again.
        """
        if not self.suspended:
            return
        self.suspended = False
        self._serve()
        self._wake_all()
        self._repeat_proposal()

    def _repeat_proposal(self) -> None:
        core = self.core
        if core.pending_isr is not None and self.alter_isr_request() is not None:
            self.emit(ProposeIsr(core.pending_isr, core.leader_epoch, core.partition_epoch))

    def step(self, event: Event, now_ms: int) -> None:
        """Give the core an event (ISR decisions, manifests, brokers) and perform its effects.

        Raises OffsetOutOfRange, before the core has stepped, for an event that would commit records
        above the log's end.
        """
        end, log_end_offset = committed_by(event, self.core), self.log.written_end_offset
        if end > log_end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition.place}: cannot be committed up to {end}, the log ends at "
                f"{log_end_offset}"
            )
        effects = self.core.step(event, now_ms)
        # A cut that the disk failed leaves the log shorter, and offline.
        if self.core.high_watermark > log_end_offset and self.offline is None:
            raise InvariantViolation(
                f"{self}: the high watermark {self.core.high_watermark} is above the log's end "
                f"{log_end_offset} after {event}"
            )
        self._perform(effects)

    def tick(self, now_ms: int) -> None:
        """Time passed: members that lag leave the ISR."""
        if self._leading and not self.core.alone:
            self._perform(self.core.tick(now_ms))

    def alter_isr_request(self) -> AlterIsrItem | None:
        """What to ask the controller; None when nothing is pending, or the answer is known.

        The same again after an attempt whose outcome nobody knows.
        """
        core = self.core
        pending = core.pending_isr
        if (
            pending is None
            or self.suspended
            or self._decided == (core.leader_epoch, core.partition_epoch)
        ):
            return None
        return AlterIsrItem(
            self.topic_id,
            self.topic_partition.partition,
            core.leader_epoch,
            core.partition_epoch,
            tuple(zip(pending, core.pending_epochs, strict=True)),
            core.all_published,
        )

    def alter_isr_completed(self, asked: AlterIsrItem, error: KeptError | None) -> None:
        """The controller's answer to ``asked``; any error that is no decision means "unknown".

        Late answers change nothing.
        """
        core = self.core
        version = (core.leader_epoch, core.partition_epoch)
        if core.pending_isr is None or version != (asked.leader_epoch, asked.partition_epoch):
            return
        if error is None or isinstance(error, OVERTAKEN):
            self._decided = version
        elif isinstance(error, REFUSED):
            self.step(IsrProposalRejected(core.partition_epoch, REFUSED_PAUSE_MS), 0)

    def mark_offline(self, reason: str) -> None:
        """The log directory failed, or a bug left the replica in no role: from now on every call of
        a client or a replica raises KafkaStorageError(reason).
        """
        if self.offline is None:
            self.offline = reason
            self._stop_leading(KafkaStorageError)

    def check_online(self) -> None:
        """Raises KafkaStorageError once :meth:`mark_offline` was called."""
        if self.offline is not None:
            raise KafkaStorageError(f"{self.topic_partition.place}: {self.offline}")

    def _check_leader(self) -> None:
        if not self._leading:
            self.check_online()
            why = "not served until the controller answers" if self.suspended else "not led"
            raise NotLeaderOrFollower(f"{self.topic_partition.place} is {why} by this node")

    def _check_epoch(self, current_leader_epoch: int) -> None:
        """Rule 25; -1 asks for no check."""
        epoch = self.core.leader_epoch
        if current_leader_epoch in (-1, epoch):
            return
        message = f"{self.topic_partition.place}: leader epoch {current_leader_epoch}, here {epoch}"
        if current_leader_epoch < epoch:
            raise FencedLeaderEpoch(message)
        raise UnknownLeaderEpoch(message)

    def failed(self, error: MachineError) -> NoReturn:
        """The machine failed under this log: it is offline from now on. Raises KafkaStorageError.
        A want of descriptors is no failure: the call did nothing, the next one may succeed, and
        ``error`` itself is raised.
        """
        if isinstance(error, ResourceExhausted):
            if self.listener is not None:
                self.listener.machine_failed(error)
            raise error
        known = self.offline is not None
        self.mark_offline(error.client_message)
        if not known and self.listener is not None:
            self.listener.machine_failed(error)
        raise KafkaStorageError(f"{self.topic_partition.place}: {error.client_message}") from error

    def _perform(self, effects: Effects) -> None:
        many = len(effects) > ACKNOWLEDGED_AT_ONCE and self.listener is not None
        if many and self._acknowledged is None:
            self._acknowledged = OrderedDict()
            self._perform(effects)
            self.emit(AcknowledgementsLeft())
            return
        for effect in effects:
            if effect is HIGH_WATERMARK_MOVED:
                if self._waiters:
                    self.wake()
            elif isinstance(effect, Acknowledge):
                callback = self._commits.pop(effect.token, None)
                if callback is None:
                    continue
                error = self._commit_error(effect.error)
                # Who lost the leadership hears it before anything of another leader's is here.
                if self._acknowledged is None or not self.core.leading:
                    callback(error)
                else:
                    self._acknowledged[effect.token] = callback, error
            else:
                self.emit(effect)

    def emit(self, effect: Effect | Report) -> None:
        """Give an effect to the node."""
        if self.listener is not None:
            self.listener.perform(effect)

    def _commit_error(self, error: type[KeptError] | None) -> KeptError | None:
        if error is None:
            return None
        if self.offline:
            why = self.offline
        elif error is NotLeaderOrFollower:
            why = "this node does not lead any more"
        else:
            core = self.core
            why = f"the ISR {core.isr} is below the minimum of {core.effective_min_isr}"
        return error(f"{self.topic_partition.place}: {why}")

    # Waiting.

    def add_waiter(self, callback: Waiter, *, replica: bool = False) -> None:
        """Call back whenever something a reader sees has moved, until removed.

        ``replica``: the reader sees up to the log end; others up to the high watermark.
        """
        (self._end_waiters if replica else self._waiters)[callback] = None

    def remove_waiter(self, callback: Waiter) -> None:
        """Call back no more; unknown callbacks are no error."""
        self._waiters.pop(callback, None)
        self._end_waiters.pop(callback, None)

    def wake(self) -> None:
        """HW, LSO or log start moved."""
        for callback in tuple(self._waiters):
            callback()

    def _wake_replicas(self) -> None:
        """The log end moved."""
        for callback in tuple(self._end_waiters):
            callback()

    def _wake_all(self) -> None:
        self.wake()
        self._wake_replicas()

    def check_invariants(self) -> None:
        """Raises InvariantViolation when log and core contradict each other."""
        self.core.check_invariants()
        if not self.log.log_start_offset <= self.core.high_watermark <= self.log.log_end_offset:
            raise InvariantViolation(f"{self}: HW {self.core.high_watermark} of {self.log}")
        self.log.check_invariants()
