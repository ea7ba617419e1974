"""A replica as follower: told by the image whom to follow, fed by a fetcher.

:meth:`FollowingReplica.perform` does to the log what a :class:`.follower.FollowerCore` decided.
Cutting and emptying block on the disk (fsync of the segment, its directory, the epoch checkpoint);
appending is one ``writev``.

Order within a cut (rules 12, 19, 22, 27): the log is cut durably, then the epoch cache, then the
recovery point and the high watermark are at most the log end in memory, then the shell hears
:class:`.reports.Truncated` and makes the recovery points durable. A crash in between leaves a log
that is cut or not, and a start that brings the rest in line with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kept.replication import follower
from kept.replication.effects import Truncated
from kept.replication.fetch_messages import Buffer
from kept.replication.fetcher import FetcherCore, Work
from kept.replication.follower import NO_LEADER
from kept.replication.lost_records import about_to_lose
from kept.replication.maintenance import KeptReplica
from kept.storage.errors import (
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
)
from kept.storage.log import AppendInfo
from kept.storage.types import MAX_INT64, TopicPartition

logger = logging.getLogger(__name__)


class FollowingReplica(KeptReplica):
    """A replica that can follow; see the module. It is a :class:`.follower.FollowerLog`.

    ``before_cut`` is called before the log is cut, and raises ReplicaNotAvailable while it must not
    be: the fetcher then tries again.
    """

    before_cut: Callable[[], None] | None = None

    # What a FollowerCore reads.

    @property
    def latest_epoch(self) -> int:
        """Leader epoch of the last batch; -1 when none is known."""
        latest = self.log.leader_epochs.latest
        return -1 if latest is None else latest

    @property
    def awaits_flush(self) -> bool:
        """``flush.messages`` asks for a flush before the leader may count what is here."""
        least = self.log.config.flush_messages
        if least == MAX_INT64:
            return False
        return self.log.written_end_offset - self.log.recovery_point >= least

    def own_end_offset(self, leader_epoch: int) -> tuple[int, int] | None:
        """(largest own epoch <= ``leader_epoch``, its end); None when it is above all."""
        return self.log.leader_epochs.end_offset_for(leader_epoch)

    # Roles.

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
        so that the fetcher must be told; otherwise only the ISR may have changed.
        """
        self._check_online()
        core = self.core
        if leader_epoch < core.leader_epoch:
            raise InvariantViolation(
                f"{self}: leader epoch {leader_epoch} after {core.leader_epoch}"
            )
        news = (
            core.leading
            or leader_epoch != core.leader_epoch
            or leader_id != self.leader_id
        )  # fmt: skip
        if core.leading:
            self.log.write()
            self.resign()
        self.leader_id = leader_id
        core.follow(leader_epoch, partition_epoch, replicas, isr)
        self._wake_all()
        return news

    @property
    def in_sync(self) -> bool:
        """The image has this node in the ISR."""
        return self.node_id in self.core.isr

    def _check_follower(self) -> None:
        self._check_online()
        if self.core.leading or self.leader_id == NO_LEADER:
            raise NotLeaderOrFollower(f"{self.topic_partition}: this node follows nobody")

    # What a fetcher brings.

    def perform(self, effect: follower.Effect, now_ms: int) -> None:
        """Do what the FollowerCore decided.

        Raises CorruptMessage, OffsetOutOfRange (nothing was appended), KafkaStorageError,
        NotLeaderOrFollower: for :meth:`.fetcher.FetcherCore.effect_failed`.
        """
        match effect:
            case follower.Append(records, high_watermark, log_start_offset):
                self.append_fetched(records, high_watermark, log_start_offset, now_ms)
            case follower.TruncateTo(offset):
                self.truncate_to(offset)
            case follower.StartAt(offset):
                self.start_at(offset)
            case follower.Backoff(why=why) if why:
                logger.warning("%s: %s", self.topic_partition, why)
            case follower.AskOffsets() | follower.AskAgain() | follower.Backoff():
                pass

    def append_fetched(
        self, records: Buffer, leader_high_watermark: int, leader_log_start: int, now_ms: int
    ) -> AppendInfo | None:
        """Append what the leader answered; HW and log start follow the leader's.

        Batches of epochs above the one followed are left out. Raises as :meth:`perform`.
        """
        self._check_follower()
        log = self.log
        info = None
        if len(records):
            try:
                info = log.append_as_follower(
                    records, now_ms, max_leader_epoch=self.core.leader_epoch
                )
                log.write()
            except MachineError as error:
                self._failed(error)
        core = self.core
        before, start = core.high_watermark, log.log_start_offset
        committed = min(leader_high_watermark, log.written_end_offset)
        if committed > before:
            core.high_watermark = committed
            log.producers.committed_to(committed)
        if leader_log_start > start:
            self._follow_start(leader_log_start, now_ms)
        if core.high_watermark != before or log.log_start_offset != start:
            self._wake()
        return info

    def _follow_start(self, leader_log_start: int, now_ms: int) -> None:
        """Rule 43: the leader moved the start of its log."""
        log = self.log
        log.advance_log_start(min(leader_log_start, log.written_end_offset), now_ms)
        self.core.high_watermark = max(self.core.high_watermark, log.log_start_offset)

    def truncate_to(self, offset: int) -> None:
        """Cut the log at ``offset``, durably; blocks.

        Raises KafkaStorageError, and as ``before_cut``.
        """
        self._check_not_leading()
        self._before_loss(offset)
        self._cut(offset)

    def cut_to_fetch_again(self, offset: int) -> None:
        """As :meth:`truncate_to`, of records that the leader has: one here is damaged or was taken
        away. The epochs agree up to the log's end, so nothing is lost with what is cut.
        """
        self._check_not_leading()
        self._cut(offset)

    def _cut(self, offset: int) -> None:
        before = self.log.log_start_offset, self.log.log_end_offset
        try:
            self.log.truncate_to(offset)
        except MachineError as error:
            self._failed(error)
        self._was_cut(*before)

    def start_at(self, offset: int) -> None:
        """Drop everything; the log starts at ``offset``. Blocks. Raises as :meth:`truncate_to`."""
        self._check_not_leading()
        before = self.log.log_start_offset, self.log.log_end_offset
        # The leader's retention is past our end; but after an unclean election the leader had
        # others at the offsets of ours, and from where on nobody can tell any more.
        self._before_loss(self.log.log_start_offset if self.may_lose else offset)
        try:
            self.log.truncate_fully_and_start_at(offset)
        except MachineError as error:
            self._failed(error)
        self._was_cut(*before)

    @property
    def may_lose(self) -> bool:
        """What it cuts may have been acknowledged: there was an unclean election since the last
        batch here. Once there is a batch of that leader's, the logs had agreed up to there.
        """
        return self.unclean_epoch > self.latest_epoch

    def _before_loss(self, offset: int) -> None:
        """Say which committed records a cut takes away, while they are there."""
        losing = about_to_lose(self.log, offset, self.core.high_watermark, unclean=self.may_lose)
        if losing is not None:
            self._tell(losing)

    def _check_not_leading(self) -> None:
        if self.offline is not None:
            raise KafkaStorageError(f"{self.topic_partition}: {self.offline}")
        if self.core.leading:
            raise InvariantViolation(f"{self}: a leader never cuts its log")
        if self.before_cut is not None:
            self.before_cut()

    def _was_cut(self, start_before: int, end_before: int) -> None:
        log, core = self.log, self.core
        start, end = log.log_start_offset, log.log_end_offset
        if (start, end) == (start_before, end_before):
            return
        committed = core.high_watermark
        core.high_watermark = max(min(committed, end), start)
        cleared = end < self.applied_end
        if cleared:
            self.applied_end = 0
        self._tell(Truncated(start, end, log.recovery_point, cleared))
        self._wake()


def perform_all(
    fetcher: FetcherCore,
    work: Work,
    find: Callable[[TopicPartition], FollowingReplica | None],
    now_ms: int,
    wall_ms: int,
) -> None:
    """Do what an answer asks of the partitions.

    ``now_ms`` is the fetcher's clock, ``wall_ms`` the time of day, which is a log's clock.
    What fails is told to the fetcher, and the partition's further effects are dropped; the others
    go on.
    """
    for tp, effects in work:
        replica = find(tp)
        if replica is None:
            continue
        try:
            for effect in effects:
                replica.perform(effect, wall_ms)
        except KeptError as error:
            logger.warning("%s: fetched in vain: %s", tp, error)
            fetcher.effect_failed(tp, error, now_ms)
