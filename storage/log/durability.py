"""Durability of a log: the recovery point, and the tickets that move it.

A :class:`FlushTicket` holds what was written when it was made on the loop. :meth:`FlushTicket.run`
fsyncs that, in any thread; the recovery point moves with :meth:`FlushTicket.done`, on the loop
again, never before. A failed fsync is not tried again (the kernel has marked the pages clean): the
ticket raises MachineError and the log directory goes offline. So it does when the file has lost its
name, or was truncated: an fsync of a file that was removed succeeds, and keeps nothing.
"""

from __future__ import annotations

from contextlib import suppress

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import MachineError, vanished
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.log.tail import Tail
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import Segment
from kept.storage.types import LogConfig


class FlushTicket:
    """Durability of a log up to ``end_offset``: :meth:`run` in any thread, then :meth:`done`."""

    __slots__ = (
        "_disk",
        "_durability",
        "_epochs",
        "active",
        "directory",
        "end_offset",
        "file",
        "in_place",
        "path",
        "segments",
        "size_bytes",
        "snapshots",
        "sync_names",
        "truncations",
    )

    def __init__(
        self, durability: Durability, disk: Disk, epochs: LeaderEpochCache, tail: Tail
    ) -> None:
        self._durability = durability
        self._disk = disk
        self._epochs = epochs
        self.directory = durability.segments.directory
        self.segments = durability.unflushed_segments()
        for segment in self.segments:
            segment.file  # noqa: B018 (open it here: a thread may come when the log has removed it)
        self.snapshots = tuple(durability.unsynced_snapshots)
        self.sync_names = durability.names_changed
        self.truncations = durability.truncations
        self.end_offset = tail.written_end_offset
        self.active = tail.active
        self.file = self.active.file
        self.path = self.active.path(layout.LOG)
        self.size_bytes = self.active.size_bytes
        self.in_place = True
        """Whether the active segment's name still stands for what was made durable, whole."""

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
        self._disk.fdatasync(self.file)
        self.in_place = self._disk.is_at(self.file, self.path, self.size_bytes)
        self._disk.reach("flush.synced")

    def _sync_names(self) -> None:
        try:
            self._disk.fsync_dir(self.directory)
        except MachineError:
            if not self._epochs.retired:
                raise

    def done(self) -> None:
        """On the loop, after :meth:`run` returned: the recovery point moves.

        Raises MachineError when what was synced is a file that nobody finds again, or that lacks
        some of it. Only here is it known whether this log itself renamed, removed or cut it
        meanwhile.
        """
        self._durability.complete(self)


class Durability:
    """How much of a log survives a power cut; see the module.

    ``recovery_point``: all below it is durable. ``truncations``: how often the log was cut; tickets
    made before a cut move nothing. ``names_changed``: a name in the log's directory may not be
    durable. ``unsynced_snapshots``: paths of producer snapshots that may not be.
    ``last_flush_ms``: when a flush was last due, or nothing was left to flush.
    """

    __slots__ = (
        "_disk",
        "_epochs",
        "_tail",
        "last_flush_ms",
        "names_changed",
        "recovery_point",
        "segments",
        "truncations",
        "unsynced_snapshots",
    )

    def __init__(  # noqa: PLR0917
        self,
        disk: Disk,
        segments: Segments,
        epochs: LeaderEpochCache,
        tail: Tail,
        recovery_point: int,
        unsynced_snapshots: list[str],
        now_ms: int,
    ) -> None:
        self._disk = disk
        self._epochs = epochs
        self._tail = tail
        self.segments = segments
        self.recovery_point = recovery_point
        self.unsynced_snapshots = unsynced_snapshots
        self.truncations = 0
        self.names_changed = False
        self.last_flush_ms = now_ms

    def unflushed_segments(self) -> list[Segment]:
        """Closed segments that are not known to be durable."""
        return [segment for segment in self.segments[:-1] if not segment.flushed]

    @property
    def is_complete(self) -> bool:
        """Nothing of the log would be lost by a power cut, and nothing is left to be fsynced."""
        return (
            self.recovery_point == self._tail.end_offset
            and all(segment.flushed for segment in self.segments)
            and not self.names_changed
            and not self.unsynced_snapshots
            and not self._epochs.dirty
        )

    def ticket(self) -> FlushTicket | None:
        """A ticket for what is written and not durable; None for nothing."""
        if (
            self._tail.written_end_offset <= self.recovery_point
            and not self.unsynced_snapshots
            and not self.unflushed_segments()
        ):
            return None
        return FlushTicket(self, self._disk, self._epochs, self._tail)

    def complete(self, ticket: FlushTicket) -> None:
        """See :meth:`FlushTicket.done`."""
        if ticket.truncations != self.truncations:
            return
        active = self._tail.active
        same = active is ticket.active and active.file is ticket.file
        if not ticket.in_place and same and self.segments.directory == ticket.directory:
            raise vanished(ticket.path)
        if ticket.sync_names and ticket.end_offset >= active.base_offset:
            self.names_changed = False
        del self.unsynced_snapshots[: len(ticket.snapshots)]
        for segment in ticket.segments:
            segment.flushed = True
            self._disk.can_close(segment)
        end = min(ticket.end_offset, self._tail.written_end_offset)
        if active is not ticket.active:
            # It was rolled meanwhile, and its indexes are not durable: a start would believe them.
            end = min([end, *(segment.base_offset for segment in self.unflushed_segments())])
        self.recovery_point = max(self.recovery_point, end)

    def is_due(self, config: LogConfig, now_ms: int) -> bool:
        """Whether ``flush.messages`` or ``flush.ms`` ask for a flush now."""
        unflushed = self._tail.written_end_offset - self.recovery_point
        if unflushed <= 0:
            self.last_flush_ms = now_ms
            return False
        if unflushed < config.flush_messages and now_ms - self.last_flush_ms < config.flush_ms:
            return False
        self.last_flush_ms = now_ms
        return True

    def snapshot_written(self, path: str) -> None:
        """A producer snapshot was written, not durably."""
        if path not in self.unsynced_snapshots:
            self.unsynced_snapshots.append(path)

    def cut(self, recovery_point: int) -> None:
        """The log was cut, and is durable below ``recovery_point``."""
        self.truncations += 1
        self.recovery_point = recovery_point
