"""Tickets for durability: made on the loop, run in a thread, settled on the loop.

A ticket holds what was written when it was made. Running it fsyncs that; the log's recovery point
moves when it is settled, never before. A failed fsync is not tried again (the kernel has marked the
pages clean): the ticket raises MachineError and the log directory goes offline.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kept.storage.disk import Disk, File
from kept.storage.epochs import LeaderEpochCache
from kept.storage.segment import Segment


class FlushTicket:
    """Durability of a log up to ``end_offset``: :meth:`run` in any thread, then :meth:`done`."""

    __slots__ = (
        "_active", "_disk", "_epochs", "_settle", "directory", "end_offset", "segments",
        "snapshots", "sync_names", "truncations",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self, disk: Disk, directory: str, end_offset: int, segments: list[Segment],
        active: File | None, settle: Callable[[FlushTicket], None], *, sync_names: bool,
        truncations: int, epochs: LeaderEpochCache, snapshots: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._disk = disk
        self.directory = directory
        self.end_offset = end_offset
        self.segments = segments
        self.snapshots = snapshots
        self._active = active
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
        if self._active is not None:
            self._disk.fdatasync(self._active)
        self._disk.reach("flush.synced")

    def _sync_names(self) -> None:
        try:
            self._disk.fsync_dir(self.directory)
        except FileNotFoundError:
            if not self._epochs.retired:
                raise

    def done(self) -> None:
        """On the loop, after :meth:`run` returned: the recovery point moves."""
        self._settle(self)
