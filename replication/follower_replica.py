"""A replica as follower: told by the image whom to follow, fed by a fetcher.

:meth:`FollowerReplica.perform` does to the log what a :class:`.follower.FollowerCore` decided.
Cutting and emptying block on the disk (fsync of the segment, its directory, the epoch checkpoint);
appending is one ``writev``. What a cut would read for long is read before, by a thread
(:mod:`kept.storage.producers.cut_preparation`).

Order within a cut (rules 12, 19, 22, 27): the checkpoints that are above its end are lowered, the
log is cut durably, then the epoch cache, then the recovery point and the high watermark are at most
the log end in memory, then the shell hears :class:`.replica_effects.LogTruncated`. A crash in
between leaves a log that is cut or not, and a start that brings the rest in line with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kept.replication import follower
from kept.replication.fetch_messages import Buffer
from kept.replication.fetcher import FetcherCore, Work, WorkFailed
from kept.replication.follower import NO_LEADER
from kept.replication.lost_records import about_to_lose
from kept.replication.manifests_events import TruncationCompleted
from kept.replication.replica_effects import LogTruncated
from kept.storage import layout
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
    is_bug,
)
from kept.storage.log.log import AppendInfo
from kept.storage.types import MAX_INT64, TopicPartition

if TYPE_CHECKING:
    from kept.replication.replica import Replica

logger = logging.getLogger(__name__)


class FollowerReplica:
    """What a replica does as a follower; see the module. It is a :class:`.follower.FollowerLog`."""

    __slots__ = ("log", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.log = replica.log

    # What a FollowerCore reads.

    @property
    def log_start_offset(self) -> int:
        """First offset."""
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Where the next record goes."""
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        """What is known as committed."""
        return self.replica.core.high_watermark

    @property
    def latest_epoch(self) -> int:
        """Leader epoch of the last batch; -1 when none is known."""
        return self.replica.latest_epoch

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

    def check_follower(self) -> None:
        """Raises NotLeaderOrFollower, KafkaStorageError unless it follows a leader."""
        self.replica.check_online()
        if self.replica.core.leading or self.replica.leader_id == NO_LEADER:
            place = self.replica.topic_partition.place
            raise NotLeaderOrFollower(f"{place}: this node follows nobody")

    # What a fetcher brings.

    def perform(self, effect: follower.Effect, now_ms: int) -> None:
        """Do what the FollowerCore decided.

        Raises CorruptMessage, OffsetOutOfRange (nothing was appended), KafkaStorageError,
        NotLeaderOrFollower, ReplicaNotAvailable (a cut has to wait): for
        :class:`.fetcher.WorkFailed`.
        """
        match effect:
            case follower.AppendBatches(records, high_watermark, log_start_offset):
                self.append_fetched(records, high_watermark, log_start_offset, now_ms)
            case follower.TruncateTo(offset):
                self.truncate_to(offset)
            case follower.StartAt(offset):
                self.start_at(offset)
            case follower.Backoff(why=why) if why:
                logger.warning("%s: %s", self.replica.topic_partition, why)
            case follower.ListOffsets() | follower.FetchAgain() | follower.Backoff():
                pass

    def append_fetched(
        self, records: Buffer, leader_high_watermark: int, leader_log_start: int, now_ms: int
    ) -> AppendInfo | None:
        """Append what the leader answered; HW and log start follow the leader's.

        Batches of epochs above the one followed are left out. Raises as :meth:`perform`.
        """
        self.check_follower()
        log = self.log
        info = None
        if len(records):
            try:
                info = log.append_as_follower(
                    records, now_ms, max_leader_epoch=self.replica.core.leader_epoch
                )
                log.write()
            except MachineError as error:
                self.replica.failed(error)
        core, start = self.replica.core, log.log_start_offset
        committed = min(leader_high_watermark, log.written_end_offset)
        moved = core.commit_known(committed)
        if moved:
            log.producers.committed_to(committed)
        if leader_log_start > start:  # rule 43: the leader moved the start of its log
            log.advance_log_start(min(leader_log_start, log.written_end_offset))
            moved = core.commit_known(log.log_start_offset) or moved
        if moved or log.log_start_offset != start:
            self.replica.wake()
        return info

    def truncate_to(self, offset: int) -> None:
        """Cut the log at ``offset``, durably; blocks.

        Where damage hides the place, or what producers wrote below, all of that segment goes, for
        the leader has what is below ``offset``; but not while the image has this replica in the
        ISR: the records count as being here, and a leader drops who does not fetch.

        Raises KafkaStorageError, DamagedData, and as ``PartitionListener.check_cut``;
        ReplicaNotAvailable, too, while the producers below ``offset`` are read elsewhere, where
        they take long.
        """
        self._check_not_leading()
        error = self._damage_at(offset)
        if error is None:
            self._before_loss(offset)
            self._cut(offset)
        elif self.replica.in_sync:
            raise error
        else:
            base = self._base(offset, error)
            # After an unclean election another round may find that less agrees.
            self._before_loss(base if self.replica.may_lose else offset)
            self._cut_segment(base, error)

    def cut_to_fetch_again(self, offset: int) -> None:
        """As :meth:`truncate_to`, of records that the leader has: one here is damaged or was taken
        away. The epochs agree up to the log's end, so nothing is lost with what is cut: where a
        damaged header hides the record, its whole segment goes. Nobody reads one below the log
        start, but a manifest may list it: the log starts anew there, without what was below.
        """
        self._check_not_leading()
        start = self.log.log_start_offset
        if offset <= start:
            logger.warning("%s: all from %d on is fetched again", self.log, start)
            self._start_at(start, segments_went=True)
            return
        error = self._damage_at(offset)
        if error is None:
            self._cut(offset)
        else:
            self._cut_segment(self._base(offset, error), error)

    def _damage_at(self, offset: int) -> DamagedData | None:
        """Why the log cannot be cut there; nothing was done."""
        try:
            self.log.check_cut(offset)
            self._prepare(offset)
        except MachineError as error:
            self.replica.failed(error)
        except DamagedData as error:
            return error
        return None

    def _base(self, offset: int, error: DamagedData) -> int:
        """Where the damaged segment begins, or the log, if that is within."""
        damaged = layout.parse_segment_file(error.path.rpartition("/")[2])
        below = offset if damaged is None else min(offset, damaged.base_offset)
        base = self.log.segments[self.log.segments.floor(below)].base_offset
        return max(base, self.log.log_start_offset)

    def _cut_segment(self, base: int, error: DamagedData) -> None:
        """Cut the log at the base of a damaged segment."""
        logger.warning("%s: all from %d on is fetched again", error, base)
        if base in self.log.segments.bases:
            self._cut(base)
        else:
            self._start_at(base)

    def _prepare(self, offset: int) -> None:
        """Have read what a cut has to know of producers. Raises ReplicaNotAvailable until then."""
        preparation, listener = self.log.prepare_cut(offset), self.replica.listener
        if preparation is None or listener is None:
            return
        if not preparation.begun:
            preparation.begun = True
            listener.prepare_cut(preparation)
        if not preparation.done:
            tp = self.replica.topic_partition
            raise ReplicaNotAvailable(f"{tp.place}: the cut waits until producers are read")
        if preparation.damage is not None:
            raise preparation.damage

    def _cut(self, offset: int) -> None:
        before = self.log.log_start_offset, self.log.log_end_offset
        try:
            self.log.truncate_to(offset)
        except MachineError as error:
            self.replica.failed(error)
        self._was_cut(*before)

    def start_at(self, offset: int) -> None:
        """Drop everything; the log starts at ``offset``. Blocks. Raises as :meth:`truncate_to`."""
        self._check_not_leading()
        # The leader's retention is past our end; but after an unclean election the leader had
        # others at the offsets of ours, and from where on nobody can tell any more.
        self._before_loss(self.log.log_start_offset if self.replica.may_lose else offset)
        self._start_at(offset)

    def _start_at(self, offset: int, *, segments_went: bool = False) -> None:
        before = self.log.log_start_offset, self.log.log_end_offset
        try:
            self.log.truncate_fully_and_start_at(offset)
        except MachineError as error:
            self.replica.failed(error)
        self._was_cut(*before, segments_went=segments_went)

    def _before_loss(self, offset: int) -> None:
        """Say which committed records a cut takes away, while they are there."""
        losing = about_to_lose(
            self.log, offset, self.replica.core.high_watermark, unclean=self.replica.may_lose
        )
        if losing is not None:
            self.replica.emit(losing)

    def _check_not_leading(self) -> None:
        if self.replica.offline is not None:
            raise KafkaStorageError(f"{self.replica.topic_partition.place}: {self.replica.offline}")
        if self.replica.core.leading:
            raise InvariantViolation(f"{self.replica}: a leader never cuts its log")
        if self.replica.listener is not None:
            self.replica.listener.check_cut()

    def _was_cut(self, start_before: int, end_before: int, *, segments_went: bool = False) -> None:
        """``segments_went``: also where the offsets tell nothing, of a log that was empty at its
        start, above records that nobody reads any more.
        """
        log, core = self.log, self.replica.core
        start, end = log.log_start_offset, log.log_end_offset
        if (start, end) == (start_before, end_before) and not segments_went:
            return
        effects = core.step(TruncationCompleted(end, start), 0)
        if end < self.replica.applied_end:
            self.replica.applied_end = 0
        self.replica.emit(LogTruncated(start, end))
        for effect in effects:
            self.replica.emit(effect)
        self.replica.wake()


def perform_all(
    fetcher: FetcherCore,
    work: Work,
    replicas: Mapping[TopicPartition, Replica],
    now_ms: int,
    wall_ms: int,
) -> None:
    """Do what an answer asks of the partitions.

    ``now_ms`` is the fetcher's clock, ``wall_ms`` the time of day, which is a log's clock.
    What fails becomes a WorkFailed of the fetcher, and the partition's further effects are dropped;
    the others go on. Raises what is a bug of ours.
    """
    for tp, effects in work:
        replica = replicas.get(tp)
        if replica is None:
            continue
        try:
            for effect in effects:
                replica.follower.perform(effect, wall_ms)
        except KeptError as error:
            if is_bug(error):
                raise
            if isinstance(error, ReplicaNotAvailable):
                logger.debug("%s: %s", tp.place, error)
            else:
                logger.warning("%s: fetched in vain: %s", tp.place, error)
            fetcher.step(WorkFailed(tp, error), now_ms)
