"""What a Raft core hands to its shell, and what it is set up with."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry, HardState
from kept.cluster.raft.messages import Message


class Role(Enum):
    """What a node is in its term."""

    OBSERVER = "observer"
    """Follows, and has no vote."""
    FOLLOWER = "follower"
    PROSPECTIVE = "prospective"
    """Asks whether it would be elected (pre-vote)."""
    CANDIDATE = "candidate"
    LEADER = "leader"


class RaftSettings(Struct, frozen=True):
    """Limits and timers of the core. A tick is what the shell makes it: 50 ms in ``kept serve``."""

    election_ticks: int = 10
    """A follower that hears nothing for this long, and up to twice as long (random), campaigns; a
    leader that no quorum answers for this long steps down."""
    candidate_ticks: int = 0
    """A candidate that no majority elects for this long, and up to twice as long (random), begins
    again; 0: as long as ``election_ticks``."""
    heartbeat_ticks: int = 2
    """The leader says that it is there this often."""
    max_inflight: int = 64
    """Appends on their way to one follower; more wait for an answer."""
    max_append_bytes: int = 1024 * 1024
    """Entries in one append; a larger entry travels alone."""
    max_uncommitted_bytes: int = 128 * 1024 * 1024
    """Entries that no majority has yet; a proposal above it is refused."""
    max_observers: int = 1024
    """Nodes that follow without a vote; more are not answered."""
    observer_ticks: int = 200
    """An observer that is silent for this long is forgotten; it presents itself again."""
    snapshot_ticks: int = 200
    """A snapshot that is not answered for this long is sent again: 10 s for some megabytes."""


class Snapshot(Struct, frozen=True):
    """The state after the entry ``index`` of ``term``, as a snapshot file's content."""

    index: int
    term: int
    data: bytes
    voters: tuple[Voter, ...]


class Ready(Struct, frozen=True):
    """What the shell must do now, in this order (:mod:`kept.cluster.raft` has all its duties):

    1. write ``hard_state``, durably;
    2. ``snapshot``: write it, then forget the whole log: it goes on after the snapshot;
    3. ``truncate_from``: forget the entries from there on; then append ``entries``, durably;
    4. send ``messages``, in order; call ``advance`` with this value;
    5. apply the entries up to the core's ``committed_to``; answer ``reads``, (token, index) each,
       once the image has reached their index, and refuse ``lost_reads`` (tokens).

    Role and leader are the core's, too: a Ready with nothing in it says that one of these moved.
    """

    hard_state: HardState | None
    snapshot: Snapshot | None
    truncate_from: int | None
    entries: tuple[Entry, ...]
    messages: tuple[Message, ...]
    reads: tuple[tuple[object, int], ...]
    lost_reads: tuple[object, ...]

    @property
    def blocks(self) -> bool:
        """Whether there is anything for the disk."""
        return not (
            self.hard_state is None
            and self.snapshot is None
            and self.truncate_from is None
            and not self.entries
        )
