"""The state that all parts of the core work on: term, vote, role, clock, and what is to be sent.

Messages leave in one of two ways. What depends on something that is not on disk yet (a vote, a
term, entries that an answer acknowledges) waits for the next :class:`.ready.Ready` and leaves after
it was written. Everything else may leave at once, even while the shell is busy writing: a disk that
takes a second to sync must not look like a dead leader, or like a dead follower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID

from kept.cluster.metadata.wal import NO_DIRECTORY, NO_VOTE, HardState
from kept.cluster.raft.log import RaftLog
from kept.cluster.raft.messages import NO_NODE, Message, PreVote
from kept.cluster.raft.progress import Progress
from kept.cluster.raft.ready import RaftSettings, Role
from kept.cluster.raft.voter_set import VoterSet

MAX_REFUSED: Final = 16
"""Refused messages that are remembered until the shell has told of them."""


@dataclass(slots=True)
class Election:
    """Of a node that does not lead: when it campaigns, and how its campaign goes."""

    elapsed: int = 0
    """Ticks since the leader was heard, or a vote given, or a campaign begun."""
    timeout: int = 0
    """A campaign begins at so many."""
    campaign_in_ticks: int | None = None
    """A campaign begins in so many ticks, because no node seems to lead; None: not early."""
    attempts_left: int = 0
    """A campaign may be repeated so many times without waiting for the timeout."""
    suspect: int = NO_NODE
    """The leader there was evidence against."""
    votes: dict[int, bool] = field(default_factory=dict)
    """Who answered the campaign, and how."""
    deferred_pre_votes: dict[int, PreVote] = field(default_factory=dict)
    """Pre-votes refused for the leader's sake; granted if it turns out dead."""


@dataclass(slots=True)
class ReadBarriers:
    """A leader's read barriers, by the shell's tokens (ReadIndex)."""

    pending: list[tuple[object, int, int]] = field(default_factory=list)
    """(token, commit index, heartbeat round) of those that wait for a quorum."""
    confirmed: list[tuple[object, int]] = field(default_factory=list)
    """(token, commit index), for the shell."""
    lost: list[object] = field(default_factory=list)
    """Those that a node dropped when it stopped to lead, for the shell."""


