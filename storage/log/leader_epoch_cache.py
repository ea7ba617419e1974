"""Leader epochs of one log: where each leader's term starts (KIP-101, KIP-279).

Entries are (epoch, start offset), both strictly ascending. They answer up to which offset two logs
agree: the end of an epoch is the start of the next higher one, of the latest one the log end.

The cache changes in memory at once and on disk by :meth:`LeaderEpochCache.save`, which blocks
(fsync); ``dirty`` tells that it is due. Rule 24: an epoch is durable before the first append in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from threading import Lock

from kept.storage.checkpoints import read_epochs, write_epochs
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, InvariantViolation


class LeaderEpochCache:
    """The leader epochs of a log, ascending."""

    __slots__ = (
        "_disk",
        "_epochs",
        "_path",
        "_saved",
        "_saving",
        "_starts",
        "_state",
        "log_end_offset",
        "retired",
    )

    def __init__(self, disk: Disk, path: str, entries: list[tuple[int, int]]) -> None:
        self._disk = disk
        self._path = path
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self._saving = Lock()
        self.retired = False
        """The log is deleted."""
        self.log_end_offset: Callable[[], int] = lambda: self._starts[-1] if self._starts else 0
        """Tells where the latest epoch ends; the log puts itself here."""
        for epoch, start in entries:
            if epoch < 0 or start < 0 or (self._epochs and epoch <= self._epochs[-1]):
                raise DamagedData(path, -1, start, f"epoch {epoch} does not ascend")
            if self._starts and start < self._starts[-1]:
                raise DamagedData(path, -1, start, f"start of epoch {epoch} does not ascend")
            if self._starts and start == self._starts[-1]:
                self._epochs.pop()
                self._starts.pop()
            self._epochs.append(epoch)
            self._starts.append(start)
        self._state: tuple[tuple[int, int], ...] = ()
        """The entries as one value, for other threads: replaced with every change."""
        self._changed()
        self._saved: tuple[tuple[int, int], ...] = self._state
        """The entries as they are on disk."""

    def _changed(self) -> None:
        self._state = tuple(zip(self._epochs, self._starts, strict=True))

    @classmethod
    def load(cls, disk: Disk, path: str) -> LeaderEpochCache:
        """Read the checkpoint of a log; absent or empty is no entries. Raises DamagedData."""
        return cls(disk, path, read_epochs(disk, path))

    @property
    def latest(self) -> int | None:
        """The highest epoch known; None when there is none."""
        return self._epochs[-1] if self._epochs else None

    @property
    def entries(self) -> list[tuple[int, int]]:
        """(epoch, start offset), ascending; a copy."""
        return list(self._state)

    @property
    def dirty(self) -> bool:
        """Memory is ahead of the disk."""
        return self._state != self._saved

    def save(self) -> None:
        """Write the checkpoint durably when it is due. Blocks; any thread, several at once."""
        if self._state == self._saved:
            return
        with self._saving:
            state = self._state
            if state != self._saved and not self.retired:
                write_epochs(self._disk, self._path, state)
                self._saved = state

    def retire(self) -> None:
        """The log is deleted: nothing is saved any more, its path may soon be another log's."""
        with self._saving:
            self.retired = True

    def enter(self, epoch: int, start_offset: int) -> None:
        """Batches from ``start_offset`` on are of ``epoch``, no earlier one: InvariantViolation."""
        if self._epochs and epoch < self._epochs[-1]:
            raise InvariantViolation(
                f"{self._path}: append in epoch {epoch} after {self._epochs[-1]}"
            )
        self.assign(epoch, start_offset)

    def assign(self, epoch: int, start_offset: int) -> bool:
        """A leader's term starts at ``start_offset``; True when that was news.

        An epoch that is already the latest changes nothing. Entries that contradict the new one
        (a start at or above it) go: an epoch without records leaves no trace.
        """
        if epoch < 0 or start_offset < 0:
            raise InvariantViolation(f"leader epoch {epoch} starting at {start_offset}")
        if self._epochs and epoch <= self._epochs[-1]:
            if epoch == self._epochs[-1]:
                return False
            raise InvariantViolation(f"{self._path}: leader epoch {epoch} after {self._epochs[-1]}")
        keep = bisect_left(self._starts, start_offset)
        del self._epochs[keep:], self._starts[keep:]
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self._changed()
        return True

    def end_offset_for(self, epoch: int) -> tuple[int, int] | None:
        """Where an epoch ends here: (largest known epoch <= ``epoch``, its end), rule 25.

        The latest epoch ends at the log end offset. An epoch below the first known one is answered
        with itself and the first start; one above the latest, or any in an empty cache, with None.
        """
        epochs = self._epochs
        if not epochs or epoch < 0 or epoch > epochs[-1]:
            return None
        if epoch == epochs[-1]:
            return epoch, self.log_end_offset()
        higher = bisect_right(epochs, epoch)
        if higher == 0:
            return epoch, self._starts[0]
        return epochs[higher - 1], self._starts[higher]

    def truncate_from_end(self, end_offset: int) -> None:
        """Forget epochs that start at or above ``end_offset``: their records are cut away."""
        keep = bisect_left(self._starts, end_offset)
        if keep < len(self._starts):
            del self._epochs[keep:], self._starts[keep:]
            self._changed()

    def truncate_from_start(self, start_offset: int) -> None:
        """The log now starts there: the epoch that covers it starts there, older ones go."""
        covering = bisect_right(self._starts, start_offset) - 1
        if covering >= 0 and (covering > 0 or self._starts[0] < start_offset):
            del self._epochs[:covering], self._starts[:covering]
            self._starts[0] = start_offset
            self._changed()

    def prepend(self, entries: list[tuple[int, int]]) -> None:
        """Entries found in batches below the first one; one of the same epoch moves it down."""
        for epoch, start in reversed(entries):
            if self._epochs and epoch == self._epochs[0]:
                self._starts[0] = min(start, self._starts[0])
            elif not self._epochs or (epoch < self._epochs[0] and start < self._starts[0]):
                self._epochs.insert(0, epoch)
                self._starts.insert(0, start)
        self._changed()

    def clear(self) -> None:
        """Forget everything: the log was emptied."""
        if self._epochs:
            self._epochs.clear()
            self._starts.clear()
            self._changed()
