"""Pre-vote, vote, and evidence that a leader died.

**Leases.** A voter that heard from a leader within an election timeout answers neither a pre-vote
nor a vote with yes, and does not even enter the vote's term: a node that lost its link, or was
voted out, disturbs nobody (thesis 4.2.3, 9.6). A transfer of leadership is excepted.

**Evidence.** The shell may know at once that the leader's process died: its connections broke and
a probe was refused. Then nobody waits for the election timeout: the first of the remaining voters
(by id) asks for pre-votes at once, the others a little later if it fails. Who has the same evidence
says yes; who still believes in the leader says no for now, has the leader probed by its own shell,
and says yes later if that proves the death. So wrong evidence costs a few messages: without a
majority that has the evidence too, nobody's term changes and the leader stays.

**Disks.** Grants are counted by voter, from the disk that votes: one grant more or a hundred from
the same voter, or one from a replaced disk, change nothing. An empty disk that is not yet one of
the founders grants nothing: what an earlier disk of that node promised is unknown.
"""

from __future__ import annotations

from typing import Final

from kept.cluster.metadata.wal import NO_VOTE
from kept.cluster.raft.message_guard import MAX_TERM
from kept.cluster.raft.messages import NO_NODE, PreVote, PreVoteReply, TimeoutNow, Vote, VoteReply
from kept.cluster.raft.ready import Role
from kept.cluster.raft.replicator import Replicator
from kept.cluster.raft.state import RaftState

SECOND_TICKS: Final = 2
"""How long the next voter waits for the first to succeed an evidently dead leader."""


