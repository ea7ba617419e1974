"""The log of one partition on one disk.

What holds, always:

- ``log_start_offset`` and ``recovery_point`` are at most ``written_end_offset <= log_end_offset``;
- an append is staged (:meth:`Log.append`) and then written with all others (:meth:`Log.write`) by
  one ``writev``; readers see what is written;
- a write that fails is cut back to what was whole before it, so the log stays a sequence of whole
  batches;
- the log moves in one thread; only :meth:`FlushTicket.run`, ``LeaderEpochCache.save`` and
  :meth:`RetiredFiles.remove` run elsewhere.

A :class:`Log` keeps its parts in step: the :class:`~kept.storage.log.tail.Tail` that is appended
to, the :class:`~kept.storage.log.durability.Durability` of what is written, segments, leader
epochs, producers. The append path does no work per record and creates no object beyond its answer
(:class:`AppendInfo`). Long because whoever uses a log does it here, and its parts only here.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from kept.storage import layout
from kept.storage.checkpoints import read_partition_metadata, write_partition_metadata
from kept.storage.disk import Bytes, Disk, FileSlice
from kept.storage.errors import (
    DamagedData,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    OffsetOutOfRange,
    RecordListTooLarge,
    ResourceExhausted,
    vanished,
)
from kept.storage.log import (
    follower_append,
    log_reader,
    recovery,
    retention,
    segment_swapper,
    truncation,
)
from kept.storage.log.durability import Durability, FlushTicket
from kept.storage.log.log_reader import FindRecord, TimestampOffset, find_record
from kept.storage.log.retention import RetiredFiles
from kept.storage.log.tail import Tail
from kept.storage.producers.cut_preparation import CutPreparation, prepare
from kept.storage.producers.producer_states import ProducerBatch, ProducerQuota
from kept.storage.producers.verification import VerificationGuard
from kept.storage.records import CheckedBatch, EndTxnMarker, build_control_batch
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import Segment
from kept.storage.segments.swap import SwapPlan
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import (
    MAX_INT64,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    AppendOrigin,
    LogConfig,
    TimestampType,
    TopicPartition,
)

logger = logging.getLogger(__name__)

_PREFIX: Final = Struct(">qii")
_LENGTH_END: Final = 12
_made: Final = tuple.__new__  # three times as fast as AppendInfo(…), for each batch


def _nobody() -> None:
    """Nobody looks on a clock."""


def _no_checkpoint(end_offset: int, recovery_point: int) -> None:
    """No checkpoint knows of the log."""


class AppendInfo(NamedTuple):
    """Where a batch went. ``duplicate``: it was there already, nothing was appended."""

    base_offset: int
    last_offset: int
    log_append_time: int
    log_start_offset: int
    duplicate: bool


class Log:
    """One partition's log; see the module."""

    def __init__(  # noqa: PLR0917
        self,
        tp: TopicPartition,
        topic_id: uuid.UUID,
        config: LogConfig,
        disk: Disk,
        recovered: recovery.Recovered,
        now_ms: int,
    ) -> None:
        self.topic_partition = tp
        self.topic_id = topic_id
        self.disk = disk
        self.segments: Segments = recovered.segments
        self.leader_epochs = recovered.epochs
        self.leader_epochs.log_end_offset = lambda: self.log_end_offset
        self.producer_state = recovered.producers
        self.producers = recovered.producers.states
        self.log_start_offset = recovered.log_start_offset
        self.tail = Tail(disk, self.segments)
        self.durability = Durability(
            disk,
            self.segments,
            self.leader_epochs,
            self.tail,
            recovered.recovery_point,
            recovered.unsynced,
            now_ms,
        )
        self.retired = RetiredFiles(disk, self.leader_epochs)
        self.failed: MachineError | None = None
        self.last_seen_ms = now_ms
        self._epoch = -1
        """The leader epoch of the last append that is saved; -1: the next one saves its own."""
        self.replacement: segment_swapper.SegmentSwapper | None = None
        """Segments that are being replaced: meanwhile retention takes none."""
        self.holds_segments = False
        """Whoever builds from the segments lost some to retention, and begins anew: it waits."""
        self.preparation: CutPreparation | None = None
        """Of a cut that waits for it; see :meth:`prepare_cut`."""
        self.is_idle = False
        """Nothing happened since whoever looks at logs on a clock has looked, who wants to know by
        ``on_dirty`` of the next change."""
        self.on_dirty: Callable[[], None] = _nobody
        self.before_cut: Callable[[int, int], None] = _no_checkpoint
        """Called before a cut with the end of the log and the recovery point that it leaves: when
        it returns no start expects, or relies on, more. Raises MachineError; the log is whole then.
        """
        self.update_config(config)

    @classmethod
    def open(
        cls,
        directory: str,
        tp: TopicPartition,
        topic_id: uuid.UUID | None,
        config: LogConfig,
        disk: Disk,
        *,
        now_ms: int,
        log_start_offset: int = 0,
        recovery_point: int | None = None,
        clean: bool = False,
        unfinished_swap: SwapPlan | None = None,
        producer_id_expiration_ms: int = 86_400_000,
        compacted_to: int | None = None,
        first_epoch: int | None = None,
        producer_quota: ProducerQuota | None = None,
        replicated: bool = False,
    ) -> Log:
        """Open a log, recovering what a crash left; create it when there is none.

        ``recovery_point``: below it all is durable, and above it compaction left no gaps between
        segments; None: nobody knows. ``clean``: its directory was closed cleanly.
        ``unfinished_swap``: the plan of a swap that may have been interrupted. ``compacted_to``:
        where the part ends in which compaction may have left gaps all the same. Without
        ``topic_id`` that of ``partition.metadata`` is taken. ``first_epoch``: led here in that
        epoch, should it be new. ``producer_quota``: what it shares with other logs; None: a quota
        of its own. ``replicated``: another replica has what is damaged here. Raises DamagedData
        when that file is damaged or names another topic id, or when a segment is that lies above
        the log start, MachineError.
        """
        disk.ensure_directory(directory)
        metadata = f"{directory}/{layout.PARTITION_METADATA}"
        stored = read_partition_metadata(disk, metadata)
        if stored is None:
            if topic_id is None:
                raise DamagedData(metadata, -1, -1, "it is missing, so the topic id is unknown")
            write_partition_metadata(disk, metadata, topic_id)
        elif topic_id is not None and stored != topic_id:
            raise DamagedData(metadata, -1, -1, f"topic id is {stored}, expected {topic_id}")
        recover = partial(
            recovery.recover,
            disk,
            directory,
            config,
            now_ms=now_ms,
            log_start_offset=log_start_offset,
            recovery_point=recovery_point,
            clean=clean,
            unfinished_swap=unfinished_swap,
            expiration_ms=producer_id_expiration_ms,
            compacted_to=compacted_to,
            first_epoch=first_epoch,
            unsynced=stored is None,
            quota=producer_quota,
            replicated=replicated,
        )
        try:
            recovered = recover()
        except DamagedData as error:
            if not recovery.drop_damaged_start(disk, directory, config, log_start_offset, error):
                raise
            recovered = recover()
        known = topic_id or stored
        assert known is not None
        return cls(tp, known, config, disk, recovered, now_ms)

    def __repr__(self) -> str:
        return f"Log({self.topic_partition}, {self.log_start_offset}..{self.log_end_offset})"

    # What it is.

    @property
    def directory(self) -> str:
        """Path of its directory."""
        return self.segments.directory

    @property
    def active_segment(self) -> Segment:
        """The segment that is appended to."""
        return self.tail.active

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets; what is staged counts."""
        return self.tail.end_offset

    @property
    def written_end_offset(self) -> int:
        """Below it all is in the file, and can be read."""
        return self.tail.written_end_offset

    @property
    def recovery_point(self) -> int:
        """Below it all is durable."""
        return self.durability.recovery_point

    @property
    def truncations(self) -> int:
        """How often it was cut since it was opened."""
        return self.durability.truncations

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self.segments.size_bytes

    @property
    def first_unstable_offset(self) -> int | None:
        """First offset of the oldest open transaction."""
        return self.producers.first_unstable_offset

    @property
    def config(self) -> LogConfig:
        """The topic's settings."""
        return self._config

    def mark_dirty(self) -> None:
        """Something is to be flushed, rolled, removed or checkpointed by and by: said once."""
        if self.is_idle:
            self.is_idle = False
            self.on_dirty()

    def update_config(self, config: LogConfig) -> None:
        """Take new settings; they hold from the next append on."""
        self._config = config
        self.mark_dirty()
        self.tail.configure(config, self.topic_partition)
        self._segment_bytes = config.segment_bytes
        self._log_append_time = config.message_timestamp_type is TimestampType.LOG_APPEND_TIME

    # Appending.

    def append(
        self,
        checked: CheckedBatch,
        leader_epoch: int,
        now_ms: int,
        guard: VerificationGuard | None = None,
        origin: AppendOrigin = AppendOrigin.CLIENT,
    ) -> AppendInfo:
        """Stage a checked batch: offsets and epoch are written into it, producer state moves.

        ``checked.data`` must not change until :meth:`write`. ``guard``: of a transaction that is
        not open here yet. Raises RecordListTooLarge, OutOfOrderSequenceNumber,
        InvalidProducerEpoch, InvalidTxnState (nothing staged), MachineError when rolling fails, and
        KafkaStorageError after that.
        """
        if self.failed is not None:
            raise KafkaStorageError(str(self.failed))
        size = checked.size_bytes
        if size > self._segment_bytes:
            raise RecordListTooLarge(
                f"{self.topic_partition.place}: a batch of {size} bytes is larger than "
                f"segment.bytes ({self._segment_bytes})"
            )
        producer_id = checked.producer_id
        count = checked.record_count
        timestamp = checked.max_timestamp
        append_time = timestamp if self._log_append_time else NO_TIMESTAMP
        if producer_id >= 0:
            if checked.is_transactional:
                client = origin is AppendOrigin.CLIENT
                again = self.producers.check_transactional(
                    producer_id,
                    checked.producer_epoch,
                    checked.base_sequence if client else NO_SEQUENCE,
                    count,
                    guard,
                )
            else:
                again = self.producers.check(
                    producer_id, checked.producer_epoch, checked.base_sequence, count
                )
            if again is not None:
                return self._appended_before(again)
        tail = self.tail
        base = tail.end_offset
        last = base + count - 1
        if leader_epoch != self._epoch:
            self._enter_epoch(leader_epoch)
        data: Bytes = checked.data
        try:
            _PREFIX.pack_into(data, 0, base, size - _LENGTH_END, leader_epoch)
        except TypeError:
            data = bytearray(data)
            _PREFIX.pack_into(data, 0, base, size - _LENGTH_END, leader_epoch)
        if not tail.index_batch(tail.staged_bytes, size, base, last, timestamp, now_ms):
            self.roll(now_ms)
            tail.index_batch(0, size, base, last, timestamp, now_ms)
        tail.stage(data, size)
        if producer_id >= 0:
            self.producers.update(
                producer_id,
                checked.producer_epoch,
                checked.base_sequence,
                count - 1,
                last,
                timestamp,
                checked.is_transactional,
            )
        return _made(AppendInfo, (base, last, append_time, self.log_start_offset, False))

    def _appended_before(self, batch: ProducerBatch) -> AppendInfo:
        """The answer to a batch that its producer sent again."""
        return AppendInfo(
            batch.first_offset,
            batch.last_offset,
            batch.timestamp if self._log_append_time else NO_TIMESTAMP,
            self.log_start_offset,
            True,
        )

    def _enter_epoch(self, leader_epoch: int) -> None:
        self._epoch = -1
        self.leader_epochs.enter(leader_epoch, self.log_end_offset)
        self.leader_epochs.save()
        self._epoch = leader_epoch

    def append_marker(
        self,
        marker: EndTxnMarker,
        producer_id: int,
        producer_epoch: int,
        leader_epoch: int,
        now_ms: int,
        *,
        is_tv2: bool = False,
    ) -> AppendInfo:
        """Stage the end of a producer's transaction, which need not have begun here.

        ``is_tv2``: its epoch is a new one. Raises InvalidProducerEpoch,
        TransactionCoordinatorFenced (nothing staged), MachineError when rolling fails, and
        KafkaStorageError after that.
        """
        if self.failed is not None:
            raise KafkaStorageError(str(self.failed))
        self.producers.check_marker(
            producer_id, producer_epoch, marker.coordinator_epoch, is_tv2=is_tv2
        )
        if leader_epoch != self._epoch:
            self._enter_epoch(leader_epoch)
        base = self.log_end_offset
        batch = build_control_batch(
            marker,
            producer_id,
            producer_epoch,
            now_ms,
            base_offset=base,
            leader_epoch=leader_epoch,
            timestamp_type=self._config.message_timestamp_type,
        )
        found = (0, len(batch), base, base, now_ms, leader_epoch, producer_id)
        follower_append.stage(self, memoryview(batch), [found], now_ms)
        return AppendInfo(base, base, NO_TIMESTAMP, self.log_start_offset, False)

    def append_as_follower(
        self, batches: Bytes, now_ms: int | None = None, *, max_leader_epoch: int | None = None
    ) -> AppendInfo | None:
        """Append whole batches that have their offsets and epochs; gaps are fine, overlaps refused.

        Every CRC is checked first and nothing is appended when one is wrong; batches of an epoch
        above ``max_leader_epoch`` are left out with all that follows them. One exception of rule
        31: an empty log whose start lies inside the first batch restarts at that batch's base.
        Raises CorruptMessage, OffsetOutOfRange for an overlap. Staged like :meth:`append`; the
        epochs become durable before the recovery point passes them. None: nothing was staged.
        """
        staged = follower_append.append(self, batches, now_ms, max_leader_epoch)
        if staged is None:
            return None
        return AppendInfo(*staged, NO_TIMESTAMP, self.log_start_offset, False)

    def write(self) -> None:
        """Write what is staged. On a failure the file is cut back, what was staged is forgotten
        (offsets, producer state) and MachineError raised: none of it may be acknowledged. One that
        somebody truncated is left so, and the log takes no more.
        """
        tail = self.tail
        if not tail.staged_bytes:
            return
        if self.is_idle:
            self.mark_dirty()
        try:
            tail.write()
        except MachineError as error:
            try:
                self._cut_back(error)
            except ResourceExhausted as exhausted:
                raise error from exhausted
            raise

    def _cut_back(self, error: MachineError) -> None:
        self.failed = error
        self.tail.drop_staged()
        active = self.tail.active
        if self.disk.size(active.file) < active.size_bytes:
            return  # somebody truncated it, and a cut would extend it
        active.cut(active.size_bytes)
        self.producer_state.rebuild(self.log_start_offset, self.log_end_offset)
        self.failed = None

    def roll(self, now_ms: int, base_offset: int | None = None) -> None:
        """Close the active segment and begin one at the log end; an empty one stays.

        Raises MachineError; after ResourceExhausted the log is as it was, and it can be tried
        again.
        """
        self.write()
        self.mark_dirty()
        closing = self.tail.active
        if not closing.is_in_place:
            raise vanished(closing.path(layout.LOG))
        base = self.log_end_offset if base_offset is None else base_offset
        self.last_seen_ms = now_ms
        if not closing.size_bytes:
            if base <= closing.base_offset:
                return
        else:
            closing.close_indexes()
            closing.mtime_ms = now_ms
            self.durability.snapshot_written(self.producer_state.write_snapshot(base))
            self.disk.reach("roll.closed")
        self.tail.begin_segment(base, now_ms)
        if closing.size_bytes:
            self.segments.loaded(closing)
        else:
            self.segments.remove([closing])
            truncation.unlink_segments(self.disk, [closing])
        self.durability.names_changed = True
        self.disk.reach("roll.created")

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll a non-empty active segment whose first append is too long ago (rule 3)."""
        due_ms = self.roll_due_ms
        if due_ms is None or now_ms <= due_ms:
            return False
        self.roll(now_ms)
        return True

    @property
    def roll_due_ms(self) -> int | None:
        """After which moment the active segment is rolled though nobody appends; None: never."""
        active = self.tail.active
        first = active.first_append_ms
        return None if first is None or not active.size_bytes else first + self.tail.roll_age_ms

    # Reading.

    def read(
        self, offset: int, max_bytes: int, end_offset: int, *, at_least_one: bool = True
    ) -> FileSlice | None:
        """Whole batches from the one that holds ``offset`` (or the next), all below ``end_offset``.

        At most ``max_bytes``, but one batch whatever its size if ``at_least_one``; they may be
        fewer than would fit. None: nothing there. Raises OffsetOutOfRange below the log start or
        above the log end, DamagedData, MachineError.
        """
        tail = self.tail
        end_offset = min(end_offset, tail.written_end_offset)
        remembered = tail.slice(offset, max_bytes, end_offset)
        if remembered is not None:
            return remembered
        if self.log_start_offset <= offset < end_offset:
            return log_reader.read_slice(self.segments, offset, max_bytes, end_offset, at_least_one)
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition.place}: offset {offset} is not within "
                f"{self.log_start_offset}..{self.log_end_offset}"
            )
        return None

    def read_batches(self, offset: int, max_bytes: int, end_offset: int) -> bytes:
        """The same as bytes; empty when there is nothing."""
        file_slice = self.read(offset, max_bytes, end_offset)
        return b"" if file_slice is None else self.disk.pread(*file_slice)

    def aborted_transactions(self, start: int, end: int) -> list[AbortedTxn]:
        """Aborted transactions that overlap ``start..end``."""
        return log_reader.aborted_transactions(self.segments, start, end)

    def read_committed(
        self, offset: int, max_bytes: int, end_offset: int, *, at_least_one: bool = True
    ) -> tuple[FileSlice | None, list[AbortedTxn]]:
        """As :meth:`read`, with the aborted transactions that overlap what it found.

        It ends early where very many of these lie ahead, but never finds nothing for that reason.
        """
        begin = offset
        end = log_reader.bounded_end(self.segments, begin, end_offset)
        found = self.read(offset, max_bytes, end, at_least_one=at_least_one)
        while found is None and end < end_offset:  # a gap: passes keep what the index has of it
            begin = end
            end = log_reader.bounded_end(self.segments, begin, end_offset)
            found = self.read(offset, max_bytes, end, at_least_one=at_least_one)
        return found, self.aborted_in_slice(begin, found, end)

    def aborted_in_slice(
        self, offset: int, found: FileSlice | None, end_offset: int
    ) -> list[AbortedTxn]:
        """Those that overlap what :meth:`read` found for ``offset`` and ``end_offset``."""
        return log_reader.aborted_in_slice(self.segments, offset, found, end_offset)

    def offset_for_timestamp(
        self, timestamp: int, find: FindRecord = find_record
    ) -> TimestampOffset | None:
        """The first record that is not older than ``timestamp``; ``find`` looks into batches."""
        self.write()
        start, end = self.log_start_offset, self.written_end_offset
        return log_reader.find_timestamp(self.disk, self.segments, timestamp, start, end, find)

    def offset_of_max_timestamp(self, find: FindRecord = find_record) -> TimestampOffset | None:
        """The first record with the largest timestamp; ``find`` looks into its batch."""
        self.write()
        return log_reader.find_max_timestamp(self.disk, self.segments, self.log_start_offset, find)

    # Start and end.

    def advance_log_start(self, offset: int) -> None:
        """Records below ``offset`` are gone (DeleteRecords, retention); it never goes back.

        Segments wholly below it leave with :meth:`delete_old_segments`. The recovery point stays:
        nothing was synced, and a start may not know of the new log start yet.
        """
        if offset <= self.log_start_offset:
            return
        if offset > self.log_end_offset:
            raise OffsetOutOfRange(f"{self}: cannot start at {offset}")
        self.write()
        self.log_start_offset = offset
        self.leader_epochs.truncate_from_start(offset)
        self.producers.truncate_from_start(offset)

    def delete_old_segments(
        self, now_ms: int, high_watermark: int, *, by_policy: bool = True
    ) -> list[tuple[int, str]]:
        """Retention: (base offset, reason) of the segments that went, oldest first.

        By time and size if the topic's policy says so and ``by_policy`` (leaders only, rule 43),
        and always what lies below the log start; never anything at or above the high watermark.
        The log start moves. While segments are being replaced, or held, it waits.
        """
        if self.replacement is not None or self.holds_segments:
            return []
        self.write()
        due = retention.deletable(
            self.segments,
            self._config,
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=high_watermark,
            now_ms=now_ms,
            by_policy=by_policy,
        )
        if not due:
            return []
        if len(due) == len(self.segments):
            self.roll(now_ms)
        gone = self.segments[: len(due)]
        self.advance_log_start(self.segments[len(due)].base_offset)
        self.segments.remove(gone)
        self.retire(gone, now_ms)
        self.producer_state.remove_snapshots([segment.base_offset for segment in gone])
        reasons = [(gone[i].base_offset, reason) for i, reason in due]
        for base_offset, reason in reasons:
            logger.info("%s: segment %d deleted: %s", self, base_offset, reason)
        return reasons

    def retire(self, segments: Sequence[Segment], now_ms: int) -> None:
        """Files of segments that are no part of the log any more are ``.deleted``, and go after
        ``file.delete.delay.ms``.
        """
        self.mark_dirty()
        self.retired.add(segments, now_ms + self._config.file_delete_delay_ms)

    def pop_expired(self, now_ms: int) -> list[str]:
        """The files whose delay is over, for :meth:`RetiredFiles.remove`."""
        return self.retired.pop_due(now_ms, self._config.file_delete_delay_ms)

    def delete_later(self, paths: Sequence[str], now_ms: int) -> None:
        """Expired files that could not be removed wait for another ``file.delete.delay.ms``."""
        self.mark_dirty()
        self.retired.put_back(paths, now_ms + self._config.file_delete_delay_ms)

    def delete_expired(self, now_ms: int) -> int:
        """Remove the files whose delay is over; returns how many. Blocks."""
        return self.retired.remove(self.pop_expired(now_ms))

    def truncate_to(self, offset: int) -> None:
        """Cut the log: batches with records at or above ``offset`` go (rules 19, 27).

        The log end becomes that of the last batch left, or the log start when none is; epochs,
        producers and recovery point follow. Raises DamagedData and ResourceExhausted (the log is as
        it was), MachineError.
        """
        self._cut(lambda: truncation.truncate_to(self, offset))

    def check_cut(self, offset: int) -> None:
        """Raises DamagedData where :meth:`truncate_to` would, and MachineError."""
        truncation.check_cut(self, offset)

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Drop everything; the empty log starts and ends at ``offset`` (rule 28). Raises
        ResourceExhausted (the log is as it was), MachineError.
        """
        self._cut(lambda: truncation.start_at(self, offset))

    def prepare_cut(self, offset: int) -> CutPreparation | None:
        """What is to be read, where it blocks nobody, before :meth:`truncate_to`; the same until
        that is done. None: there is nothing to wait for. Raises DamagedData, also of what was read,
        and MachineError.
        """
        if not self.log_start_offset <= offset < self.log_end_offset:
            return None
        known = self.preparation
        if known is None or not known.fits(offset, self.truncations, self.segments):
            known = self.preparation = prepare(self.producer_state, offset, self.truncations)
        if known is not None and known.damage is not None:
            raise known.damage.without_frames()
        return None if known is None or known.done else known

    def _cut(self, truncate: Callable[[], None]) -> None:
        if self.replacement is not None:
            self.replacement.conclude(self.last_seen_ms)
        before = self.truncations
        truncate()
        if self.truncations != before:
            # The recovery point may be lower: its checkpoint is due before the next append.
            self.mark_dirty()
            self._epoch = -1

    # Durability.

    def flush_ticket(self) -> FlushTicket | None:
        """A ticket for what is written and not durable; None for nothing."""
        return self.durability.ticket()

    def flush_due(self, now_ms: int) -> bool:
        """Whether ``flush.messages`` or ``flush.ms`` ask for a flush now."""
        return self.durability.is_due(self._config, now_ms)

    def flush(self) -> None:
        """Make everything written durable, here and now; blocks."""
        self.write()
        self.leader_epochs.save()
        ticket = self.flush_ticket()
        if ticket is not None:
            ticket.run()
            ticket.done()

    def expire_producers(self, now_ms: int) -> int:
        """Forget silent producers; returns how many."""
        return self.producers.expire(now_ms)

    def begin_replacement(self, plan: SwapPlan) -> segment_swapper.SegmentSwapper:
        """Begin to put cleaned segments in place of others (rule 11); their files are there and
        durable. Raises InvariantViolation when the plan does not fit.
        """
        self.replacement = segment_swapper.SegmentSwapper(self, plan)
        return self.replacement

    def close(self) -> None:
        """Flush, write snapshot and indexes: the log is clean. Do not use it any more."""
        self.write()
        self.delete_expired(MAX_INT64)
        if self._is_as_closed():
            return
        active = self.tail.active
        active.close_indexes()
        path = self.producer_state.write_snapshot(self.log_end_offset)
        self.disk.fsync(self.disk.open_read(path))
        active.fsync()
        self.flush()
        self.disk.fsync_dir(self.directory)

    def _is_as_closed(self) -> bool:
        """Nothing happened since it was closed cleanly the last time: no write, no fsync is due."""
        active = self.tail.active
        snapshot = layout.segment_file(self.directory, self.log_end_offset, layout.SNAPSHOT)
        files = (active.index.path, active.time_index.path, snapshot)
        return self.durability.is_complete and all(map(self.disk.exists, files))

    def delete(self) -> None:
        """Remove the log's files; readers that hold slices keep reading."""
        self.disk.remove_tree(self.directory)

    def check_invariants(self) -> None:
        """Raises InvariantViolation when the state is one that must not exist."""
        self.segments.check_invariants()
        self.producers.check_invariants()
        if not self.log_start_offset <= self.written_end_offset <= self.log_end_offset:
            raise InvariantViolation(f"{self}: written to {self.written_end_offset}")
        if self.recovery_point > self.written_end_offset:
            raise InvariantViolation(f"{self}: recovery point {self.recovery_point}")
        if self.tail.active is not self.segments.active:
            raise InvariantViolation(f"{self}: the active segment is not the last")
