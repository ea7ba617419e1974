"""The entries that a Raft node holds: all after its base, in memory, and how many are durable.

The node's disk holds the same entries, later. ``stable_index`` says up to where both agree; what
is above it has been handed to the shell or waits for it. While the shell writes one group, entries
of that group may be replaced by another leader's: then only what was not replaced counts as written
when the shell is done, and the next group begins with a truncation.

Memory: the shell drops what a snapshot made superfluous (:meth:`RaftLog.compact`), so it is bounded
by the size at which snapshots are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.ready import Snapshot
from kept.storage.errors import InvariantViolation

ENTRY_OVERHEAD_BYTES: Final = 36
"""What an entry costs besides its data, on the disk and, about, on the wire."""


def size_bytes(entry: Entry) -> int:
    """What an entry counts for in the limits."""
    return len(entry.data) + ENTRY_OVERHEAD_BYTES


class RaftLog:
    """The log of one node. Indexes are dense; terms never fall from one entry to the next."""

    __slots__ = (
        "_cut",
        "_entries",
        "_snapshot",
        "_writing_to",
        "base_index",
        "base_term",
        "commit_index",
        "stable_index",
    )

    def __init__(self, base_index: int, base_term: int, entries: Iterable[Entry]) -> None:
        self.base_index = base_index
        """The entry before the first one held; a snapshot holds it and those before it."""
        self.base_term = base_term
        self._entries = list(entries)
        self.commit_index = base_index
        """A majority has the entries up to here; never falls."""
        self.stable_index = self.last_index
        """On this node's disk are the same entries up to here."""
        self._writing_to: int | None = None
        """Written by the shell just now: up to here and still so; None: it writes nothing."""
        self._cut: int | None = None
        """The disk holds, or will hold, others from here on."""
        self._snapshot: Snapshot | None = None
        """To be written in the place of everything."""

    @property
    def last_index(self) -> int:
        """Index of the last entry; ``base_index`` when there is none."""
        return self.base_index + len(self._entries)

    @property
    def last_term(self) -> int:
        """Term of the last entry."""
        return self._entries[-1].term if self._entries else self.base_term

    @property
    def committed_to(self) -> int:
        """Entries up to here may be applied: a majority has them and this node's disk, too."""
        return min(self.commit_index, self.stable_index)

    def term_at(self, index: int) -> int | None:
        """The term of an entry or of the base; None outside of the log."""
        if index == self.base_index:
            return self.base_term
        slot = index - self.base_index - 1
        return self._entries[slot].term if 0 <= slot < len(self._entries) else None

    def matches(self, index: int, term: int) -> bool:
        """Whether the entry ``index`` is the one proposed in ``term``."""
        return self.term_at(index) == term

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a log that ends so holds at least what this one holds (Raft 5.4.1)."""
        return (last_term, last_index) >= (self.last_term, self.last_index)

    def entry(self, index: int) -> Entry:
        """One entry. Raises InvariantViolation outside of the log."""
        slot = index - self.base_index - 1
        if not 0 <= slot < len(self._entries):
            raise InvariantViolation(
                f"entry {index} of a log from {self.base_index + 1} to {self.last_index}"
            )
        return self._entries[slot]

    def entries(self, first: int, end: int, max_bytes: int) -> tuple[Entry, ...]:
        """Entries of [first, end): as many as ``max_bytes`` hold, at least one if there is one."""
        slot = first - self.base_index - 1
        if slot < 0:
            raise InvariantViolation(f"entry {first} is in the snapshot {self.base_index}")
        entries: list[Entry] = []
        total = 0
        for entry in islice(self._entries, slot, max(slot, end - self.base_index - 1)):
            total += size_bytes(entry)
            if entries and total > max_bytes:
                break
            entries.append(entry)
        return tuple(entries)

    def last_of_term(self, index: int, term: int) -> tuple[int, int]:
        """The largest (index, term) at or below ``index`` whose term is at most ``term``.

        Another log whose entry ``index`` is of ``term`` cannot match this one above it: that is
        what a refusal hints at, and where the leader looks next. (base, its term) at the least.
        """
        index = min(index, self.last_index)
        while index > self.base_index:
            known_term = self._entries[index - self.base_index - 1].term
            if known_term <= term:
                return index, known_term
            index -= 1
        return self.base_index, self.base_term

    # Changing it.

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries with the next indexes."""
        index, term = self.last_index, self.last_term
        for entry in entries:
            index += 1
            if entry.index != index or entry.term < term:
                raise InvariantViolation(
                    f"entry {entry.index} of term {entry.term} "
                    f"after entry {index - 1} of term {term}"
                )
            term = entry.term
        self._entries.extend(entries)

    def truncate_from(self, index: int) -> None:
        """Forget the entries from ``index`` on. Raises InvariantViolation for a committed one."""
        if index <= self.commit_index:
            raise InvariantViolation(
                f"entry {index} is to be replaced, but {self.commit_index} are committed"
            )
        del self._entries[index - self.base_index - 1 :]
        written = (
            self.stable_index
            if self._writing_to is None
            else max(self._writing_to, self.stable_index)
        )
        if index <= written or self._cut is not None:
            self._cut = index if self._cut is None else min(self._cut, index)
        self.stable_index = min(self.stable_index, index - 1)
        if self._writing_to is not None:
            self._writing_to = min(self._writing_to, index - 1)

    def commit_to(self, index: int) -> bool:
        """Note that a majority has the entries up to ``index``; returns whether that is news."""
        if index <= self.commit_index:
            return False
        if index > self.last_index:
            raise InvariantViolation(f"entry {index} committed, the log ends at {self.last_index}")
        self.commit_index = index
        return True

    def restore(self, snapshot: Snapshot) -> None:
        """Replace everything by a snapshot."""
        if snapshot.index <= self.commit_index:
            raise InvariantViolation(
                f"snapshot {snapshot.index}, but {self.commit_index} are committed"
            )
        self._entries.clear()
        self.base_index, self.base_term = snapshot.index, snapshot.term
        self.commit_index = snapshot.index
        self.stable_index = 0
        self._cut = None
        if self._writing_to is not None:
            self._writing_to = 0
        self._snapshot = snapshot

    def compact(self, index: int) -> None:
        """Forget the entries up to ``index``, which a durable snapshot holds."""
        index = min(index, self.committed_to)
        term = self.term_at(index)
        if term is None or index <= self.base_index:
            return
        del self._entries[: index - self.base_index]
        self.base_index, self.base_term = index, term

    # Writing it.

    @property
    def has_unwritten(self) -> bool:
        """Whether the shell has something to write."""
        return (
            self._snapshot is not None
            or self._cut is not None
            or self.last_index > self.stable_index
        )

    def next_write(self) -> tuple[Snapshot | None, int | None, tuple[Entry, ...]]:
        """What to write now: (snapshot, where to cut, entries); :meth:`write_done` must follow."""
        if self._writing_to is not None:
            raise InvariantViolation("a second group for the disk before the first was written")
        first = max(self.stable_index, self.base_index) + 1
        entries = tuple(self._entries[first - self.base_index - 1 :])
        group = self._snapshot, self._cut, entries
        self._snapshot = self._cut = None
        self._writing_to = self.last_index
        return group

    def write_done(self) -> None:
        """The group is durable."""
        if self._writing_to is None:
            raise InvariantViolation("written, but nothing was handed out")
        if self._snapshot is None:
            self.stable_index = self._writing_to
        self._writing_to = None

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the log contradicts itself."""
        if self._entries and self._entries[0].index != self.base_index + 1:
            raise InvariantViolation(f"entry {self._entries[0].index} after base {self.base_index}")
        if not self.base_index <= self.commit_index <= self.last_index:
            raise InvariantViolation(
                f"base {self.base_index}, commit {self.commit_index}, last {self.last_index}"
            )
        if self.stable_index > self.last_index:
            raise InvariantViolation(f"stable {self.stable_index}, last {self.last_index}")
