"""Durability of a log: tickets, made on the loop, run in a thread, settled on the loop.

A ticket holds what was written when it was made. Running it fsyncs that; the log's recovery point
moves when it is settled, never before. A failed fsync is not tried again (the kernel has marked the
pages clean): the ticket raises MachineError and the log directory goes offline. So it does when the
file has lost its name: an fsync of a file that was removed succeeds, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.epochs import LeaderEpochCache
from kept.storage.errors import MachineError, vanished
from kept.storage.segment import Segment

if TYPE_CHECKING:
    from kept.storage.log import Log


class FlushTicket:
    """Durability of a log up to ``end_offset``: :meth:`run` in any thread, then :meth:`done`."""

    __slots__ = (
        "_active", "_disk", "_epochs", "_file", "_path", "_settle", "directory", "end_offset",
        "in_place", "segments", "snapshots", "sync_names", "truncations",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self, disk: Disk, directory: str, end_offset: int, segments: list[Segment],
        active: Segment, settle: Callable[[FlushTicket], None], *, sync_names: bool,
        truncations: int, epochs: LeaderEpochCache, snapshots: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._disk = disk
        self.directory = directory
        self.end_offset = end_offset
        self.segments = segments
        self.snapshots = snapshots
        self._active = active
        self._file = active.file
        self._path = active.path(layout.LOG)
        self.in_place = True
        """Whether the active segment's name still stands for what was made durable."""
        self._epochs = epochs
        self._settle = settle
        self.sync_names = sync_names
        self.truncations = truncations

    def run(self) -> None:
        """Fsync; blocks. Raises MachineError.

        Leader epochs first: what lies below the recovery point is never read for them again.
        """
        self._epochs.save()
        for path in self.snapshots:
            with suppress(FileNotFoundError):  # truncation and retention remove some
                self._disk.fsync(self._disk.open_read(path))
        for segment in self.segments:
            segment.fsync()
        if self.segments or self.snapshots or self.sync_names:
            self._sync_names()
        self._disk.fdatasync(self._file)
        self.in_place = self._disk.is_at(self._file, self._path)
        self._disk.reach("flush.synced")

    def _sync_names(self) -> None:
        try:
            self._disk.fsync_dir(self.directory)
        except MachineError:
            if not self._epochs.retired:
                raise

    def done(self) -> None:
        """On the loop, after :meth:`run` returned: the recovery point moves.

        Raises MachineError when what was synced is a file that nobody finds again. Only here is it
        known whether this log itself renamed or removed it meanwhile.
        """
        self._settle(self)

    def check_in_place(self, log: Log) -> None:
        """See :meth:`done`."""
        active = log.active_segment
        same = active is self._active and active.file is self._file
        if not self.in_place and same and log.directory == self.directory:
            raise vanished(self._path)


def ticket_for(log: Log, up_to: int | None) -> FlushTicket | None:
    """See :meth:`Log.flush_ticket`."""
    end = log.written_end_offset
    if up_to is not None and up_to <= log.recovery_point:
        return None
    unflushed = [segment for segment in log.segments[:-1] if not segment.flushed]
    for segment in unflushed:
        segment.file  # noqa: B018 (open it here: a thread may come when the log has removed it)
    if end <= log.recovery_point and not unflushed and not log.unsynced_snapshots:
        return None
    return FlushTicket(
        log.disk, log.directory, end, unflushed, log.active_segment, partial(_settle, log),
        snapshots=tuple(log.unsynced_snapshots), sync_names=log.names_changed,
        truncations=log.truncations, epochs=log.leader_epochs,
    )  # fmt: skip


def _settle(log: Log, ticket: FlushTicket) -> None:
    if ticket.truncations != log.truncations:
        return
    ticket.check_in_place(log)
    if ticket.sync_names and ticket.end_offset >= log.active_segment.base_offset:
        log.names_changed = False
    del log.unsynced_snapshots[: len(ticket.snapshots)]
    for segment in ticket.segments:
        segment.flushed = True
        log.disk.can_close(segment)
    end = min(ticket.end_offset, log.written_end_offset)
    log.recovery_point = max(log.recovery_point, end)


def is_due(log: Log, now_ms: int) -> bool:
    """See :meth:`Log.flush_due`."""
    unflushed = log.written_end_offset - log.recovery_point
    if unflushed <= 0:
        log.last_flush_ms = now_ms
        return False
    config = log.config
    if unflushed < config.flush_messages and now_ms - log.last_flush_ms < config.flush_ms:
        return False
    log.last_flush_ms = now_ms
    return True