class Elector:
    """How a node becomes leader, and helps others to."""

    def __init__(self, state: RaftState, replicator: Replicator) -> None:
        self.state = state
        self.replicator = replicator

    @property
    def may_vote(self) -> bool:
        """Whether a vote from this disk can be relied on."""
        return self.state.formed or self.state.log.last_index > 0

    def tick(self) -> None:
        """One tick of a node that does not lead."""
        state = self.state
        state.election.elapsed += 1
        if not state.is_voter:
            return
        if state.election.campaign_in_ticks is not None:
            state.election.campaign_in_ticks -= 1
            if state.election.campaign_in_ticks <= 0:
                state.election.campaign_in_ticks = None
                self.start_pre_vote()
        elif state.role is Role.PROSPECTIVE and state.election.attempts_left > 0:
            self.start_pre_vote()
        elif state.election.elapsed >= state.election.timeout:
            state.election.attempts_left = 0
            self.start_pre_vote()

    def campaign_soon(self) -> None:
        """A node that just started knows no leader: elect one, unless another node knows it."""
        state = self.state
        if state.is_voter and state.leader_id == NO_NODE and state.role is Role.FOLLOWER:
            heartbeat = state.settings.heartbeat_ticks
            state.election.campaign_in_ticks = (
                0 if len(state.voter_set.voters) == 1 else 1 + state.random(heartbeat + 2)
            )
            state.election.attempts_left = state.settings.election_ticks
            if state.election.campaign_in_ticks == 0:
                state.election.campaign_in_ticks = None
                self.start_pre_vote()

    # Campaigning.

    def start_pre_vote(self) -> None:
        """Begin a pre-vote, or repeat it."""
        state = self.state
        if not state.is_voter or state.disk_fails:
            return
        if state.role is not Role.PROSPECTIVE:
            state.role = Role.PROSPECTIVE
            state.leader_id = NO_NODE
            state.election.votes = {}
            state.restart_timer()
        elif state.election.elapsed >= state.election.timeout:
            state.election.votes = {}
            state.restart_timer()
        state.election.attempts_left -= state.election.attempts_left > 0
        for voter in state.voter_set.voters:
            if voter.node_id != state.node_id and not state.election.votes.get(voter.node_id):
                state.send(
                    PreVote(
                        **state.head(voter.node_id, state.term + 1),
                        last_index=state.log.last_index,
                        last_term=state.log.last_term,
                        suspect=state.election.suspect,
                    )
                )
        self._count_vote(state.node_id, True)

    def campaign(self, *, transfer: bool = False) -> None:
        """Enter the next term as candidate. The own vote counts once it is durable."""
        state = self.state
        if state.term >= MAX_TERM:
            return
        state.set_term(state.term + 1)
        state.vote, state.vote_directory = state.node_id, state.directory_id
        state.role = Role.CANDIDATE
        state.leader_id = NO_NODE
        state.election.votes = {}
        state.election.campaign_in_ticks = None
        state.restart_timer()
        for voter in state.voter_set.voters:
            if voter.node_id != state.node_id:
                state.send(
                    Vote(
                        **state.head(voter.node_id),
                        last_index=state.log.last_index,
                        last_term=state.log.last_term,
                        transfer=transfer,
                    )
                )

    def vote_is_durable(self) -> None:
        """The hard state was written: a candidate has its own vote now."""
        state = self.state
        if state.role is Role.CANDIDATE and state.hard_state == state.durable:
            self._count_vote(state.node_id, True)

    def _count_vote(self, voter: int, granted: bool) -> None:
        """Note a reply; act when the replies decide."""
        state = self.state
        state.election.votes[voter] = state.election.votes.get(voter, False) or granted
        quorum = state.voter_set.quorum
        ids = state.voter_set.ids
        given = sum(state.election.votes.get(node_id, False) for node_id in ids)
        if given >= quorum:
            if state.role is Role.PROSPECTIVE:
                self.campaign()
            else:
                self.replicator.start_leading()
            return
        possible = sum(state.election.votes.get(i, i not in state.down) for i in ids)
        if possible >= quorum or (
            state.role is Role.PROSPECTIVE and state.election.attempts_left > 0
        ):
            return
        repeat = state.role is Role.CANDIDATE and state.election.attempts_left > 0
        state.become_follower(state.term, NO_NODE)
        if repeat:
            state.election.campaign_in_ticks = 1 + state.random(SECOND_TICKS + 1)

    def handle_pre_vote_reply(self, reply: PreVoteReply) -> None:
        """A reply to a pre-vote."""
        if self.state.role is not Role.PROSPECTIVE or not self._votes(reply):
            return
        if reply.term == self.state.term + reply.granted:
            self._count_vote(reply.sender, reply.granted)

    def handle_vote_reply(self, reply: VoteReply) -> None:
        """A reply to a vote of this term."""
        if self.state.role is Role.CANDIDATE and self._votes(reply):
            self._count_vote(reply.sender, reply.granted)

    def _votes(self, reply: PreVoteReply | VoteReply) -> bool:
        return self.state.voter_set.has(reply.sender, reply.directory_id)

    def handle_timeout_now(self, message: TimeoutNow) -> None:
        """The leader hands over."""
        state = self.state
        if (
            state.role is Role.FOLLOWER
            and state.is_voter
            and not state.disk_fails
            and state.leader_id in (message.sender, NO_NODE)
        ):
            self.campaign(transfer=True)

    # Requests of candidates.

    def handle_pre_vote(self, request: PreVote) -> None:
        """Reply whether this node would vote for the sender."""
        state = self.state
        if not self.may_vote:
            return
        fits = state.log.is_up_to_date(request.last_index, request.last_term)
        granted = request.term > state.term and fits and not state.in_lease
        if granted:
            self._yield_to(request)
        elif request.term > state.term and fits and state.role is Role.FOLLOWER:
            state.election.deferred_pre_votes[request.sender] = request
            if request.suspect == state.leader_id:
                state.to_probe.add(request.suspect)
        elif not fits and not state.in_lease:
            self._preempt()
        state.send(
            PreVoteReply(
                **state.head(request.sender, request.term if granted else state.term),
                granted=granted,
            )
        )

    def _yield_to(self, request: PreVote) -> None:
        """Of two prospective candidates the one with the better claim goes on."""
        state = self.state
        mine = (-state.log.last_term, -state.log.last_index, state.node_id)
        if (-request.last_term, -request.last_index, request.sender) > mine:
            return
        if state.role is Role.PROSPECTIVE:
            attempts_left = state.election.attempts_left
            state.become_follower(state.term, NO_NODE)
            state.election.attempts_left = attempts_left
            state.election.campaign_in_ticks = SECOND_TICKS + 1 if attempts_left > 0 else None
        elif state.election.campaign_in_ticks is not None:
            state.election.campaign_in_ticks = max(state.election.campaign_in_ticks, SECOND_TICKS)

    def _preempt(self) -> None:
        """A candidate's log is too old to win, and no node leads: campaign without waiting for the
        timeout. (Of three voters one is left, and another one comes back.)
        """
        state = self.state
        if not state.is_voter or state.role not in (Role.FOLLOWER, Role.PROSPECTIVE):
            return
        state.election.attempts_left = max(state.election.attempts_left, SECOND_TICKS)
        if state.role is Role.FOLLOWER:
            state.election.campaign_in_ticks = 1

    def handle_vote(self, request: Vote) -> None:
        """The sender campaigns in this node's term; at most one disk gets its vote in a term."""
        state = self.state
        if not self.may_vote:
            return
        mine = (state.vote, state.vote_directory)
        free = state.vote == NO_VOTE and state.leader_id == NO_NODE
        granted = (
            request.term == state.term
            and (free or mine == (request.sender, request.directory_id))
            and state.log.is_up_to_date(request.last_index, request.last_term)
        )
        if granted:
            state.vote, state.vote_directory = request.sender, request.directory_id
            state.restart_timer()
            state.election.campaign_in_ticks = None
        state.send(VoteReply(**state.head(request.sender), granted=granted))

    # Evidence.

    def peer_down(self, node_id: int) -> None:
        """The shell has evidence that a node's process died. It may be wrong."""
        state = self.state
        if node_id == state.node_id:
            return
        state.down.add(node_id)
        if state.leads:
            self.replicator.restart_probe(node_id)
        elif node_id == state.leader_id:
            state.leader_id = NO_NODE
            state.election.suspect = node_id
            state.election.attempts_left = state.settings.election_ticks
            waiting = tuple(state.election.deferred_pre_votes.values())
            state.election.deferred_pre_votes.clear()
            for request in waiting:
                self.handle_pre_vote(request)
            self._succeed_leader(another_campaigns=bool(waiting))
        elif state.election.campaign_in_ticks is not None and state.election.suspect != NO_NODE:
            state.election.campaign_in_ticks = None  # it may have been the next in line
            self._succeed_leader(another_campaigns=False)

    def _succeed_leader(self, *, another_campaigns: bool) -> None:
        """Campaign at once, or after those who are first in line."""
        state = self.state
        if (
            not state.is_voter
            or state.role is not Role.FOLLOWER
            or state.election.campaign_in_ticks is not None
        ):
            return
        line = sorted(i for i in state.voter_set.ids if i not in state.down)
        place = line.index(state.node_id)
        if place == 0 and not another_campaigns:
            self.start_pre_vote()
        else:
            state.election.campaign_in_ticks = SECOND_TICKS + state.random(place + 1)
