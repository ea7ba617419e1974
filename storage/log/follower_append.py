"""Appending what a leader sent (rule 31): batches keep their offsets and leader epochs.

Every CRC is checked in one pass of the kernel before anything is appended; per batch there is one
tuple of numbers, per record nothing. What lies in one segment is staged as one buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.storage.disk import Bytes
from kept.storage.errors import KafkaStorageError, OffsetOutOfRange
from kept.storage.producers.producer_state_manager import note_producer
from kept.storage.records import ReplicaBatch, check_replicas, read_header
from kept.storage.types import MAX_INT32

if TYPE_CHECKING:
    from kept.storage.log.log import Log


def append(
    log: Log, batches: Bytes, now_ms: int | None, max_leader_epoch: int | None
) -> tuple[int, int] | None:
    """See :meth:`Log.append_as_follower`; (first, last offset) of what was staged."""
    if log.failed is not None:
        raise KafkaStorageError(str(log.failed))
    if not len(batches):
        return None
    found = check_replicas(batches)
    if max_leader_epoch is not None:
        found = _up_to(found, max_leader_epoch)
    if not found:
        return None
    _check_order(log, found)
    now_ms = log.last_seen_ms if now_ms is None else now_ms
    first = found[0][2]
    if first < log.log_end_offset:
        log.truncate_fully_and_start_at(first)
    stage(log, memoryview(batches), found, now_ms)
    return first, found[-1][3]


def _up_to(batches: list[ReplicaBatch], max_leader_epoch: int) -> list[ReplicaBatch]:
    """Batches of later epochs, and all after them, were not there when the leader answered: it
    read its file after it had lost its leadership and was cut (KAFKA-18723).
    """
    for i, batch in enumerate(batches):
        if batch[5] > max_leader_epoch:
            return batches[:i]
    return batches


def _check_order(log: Log, batches: list[ReplicaBatch]) -> None:
    next_offset = log.log_end_offset
    empty = next_offset == log.log_start_offset == log.segments.bases[0]
    for _, _, base, last, _, _, _ in batches:
        if base < next_offset and not (empty and last >= next_offset):
            raise OffsetOutOfRange(
                f"{log.topic_partition.place}: batch {base}..{last} overlaps the log, which ends "
                f"at {next_offset}"
            )
        next_offset = last + 1
        empty = False


def stage(log: Log, view: memoryview, batches: list[ReplicaBatch], now_ms: int) -> None:
    """Stage batches at the log's end that have their offsets and epochs, whatever they hold."""
    tail = log.tail
    start = end = 0
    latest = log.leader_epochs.latest
    epoch = -1 if latest is None else latest
    for at, size, base, last, timestamp, leader_epoch, producer_id in batches:
        if leader_epoch > epoch:
            epoch = leader_epoch
            log.leader_epochs.enter(leader_epoch, base)
        ahead = tail.staged_bytes + end - start
        if not tail.index_batch(ahead, size, base, last, timestamp, now_ms):
            tail.stage(view[start:end], end - start)
            far = last - log.log_end_offset > MAX_INT32
            log.roll(now_ms, base if far else log.log_end_offset)
            start = at
            tail.index_batch(0, size, base, last, timestamp, now_ms)
        end = at + size
        if producer_id >= 0:
            aborted = note_producer(log.producers, read_header(view, at), view, at)
            if aborted is not None:
                tail.active.note_aborted(aborted)
    tail.stage(view[start:end], end - start)
