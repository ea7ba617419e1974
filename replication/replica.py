"""One replica of a partition on this node: its log, its leader core, and what happens to both.

Here are leadership, offline logs, waiting and upkeep (retention, rolling, flushing, settings);
``partition.py`` adds reading and writing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn
from uuid import UUID

from kept.replication.leader import (
    Acknowledge,
    CommitKnown,
    Effect,
    Effects,
    Elected,
    Event,
    IsrDecided,
    LeaderCore,
    MinIsrChanged,
    Ticked,
)
from kept.replication.views import (
    ProducerView,
    SegmentView,
    Waiter,
    producer_views,
    segment_views,
)
from kept.storage.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    PolicyViolation,
    UnknownLeaderEpoch,
)
from kept.storage.flush import FlushTicket
from kept.storage.log import Log
from kept.storage.types import LogConfig, TopicPartition

DELETE_TO_HIGH_WATERMARK = -1
"""DeleteRecords' offset for "all that is committed"."""


class EpochTicket:
    """Durability of a leader epoch (rule 24): :meth:`run` in any thread, then :meth:`done`."""

    __slots__ = ("_partition", "leader_epoch")

    def __init__(self, partition: Replica, leader_epoch: int) -> None:
        self._partition = partition
        self.leader_epoch = leader_epoch

    def run(self) -> None:
        """Write the epoch cache; blocks. Raises MachineError: the directory is to go offline."""
        self._partition.log.leader_epochs.save()

    def done(self) -> None:
        """On the loop, after :meth:`run` returned: the partition takes appends."""
        self._partition.epoch_is_durable(self.leader_epoch)


