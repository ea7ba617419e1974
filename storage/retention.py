"""Retention: which of the oldest segments go (rule 43), and taking them away.

Segments go from the oldest on, each for the first reason that holds; the first one with none ends
it. A segment is never touched while the high watermark is inside or below it. When even the active
segment is due by time, it is rolled first, so that an idle topic empties.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kept.storage import layout, producer_recovery
from kept.storage.segment import Segment
from kept.storage.types import LogConfig

if TYPE_CHECKING:
    from kept.storage.log import Log

REASON_START: Final = "below log start offset"
REASON_TIME: Final = "retention.ms"
REASON_SIZE: Final = "retention.bytes"

logger = logging.getLogger(__name__)


def deletable(
    segments: Sequence[Segment], config: LogConfig, *, log_start_offset: int,
    log_end_offset: int, high_watermark: int, now_ms: int, by_policy: bool = True,
) -> list[tuple[int, str]]:  # fmt: skip
    """(index, reason) of the segments that are due, a prefix of ``segments``.

    Without ``by_policy`` only what lies below the log start is: that is a follower's part.
    """
    excess = sum(s.size_bytes for s in segments) - config.retention_bytes
    found = []
    for i, segment in enumerate(segments):
        is_active = i + 1 == len(segments)
        end = log_end_offset if is_active else segments[i + 1].base_offset
        if high_watermark < end or (is_active and not segment.size_bytes):
            break
        if not is_active and end <= log_start_offset:
            reason = REASON_START
        elif not (by_policy and config.delete):
            break
        elif 0 <= config.retention_ms < now_ms - segment.largest_timestamp:
            reason = REASON_TIME
        elif config.retention_bytes >= 0 and excess >= segment.size_bytes and not is_active:
            reason = REASON_SIZE
        else:
            break
        excess -= segment.size_bytes
        found.append((i, reason))
    return found


def apply(
    log: Log, now_ms: int, high_watermark: int, by_policy: bool = True
) -> list[tuple[int, str]]:
    """See :meth:`Log.delete_old_segments`."""
    log.write()
    due = deletable(
        log.segments, log.config, log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset, high_watermark=high_watermark, now_ms=now_ms,
        by_policy=by_policy,
    )  # fmt: skip
    if not due:
        return []
    if len(due) == len(log.segments):
        log.roll(now_ms)
    gone = log.segments[: len(due)]
    answer = [(log.segments[i].base_offset, reason) for i, reason in due]
    log.advance_log_start(log.segments[len(due)].base_offset, now_ms)
    log.segments.remove(gone)
    retire(log, gone, now_ms)
    producer_recovery.remove_snapshots(log.disk, log.directory, [s.base_offset for s in gone])
    for base_offset, reason in answer:
        logger.info("%s: segment %d deleted: %s", log, base_offset, reason)
    return answer


def retire(log: Log, segments: Sequence[Segment], now_ms: int) -> None:
    """Mark the files of segments ``.deleted``; they go after ``file.delete.delay.ms``."""
    paths = []
    for segment in segments:
        segment.rename("", layout.DELETED)
        paths += [segment.path(kind, layout.DELETED) for kind in layout.SEGMENT_SUFFIXES]
    log.delete_later(paths, now_ms)


def take_expired(log: Log, now_ms: int) -> list[str]:
    """The files whose delay is over, for :func:`remove`; they wait no longer.

    Nobody waits for more than the delay: the clock may have been set back.
    """
    latest_ms = now_ms + log.config.file_delete_delay_ms
    log.waiting_deletes = [(min(due_ms, latest_ms), paths) for due_ms, paths in log.waiting_deletes]
    due = [path for due_ms, paths in log.waiting_deletes if due_ms <= now_ms for path in paths]
    log.waiting_deletes = [entry for entry in log.waiting_deletes if entry[0] > now_ms]
    return due


def remove(log: Log, paths: Sequence[str]) -> int:
    """Remove files that are no part of the log any more; returns how many. Blocks, any thread may:
    the last link of a large file takes its time.

    The leader epochs that went with them are saved first, so that a start after a crash can tell
    retention from loss.
    """
    if paths:
        log.leader_epochs.save()
    for path in paths:
        log.disk.unlink(path)
    return len(paths)
