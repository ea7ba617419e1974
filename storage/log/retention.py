"""Retention: which of the oldest segments go (rule 43), and taking them away.

Segments go from the oldest on, each for the first reason that holds; the first one with none ends
it. A segment is never touched while the high watermark is inside or below it. When even the active
segment is due by time, it is rolled first, so that an idle topic empties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.segments.segment import Segment
from kept.storage.types import LogConfig

REASON_START: Final = "below log start offset"
REASON_TIME: Final = "retention.ms"
REASON_SIZE: Final = "retention.bytes"


def deletable(
    segments: Sequence[Segment],
    config: LogConfig,
    *,
    log_start_offset: int,
    log_end_offset: int,
    high_watermark: int,
    now_ms: int,
    by_policy: bool = True,
) -> list[tuple[int, str]]:
    """(index, reason) of the segments that are due, a prefix of ``segments``.

    Without ``by_policy`` only what lies below the log start is: that is a follower's part.
    """
    excess = sum(s.size_bytes for s in segments) - config.retention_bytes
    due = []
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
        due.append((i, reason))
    return due


class RetiredFiles:
    """Files of segments that left a log, removed after a delay so that readers can finish."""

    def __init__(self, disk: Disk, epochs: LeaderEpochCache) -> None:
        self._disk = disk
        self._epochs = epochs
        self._waiting: list[tuple[int, list[str]]] = []
        """(when they are due, paths)."""

    def __len__(self) -> int:
        return sum(len(paths) for _, paths in self._waiting)

    @property
    def paths(self) -> list[str]:
        """Those that wait, the oldest first."""
        return [path for _, paths in self._waiting for path in paths]

    def add(self, segments: Sequence[Segment], due_ms: int) -> None:
        """Mark the files of segments ``.deleted``; they are due at ``due_ms``."""
        paths = []
        for segment in segments:
            segment.rename("", layout.DELETED)
            paths += [segment.path(kind, layout.DELETED) for kind in layout.SEGMENT_SUFFIXES]
        self._waiting.append((due_ms, paths))

    def put_back(self, paths: Sequence[str], due_ms: int) -> None:
        """Files of :meth:`pop_due` that could not be removed: they are due again at ``due_ms``."""
        self._waiting.append((due_ms, list(paths)))

    def pop_due(self, now_ms: int, delay_ms: int) -> list[str]:
        """The files whose delay is over, for :meth:`remove`; they wait no longer.

        Nothing waits for more than ``delay_ms``: the clock may have been set back.
        """
        waiting = [(min(due_ms, now_ms + delay_ms), paths) for due_ms, paths in self._waiting]
        self._waiting = [entry for entry in waiting if entry[0] > now_ms]
        return [path for due_ms, paths in waiting if due_ms <= now_ms for path in paths]

    def remove(self, paths: Sequence[str]) -> int:
        """Remove files that are no part of the log any more; returns how many. Blocks, any thread
        may: the last link of a large file takes its time.

        The leader epochs that went with them are saved first, so that a start after a crash can
        tell retention from loss.
        """
        if paths:
            self._epochs.save()
        for path in paths:
            self._disk.unlink(path)
        return len(paths)
