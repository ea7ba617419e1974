"""One partition on this node: its log, its leader core, and everybody who waits for it.

Handlers, coordinators and retention read and write by this. It adds to the log: who may read and
write and how far (epochs, HW, LSO; rules 25, 26, 38), who is told when something moves, and what a
broken disk means (the partition is offline, with a reason, and every call raises
KafkaStorageError).

Around it the node uses ``log`` for what asks no role and moves no offset that anybody waits for:
its sizes, settings and segments; flushes (``flush_ticket``, ``flush_due``), forgetting of silent
producers, removal of files that left, ``close``; and the cleaner and manifests replace segments.
Whoever does so takes the directory offline for a MachineError. Records are appended, cut and read
for clients here only.

One thread; calls do not block but for the log's own file I/O. Callbacks are called within the call
that moved the offset, after the state is consistent; they must not raise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import Final, NoReturn

from kept.replication.events import NO_TOKEN, CommitAdvanced, MinIsrChanged, Token, WaitCancelled
from kept.replication.fetch_messages import FetchPartition
from kept.replication.offsets import diverging_epoch, list_offset
from kept.replication.partition_views import CommitCallback, ListedOffset, PartitionFetch
from kept.replication.replica import EpochTicket, Replica
from kept.storage.errors import (
    KafkaStorageError,
    MachineError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    OffsetOutOfRange,
    PolicyViolation,
    TransactionCoordinatorFenced,
)
from kept.storage.log.log import AppendInfo
from kept.storage.log.log_reader import FindRecord, find_record
from kept.storage.producers.verification import VerificationGuard
from kept.storage.records import CheckedBatch, EndTxnMarker
from kept.storage.types import MAX_INT32, AppendOrigin, IsolationLevel, LogConfig

__all__ = ["AppendInfo", "EpochTicket", "ListedOffset", "Partition", "PartitionFetch"]

DELETE_TO_HIGH_WATERMARK: Final = -1
"""DeleteRecords' offset for "all that is committed"."""
ENOUGH_BYTES: Final = MAX_INT32
"""More than any ``min_bytes`` asks for."""