@dataclass(kw_only=True, slots=True, eq=False)
class RaftState:
    """One node's state. The parts of :class:`~.core.RaftCore` read and change it."""

    node_id: int
    directory_id: UUID
    log: RaftLog
    voter_set: VoterSet
    settings: RaftSettings
    random: Callable[[int], int]
    durable: HardState
    """The hard state on disk."""
    term: int = 0
    """Never falls. Entries of a term whose hard state was not written tell the term, too."""
    vote: int = NO_VOTE
    vote_directory: UUID = NO_DIRECTORY
    role: Role = Role.FOLLOWER
    """FOLLOWER also where this node has no vote: see :attr:`RaftCore.role`."""
    leader_id: int = NO_NODE
    """Who leads this term, as far as known."""
    leader_directory: UUID = NO_DIRECTORY
    """The disk of the leader that was heard last."""
    contacts: tuple[int, ...] = ()
    """Nodes that may know the leader, from configuration; the log's voters come on top."""
    formed: bool = False
    """The voters of a new cluster have found each other (or the log is not empty)."""
    disk_fails: bool = False
    """The disk took nothing lately: this node must not lead."""
    last_leader: tuple[int, int] = (NO_NODE, 0)
    """Who led when this node last had word of a leader, and the tick of that."""
    predecessor: tuple[int, int] = (NO_NODE, 0)
    """The same when this node began to lead."""
    down: set[int] = field(default_factory=set)
    """Nodes of which there is evidence that they died, and no word since."""
    ticks: int = 0
    election: Election = field(default_factory=Election)
    reads: ReadBarriers = field(default_factory=ReadBarriers)
    progress: dict[int, Progress] = field(default_factory=dict)
    """Of the followers; empty unless leading."""
    to_probe: set[int] = field(default_factory=set)
    """Leaders that a peer calls dead, for the shell to probe."""
    transferee: int = NO_NODE
    vouched: frozenset[int] = frozenset()
    """Nodes that vote, or lead, as others said; believed where the log here has not the id."""
    vouched_disks: frozenset[int] = frozenset()
    """The same of voters that know more than the log here: believed whatever it has."""
    refused: deque[tuple[int, str]] = field(default_factory=partial(deque, maxlen=MAX_REFUSED))
    """(sender, why) of messages that were dropped as a whole, for the shell to tell of."""
    sendable: list[Message] = field(default_factory=list)
    sendable_after_write: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.term = max(self.durable.term, self.log.last_term)
        if self.durable.term == self.term:
            self.vote, self.vote_directory = self.durable.vote, self.durable.vote_directory
        self.restart_timer()

    @property
    def is_voter(self) -> bool:
        """Whether this node votes, from this disk."""
        return self.voter_set.has(self.node_id, self.directory_id)

    @property
    def leads(self) -> bool:
        """Whether this node leads its term."""
        return self.role is Role.LEADER

    @property
    def hard_state(self) -> HardState:
        """What must not be forgotten."""
        return HardState(self.term, self.vote, self.vote_directory)

    @property
    def in_lease(self) -> bool:
        """Whether a leader was heard lately, with no evidence against it since: others wait."""
        if self.leads:
            return True
        return self.leader_id != NO_NODE and self.election.elapsed < self.settings.election_ticks

    def head(self, to: int, term: int | None = None) -> dict[str, Any]:
        """The fields that all messages share."""
        return {
            "term": self.term if term is None else term,
            "sender": self.node_id,
            "to": to,
            "directory_id": self.directory_id,
        }

    def send(self, message: Message, *, after_write: bool = False) -> None:
        """Send at once, or ``after_write``; nothing at once while term or vote are not durable."""
        if after_write or self.hard_state != self.durable:
            self.sendable_after_write.append(message)
        else:
            self.sendable.append(message)

    def is_alive(self, node_id: int) -> bool:
        """On the leader: whether a follower replied within an election timeout, and there is no
        evidence that it died.
        """
        progress = self.progress.get(node_id)
        return (
            progress is not None
            and node_id not in self.down
            and self.ticks - progress.last_contact <= self.settings.election_ticks
        )

    def forget_vouched(self) -> None:
        """Here, or with a leader that is known here, is a log that names all voters."""
        self.vouched = self.vouched_disks = frozenset()

    def refuse(self, message: Message, why: str) -> None:
        """Drop a message that no honest node sends, or that this node must not believe."""
        self.refused.append((message.sender, f"{type(message).__name__} refused: {why}"))

    def restart_timer(self) -> None:
        """Wait for the leader anew."""
        self.election.elapsed = 0
        patience = self.settings.election_ticks
        if self.role in (Role.PROSPECTIVE, Role.CANDIDATE):
            patience = self.settings.candidate_ticks or patience
        self.election.timeout = patience + self.random(patience)

    def set_term(self, term: int) -> None:
        """Enter a later term: no vote is given in it yet."""
        if term > self.term:
            self.term = term
            self.vote, self.vote_directory = NO_VOTE, NO_DIRECTORY
            self.election.deferred_pre_votes.clear()

    def become_follower(self, term: int, leader_id: int) -> None:
        """Follow ``leader_id``, or wait for a leader, in ``term``. Read barriers are lost."""
        self.set_term(term)
        self.role = Role.FOLLOWER
        self.leader_id = leader_id
        self.progress.clear()
        self.reads.lost += (token for token, _, _ in self.reads.pending)
        self.reads.pending.clear()
        self.transferee = NO_NODE
        self.restart_timer()

    def follow(self, leader_id: int) -> None:
        """The leader of this term was heard."""
        if self.role is not Role.FOLLOWER:
            self.become_follower(self.term, leader_id)
        self.leader_id = leader_id
        self.last_leader = (leader_id, self.ticks)
        self.election.suspect = NO_NODE
        self.election.campaign_in_ticks = None
        self.election.attempts_left = 0
        self.restart_timer()
