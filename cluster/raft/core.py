"""The Raft core: one node's state machine, without disk, network, clock or randomness of its own.

:mod:`kept.cluster.raft` says what the shell owes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY, Entry, HardState
from kept.cluster.raft.elector import Elector
from kept.cluster.raft.follower import Follower
from kept.cluster.raft.log import RaftLog
from kept.cluster.raft.message_guard import TERM_STEP, flaw
from kept.cluster.raft.messages import (
    NO_NODE,
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    LeaderHint,
    Message,
    Observe,
    PreVote,
    PreVoteReply,
    SnapshotReply,
    TimeoutNow,
    Vote,
    VoteReply,
)
from kept.cluster.raft.observer import Observer
from kept.cluster.raft.ready import RaftSettings, Ready, Role, Snapshot
from kept.cluster.raft.replicator import Replicator
from kept.cluster.raft.state import RaftState
from kept.cluster.raft.voter_set import VoterSet
from kept.storage.errors import InvariantViolation


class StoredLog(Protocol):
    """What the core reads, once, of the log on disk: a ``WriteAheadLog`` is one."""

    @property
    def base_index(self) -> int:
        """The entry before the first one."""

    @property
    def base_term(self) -> int:
        """Its term."""

    def entries(self, first: int, max_bytes: int) -> Iterable[Entry]:
        """The entries from ``first`` on."""


class RaftCore:
    """One node: the parts of Raft over one state, and the messages and calls that each one gets.

    All calls are made by one thread; none blocks. Shells read ``state``, and change it by calls.
    """

    def __init__(
        self,
        *,
        node_id: int,
        voters: tuple[Voter, ...],
        log: StoredLog,
        random: Callable[[int], int],
        take_snapshot: Callable[[], Snapshot],
        directory_id: UUID = NO_DIRECTORY,
        hard_state: HardState | None = None,
        settings: RaftSettings | None = None,
        contacts: tuple[int, ...] = (),
        applied: int = 0,
    ) -> None:
        """``voters``: those of the snapshot below the log; for a new cluster the founders, with
        their directory ids; none for a node that joins. ``random(n)`` gives 0 to n - 1.

        ``contacts``: who may know the leader, for a node without a vote. ``applied``: the index of
        a durable snapshot, which may be ahead of the log's base; it and what precedes it was
        committed.
        """
        entries = list(log.entries(log.base_index + 1, 1 << 62))
        voter_set = VoterSet(log.base_index, voters)
        voter_set.appended(entries)
        state = self.state = RaftState(
            node_id=node_id,
            directory_id=directory_id,
            log=RaftLog(log.base_index, log.base_term, entries),
            voter_set=voter_set,
            durable=hard_state or HardState(),
            random=random,
            settings=settings or RaftSettings(),
        )
        state.log.commit_to(applied)
        state.voter_set.committed(state.log.commit_index)
        state.contacts = contacts
        state.formed = bool(voters)
        self.replicator = Replicator(state, take_snapshot)
        self.elector = Elector(state, self.replicator)
        self.follower = Follower(state)
        self.observer = Observer(state)
        self._outstanding: Ready | None = None
        self._announced = (self.committed_to, self.role, self.leader_id)
        self.elector.campaign_soon()

    @property
    def log(self) -> RaftLog:
        """The entries."""
        return self.state.log

    @property
    def term(self) -> int:
        """The current term; it never falls."""
        return self.state.term

    @property
    def role(self) -> Role:
        """What this node is in its term."""
        role = self.state.role
        return Role.OBSERVER if role is Role.FOLLOWER and not self.state.is_voter else role

    @property
    def leader_id(self) -> int:
        """Who leads this term, as far as known; NO_NODE while it is not."""
        return self.state.leader_id

    @property
    def commit_index(self) -> int:
        """A majority has the entries up to here."""
        return self.log.commit_index

    @property
    def committed_to(self) -> int:
        """Entries up to here may be applied."""
        return self.log.committed_to

    @property
    def voters(self) -> tuple[Voter, ...]:
        """Who votes, by the newest record in the log."""
        return self.state.voter_set.voters

    def form(self, voters: tuple[Voter, ...], first_entry: bytes) -> None:
        """The founders of a new cluster have found each other: this empty node is one of them."""
        if self.log.last_index:
            raise InvariantViolation(f"a new cluster over {self.log.last_index} entries")
        self.state.voter_set.form(voters)
        self.replicator.first_entry = first_entry
        self.state.formed = True
        self.elector.campaign_soon()

    def compact(self, index: int) -> None:
        """A durable snapshot holds the entries up to ``index``: forget them."""
        self.log.compact(index)

    # Input.

    def tick(self) -> None:
        """Time passes: one tick."""
        state = self.state
        state.ticks += 1
        if state.leads:
            self.replicator.tick()
            return
        self.elector.tick()
        if not state.is_voter:
            self.observer.tick()

    def peer_down(self, node_id: int) -> None:
        """The shell has evidence that a node's process died. It may be wrong."""
        self.elector.peer_down(node_id)

    def propose(self, data: bytes) -> int:
        """Add an entry: :meth:`Replicator.propose`."""
        return self.replicator.propose(data)

    def change_voters(self, voters: tuple[Voter, ...]) -> int:
        """Let one voter join or leave: :meth:`Replicator.change_voters`."""
        return self.replicator.change_voters(voters)

    def transfer(self, to: int) -> None:
        """Hand leadership to a voter: :meth:`Replicator.transfer`."""
        self.replicator.transfer(to)

    def read_barrier(self, token: object) -> None:
        """Confirm that this node leads: :meth:`Replicator.read_barrier`."""
        self.replicator.read_barrier(token)

    def step(self, message: Message) -> None:
        """A message arrived. Old, repeated or misdirected ones change nothing."""
        state, observer = self.state, self.observer
        if message.to != state.node_id or message.sender == state.node_id:
            return
        wrong = flaw(message)
        if wrong:
            state.refuse(message, f"it cannot be true: {wrong}")
            return
        state.down.discard(message.sender)
        votes = state.voter_set.has(message.sender, message.directory_id)
        match message:
            case Observe():
                observer.send_hint(message)
                if state.leads:
                    self.replicator.handle_observe(message)
            case LeaderHint():
                observer.learn_voters(message)
                observer.handle_leader_hint(message)
            case PreVote():
                if state.leads and not votes:
                    observer.send_hint(message)
                    self.replicator.handle_observe(message)
                elif observer.trusts(message):
                    self.elector.handle_pre_vote(message)
            case PreVoteReply(granted=True):
                self.elector.handle_pre_vote_reply(message)
            case AppendEntriesReply() | SnapshotReply() if not votes:
                # An observer follows the leader's term. It has no vote, so it moves no term.
                if message.term == state.term:
                    self._dispatch(message)
            case _ if observer.trusts(message) and self._enter_term(message):
                self._dispatch(message)

    def _enter_term(self, message: Message) -> bool:
        """Follow a later term; reject an earlier one; returns whether to go on."""
        state = self.state
        if message.term < state.term:
            self._reject_old_term(message)
            return False
        if message.term > state.term:
            if isinstance(message, Vote) and not message.transfer and state.in_lease:
                return False
            if message.term > state.term + TERM_STEP:
                state.refuse(message, f"its term {message.term} is far beyond {state.term} here")
                if state.is_voter or not state.in_lease:
                    state.become_follower(state.term + TERM_STEP, NO_NODE)
                return False
            leads = isinstance(message, AppendEntries | InstallSnapshot)
            state.become_follower(message.term, message.sender if leads else NO_NODE)
        return True

    def _reject_old_term(self, message: Message) -> None:
        """Tell a deposed leader or a late candidate which term it is."""
        state = self.state
        head = state.head(message.sender)
        if isinstance(message, AppendEntries):
            index = message.prev_index
            state.send(AppendEntriesReply(**head, accepted=False, match_index=index))
        elif isinstance(message, InstallSnapshot):
            state.send(AppendEntriesReply(**head, accepted=False, match_index=message.last_index))
        elif isinstance(message, Vote):
            state.send(VoteReply(**head, granted=False))

    def _dispatch(self, message: Message) -> None:
        state = self.state
        match message:
            case AppendEntries() | InstallSnapshot():
                if state.leads:
                    state.refuse(message, f"it is of term {state.term}, which this node leads")
                elif isinstance(message, AppendEntries):
                    self.follower.handle_append(message)
                else:
                    self.follower.handle_snapshot(message)
            case AppendEntriesReply() | SnapshotReply():
                if state.leads:
                    self.replicator.handle_append_reply(message)
            case Vote():
                self.elector.handle_vote(message)
            case VoteReply():
                self.elector.handle_vote_reply(message)
            case PreVoteReply():
                self.elector.handle_pre_vote_reply(message)
            case TimeoutNow():
                self.elector.handle_timeout_now(message)

    # Output.

    def drain_messages(self) -> tuple[Message, ...]:
        """What may be sent at once, in order, even while a :class:`Ready` is being written."""
        messages = tuple(self.state.sendable)
        self.state.sendable.clear()
        return messages

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`ready` has anything to give."""
        state = self.state
        return self._outstanding is None and bool(
            state.sendable
            or state.sendable_after_write
            or self.log.has_unwritten
            or state.hard_state != state.durable
            or state.reads.confirmed
            or state.reads.lost
            or self._announced != (self.committed_to, self.role, state.leader_id)
        )

    def ready(self) -> Ready:
        """Everything to be done now; :meth:`advance` must follow before the next."""
        state = self.state
        if self._outstanding is not None:
            raise InvariantViolation("a second Ready before the first was advanced")
        snapshot, cut, entries = self.log.next_write()
        ready = Ready(
            hard_state=state.hard_state if state.hard_state != state.durable else None,
            snapshot=snapshot,
            truncate_from=cut,
            entries=entries,
            messages=(*self.drain_messages(), *state.sendable_after_write),
            reads=tuple(state.reads.confirmed),
            lost_reads=tuple(state.reads.lost),
        )
        state.sendable_after_write.clear()
        state.reads.confirmed.clear()
        state.reads.lost.clear()
        commit = min(self.log.commit_index, self.log.last_index)
        self._announced = (commit, self.role, state.leader_id)
        self._outstanding = ready
        return ready

    def advance(self, ready: Ready) -> None:
        """What ``ready`` asked to write is durable."""
        state = self.state
        if ready is not self._outstanding:
            raise InvariantViolation("advanced what is not outstanding")
        self._outstanding = None
        state.disk_fails = False
        self.log.write_done()
        if ready.hard_state is not None:
            state.durable = ready.hard_state
            self.elector.vote_is_durable()
        if state.leads:
            self.replicator.maybe_commit()

    def announced(self) -> None:
        """The shell knows commit index, role and leader: they alone are no reason for a Ready."""
        self._announced = (self.committed_to, self.role, self.state.leader_id)

    def resign(self) -> None:
        """The disk takes nothing: let another voter lead, and campaign no more until it does."""
        state = self.state
        state.disk_fails = True
        state.election.campaign_in_ticks = None
        if state.leads:
            self.replicator.hand_over()
        elif state.role is not Role.FOLLOWER:
            state.become_follower(state.term, NO_NODE)

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the state contradicts itself."""
        state = self.state
        self.log.check_invariants()
        if (state.leads) != (state.leader_id == state.node_id):
            raise InvariantViolation(f"{state.role}, but node {state.leader_id} leads")
        if state.progress and state.role is not Role.LEADER:
            raise InvariantViolation(f"{state.role} with followers")
        if state.role is Role.CANDIDATE and state.vote != state.node_id:
            raise InvariantViolation(f"a candidate that voted for {state.vote}")
        if state.term < max(self.log.last_term, state.durable.term):
            raise InvariantViolation(f"term {state.term} after {self.log.last_term}")
        for progress in state.progress.values():
            progress.check_invariants()
            if progress.match_index > self.log.last_index:
                raise InvariantViolation(
                    f"a follower matches up to {progress.match_index} of {self.log.last_index}"
                )