class Partition(Replica):
    """A partition as handlers use it; see the module."""

    # Writing.

    def append(
        self,
        checked: CheckedBatch,
        now_ms: int,
        acks: int = 1,
        guard: VerificationGuard | None = None,
        origin: AppendOrigin = AppendOrigin.CLIENT,
    ) -> AppendInfo:
        """Stage a checked batch; readable, and in HW, after :meth:`write`.

        ``guard``: what :meth:`verification_guard` gave for it. Raises NotLeaderOrFollower,
        KafkaStorageError, NotEnoughReplicas (``acks`` -1 below the minimum ISR),
        OutOfOrderSequenceNumber, InvalidProducerEpoch, InvalidTxnState; then nothing was staged.
        """
        core = self.core
        if not self._appendable or (acks == -1 and core.below_min_isr):
            self._refuse_append()
        if guard is not None and guard.leader_epoch != core.leader_epoch:
            raise NotLeaderOrFollower(
                f"{self.topic_partition.place}: was verified in leader epoch {guard.leader_epoch}, "
                f"here {core.leader_epoch}"
            )
        try:
            return self.log.append(checked, core.leader_epoch, now_ms, guard, origin)
        except MachineError as error:
            self.failed(error)

    def _refuse_append(self) -> NoReturn:
        core = self.core
        if not self._appendable:
            self._check_leader()
            raise NotLeaderOrFollower(
                f"{self.topic_partition.place}: leader epoch {core.leader_epoch} is not durable yet"
            )
        raise NotEnoughReplicas(
            f"{self.topic_partition.place}: the ISR {core.isr} is below the minimum of "
            f"{core.effective_min_isr}"
        )

    def verification_guard(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        record_count: int = 1,
        *,
        is_tv2: bool,
        now_ms: int,
    ) -> VerificationGuard | None:
        """What :meth:`append` must be shown for a transactional batch, once its coordinator said
        that the transaction is open and holds this partition.

        None: nobody needs to be asked, it is open here, or the batch is a duplicate. A negative
        ``sequence``: the batch is of a coordinator. Raises NotLeaderOrFollower, KafkaStorageError,
        InvalidProducerEpoch.
        """
        self._check_leader()
        producers = self.log.producers
        if producers.find_duplicate(producer_id, epoch, sequence, record_count) is not None:
            return None
        if producers.is_open(producer_id, epoch):
            return None
        return producers.guards.obtain(
            producer_id,
            epoch,
            sequence,
            is_tv2=is_tv2,
            leader_epoch=self.core.leader_epoch,
            now_ms=now_ms,
        )

    def note_coordinator_epoch(self, producer_id: int, epoch: int) -> None:
        """The coordinator of a producer said yes, which leads in that epoch: markers of an older
        one are refused from now on, while this node leads.

        Raises TransactionCoordinatorFenced where a later one is known here already: it may have
        ended meanwhile what the earlier one believes to be open.
        """
        newest = self.log.producers.coordinator_epoch(producer_id)
        if epoch < newest:
            raise TransactionCoordinatorFenced(
                f"{self.topic_partition.place}: coordinator epoch {epoch} says that producer "
                f"{producer_id} has a transaction open, known is {newest}"
            )
        self.log.producers.guards.note_coordinator_epoch(producer_id, epoch)

    def append_marker(
        self,
        marker: EndTxnMarker,
        producer_id: int,
        producer_epoch: int,
        now_ms: int,
        *,
        is_tv2: bool = False,
    ) -> AppendInfo:
        """Stage the end of a transaction, which may hold nothing here, as with ``acks`` -1.

        ``is_tv2``: by version 2, in which an end brings a new epoch. Raises NotLeaderOrFollower,
        KafkaStorageError, NotEnoughReplicas, InvalidProducerEpoch, TransactionCoordinatorFenced;
        then nothing was staged.
        """
        core = self.core
        if not self._appendable or core.below_min_isr:
            self._refuse_append()
        try:
            return self.log.append_marker(
                marker, producer_id, producer_epoch, core.leader_epoch, now_ms, is_tv2=is_tv2
            )
        except MachineError as error:
            self.failed(error)

    def write(self) -> None:
        """Write what is staged; HW moves, and those who wait for it are told.

        Raises KafkaStorageError when the partition is offline, by this write or since the batches
        were staged (a roll between them may have failed, and lost them): none may be acknowledged.
        """
        if self.offline is not None:
            self.check_online()
        try:
            self.log.write()
        except MachineError as error:
            self.failed(error)
        core = self.core
        if core.leading:
            effects = core.appended(self.log.written_end_offset)
            if effects:
                self._perform(effects)
            if self._end_waiters:
                self._wake_replicas()

    def when_committed(self, end_offset: int, callback: CommitCallback) -> Token:
        """Call back once HW >= ``end_offset``: at once when it is, else when it moves there, or a
        moment later behind many others.

        With an error: NotEnoughReplicasAfterAppend (committed, but by too few), NotLeaderOrFollower
        or KafkaStorageError (nobody knows). Returns what :meth:`forget_commit` knows it by.
        """
        core = self.core
        if core.alone and core.high_watermark >= end_offset and self._acknowledged is None:
            callback(None)
        elif self.offline is not None:
            callback(KafkaStorageError(f"{self.topic_partition.place}: {self.offline}"))
        else:
            self._last_token += 1
            self._commits[self._last_token] = callback
            token = self._last_token
            self._perform(core.commit_awaited(token, end_offset))
            return token
        return NO_TOKEN

    def forget_commit(self, token: Token) -> None:
        """The waiter gave up (its request timed out): it is called now if the wait is over, which
        it was to hear in its turn, else not any more.
        """
        if self._acknowledged is not None and token in self._acknowledged:
            callback, error = self._acknowledged.pop(token)
            callback(error)
        elif self._commits.pop(token, None) is not None:
            self._perform(self.core.step(WaitCancelled(token), 0))

    def acknowledge_next(self) -> bool:
        """Call who is next of those that :class:`.replica_effects.AcknowledgementsLeft` is about;
        False: nobody is left. Raises what is raised there.
        """
        if not self._acknowledged:
            self._acknowledged = None
            return False
        _, (callback, error) = self._acknowledged.popitem(last=False)
        callback(error)
        return True

    # Reading.

    def fetch(
        self,
        offset: int,
        max_bytes: int,
        *,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        current_leader_epoch: int = -1,
        last_fetched_epoch: int = -1,
        replica_id: int = -1,
        broker_epoch: int = -1,
        log_start_offset: int = -1,
        at_least_one: bool = True,
        from_follower: bool = False,
        now_ms: int = 0,
        again: bool = False,
    ) -> PartitionFetch:
        """Whole batches from ``offset`` on: for consumers below HW (LSO), for replicas below LEO.

        Nothing there is an empty answer. ``broker_epoch`` (Fetch v15), ``log_start_offset`` and
        ``now_ms`` matter for replicas only, whose progress they note, but not where a request that
        waited is read ``again``; ``from_follower`` (Fetch v11) for consumers, whom an in-sync
        follower serves, too (KIP-392). Raises OffsetOutOfRange, OffsetNotAvailable,
        FencedLeaderEpoch, UnknownLeaderEpoch, NotLeaderOrFollower, KafkaStorageError, DamagedData.
        """
        if not self._leading:
            if not (from_follower and replica_id < 0):
                self._check_leader()
            self._check_reads(offset)
        core = self.core
        if current_leader_epoch not in (-1, core.leader_epoch):
            self._check_epoch(current_leader_epoch)
        log = self.log
        start = log.log_start_offset
        if last_fetched_epoch != -1:
            diverging = diverging_epoch(log, last_fetched_epoch, offset)
            if diverging is not None:
                stable = self.last_stable_offset
                return PartitionFetch(None, core.high_watermark, stable, start, None, diverging)
        if offset < start:
            self._check_start(offset)
        aborted = None
        if replica_id >= 0:
            end = log.written_end_offset
        else:
            end = core.high_watermark
            if isolation:
                end = self.last_stable_offset
        try:
            if isolation and replica_id < 0:
                read, overlapping = log.read_committed(
                    offset, max_bytes, end, at_least_one=at_least_one
                )
                aborted = [(txn.producer_id, txn.first_offset) for txn in overlapping]
            else:
                read = log.read(offset, max_bytes, end, at_least_one=at_least_one)
        except MachineError as error:
            self.failed(error)
        if again and replica_id >= 0:
            core.follower_of(replica_id, broker_epoch)
        elif replica_id >= 0:
            self._follower_fetched(replica_id, offset, now_ms, broker_epoch, log_start_offset)
        committed = core.high_watermark
        unstable = log.producers.first_undecided_offset(committed, start)
        stable = committed if unstable is None else min(unstable, committed)
        return PartitionFetch(read, committed, stable, start, aborted, None)

    def _check_reads(self, offset: int) -> None:
        """Whether consumers may read from this follower: in sync, and not ahead of it."""
        self.follower.check_follower()
        tp = self.topic_partition
        if not self._serves_consumers:
            raise NotLeaderOrFollower(f"{tp.place}: this replica is not in sync, ask the leader")
        if offset > self.log.written_end_offset:
            raise OffsetNotAvailable(
                f"{tp.place}: offset {offset} is not here yet, this follower has "
                f"{self.log.written_end_offset}"
            )

    @property
    def _serves_consumers(self) -> bool:
        """As a follower in the ISR."""
        return self.is_follower and not self.suspended and self.in_sync

    def _check_start(self, offset: int) -> None:
        start = self.log.log_start_offset
        if offset < start:
            raise OffsetOutOfRange(
                f"{self.topic_partition.place}: offset {offset} is below the log start {start}"
            )

    def _follower_fetched(
        self, replica_id: int, offset: int, now_ms: int, broker_epoch: int, log_start_offset: int
    ) -> None:
        core = self.core
        effects = core.fetched(replica_id, offset, now_ms, broker_epoch)
        started = core.log_starts(replica_id, log_start_offset)
        if effects:
            self._perform(effects)
        if started and self._waiters:
            self.wake()

    def follower_has_all(
        self, replica_id: int, broker_epoch: int, wanted: FetchPartition, now_ms: int
    ) -> bool:
        """Whether a follower has all that is here: that is noted then, as by :meth:`fetch`, which
        would find nothing. Raises NotLeaderOrFollower.
        """
        log, offset = self.log, wanted.fetch_offset
        if (
            not self._leading
            or wanted.current_leader_epoch != self.core.leader_epoch
            or offset != log.written_end_offset
            or wanted.last_fetched_epoch != self.latest_epoch
        ):
            return False
        self._follower_fetched(replica_id, offset, now_ms, broker_epoch, wanted.log_start_offset)
        # Whoever waited for it to be committed may have appended.
        return offset == log.written_end_offset

    def follower_polled(self, replica_id: int, now_ms: int) -> None:
        """Until ``now_ms`` a follower's requests left out what they knew (KIP-227): it was there.

        For a partition whose log end had not moved since its last :meth:`fetch`.
        """
        follower = self.core.followers.get(replica_id)
        if follower is not None:
            follower.polled(now_ms)

    def follower_stopped(self, replica_id: int) -> None:
        """A follower said that it follows no more: it does not join the ISR until it fetches."""
        follower = self.core.followers.get(replica_id)
        if follower is not None:
            follower.follows = False

    def read_batches(self, offset: int, max_bytes: int) -> bytes:
        """Committed batches from ``offset`` on as bytes: for the node's own readers. At least one.

        Does not ask for leadership. Raises OffsetOutOfRange, KafkaStorageError, DamagedData.
        """
        self.check_online()
        self._check_start(offset)
        try:
            return self.log.read_batches(offset, max_bytes, self.core.high_watermark)
        except MachineError as error:
            self.failed(error)

    def readable_bytes(
        self,
        offset: int,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        *,
        replica: bool = False,
    ) -> int:
        """Bytes that a consumer (or a ``replica``) could fetch from ``offset``: for ``min_bytes``.

        ENOUGH_BYTES for an offset in an older segment: a fetch ends with its segment, so whoever
        asks for more than is left there would wait for nothing (Kafka answers such a fetch at once,
        too). ENOUGH_BYTES, too, where nobody is served any more; 0 for an offset out of range: the
        fetch that follows says so.
        """
        if not (self._leading or (self._serves_consumers and not replica)):
            return ENOUGH_BYTES
        if replica:
            end = self.log.written_end_offset
        else:
            end = self.last_stable_offset if isolation else self.core.high_watermark
        if self.log.log_start_offset <= offset < end:
            if self._is_in_older_segment(offset, end):
                return ENOUGH_BYTES
            try:
                read = self.log.read(offset, MAX_INT32, end)
            except MachineError as error:
                self.failed(error)
            return 0 if read is None else read.size_bytes
        return 0

    def readable_replicas(self, offset: int) -> tuple[int, ...]:
        """Replicas in the ISR that have ``offset``: whom a consumer may be sent to (KIP-392)."""
        core = self.core
        return tuple(
            member
            for member in core.isr
            if member == self.node_id
            or ((follower := core.followers.get(member)) and follower.log_end_offset >= offset)
        )

    def _is_in_older_segment(self, offset: int, end: int) -> bool:
        """Whether the batches below ``end`` reach into a segment after that of ``offset``."""
        if self.log.active_segment.base_offset <= offset:
            return False
        bases = self.log.segments.bases
        return bases[bisect_left(bases, end) - 1] > offset

    def list_offset(
        self,
        timestamp: int,
        isolation: IsolationLevel | None = IsolationLevel.READ_UNCOMMITTED,
        current_leader_epoch: int = -1,
        find: FindRecord = find_record,
    ) -> ListedOffset:
        """ListOffsets; ``isolation`` None: a replica asks, who sees up to LEO. ``find`` looks into
        a batch.

        Raises OffsetNotAvailable (rule 38), as :meth:`fetch` does, and what ``find`` does.
        """
        self._check_leader()
        self._check_epoch(current_leader_epoch)
        core = self.core
        late = None
        if isolation is None:
            fetchable = self.log.written_end_offset
        else:
            fetchable = self.last_stable_offset if isolation else core.high_watermark
            if core.high_watermark < core.epoch_start_offset:
                late = (
                    f"{self.topic_partition.place}: the high watermark {core.high_watermark} has "
                    f"not reached the start {core.epoch_start_offset} of leader epoch "
                    f"{core.leader_epoch}"
                )
        try:
            return list_offset(
                self.log,
                timestamp,
                fetchable=fetchable,
                leader_epoch=core.leader_epoch,
                late=late,
                find=find,
            )
        except MachineError as error:
            self.failed(error)

    def end_offset_for_epoch(self, current_leader_epoch: int, leader_epoch: int) -> tuple[int, int]:
        """Where an epoch ends: (largest epoch <= ``leader_epoch``, its end); (-1, -1) undefined."""
        self._check_leader()
        self._check_epoch(current_leader_epoch)
        return self.log.leader_epochs.end_offset_for(leader_epoch) or (-1, -1)

    # Maintenance. Only the leader decides what goes (rule 43); a follower removes the segments
    # that lie wholly below the log start that its leader told.

    def delete_records(self, offset: int) -> int:
        """Move the log start up to ``offset`` (-1: to HW); returns the low watermark.

        Raises PolicyViolation for a topic that is only compacted, OffsetOutOfRange below 0 or above
        HW, NotLeaderOrFollower, KafkaStorageError.
        """
        self._check_leader()
        config = self.log.config
        if config.compact and not config.delete:
            raise PolicyViolation(
                f"Records of partition {self.topic_partition.place} can not be deleted "
                "due to the configured policy"
            )
        if offset == DELETE_TO_HIGH_WATERMARK:
            offset = self.core.high_watermark
        if not 0 <= offset <= self.core.high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition.place}: cannot delete up to {offset}, "
                f"the high watermark is {self.core.high_watermark}"
            )
        self._advance_start(offset)
        return self.log.log_start_offset

    def low_watermark(self, live: Collection[int]) -> int:
        """The least log start among this leader and the ``live`` replicas; -1: one is not known.

        Raises NotLeaderOrFollower, KafkaStorageError.
        """
        self._check_leader()
        followers = self.core.followers
        starts = (followers[replica].log_start_offset for replica in followers if replica in live)
        return min((self.log.log_start_offset, *starts))

    def _advance_start(self, offset: int) -> None:
        if offset > self.log.log_start_offset:
            try:
                self.log.advance_log_start(offset)
            except MachineError as error:
                self.failed(error)
            self.wake()

    def retention(self, now_ms: int) -> list[tuple[int, str]]:
        """Drop old segments by time, size and log start: (base offset, reason) of those that went.

        The leader decides (rule 43); elsewhere only what lies below the log start goes.
        """
        if self.offline is not None or self.suspended:
            return []
        start = self.log.log_start_offset
        try:
            gone = self.log.delete_old_segments(
                now_ms, self.core.high_watermark, by_policy=self._leading
            )
        except MachineError as error:
            self.failed(error)
        if self.log.log_start_offset != start:
            self.wake()
        return gone

    def update_config(self, config: LogConfig) -> None:
        """New settings of the topic; they hold at once."""
        self.log.update_config(config)
        self.step(MinIsrChanged(config.min_insync_replicas), 0)

    def raise_high_watermark(self, offset: int) -> None:
        """Before a swap: what the manifest covers was committed, so HW is at least its end.

        Raises OffsetOutOfRange above the log's end.
        """
        self.step(CommitAdvanced(offset), 0)

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll an active segment that is too old, also of an idle log (rule 3): whether it did."""
        if self.offline is not None:
            return False
        try:
            return self.log.maybe_roll(now_ms)
        except MachineError as error:
            self.failed(error)
