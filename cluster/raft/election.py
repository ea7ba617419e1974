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

from kept.cluster.raft.leader import Leading
from kept.cluster.raft.message_guard import MAX_TERM
from kept.cluster.raft.messages import NO_NODE, PreVote, PreVoteReply, TimeoutNow, Vote, VoteReply
from kept.cluster.raft.ready import Role

SECOND_TICKS = 2
"""How long the next voter waits for the first to succeed an evidently dead leader."""


class Election(Leading):
    """How a node becomes leader, and helps others to."""

    formed = False
    """The voters of a new cluster have found each other (or the log is not empty)."""
    disk_fails = False
    """The disk took nothing lately: this node must not lead."""

    @property
    def may_vote(self) -> bool:
        """Whether a vote from this disk can be relied on."""
        return self.formed or self.log.last_index > 0

    def tick_waiting(self) -> None:
        """One tick of a node that does not lead."""
        self.elapsed += 1
        if not self.is_voter:
            return
        if self.soon is not None:
            self.soon -= 1
            if self.soon <= 0:
                self.soon = None
                self.ask()
        elif self._role is Role.PROSPECTIVE and self.attempts > 0:
            self.ask()
        elif self.elapsed >= self.timeout:
            self.attempts = 0
            self.ask()

    def start_soon(self) -> None:
        """A node that just started does not know of a leader: if nobody else does, elect one."""
        if self.is_voter and self.leader_id == NO_NODE and self._role is Role.FOLLOWER:
            heartbeat = self.settings.heartbeat_ticks
            self.soon = 0 if len(self.membership.voters) == 1 else 1 + self.random(heartbeat + 2)
            self.attempts = self.settings.election_ticks
            if self.soon == 0:
                self.soon = None
                self.ask()

    # Campaigning.

    def ask(self) -> None:
        """Begin a pre-vote, or repeat it."""
        if not self.is_voter or self.disk_fails:
            return
        if self._role is not Role.PROSPECTIVE:
            self._role = Role.PROSPECTIVE
            self.leader_id = NO_NODE
            self.votes = {}
            self.restart_timer()
        elif self.elapsed >= self.timeout:
            self.votes = {}
            self.restart_timer()
        self.attempts -= self.attempts > 0
        for voter in self.membership.voters:
            if voter.node_id != self.node_id and not self.votes.get(voter.node_id):
                self.send(
                    PreVote(
                        **self.head(voter.node_id, self.term + 1),
                        last_index=self.log.last_index,
                        last_term=self.log.last_term,
                        suspect=self.suspect,
                    )
                )
        self._count(self.node_id, True)

    def campaign(self, *, transfer: bool = False) -> None:
        """Enter the next term as candidate. The own vote counts once it is durable."""
        if self.term >= MAX_TERM:
            return
        self.set_term(self.term + 1)
        self.vote, self.vote_directory = self.node_id, self.directory_id
        self._role = Role.CANDIDATE
        self.leader_id = NO_NODE
        self.votes = {}
        self.soon = None
        self.restart_timer()
        for voter in self.membership.voters:
            if voter.node_id != self.node_id:
                self.send(
                    Vote(
                        **self.head(voter.node_id),
                        last_index=self.log.last_index,
                        last_term=self.log.last_term,
                        transfer=transfer,
                    )
                )

    def vote_is_durable(self) -> None:
        """The hard state was written: a candidate has its own vote now."""
        if self._role is Role.CANDIDATE and self.hard_state == self.durable:
            self._count(self.node_id, True)

    def _count(self, voter: int, granted: bool) -> None:
        """Note an answer; act when the answers decide."""
        self.votes[voter] = self.votes.get(voter, False) or granted
        quorum = self.membership.quorum
        ids = self.membership.ids
        given = sum(self.votes.get(node_id, False) for node_id in ids)
        if given >= quorum:
            if self._role is Role.PROSPECTIVE:
                self.campaign()
            else:
                self.start_leading()
            return
        possible = sum(self.votes.get(i, i not in self.down) for i in ids)
        if possible >= quorum or (self._role is Role.PROSPECTIVE and self.attempts > 0):
            return
        again = self._role is Role.CANDIDATE and self.attempts > 0
        self.become_follower(self.term, NO_NODE)
        if again:
            self.soon = 1 + self.random(SECOND_TICKS + 1)

    def handle_pre_vote_reply(self, reply: PreVoteReply) -> None:
        """Somebody answered a pre-vote."""
        if self._role is not Role.PROSPECTIVE or not self._votes(reply):
            return
        if reply.term == self.term + reply.granted:
            self._count(reply.sender, reply.granted)

    def handle_vote_reply(self, reply: VoteReply) -> None:
        """Somebody answered a vote of this term."""
        if self._role is Role.CANDIDATE and self._votes(reply):
            self._count(reply.sender, reply.granted)

    def _votes(self, reply: PreVoteReply | VoteReply) -> bool:
        return self.membership.has(reply.sender, reply.directory_id)

    def handle_timeout_now(self, message: TimeoutNow) -> None:
        """The leader hands over."""
        if (
            self._role is Role.FOLLOWER
            and self.is_voter
            and not self.disk_fails
            and self.leader_id
            in (
                message.sender,
                NO_NODE,
            )
        ):
            self.campaign(transfer=True)

    # Being asked.

    def handle_pre_vote(self, asked: PreVote) -> None:
        """Would this node vote for the sender?"""
        if not self.may_vote:
            return
        fits = self.log.is_up_to_date(asked.last_index, asked.last_term)
        granted = asked.term > self.term and fits and not self.in_lease
        if granted:
            self._step_aside(asked)
        elif asked.term > self.term and fits and self._role is Role.FOLLOWER:
            self.deferred[asked.sender] = asked
            if asked.suspect == self.leader_id:
                self.probes.add(asked.suspect)
        elif not fits and not self.in_lease:
            self._outdo()
        self.send(
            PreVoteReply(
                **self.head(asked.sender, asked.term if granted else self.term), granted=granted
            )
        )

    def _step_aside(self, asked: PreVote) -> None:
        """Of two that ask at the same time the one with the better claim goes on."""
        mine = (-self.log.last_term, -self.log.last_index, self.node_id)
        if (-asked.last_term, -asked.last_index, asked.sender) > mine:
            return
        if self._role is Role.PROSPECTIVE:
            attempts = self.attempts
            self.become_follower(self.term, NO_NODE)
            self.attempts = attempts
            self.soon = SECOND_TICKS + 1 if attempts > 0 else None
        elif self.soon is not None:
            self.soon = max(self.soon, SECOND_TICKS)

    def _outdo(self) -> None:
        """Somebody asks whose log is too old to win, and nobody leads: ask it, without waiting for
        the time-out. (Of three voters one is left, and another one comes back.)
        """
        if not self.is_voter or self._role not in (Role.FOLLOWER, Role.PROSPECTIVE):
            return
        self.attempts = max(self.attempts, SECOND_TICKS)
        if self._role is Role.FOLLOWER:
            self.soon = 1

    def handle_vote(self, asked: Vote) -> None:
        """The sender campaigns in this node's term; at most one disk gets its vote in a term."""
        if not self.may_vote:
            return
        mine = (self.vote, self.vote_directory)
        free = self.vote == NO_NODE and self.leader_id == NO_NODE
        granted = (
            asked.term == self.term
            and (free or mine == (asked.sender, asked.directory_id))
            and self.log.is_up_to_date(asked.last_index, asked.last_term)
        )
        if granted:
            self.vote, self.vote_directory = asked.sender, asked.directory_id
            self.restart_timer()
            self.soon = None
        self.send(VoteReply(**self.head(asked.sender), granted=granted))

    # Evidence.

    def peer_down(self, node_id: int) -> None:
        """The shell has evidence that a node's process died. It may be wrong."""
        if node_id == self.node_id:
            return
        self.down.add(node_id)
        if self._role is Role.LEADER:
            self.forget_sent(node_id)
        elif node_id == self.leader_id:
            self.leader_id = NO_NODE
            self.suspect = node_id
            self.attempts = self.settings.election_ticks
            waiting = tuple(self.deferred.values())
            self.deferred.clear()
            for asked in waiting:
                self.handle_pre_vote(asked)
            self._succeed(another_asks=bool(waiting))
        elif self.soon is not None and self.suspect != NO_NODE:
            self.soon = None  # it may have been the next in line
            self._succeed(another_asks=False)

    def _succeed(self, *, another_asks: bool) -> None:
        """Campaign at once, or after those who are first in line."""
        if not self.is_voter or self._role is not Role.FOLLOWER or self.soon is not None:
            return
        line = sorted(i for i in self.membership.ids if i not in self.down)
        place = line.index(self.node_id)
        if place == 0 and not another_asks:
            self.ask()
        else:
            self.soon = SECOND_TICKS + self.random(place + 1)
