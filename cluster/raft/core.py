"""The Raft core: one node's state machine, without disk, network, clock or randomness of its own.

:mod:`kept.cluster.raft` says what the shell owes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID

from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY, Entry, HardState
from kept.cluster.raft.follower import Following
from kept.cluster.raft.log import RaftLog
from kept.cluster.raft.message_guard import TERM_STEP, flaw
from kept.cluster.raft.messages import (
    NO_NODE,
    Append,
    AppendReply,
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
from kept.cluster.raft.ready import RaftSettings, Ready, Role, Snapshot
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


class RaftCore(Following):
    """One node. All calls are made by one thread; none blocks."""

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
        first_entry: bytes = b"",
        applied: int = 0,
    ) -> None:
        """``voters``: those of the snapshot below the log; for a new cluster the founders, with
        their directory ids; none for a node that joins. ``random(n)`` gives 0 to n - 1.

        ``contacts``: who may know the leader, for a node without a vote. ``first_entry``: what the
        first leader writes into an empty log. ``applied``: the index of a durable snapshot, which
        may be ahead of the log's base; it and what precedes it was committed.
        """
        entries = list(log.entries(log.base_index + 1, 1 << 62))
        membership = VoterSet(log.base_index, voters)
        membership.see(entries)
        super().__init__(
            node_id=node_id,
            directory_id=directory_id,
            log=RaftLog(log.base_index, log.base_term, entries),
            membership=membership,
            hard_state=hard_state or HardState(),
            random=random,
            settings=settings or RaftSettings(),
        )
        self.log.commit_to(applied)
        self.membership.committed(self.log.commit_index)
        self.take_snapshot = take_snapshot
        self.contacts = contacts
        self.first_entry = first_entry
        self.formed = bool(voters)
        self._outstanding: Ready | None = None
        self._told = (self.committed_to, self.role, self.leader_id)
        self.start_soon()

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
        return self.membership.voters

    def form(self, voters: tuple[Voter, ...], first_entry: bytes) -> None:
        """The founders of a new cluster have found each other: this empty node is one of them."""
        if self.log.last_index:
            raise InvariantViolation(f"a new cluster over {self.log.last_index} entries")
        self.membership.form(voters)
        self.first_entry = first_entry
        self.formed = True
        self.start_soon()

    def compact(self, index: int) -> None:
        """A durable snapshot holds the entries up to ``index``: forget them."""
        self.log.compact(index)

    # Input.

    def tick(self) -> None:
        """Time passes: one tick."""
        self.ticks += 1
        if self._role is Role.LEADER:
            self.tick_leader()
            return
        self.tick_waiting()
        if not self.is_voter:
            self.tick_observer()

    def step(self, message: Message) -> None:
        """A message arrived. Old, repeated or misdirected ones change nothing."""
        if message.to != self.node_id or message.sender == self.node_id:
            return
        wrong = flaw(message)
        if wrong:
            self.refuse(message, f"it cannot be true: {wrong}")
            return
        self.down.discard(message.sender)
        match message:
            case Observe():
                self.answer_observe(message)
                if self._role is Role.LEADER:
                    self.handle_observe(message)
            case LeaderHint():
                self.vouch(message)
                self.handle_hint(message)
            case PreVote():
                if self._role is Role.LEADER and not self.membership.has(
                    message.sender, message.directory_id
                ):
                    self.answer_observe(message)
                    self.handle_observe(message)
                elif self.knows(message):
                    self.handle_pre_vote(message)
            case PreVoteReply(granted=True):
                self.handle_pre_vote_reply(message)
            case AppendReply() | SnapshotReply() if not self.membership.has(
                message.sender, message.directory_id
            ):
                # An observer follows the leader's term. It has no vote, so it moves no term.
                if message.term == self.term:
                    self._dispatch(message)
            case _ if self.knows(message) and self._enter_term(message):
                self._dispatch(message)

    def _enter_term(self, message: Message) -> bool:
        """Follow a later term; answer an earlier one; returns whether to go on."""
        if message.term < self.term:
            self._answer_old(message)
            return False
        if message.term > self.term:
            if isinstance(message, Vote) and not message.transfer and self.in_lease:
                return False
            if message.term > self.term + TERM_STEP:
                self.refuse(message, f"its term {message.term} is far beyond {self.term} here")
                if self.is_voter or not self.in_lease:
                    self.become_follower(self.term + TERM_STEP, NO_NODE)
                return False
            leads = isinstance(message, Append | InstallSnapshot)
            self.become_follower(message.term, message.sender if leads else NO_NODE)
        return True

    def _answer_old(self, message: Message) -> None:
        """Tell a deposed leader or a late candidate which term it is."""
        head = self.head(message.sender)
        if isinstance(message, Append):
            index = message.prev_index
            self.send(AppendReply(**head, accepted=False, match_index=index))
        elif isinstance(message, InstallSnapshot):
            self.send(AppendReply(**head, accepted=False, match_index=message.last_index))
        elif isinstance(message, Vote):
            self.send(VoteReply(**head, granted=False))

    def _dispatch(self, message: Message) -> None:
        match message:
            case Append() | InstallSnapshot():
                if self._role is Role.LEADER:
                    self.refuse(message, f"it is of term {self.term}, which this node leads")
                elif isinstance(message, Append):
                    self.handle_append(message)
                else:
                    self.handle_snapshot(message)
            case AppendReply() | SnapshotReply():
                if self._role is Role.LEADER:
                    self.handle_append_reply(message)
            case Vote():
                self.handle_vote(message)
            case VoteReply():
                self.handle_vote_reply(message)
            case PreVoteReply():
                self.handle_pre_vote_reply(message)
            case TimeoutNow():
                self.handle_timeout_now(message)

    # Output.

    def take_messages(self) -> tuple[Message, ...]:
        """What may be sent at once, in order, even while a :class:`Ready` is being written."""
        messages = tuple(self._free)
        self._free.clear()
        return messages

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`ready` has anything to give."""
        return self._outstanding is None and bool(
            self._free
            or self._after
            or self.log.waits
            or self.hard_state != self.durable
            or self.reads
            or self.lost_reads
            or self._told != (self.committed_to, self.role, self.leader_id)
        )

    def ready(self) -> Ready:
        """Everything to be done now; :meth:`advance` must follow before the next."""
        if self._outstanding is not None:
            raise InvariantViolation("a second Ready before the first was advanced")
        snapshot, cut, entries = self.log.hand_out()
        commit = min(self.log.commit_index, self.log.last_index)
        ready = Ready(
            hard_state=self.hard_state if self.hard_state != self.durable else None,
            snapshot=snapshot,
            truncate_from=cut,
            entries=entries,
            messages=(*self.take_messages(), *self._after),
            committed_to=commit,
            reads=tuple(self.reads),
            lost_reads=tuple(self.lost_reads),
            role=self.role,
            leader_id=self.leader_id,
        )
        self._after.clear()
        self.reads.clear()
        self.lost_reads.clear()
        self._told = (commit, self.role, self.leader_id)
        self._outstanding = ready
        return ready

    def advance(self, ready: Ready) -> None:
        """What ``ready`` asked to write is durable."""
        if ready is not self._outstanding:
            raise InvariantViolation("advanced what is not outstanding")
        self._outstanding = None
        self.disk_fails = False
        self.log.written()
        if ready.hard_state is not None:
            self.durable = ready.hard_state
            self.vote_is_durable()
        if self._role is Role.LEADER:
            self.maybe_commit()

    def acknowledge(self) -> None:
        """The shell knows commit index, role and leader: they alone are no reason for a Ready."""
        self._told = (self.committed_to, self.role, self.leader_id)

    def resign(self) -> None:
        """The disk takes nothing: let another voter lead, and campaign no more until it does."""
        self.disk_fails = True
        self.soon = None
        if self._role is Role.LEADER:
            self.hand_over()
        elif self._role is not Role.FOLLOWER:
            self.become_follower(self.term, NO_NODE)

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the state contradicts itself."""
        self.log.check_invariants()
        if (self._role is Role.LEADER) != (self.leader_id == self.node_id):
            raise InvariantViolation(f"{self._role}, but node {self.leader_id} leads")
        if self.progress and self._role is not Role.LEADER:
            raise InvariantViolation(f"{self._role} with followers")
        if self._role is Role.CANDIDATE and self.vote != self.node_id:
            raise InvariantViolation(f"a candidate that voted for {self.vote}")
        if self.term < max(self.log.last_term, self.durable.term):
            raise InvariantViolation(f"term {self.term} after {self.log.last_term}")
        for progress in self.progress.values():
            progress.check_invariants()
            if progress.match_index > self.log.last_index:
                raise InvariantViolation(
                    f"a follower matches up to {progress.match_index} of {self.log.last_index}"
                )
