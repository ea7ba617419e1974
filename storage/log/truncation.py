"""Cutting a log at its end (rules 19, 27, 28), and all that follows from the batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import OffsetOutOfRange, ResourceExhausted
from kept.storage.segments.segment import SCAN_BYTES, Segment

if TYPE_CHECKING:
    from kept.storage.log.log import Log

logger = logging.getLogger(__name__)


def unlink_segments(disk: Disk, segments: Sequence[Segment]) -> None:
    """Remove the files of segments; open ones stay readable for who holds them.

    The ``.log`` goes last: an index without one tells that somebody else removed it.
    """
    for segment in segments:
        for kind in reversed(layout.SEGMENT_SUFFIXES):
            disk.unlink(segment.path(kind))


def truncate_to(log: Log, offset: int) -> None:
    """See :meth:`Log.truncate_to`. Raises OffsetOutOfRange below zero.

    A cut that stops half way leaves a log that cannot go on: whatever stops it is a failure.
    """
    try:
        _truncate_to(log, offset)
    except ResourceExhausted as error:
        raise error.as_failure() from error


def _truncate_to(log: Log, offset: int) -> None:
    if offset < 0:
        raise OffsetOutOfRange(f"{log}: cannot truncate to {offset}")
    log.write()
    if offset >= log.log_end_offset:
        # A leader that appended nothing in its epoch left an entry at the log end.
        log.leader_epochs.truncate_from_end(log.log_end_offset)
        log.leader_epochs.save()
        return
    if offset < log.log_start_offset:
        _start_at(log, offset)
        return
    logger.info("%s: truncating to %d", log, offset)
    log.producer_state.remove_snapshots_above(offset)
    gone = [s for s in log.segments if s.base_offset > offset]
    remaining = log.segments[: len(log.segments) - len(gone)]
    active = remaining[-1]
    log.segments.remove(gone)
    for segment in reversed(gone):
        unlink_segments(log.disk, [segment])
    if gone:
        log.disk.fsync_dir(log.directory)
    batch = active.locate(offset)
    if batch is not None:
        log.disk.truncate(active.file, batch[0])
        active.size_bytes = batch[0]
    log.disk.fsync(active.file)
    reopen(active)
    end_offset = active.next_offset
    if end_offset < log.log_start_offset:
        _start_at(log, log.log_start_offset)
        return
    log.durability.cut(min(log.recovery_point, end_offset))
    log.tail.reset(end_offset)
    log.leader_epochs.truncate_from_end(end_offset)
    log.leader_epochs.save()
    log.producer_state.rebuild(log.log_start_offset, end_offset)
    log.disk.fsync_dir(log.directory)


def reopen(segment: Segment) -> None:
    """Derive everything from the batches again: the index files of the active segment are stale."""
    segment.reset_indexes()
    for batch in segment.walk(0, segment.size_bytes, SCAN_BYTES):
        segment.note(batch)
    segment.flushed = False
    segment.reset_aborted([e for e in segment.aborted if e.last_offset < segment.next_offset])
    segment.save_aborted()


def start_at(log: Log, offset: int) -> None:
    """See :meth:`Log.truncate_fully_and_start_at`; fails as :func:`truncate_to` does."""
    try:
        _start_at(log, offset)
    except ResourceExhausted as error:
        raise error.as_failure() from error


def _start_at(log: Log, offset: int) -> None:
    logger.info("%s: emptied, it starts at %d", log, offset)
    log.producer_state.remove_snapshots_above(-1)
    log.leader_epochs.clear()
    log.leader_epochs.save()
    gone = list(log.segments)
    log.segments.remove(gone)
    for segment in reversed(gone):
        unlink_segments(log.disk, [segment])
    log.segments.create(offset, log.config.index_interval_bytes, log.last_seen_ms)
    log.log_start_offset = offset
    log.durability.cut(offset)
    log.tail.reset(offset)
    log.producers.clear()
    log.disk.fsync_dir(log.directory)
