"""What all parts of the core share: the hard state, the role, the clock, and what is to be sent.

Messages leave by one of two doors. What depends on something that is not on disk yet (a vote, a
term, entries that an answer acknowledges) waits for the next :class:`Ready` and leaves after it was
written. Everything else may leave at once, even while the shell is busy writing: a disk that takes
a second to sync must not look like a dead leader, or like a dead follower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


class RaftState:
    """The fields of a node, and the steps every part takes."""

    def __init__(
        self,
        *,
        node_id: int,
        directory_id: UUID,
        log: RaftLog,
        membership: VoterSet,
        hard_state: HardState,
        random: Callable[[int], int],
        settings: RaftSettings,
    ) -> None:
        self.node_id = node_id
        self.directory_id = directory_id
        self.log = log
        self.membership = membership
        self.settings = settings
        self.random = random
        self.durable = hard_state
        """The hard state on disk."""
        self.term = max(hard_state.term, log.last_term)
        """Never falls. Entries of a term whose hard state was not written tell the term, too."""
        voted = hard_state if hard_state.term == self.term else HardState(self.term)
        self.vote = voted.vote
        self.vote_directory = voted.vote_directory
        self._role = Role.FOLLOWER
        self.leader_id = NO_NODE
        """Who leads this term, as far as known."""
        self.heard = (NO_NODE, 0)
        """Who led when this node last had word of a leader, and the tick of that."""
        self.predecessor = (NO_NODE, 0)
        """The same when this node began to lead."""
        self.down: set[int] = set()
        """Nodes of which there is evidence that they died, and no word since."""
        self.ticks = 0
        self.elapsed = 0
        """Ticks since the leader was heard, or a vote given, or a campaign begun."""
        self.timeout = 0
        """A campaign begins at so many."""
        self.soon: int | None = None
        """A campaign begins in so many ticks, because nobody seems to lead."""
        self.attempts = 0
        """So many more times it may be tried without waiting for the timeout."""
        self.suspect = NO_NODE
        """The leader there was evidence against."""
        self.votes: dict[int, bool] = {}
        """Who answered the campaign, and how."""
        self.progress: dict[int, Progress] = {}
        """Of the followers; empty unless leading."""
        self.reads: list[tuple[object, int]] = []
        """Confirmed read barriers, for the shell."""
        self.lost_reads: list[object] = []
        self.pending_reads: list[tuple[object, int, int]] = []
        """(token, index, round) of barriers that wait for a quorum."""
        self.probes: set[int] = set()
        """Leaders that a peer calls dead, for the shell to probe."""
        self.deferred: dict[int, PreVote] = {}
        """Pre-votes refused for the leader's sake; granted if it turns out dead."""
        self.transferee = NO_NODE
        self.vouched: frozenset[int] = frozenset()
        """Nodes that vote, or lead, as others said; believed where the log here has not the id."""
        self.vouched_disks: frozenset[int] = frozenset()
        """The same of voters that know more than the log here: believed whatever it has."""
        self.refused: deque[tuple[int, str]] = deque(maxlen=MAX_REFUSED)
        """(sender, why) of messages that were dropped as a whole, for the shell to tell of."""
        self._free: list[Message] = []
        self._after: list[Message] = []
        self.restart_timer()

    @property
    def role(self) -> Role:
        """What this node is now."""
        if self._role is Role.FOLLOWER and not self.is_voter:
            return Role.OBSERVER
        return self._role

    @property
    def is_voter(self) -> bool:
        """Whether this node votes, from this disk."""
        return self.membership.has(self.node_id, self.directory_id)

    @property
    def hard_state(self) -> HardState:
        """What must not be forgotten."""
        return HardState(self.term, self.vote, self.vote_directory)

    @property
    def in_lease(self) -> bool:
        """Whether a leader was heard lately, with no evidence against it since: others wait."""
        if self._role is Role.LEADER:
            return True
        return self.leader_id != NO_NODE and self.elapsed < self.settings.election_ticks

    def head(self, to: int, term: int | None = None) -> dict[str, Any]:
        """The fields that all messages share."""
        return {
            "term": self.term if term is None else term,
            "sender": self.node_id,
            "to": to,
            "directory_id": self.directory_id,
        }

    def send(self, message: Message, *, after: bool = False) -> None:
        """Send at once, or ``after`` all that is to be written now is durable.

        Nothing leaves at once while term or vote are not durable.
        """
        if after or self.hard_state != self.durable:
            self._after.append(message)
        else:
            self._free.append(message)

    def forget_vouched(self) -> None:
        """Here, or with a leader that is known here, is a log that names all voters."""
        self.vouched = self.vouched_disks = frozenset()

    def refuse(self, message: Message, why: str) -> None:
        """Drop a message that no honest node sends, or that this node must not believe."""
        self.refused.append((message.sender, f"{type(message).__name__} refused: {why}"))

    def restart_timer(self) -> None:
        """Wait for the leader anew."""
        self.elapsed = 0
        patience = self.settings.election_ticks
        if self._role in (Role.PROSPECTIVE, Role.CANDIDATE):
            patience = self.settings.candidate_ticks or patience
        self.timeout = patience + self.random(patience)

    def set_term(self, term: int) -> None:
        """Enter a later term: no vote is given in it yet."""
        if term > self.term:
            self.term = term
            self.vote, self.vote_directory = NO_VOTE, NO_DIRECTORY
            self.deferred.clear()

    def become_follower(self, term: int, leader_id: int) -> None:
        """Follow ``leader_id``, or wait for a leader, in ``term``."""
        self.set_term(term)
        self._role = Role.FOLLOWER
        self.leader_id = leader_id
        self.progress.clear()
        self.lost_reads += (token for token, _, _ in self.pending_reads)
        self.pending_reads.clear()
        self.transferee = NO_NODE
        self.restart_timer()

    def follow(self, leader_id: int) -> None:
        """The leader of this term was heard."""
        if self._role is not Role.FOLLOWER:
            self.become_follower(self.term, leader_id)
        self.leader_id = leader_id
        self.heard = (leader_id, self.ticks)
        self.suspect = NO_NODE
        self.soon = None
        self.attempts = 0
        self.restart_timer()
