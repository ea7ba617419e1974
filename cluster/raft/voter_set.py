"""Who votes: the newest voters' record in the log, committed or not (Raft thesis 4.1).

A change counts from the moment it is in the log, so whoever truncates the log takes it back. One
voter at a time joins or leaves: then each majority of the old voters meets each majority of the
new ones, and no further rule is needed. (A voter whose disk was replaced leaves and joins: as one
step, old disk and new disk could be in two majorities that do not meet.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from kept.cluster.metadata.records import VotersRecord, decode_batch, encode_batch
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.ready import Snapshot
from kept.storage.errors import CorruptMessage, InvalidRequest, UnsupportedVersion

_VOTERS_TYPE: Final = 65
_TYPE_AT: Final = 8
"""Where the type of an entry's first record stands: after the count and the length."""


def voters_in(data: bytes) -> tuple[Voter, ...] | None:
    """The voters that an entry sets; None for any other entry. They are its first record."""
    if len(data) <= _TYPE_AT or data[_TYPE_AT] != _VOTERS_TYPE:
        return None
    try:
        first = decode_batch(data)[0]
    except (CorruptMessage, UnsupportedVersion):
        return None
    return first.voters if isinstance(first, VotersRecord) else None


def voters_entry(voters: tuple[Voter, ...]) -> bytes:
    """The data of an entry that sets the voters."""
    return encode_batch([VotersRecord(voters)])


def check_change(old: tuple[Voter, ...], new: tuple[Voter, ...]) -> None:
    """Raises InvalidRequest unless at most one voter joins or leaves."""
    before = {(v.node_id, v.directory_id) for v in old}
    after = {(v.node_id, v.directory_id) for v in new}
    if len(before ^ after) > 1:
        raise InvalidRequest(
            "One voter at a time: remove or add one, and wait until that is committed "
            "(a voter whose disk was replaced is removed first, then added)"
        )
    ids = [v.node_id for v in new]
    if not ids or len(set(ids)) != len(ids):
        raise InvalidRequest(f"Voters {ids}: at least one, and no node twice")


class VoterSet:
    """The voters, and those before them while a change may still be taken back."""

    __slots__ = ("_changes",)

    def __init__(self, base_index: int, voters: tuple[Voter, ...]) -> None:
        self._changes: list[tuple[int, tuple[Voter, ...]]] = [(base_index, voters)]

    @property
    def voters(self) -> tuple[Voter, ...]:
        """Who votes now."""
        return self._changes[-1][1]

    @property
    def changed_at(self) -> int:
        """The entry that made them the voters."""
        return self._changes[-1][0]

    @property
    def ids(self) -> tuple[int, ...]:
        """Their node ids."""
        return tuple(v.node_id for v in self.voters)

    @property
    def quorum(self) -> int:
        """How many of them are a majority."""
        return len(self.voters) // 2 + 1

    def directory_of(self, node_id: int) -> UUID | None:
        """The disk that a node votes from; None when it does not vote."""
        return next((v.directory_id for v in self.voters if v.node_id == node_id), None)

    def has(self, node_id: int, directory_id: UUID) -> bool:
        """Whether this node votes, from this disk."""
        return self.directory_of(node_id) == directory_id

    def appended(self, entries: Iterable[Entry]) -> None:
        """Entries were appended."""
        for entry in entries:
            voters = voters_in(entry.data)
            if voters is not None:
                self._changes.append((entry.index, voters))

    def truncate_from(self, index: int) -> None:
        """Entries were taken back, and what they changed."""
        while len(self._changes) > 1 and self._changes[-1][0] >= index:
            self._changes.pop()

    def committed(self, index: int) -> None:
        """Entries up to here stay: nobody needs the voters before them any more."""
        while len(self._changes) > 1 and self._changes[1][0] <= index:
            del self._changes[0]

    def restore(self, snapshot: Snapshot) -> None:
        """A snapshot replaces everything."""
        self._changes = [(snapshot.index, snapshot.voters)]

    def form(self, voters: tuple[Voter, ...]) -> None:
        """The voters of a new cluster, whose log is empty."""
        self._changes = [(0, voters)]