class Replica:
    """See the module. One thread; what the machine does wrong takes it offline.

    ``high_watermark``: what the checkpoint says; ``applied_end``: b of the manifest applied or
    being applied (rule 12). ``on_machine_error`` hears once of an error that takes the partition
    offline, so that the node takes the whole directory offline; ``on_effect`` gets the core's
    effects that go to the controller and the other replicas.
    """

    def __init__(
        self,
        log: Log,
        node_id: int = 0,
        *,
        high_watermark: int = 0,
        applied_end: int = 0,
        lag_time_max_ms: int = 30_000,
        on_machine_error: Callable[[MachineError], None] | None = None,
        on_effect: Callable[[Effect], None] | None = None,
    ) -> None:
        self.log = log
        self.node_id = node_id
        self.topic_partition: TopicPartition = log.topic_partition
        self.topic_id: UUID = log.topic_id
        self.offline: str | None = None
        self.core = LeaderCore(node_id, lag_time_max_ms, log.config.min_insync_replicas)
        restored = max(high_watermark, applied_end, log.log_start_offset)
        self.core.high_watermark = min(restored, log.log_end_offset)
        self._leading = False
        self._appendable = False
        self._waiters: dict[Waiter, None] = {}
        self._on_machine_error = on_machine_error
        self._on_effect = on_effect

    def __repr__(self) -> str:
        role = f"leads in epoch {self.leader_epoch}" if self._leading else "does not lead"
        return f"{type(self).__name__}({self.topic_partition}, {role})"

    # What it is.

    @property
    def is_leader(self) -> bool:
        """This node leads the partition."""
        return self._leading

    @property
    def leader_epoch(self) -> int:
        """Epoch of the current, or last, leadership; -1 before the first."""
        return self.core.leader_epoch

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
        """What read_committed consumers read below: HW, or the first open transaction."""
        unstable = self.log.first_unstable_offset
        committed = self.core.high_watermark
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
    ) -> EpochTicket | None:
        """Lead in that epoch (or take a new ISR in the current one).

        Returns a ticket when the epoch must become durable before the first append: until it is
        done, appends raise NotLeaderOrFollower, reads are answered.
        """
        self._check_online()
        core = self.core
        if self._leading and leader_epoch == core.leader_epoch:
            self.step(IsrDecided(partition_epoch, replicas, isr))
            return None
        log = self.log
        log.leader_epochs.assign(leader_epoch, log.log_end_offset)
        effects = core.elected(
            Elected(
                leader_epoch,
                partition_epoch,
                replicas,
                isr,
                log.log_end_offset,
                core.high_watermark,
                now_ms,
            )
        )
        self._leading = True
        self._appendable = not log.leader_epochs.dirty
        self._perform(effects)
        self._wake()
        return None if self._appendable else EpochTicket(self, leader_epoch)

    def epoch_is_durable(self, leader_epoch: int) -> None:
        """The epoch cache is on disk: appends are taken, if it is still that epoch."""
        if self._leading and leader_epoch == self.core.leader_epoch:
            self._appendable = True

    def resign(self) -> None:
        """Lead no more: those who wait are told so."""
        self._stop_leading(NotLeaderOrFollower)

    def _stop_leading(self, error: type[KeptError]) -> None:
        self._leading = self._appendable = False
        self._perform(self.core.resigned(error))
        self._wake()

    def step(self, event: Event) -> None:
        """Give the core an event (ISR decisions, manifests, brokers) and perform its effects."""
        before = self.core.high_watermark
        self._perform(self.core.step(event))
        if self.core.high_watermark != before:
            self._wake()

    def tick(self, now_ms: int) -> None:
        """Time passed: members that lag leave the ISR."""
        if self._leading and not self.core.alone:
            self.step(Ticked(now_ms))

    def mark_offline(self, reason: str) -> None:
        """The log directory failed: from now on every call raises KafkaStorageError(reason)."""
        if self.offline is None:
            self.offline = reason
            self._stop_leading(KafkaStorageError)

    def _check_online(self) -> None:
        if self.offline is not None:
            raise KafkaStorageError(f"{self.topic_partition}: {self.offline}")

    def _check_leader(self) -> None:
        if not self._leading:
            self._check_online()
            raise NotLeaderOrFollower(f"{self.topic_partition} is not led by this node")

    def _check_epoch(self, current_leader_epoch: int) -> None:
        """Rule 25; -1 asks for no check."""
        epoch = self.core.leader_epoch
        if current_leader_epoch in (-1, epoch):
            return
        message = f"{self.topic_partition}: leader epoch {current_leader_epoch}, here {epoch}"
        if current_leader_epoch < epoch:
            raise FencedLeaderEpoch(message)
        raise UnknownLeaderEpoch(message)

    def _failed(self, error: MachineError) -> NoReturn:
        """The machine failed under this log."""
        known = self.offline is not None
        self.mark_offline(str(error))
        if not known and self._on_machine_error is not None:
            self._on_machine_error(error)
        raise KafkaStorageError(f"{self.topic_partition}: {error}") from error

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Acknowledge):
                error = effect.error
                message = f"{self.topic_partition}: {self.offline or self._why(error)}"
                effect.token(None if error is None else error(message))  # type: ignore[operator]
            elif self._on_effect is not None:
                self._on_effect(effect)

    def _why(self, error: type[KeptError] | None) -> str:
        if error is NotLeaderOrFollower:
            return "this node does not lead any more"
        core = self.core
        return f"the ISR {core.isr} is below the minimum of {core.effective_min_isr}"

    # Waiting.

    def add_waiter(self, callback: Waiter) -> None:
        """Call back whenever something a reader sees has moved, until removed."""
        self._waiters[callback] = None

    def remove_waiter(self, callback: Waiter) -> None:
        """Call back no more; unknown callbacks are no error."""
        self._waiters.pop(callback, None)

    def _wake(self) -> None:
        for callback in tuple(self._waiters):
            callback()

    # Keeping.

    def delete_records(self, offset: int, now_ms: int) -> int:
        """Move the log start up to ``offset`` (-1: to HW); returns the low watermark.

        Raises PolicyViolation for a topic that is only compacted, OffsetOutOfRange below 0 or above
        HW, NotLeaderOrFollower, KafkaStorageError.
        """
        self._check_leader()
        config = self.log.config
        if config.compact and not config.delete:
            raise PolicyViolation(
                f"Records of partition {self.topic_partition} can not be deleted "
                "due to the configured policy"
            )
        if offset == DELETE_TO_HIGH_WATERMARK:
            offset = self.core.high_watermark
        if not 0 <= offset <= self.core.high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {offset}, "
                f"the high watermark is {self.core.high_watermark}"
            )
        self._advance_start(offset, now_ms)
        return self.log.log_start_offset

    def _advance_start(self, offset: int, now_ms: int) -> None:
        if offset > self.log.log_start_offset:
            self.log.advance_log_start(offset, now_ms)
            self._wake()

    def retention(self, now_ms: int) -> list[tuple[int, str]]:
        """Drop old segments by time, size and log start: (base offset, reason) of those that went.

        The leader decides (rule 43); elsewhere nothing happens.
        """
        if not self._leading:
            return []
        start = self.log.log_start_offset
        try:
            gone = self.log.delete_old_segments(now_ms, self.core.high_watermark)
        except MachineError as error:
            self._failed(error)
        if self.log.log_start_offset != start:
            self._wake()
        return gone

    def update_config(self, config: LogConfig) -> None:
        """New settings of the topic; they hold at once."""
        self.log.update_config(config)
        self.step(MinIsrChanged(config.min_insync_replicas))

    def raise_high_watermark(self, offset: int) -> None:
        """Before a swap: what the manifest covers was committed, so HW is at least its end."""
        if offset > self.log.written_end_offset:
            raise OffsetOutOfRange(f"{self.topic_partition}: HW cannot be {offset}")
        self.step(CommitKnown(offset))

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll an active segment that is too old, also of an idle log (rule 3)."""
        self._check_online()
        try:
            return self.log.maybe_roll(now_ms)
        except MachineError as error:
            self._failed(error)

    def flush_due(self, now_ms: int) -> bool:
        """``flush.messages`` or ``flush.ms`` ask for a flush."""
        return self.offline is None and self.log.flush_due(now_ms)

    def flush_ticket(self) -> FlushTicket | None:
        """What is written and not durable, for the node's pool; None when there is nothing."""
        return None if self.offline is not None else self.log.flush_ticket()

    def expire_producers(self, now_ms: int) -> int:
        """Forget producers that were silent too long; returns how many."""
        return 0 if self.offline is not None else self.log.expire_producers(now_ms)

    def delete_expired(self, now_ms: int) -> int:
        """Remove files of segments that went ``file.delete.delay.ms`` ago; returns how many."""
        if self.offline is not None:
            return 0
        try:
            return self.log.delete_expired(now_ms)
        except MachineError as error:
            self._failed(error)

    def close(self, now_ms: int) -> None:
        """Stop leading, make everything durable, close the log. Blocks.

        Raises KafkaStorageError.
        """
        self.resign()
        if self.offline is None:
            try:
                self.log.close(now_ms)
            except MachineError as error:
                self._failed(error)

    def check_invariants(self) -> None:
        """Raises InvariantViolation when log and core contradict each other."""
        if self._leading:
            self.core.check_invariants()
        self.log.check_invariants()
