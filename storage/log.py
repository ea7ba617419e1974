"""The log of one partition on one disk.

What holds, always:

- ``log_start_offset <= recovery_point <= written_end_offset <= log_end_offset``;
- an append is staged (:meth:`Log.append`) and then written with all others (:meth:`Log.write`) by
  one ``writev``; readers see what is written;
- a write that fails is cut back to what was whole before it, so the log stays a sequence of whole
  batches;
- the log moves in one thread; only :class:`FlushTicket.run` and ``LeaderEpochCache.save`` run
  elsewhere.

The append path does no work per record and creates no object beyond its answer
(:class:`AppendInfo`); index entries go to arrays in memory that are written when a segment is
rolled or the log is closed.

Long because it is the one face of a log: every method keeps the offsets and indexes above in step.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from kept.storage import (
    clean_close,
    flush,
    follower_append,
    layout,
    log_reader,
    producer_recovery,
    recovery,
    retention,
    segment_swapper,
    truncation,
)
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
from kept.storage.flush import FlushTicket
from kept.storage.log_reader import TimestampOffset
from kept.storage.producers import ProducerQuota
from kept.storage.records import CheckedBatch
from kept.storage.segment import Segment
from kept.storage.segments import Segments
from kept.storage.swap import SwapPlan
from kept.storage.txn_index import AbortedTxn
from kept.storage.types import (
    MAX_INT32,
    MAX_INT64,
    NO_TIMESTAMP,
    LogConfig,
    TimestampType,
    TopicPartition,
)

_PREFIX: Final = Struct(">qii")
_LENGTH_END: Final = 12
TAIL_OFFSETS: Final = 1024
"""Batches whose positions are remembered, so that a read at the tail needs no look-up."""
MIN_INDEX_ENTRIES: Final = 2
_made: Final = tuple.__new__  # three times as fast as AppendInfo(…), for each batch


def _nobody() -> None:
    """Nobody looks on a clock."""


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
        self, directory: str, tp: TopicPartition, topic_id: uuid.UUID, config: LogConfig,
        disk: Disk, recovered: recovery.Recovered, now_ms: int,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.topic_partition = tp
        self.topic_id = topic_id
        self.disk = disk
        self.segments: Segments = recovered.segments
        self.leader_epochs = recovered.epochs
        self.leader_epochs.log_end_offset = lambda: self.log_end_offset
        self.producers = recovered.producers
        self.log_start_offset = recovered.log_start_offset
        self.recovery_point = recovered.recovery_point
        self.failed: MachineError | None = None
        self.waiting_deletes: list[tuple[int, list[str]]] = []
        self.last_flush_ms = self.last_seen_ms = now_ms
        self._active = self.segments.active
        self._staged: list[Bytes] = []
        self.staged_bytes = 0
        self._tail: dict[int, int] = {}
        self._epoch = -1
        self.truncations = 0
        self.replacement: segment_swapper.SegmentSwapper | None = None
        """Segments that are being replaced: meanwhile retention takes none."""
        self.names_changed = False
        self.unsynced_snapshots = recovered.unsynced
        self.at_rest = False
        """Whoever looks at logs on a clock has looked, and wants to hear when anything moves."""
        self.on_stir: Callable[[], None] = _nobody
        self.log_end_offset = self.written_end_offset = self._active.next_offset
        self.update_config(config)

    @classmethod
    def open(
        cls, directory: str, tp: TopicPartition, topic_id: uuid.UUID | None, config: LogConfig,
        disk: Disk, *, now_ms: int, log_start_offset: int = 0, recovery_point: int | None = None,
        clean: bool = False, unfinished_swap: SwapPlan | None = None,
        producer_id_expiration_ms: int = 86_400_000, compacted_to: int | None = None,
        first_epoch: int | None = None, producer_quota: ProducerQuota | None = None,
    ) -> Log:  # fmt: skip
        """Open a log, recovering what a crash left; create it when there is none.

        ``recovery_point``: below it all is durable, and above it compaction left no gaps between
        segments; None: nobody knows. ``clean``: its directory was closed cleanly.
        ``unfinished_swap``: the plan of a swap that may have been interrupted. ``compacted_to``:
        where the part ends in which compaction may have left gaps all the same. Without
        ``topic_id`` that of ``partition.metadata`` is taken. ``first_epoch``: led here in that
        epoch, should it be new. ``producer_quota``: what it shares with other logs; None: a quota
        of its own. Raises DamagedData when that file is damaged or names another topic id,
        MachineError.
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
        recovered = recovery.recover(
            disk, directory, config, now_ms=now_ms, log_start_offset=log_start_offset,
            recovery_point=recovery_point, clean=clean, unfinished_swap=unfinished_swap,
            expiration_ms=producer_id_expiration_ms, compacted_to=compacted_to,
            first_epoch=first_epoch, unsynced=stored is None,
            quota=producer_quota,
        )  # fmt: skip
        known = topic_id or stored
        assert known is not None
        return cls(directory, tp, known, config, disk, recovered, now_ms)

    def __repr__(self) -> str:
        return f"Log({self.topic_partition}, {self.log_start_offset}..{self.log_end_offset})"

    # What it is.

    @property
    def active_segment(self) -> Segment:
        """The segment that is appended to."""
        return self._active

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

    def stir(self) -> None:
        """Something is to be flushed, rolled, removed or checkpointed by and by: said once."""
        if self.at_rest:
            self.at_rest = False
            self.on_stir()

    def update_config(self, config: LogConfig) -> None:
        """Take new settings; they hold from the next append on."""
        self._config = config
        self.stir()
        age = min(config.segment_ms, config.max_compaction_lag_ms if config.compact else MAX_INT64)
        if config.segment_jitter_ms:
            seed = zlib.crc32(str(self.topic_partition).encode())
            age -= seed % min(config.segment_jitter_ms + 1, max(age, 1))
        self.roll_age_ms = max(age, 0)
        self._segment_bytes = config.segment_bytes
        entries = max(config.segment_index_bytes // 12 - 1, MIN_INDEX_ENTRIES)
        self._max_index_entries = entries
        self._interval = config.index_interval_bytes
        self._active.index_interval_bytes = config.index_interval_bytes
        self._log_append_time = config.message_timestamp_type is TimestampType.LOG_APPEND_TIME

    # Appending.

    def append(self, checked: CheckedBatch, leader_epoch: int, now_ms: int) -> AppendInfo:
        """Stage a checked batch: offsets and epoch are written into it, producer state moves.

        ``checked.data`` must not change until :meth:`write`. Raises RecordListTooLarge,
        OutOfOrderSequenceNumber, InvalidProducerEpoch (nothing staged), MachineError when rolling
        fails.
        """
        if self.failed is not None:
            raise KafkaStorageError(str(self.failed))
        size = checked.size_bytes
        if size > self._segment_bytes:
            raise RecordListTooLarge(
                f"{self.topic_partition}: a batch of {size} bytes is larger than "
                f"segment.bytes ({self._segment_bytes})"
            )
        producer_id = checked.producer_id
        count = checked.record_count
        timestamp = checked.max_timestamp
        append_time = timestamp if self._log_append_time else NO_TIMESTAMP
        if producer_id >= 0:
            again = self.producers.check(
                producer_id, checked.producer_epoch, checked.base_sequence, count
            )
            if again is not None:
                return AppendInfo(
                    again.first_offset, again.last_offset,
                    again.timestamp if self._log_append_time else NO_TIMESTAMP,
                    self.log_start_offset, True,
                )  # fmt: skip
        base = self.log_end_offset
        last = base + count - 1
        if leader_epoch != self._epoch:
            self.enter_epoch(leader_epoch, base)
            try:
                self.leader_epochs.save()
            except MachineError:
                self._epoch = -1  # the next append saves it
                raise
        active = self._active
        position = active.size_bytes + self.staged_bytes
        if position and self._roll_is_due(active, position + size, last, timestamp, now_ms):
            self.roll(now_ms)
            active = self._active
            position = 0
        data: Bytes = checked.data
        try:
            _PREFIX.pack_into(data, 0, base, size - _LENGTH_END, leader_epoch)
        except TypeError:
            data = bytearray(data)
            _PREFIX.pack_into(data, 0, base, size - _LENGTH_END, leader_epoch)
        self.note(self.staged_bytes, size, base, last, timestamp, now_ms)
        self._staged.append(data)
        self.staged_bytes += size
        if producer_id >= 0:
            self.producers.update(
                producer_id, checked.producer_epoch, checked.base_sequence, count - 1, last,
                timestamp, checked.is_transactional,
            )  # fmt: skip
        return _made(AppendInfo, (base, last, append_time, self.log_start_offset, False))

    def note(  # noqa: PLR0917
        self, ahead: int, size: int, base: int, last: int, timestamp: int, now_ms: int
    ) -> None:
        """A batch is staged, or about to be, ``ahead`` bytes after what is written.

        ``Segment.note``, inlined: this runs for every batch.
        """
        active = self._active
        position = active.size_bytes + ahead
        if timestamp > active.max_timestamp:
            active.max_timestamp, active.max_timestamp_offset = timestamp, last
        if active.bytes_since_index > self._interval:
            active.index.offsets.append(last - active.base_offset)
            active.index.positions.append(position)
            active.time_index.append(active.max_timestamp, active.max_timestamp_offset)
            active.bytes_since_index = size
        else:
            active.bytes_since_index += size
        if not position:
            active.first_timestamp = timestamp
            active.first_append_ms = now_ms
        tail = self._tail
        if len(tail) >= TAIL_OFFSETS:
            tail.clear()
        tail[base] = position
        self.log_end_offset = last + 1

    def stage(self, data: Bytes, size: int) -> None:
        """Have noted batches written by :meth:`write`."""
        if size:
            self._staged.append(data)
            self.staged_bytes += size

    def has_room(self, ahead: int, size: int, last: int, timestamp: int, now_ms: int) -> bool:
        """Whether the active segment takes a batch of a leader's ``ahead`` bytes after its end."""
        active = self._active
        position = active.size_bytes + ahead
        if last - active.base_offset > MAX_INT32:
            return False
        return not position or not self._roll_is_due(
            active, position + size, last, timestamp, now_ms
        )

    def _roll_is_due(
        self, active: Segment, size_after: int, last: int, timestamp: int, now_ms: int
    ) -> bool:
        if size_after > self._segment_bytes or last - active.base_offset > MAX_INT32:
            return True
        if len(active.index.offsets) >= self._max_index_entries:
            return True
        first = active.first_timestamp
        waited = timestamp - first if first >= 0 else now_ms - active.created_ms
        return waited > self.roll_age_ms

    def enter_epoch(self, leader_epoch: int, start_offset: int) -> None:
        """Batches from ``start_offset`` on are of another epoch. Not durable yet."""
        latest = self.leader_epochs.latest
        if latest is not None and leader_epoch < latest:
            raise InvariantViolation(f"{self}: append in epoch {leader_epoch} after {latest}")
        self.leader_epochs.assign(leader_epoch, start_offset)
        self._epoch = leader_epoch

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
        (offsets, producer state) and MachineError raised: none of it may be acknowledged.
        """
        staged = self._staged
        if not staged:
            return
        if self.at_rest:
            self.stir()
        active = self._active
        disk = self.disk
        try:
            if disk.fail_points:
                disk.reach("append.write")
            disk.writev(active.file, staged, active.size_bytes)
            if disk.fail_points:
                disk.reach("append.written")
        except MachineError as error:
            try:
                self._cut_back(error)
            except ResourceExhausted as exhausted:
                raise error from exhausted
            raise
        active.size_bytes += self.staged_bytes
        active.flushed = False
        self.staged_bytes = 0
        self._staged = []
        active.next_offset = self.written_end_offset = self.log_end_offset

    def _cut_back(self, error: MachineError) -> None:
        self.failed = error
        self._staged = []
        self.staged_bytes = 0
        self.log_end_offset = self.written_end_offset
        self._tail.clear()
        active = self._active
        self.disk.truncate(active.file, active.size_bytes)
        truncation.reopen(active)
        truncation.rewind(self)
        self.failed = None

    def roll(self, now_ms: int, base_offset: int | None = None) -> None:
        """Close the active segment and begin one at the log end; an empty one stays.

        Raises MachineError; after ResourceExhausted the log is as it was, and it can be tried
        again.
        """
        self.write()
        self.stir()
        active = self._active
        if not active.is_in_place:
            raise vanished(active.path(layout.LOG))
        base = self.log_end_offset if base_offset is None else base_offset
        self.last_seen_ms = now_ms
        if not active.size_bytes:
            if base <= active.base_offset:
                return
        else:
            active.close_indexes()
            active.mtime_ms = now_ms
            path = producer_recovery.write_snapshot(self.disk, self.directory, self.producers, base)
            if path not in self.unsynced_snapshots:
                self.unsynced_snapshots.append(path)
            self.disk.reach("roll.closed")
        self._active = self.segments.create(base, self._interval, now_ms)
        if active.size_bytes:
            self.segments.loaded(active)
        else:
            self.segments.remove([active])
            truncation.unlink_segments(self.disk, [active])
        self.names_changed = True
        self.log_end_offset = self.written_end_offset = max(base, self.log_end_offset)
        self._active.next_offset = base
        self._tail.clear()
        self.disk.reach("roll.created")

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll a non-empty active segment whose first append is too long ago (rule 3: idle logs
        too).
        """
        due_ms = self.roll_due_ms
        if due_ms is None or now_ms <= due_ms:
            return False
        self.roll(now_ms)
        return True

    @property
    def roll_due_ms(self) -> int | None:
        """After which moment the active segment is rolled though nobody appends; None: never."""
        active = self._active
        first = active.first_append_ms
        return None if first is None or not active.size_bytes else first + self.roll_age_ms

    # Reading.

    def read(
        self, offset: int, max_bytes: int, end_offset: int, *, at_least_one: bool = True
    ) -> FileSlice | None:
        """Whole batches from the one that holds ``offset`` (or the next), all below ``end_offset``.

        At most ``max_bytes``, but one batch whatever its size if ``at_least_one``; they may be
        fewer than would fit. None: nothing there. Raises OffsetOutOfRange below the log start or
        above the log end, DamagedData, MachineError.
        """
        written = self.written_end_offset
        end_offset = min(end_offset, written)
        active = self._active
        position = self._tail.get(offset)
        if position is not None and offset < end_offset:
            end = active.size_bytes if end_offset == written else self._tail.get(end_offset, -1)
            if 0 < end - position <= max_bytes:
                return FileSlice(active.file, position, end - position)
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not within "
                f"{self.log_start_offset}..{self.log_end_offset}"
            )
        if offset >= end_offset:
            return None
        return log_reader.read_slice(self.segments, offset, max_bytes, end_offset, at_least_one)

    def read_batches(self, offset: int, max_bytes: int, end_offset: int) -> bytes:
        """The same as bytes; empty when there is nothing."""
        found = self.read(offset, max_bytes, end_offset)
        return b"" if found is None else self.disk.pread(*found)

    def aborted_transactions(self, start: int, end: int) -> list[AbortedTxn]:
        """Aborted transactions that overlap ``start..end``."""
        return log_reader.aborted_transactions(self.segments, start, end)

    def aborted_in_slice(
        self, offset: int, found: FileSlice | None, end_offset: int
    ) -> list[AbortedTxn]:
        """Those that overlap what :meth:`read` found for ``offset`` and ``end_offset``."""
        return log_reader.aborted_in_slice(self.segments, offset, found, end_offset)

    def offset_for_timestamp(self, timestamp: int) -> TimestampOffset | None:
        """The first record that is not older than ``timestamp``."""
        self.write()
        return log_reader.find_timestamp(
            self.disk, self.segments, timestamp, self.log_start_offset, self.written_end_offset
        )

    def offset_of_max_timestamp(self) -> TimestampOffset | None:
        """The first record with the largest timestamp."""
        self.write()
        return log_reader.find_max_timestamp(self.disk, self.segments, self.log_start_offset)

    # Start and end.

    def advance_log_start(self, offset: int, now_ms: int) -> None:  # noqa: ARG002 (the seam's)
        """Records below ``offset`` are gone (DeleteRecords, retention); it never goes back.

        Segments wholly below it leave with :meth:`delete_old_segments`.
        """
        if offset <= self.log_start_offset:
            return
        if offset > self.log_end_offset:
            raise OffsetOutOfRange(f"{self}: cannot start at {offset}")
        self.write()
        self.log_start_offset = offset
        self.recovery_point = max(self.recovery_point, offset)
        self.leader_epochs.truncate_from_start(offset)
        self.producers.truncate_from_start(offset)

    def delete_old_segments(
        self, now_ms: int, high_watermark: int, *, by_policy: bool = True
    ) -> list[tuple[int, str]]:
        """Retention: (base offset, reason) of the segments that went, oldest first.

        By time and size if the topic's policy says so and ``by_policy`` (leaders only, rule 43),
        and always what lies below the log start; never anything at or above the high watermark.
        The log start moves. While segments are being replaced it waits.
        """
        if self.replacement is not None:
            return []
        return retention.apply(self, now_ms, high_watermark, by_policy)

    def truncate_to(self, offset: int) -> None:
        """Cut the log: batches with records at or above ``offset`` go (rules 19, 27).

        The log end becomes that of the last batch left, or the log start when none is; epochs,
        producers and recovery point follow.
        """
        if self.replacement is not None:
            self.replacement.settle(self.last_seen_ms)
        truncation.truncate_to(self, offset)

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Drop everything; the empty log starts and ends at ``offset`` (rule 28)."""
        if self.replacement is not None:
            self.replacement.settle(self.last_seen_ms)
        truncation.start_at(self, offset)

    def reset_active(self, end_offset: int) -> None:
        """The segments changed under the log (truncation): the last one is active from now on.

        Tickets made before do not count any more. The recovery point may have moved back: its
        checkpoint is to be written before the next append.
        """
        self.truncations += 1
        self.stir()
        self._active = self.segments.active
        self._active.index_interval_bytes = self._interval
        self._staged, self.staged_bytes = [], 0
        self._tail.clear()
        self.log_end_offset = self.written_end_offset = end_offset
        self._epoch = -1

    # Durability.

    def flush_ticket(self, up_to: int | None = None) -> FlushTicket | None:
        """A ticket for what is written and not durable (below ``up_to``); None for nothing."""
        return flush.ticket_for(self, up_to)

    def flush_due(self, now_ms: int) -> bool:
        """Whether ``flush.messages`` or ``flush.ms`` ask for a flush now."""
        return flush.is_due(self, now_ms)

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

    def replace_segments(self, plan: SwapPlan, now_ms: int) -> None:
        """Put cleaned segments in place of others (rule 11); their files are there and durable."""
        segment_swapper.replace(self, plan, now_ms)

    def begin_replacement(self, plan: SwapPlan) -> segment_swapper.SegmentSwapper:
        """The same in steps, for what blocks is to run in other threads. Raises InvariantViolation
        when the plan does not fit.
        """
        self.replacement = segment_swapper.SegmentSwapper(self, plan)
        return self.replacement

    @property
    def expired_files(self) -> list[str]:
        """Files of segments that went, waiting for ``file.delete.delay.ms``."""
        return [path for _, paths in self.waiting_deletes for path in paths]

    def delete_later(self, paths: Sequence[str], now_ms: int) -> None:
        """These ``.deleted`` files go after ``file.delete.delay.ms``."""
        self.stir()
        self.waiting_deletes.append((now_ms + self._config.file_delete_delay_ms, list(paths)))

    def delete_expired(self, now_ms: int) -> int:
        """Remove the files whose delay is over; returns how many."""
        return retention.remove(self, retention.take_expired(self, now_ms))

    def close(self, now_ms: int) -> None:  # noqa: ARG002 (the seam's)
        """Flush, write snapshot and indexes: the log is clean. Do not use it any more."""
        clean_close.close(self)

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
        if self._active is not self.segments.active:
            raise InvariantViolation(f"{self}: the active segment is not the last")
