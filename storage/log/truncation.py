"""Cutting a log at its end (rules 19, 27, 28), and all that follows from the batches.

A cut blocks, on the loop that appends, so it reads no more than it must and syncs nothing twice.
What must be durable before what:

1. the durable recovery point, and the checkpoints of high watermark and log start, are at most
   where the log will end (:attr:`Log.before_cut`): a start would say that records are lost, hide
   those that come next, and later trust what was never synced. The log is whole meanwhile, so they
   may be written in any order;
2. the names of later segments and of producer snapshots above the cut are gone (one fsync of the
   directory, where there were any) before the segment that stays is cut: a log whose middle is gone
   would read as compacted, and a snapshot that came back would vouch for other records;
3. the segment is cut (its fsync) before its epochs are forgotten: records that came back without
   their epochs could not be told from their leader's;
4. the aborted transactions that are left, where some went: a segment that is durable up to its end
   is not read again by a start, so its transaction index is believed;
5. the epochs that are left, where some went, before anything is appended. The high watermark
   follows (:mod:`kept.replication.follower_replica`).

A log that starts anew above its end, or below its first segment, gets the new segment before the
old ones go, those next to the gap last: a start finds a log that ends at either place. Above the
end, that is where all replicas come that were away for long, nothing is to be lowered then.

Nothing else needs the disk: the other indexes of an active segment are in memory, a crash has them
made anew from the batches, and a stray snapshot below the end is removed by the next start.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, MachineError, OffsetOutOfRange, ResourceExhausted
from kept.storage.segments.segment import Segment

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

    A cut that stops half way leaves a log that cannot go on: whatever stops it is a failure. Damage
    that hides where to cut is told as DamagedData, before anything is gone, and so is a want of
    descriptors by then, as ResourceExhausted: the log is whole, and can be cut again.
    """
    if offset < 0:
        raise OffsetOutOfRange(f"{log}: cannot truncate to {offset}")
    log.write()
    if offset >= log.log_end_offset:
        # A leader that appended nothing in its epoch left an entry at the log end.
        log.leader_epochs.truncate_from_end(log.log_end_offset)
        try:
            log.leader_epochs.save()
        except ResourceExhausted as error:  # the file has an epoch that nobody cuts again
            raise error.as_failure() from error
        return
    if offset < log.log_start_offset:
        start_at(log, offset)
        return
    logger.info("%s: truncating to %d", log, offset)
    gone = [s for s in log.segments if s.base_offset > offset]
    active, size_bytes, end_offset = _find_cut(log, offset)
    log.before_cut(end_offset, min(log.recovery_point, end_offset))
    try:
        _cut(log, active, size_bytes, gone, offset)
    except DamagedData as error:
        raise MachineError(error.path, "truncate", OSError(errno.EIO, str(error))) from error
    except ResourceExhausted as error:
        raise error.as_failure() from error


def check_cut(log: Log, offset: int) -> None:
    """See :meth:`Log.check_cut`."""
    log.write()
    if log.log_start_offset <= offset < log.log_end_offset:
        _find_cut(log, offset)


def _find_cut(log: Log, offset: int) -> tuple[Segment, int, int]:
    """The segment that is cut at ``offset``, how many bytes of it stay, and the log's end then. At
    its base the whole segment goes: it is not read, and may be damaged.
    """
    active = log.segments[log.segments.floor(offset)]
    size_bytes = 0
    if offset > active.base_offset:
        batch = active.locate(offset)
        size_bytes = active.size_bytes if batch is None else batch[0]
    if size_bytes:
        _ = active.aborted  # the cut needs them: damage of their file is told here
    return active, size_bytes, active.end_below(size_bytes)


def _cut(log: Log, active: Segment, size_bytes: int, gone: list[Segment], offset: int) -> None:
    """Remove what is above ``offset``: segments, and the end of the one that becomes active."""
    prepared, log.preparation = log.preparation, None
    if prepared is not None and not prepared.fits(offset, log.truncations, log.segments):
        prepared = None
    names_gone = log.producer_state.remove_snapshots_above(offset)
    log.segments.remove(gone)
    for segment in reversed(gone):
        unlink_segments(log.disk, [segment])
    if gone or names_gone:
        log.disk.fsync_dir(log.directory)
    forgets_aborted = active.cut(size_bytes)
    log.disk.fsync(active.file)
    if forgets_aborted:
        active.save_aborted(durably=True)
    end_offset = active.next_offset
    if end_offset < log.log_start_offset:
        start_at(log, log.log_start_offset)
        return
    log.durability.cut(min(log.recovery_point, end_offset))
    log.tail.reset(end_offset)
    log.leader_epochs.truncate_from_end(end_offset)
    log.leader_epochs.save()
    states = None if prepared is None or not prepared.done else prepared.states
    log.producer_state.rebuild(log.log_start_offset, end_offset, states)


def start_at(log: Log, offset: int) -> None:
    """See :meth:`Log.truncate_fully_and_start_at`; fails as :func:`truncate_to` does."""
    begin, end = log.segments.bases[0], log.segments.active.next_offset
    is_apart = not begin <= offset <= end
    left = offset if is_apart else 0  # a start may find no segment, and an older log start
    log.before_cut(left, left)
    logger.info("%s: emptied, it starts at %d", log, offset)
    try:
        _begin_anew(log, offset, is_apart=is_apart)
    except ResourceExhausted as error:
        raise error.as_failure() from error


def _begin_anew(log: Log, offset: int, *, is_apart: bool) -> None:
    end = log.segments.active.next_offset
    log.producer_state.remove_snapshots_above(-1)
    log.leader_epochs.clear()
    log.leader_epochs.save()
    gone = list(log.segments)
    log.segments.remove(gone)
    if is_apart:
        _create(log, offset)
    for segment in gone if offset > end else reversed(gone):
        unlink_segments(log.disk, [segment])
    if not is_apart:
        _create(log, offset)
    log.log_start_offset = offset
    log.durability.cut(offset)
    log.tail.reset(offset)
    log.producers.clear()
    log.disk.fsync_dir(log.directory)


def _create(log: Log, offset: int) -> None:
    log.segments.create(offset, log.config.index_interval_bytes, log.last_seen_ms)
