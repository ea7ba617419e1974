"""Who votes and who leads, for a node whose own log does not tell it.

A node without a vote looks for the leader with :class:`Observe`; any node replies with
:class:`LeaderHint`. A log that lags need not name all voters (Raft thesis 4.1: a new one may lead,
or be the only one that can be elected). So where no leader is heard, the voters that are known are
sent :class:`Observe`, too. What they reply is believed of nodes that the log here does not name,
and, from a voter with a longer log, of another disk, until a known leader is heard, or this node
leads. An empty log names no voter: then the nodes of the settings are believed.
"""

from __future__ import annotations

from kept.cluster.raft.messages import (
    NO_NODE,
    AppendEntries,
    InstallSnapshot,
    LeaderHint,
    Message,
    Observe,
    PreVote,
    TimeoutNow,
    Vote,
)
from kept.cluster.raft.state import RaftState


class Observer:
    """Finds the leader, and judges whose messages count."""

    def __init__(self, state: RaftState) -> None:
        self.state = state
        self.cluster_id = ""
        """Sent with hints; the core does not read it."""
        self.observe_in = 0
        """The next :class:`Observe` leaves in so many ticks."""
        self._observe_gap = 1
        self._hinted = False
        """A hint was followed in this tick."""
        self._inquired_at = -(1 << 62)
        """The tick at which voters were last asked about a node that is not known here."""

    def trusts(self, message: Message) -> bool:
        """Whether the sender may lead, or be voted for: a voter of the log here, on its disk.

        A sender that is not known is inquired about, while no leader is heard.
        """
        state = self.state
        voter_set, sender = state.voter_set, message.sender
        if voter_set.has(sender, message.directory_id) or sender in state.vouched_disks:
            return True
        if sender in state.vouched and sender not in voter_set.ids:
            return True
        leader = (state.leader_id, state.leader_directory, state.term)
        if (sender, message.directory_id, message.term) == leader:
            return True  # a leader that was voted out goes on until that is committed
        if not voter_set.voters and (sender in state.contacts or not state.contacts):
            return True
        if not isinstance(message, AppendEntries | InstallSnapshot | PreVote | Vote | TimeoutNow):
            return False
        state.refuse(message, f"directory {message.directory_id} of node {sender} is no voter's")
        if not state.in_lease and state.ticks - self._inquired_at >= state.settings.election_ticks:
            self._inquired_at = state.ticks
            for node_id in sorted({*state.contacts, *voter_set.ids} - {state.node_id, sender}):
                self._observe(node_id)
        return False

    def learn_voters(self, hint: LeaderHint) -> None:
        """A node named the voters and the leader: believed of a voter, and of a node in the
        settings whose vote the log here does not know.
        """
        state = self.state
        voter_set = state.voter_set
        known = voter_set.directory_of(hint.sender)
        if known == hint.directory_id:
            longer = hint.last_index > state.log.last_index
        elif known is None and hint.sender in state.contacts:
            longer = False
        else:
            return
        named = {*hint.voters, hint.leader_id} - {NO_NODE, state.node_id}
        state.vouched |= named
        if longer:
            state.vouched_disks |= named.intersection(voter_set.ids)

    # Finding the leader.

    def tick(self) -> None:
        """One tick of a node that does not vote: request the log while no leader is heard."""
        state = self.state
        self._hinted = False
        if state.leader_id != NO_NODE and state.election.elapsed < state.settings.election_ticks:
            self._observe_gap, self.observe_in = 1, 0
            return
        state.leader_id = NO_NODE
        self.observe_in -= 1
        if self.observe_in <= 0:
            self.observe_in = self._observe_gap
            self._observe_gap = min(2 * self._observe_gap, state.settings.election_ticks)
            for node_id in sorted({*state.contacts, *state.voter_set.ids} - {state.node_id}):
                self._observe(node_id)

    def _observe(self, node_id: int) -> None:
        state = self.state
        state.send(
            Observe(
                **state.head(node_id),
                last_index=state.log.last_index,
                last_term=state.log.last_term,
            )
        )

    def send_hint(self, message: Observe | PreVote) -> None:
        """Name the leader as far as it is known; the leader sends its log, too."""
        state = self.state
        state.send(
            LeaderHint(
                **state.head(message.sender),
                leader_id=state.leader_id,
                last_index=state.log.last_index,
                voters=state.voter_set.ids or state.contacts,
                cluster_id=self.cluster_id,
            )
        )

    def handle_leader_hint(self, hint: LeaderHint) -> None:
        """A node named the leader: request its log, one leader a tick at most."""
        state = self.state
        searching = state.leader_id == NO_NODE and not state.is_voter and not self._hinted
        if searching and hint.leader_id not in (NO_NODE, hint.sender, state.node_id):
            self._hinted = True
            self._observe(hint.leader_id)
