"""The leader's part: replication, commit, read barriers, transfer, membership, observers.

An entry commits when a majority of the voters has it on disk and it is of the leader's own term;
older entries commit with it (Raft 5.4.2). A leader that no quorum answers for an election timeout
steps down (check-quorum). A read barrier is confirmed when a quorum answered a heartbeat sent after
it was asked for, and only by a leader that has committed an entry of its term (thesis 6.4).
"""

from __future__ import annotations

from collections.abc import Callable

from kept.cluster.metadata.records import NoOpRecord, encode_batch
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import MAX_ENTRY_BYTES, Entry
from kept.cluster.raft.log import size_bytes
from kept.cluster.raft.messages import (
    NO_NODE,
    Append,
    AppendReply,
    InstallSnapshot,
    Observe,
    PreVote,
    SnapshotReply,
    TimeoutNow,
)
from kept.cluster.raft.progress import Pace, Progress
from kept.cluster.raft.ready import Role, Snapshot
from kept.cluster.raft.state import RaftState
from kept.cluster.raft.voter_set import check_change, voters_entry
from kept.storage.errors import InvalidRequest, MessageTooLarge, NotController, RequestTimedOut

NO_OP = encode_batch([NoOpRecord()])
"""The data of the entry with which a leader begins its term."""


class Leading(RaftState):
    """What a node does while it leads."""

    first_of_term = 0
    """The entry with which this node began to lead."""
    round = 0
    """Counts heartbeats; answers repeat it."""
    uncommitted_bytes = 0
    first_entry = b""
    """What the first leader of a new cluster writes in place of the no-op."""
    take_snapshot: Callable[[], Snapshot]
    """The shell's: a snapshot of what it has applied."""
    heartbeat_elapsed = 0
    transfer_elapsed = 0

    @property
    def commits_own_term(self) -> bool:
        """Whether it leads and an entry of its term is committed: only then may it decide."""
        return self._role is Role.LEADER and self.log.commit_index >= self.first_of_term

    def start_leading(self) -> None:
        """Elected: a first entry of this term, and everybody hears of it."""
        self._role = Role.LEADER
        self.leader_id = self.node_id
        self.predecessor, self.heard = self.heard, (self.node_id, self.ticks)
        self.soon = None
        self.attempts = 0
        self.suspect = NO_NODE
        self.deferred.clear()
        self.forget_vouched()
        self.progress = {
            v.node_id: Progress(v.directory_id, self.log.last_index + 1, self.ticks)
            for v in self.membership.voters
            if v.node_id != self.node_id
        }
        self.round = self.heartbeat_elapsed = self.uncommitted_bytes = 0
        self.first_of_term = self.log.last_index + 1
        new_cluster = self.log.last_index == 0 and self.first_entry
        self.append_own(self.first_entry if new_cluster else NO_OP)

    def append_own(self, data: bytes) -> int:
        """Add an entry of this term and send it on; returns its index."""
        entry = Entry(self.term, self.log.last_index + 1, data)
        self.log.append((entry,))
        self.membership.see((entry,))
        self.uncommitted_bytes += size_bytes(entry)
        self._keep_progress()
        self.broadcast(even_empty=False)
        return entry.index

    def _keep_progress(self) -> None:
        """Every voter has its progress, also one that just joined."""
        for voter in self.membership.voters:
            known = self.progress.get(voter.node_id)
            if voter.node_id != self.node_id and known is None:
                self.progress[voter.node_id] = Progress(
                    voter.directory_id, self.log.last_index, self.ticks
                )

    # Asked by the shell.

    def propose(self, data: bytes) -> int:
        """Add an entry; returns the index it has if it is committed.

        Raises NotController where this node does not lead or is handing leadership over,
        MessageTooLarge, RequestTimedOut while too much waits for a majority.
        """
        self._refuse_unless_leading()
        if self.transferee != NO_NODE:
            raise NotController(f"Leadership goes to node {self.transferee}", NO_NODE)
        if len(data) > MAX_ENTRY_BYTES:
            raise MessageTooLarge(f"An entry of {len(data)} bytes; {MAX_ENTRY_BYTES} is the limit")
        waiting = self.uncommitted_bytes
        if waiting and waiting + len(data) > self.settings.max_uncommitted_bytes:
            raise RequestTimedOut(f"Entries of {waiting} bytes wait for a majority of the voters")
        return self.append_own(data)

    def _refuse_unless_leading(self) -> None:
        if self._role is not Role.LEADER:
            known = f"node {self.leader_id} is" if self.leader_id != NO_NODE else "none is known"
            raise NotController(f"Node {self.node_id} is not the active controller; {known}",
                                self.leader_id)  # fmt: skip

    def change_voters(self, voters: tuple[Voter, ...]) -> int:
        """Let one voter join or leave; returns the index of the change.

        Raises NotController, InvalidRequest: while another change or this term's first entry is not
        committed, for more than one voter at once, for a joining one that does not follow yet.
        """
        self._refuse_unless_leading()
        if not self.commits_own_term or self.membership.changed_at > self.log.commit_index:
            raise InvalidRequest("The last change of the voters is not committed yet; try again")
        check_change(self.membership.voters, voters)
        for voter in voters:
            if self.membership.has(voter.node_id, voter.directory_id):
                continue
            follows = self.progress.get(voter.node_id)
            if (
                follows is None
                or follows.directory_id != voter.directory_id
                or follows.pace is not Pace.REPLICATE
            ):
                raise InvalidRequest(
                    f"Node {voter.node_id} (directory {voter.directory_id}) does not follow the "
                    f"metadata log yet: start it, wait until it is an observer, then add it"
                )
        return self.append_own(voters_entry(voters))

    def transfer(self, to: int) -> None:
        """Hand leadership to a voter; given up after an election timeout.

        Raises NotController, InvalidRequest for a node that does not vote.
        """
        self._refuse_unless_leading()
        if to == self.node_id:
            return
        if to not in self.membership.ids or to not in self.progress:
            raise InvalidRequest(f"Node {to} is no voter; voters are {self.membership.ids}")
        self.transferee = to
        self.transfer_elapsed = 0
        self._transfer_when_ready()

    def _transfer_when_ready(self) -> None:
        to = self.transferee
        if to != NO_NODE and self.progress[to].match_index == self.log.last_index:
            self.send(TimeoutNow(**self.head(to)))

    def read_barrier(self, token: object) -> None:
        """Ask until which index a read must wait; answered through ``reads`` or ``lost_reads``.

        Raises NotController.
        """
        self._refuse_unless_leading()
        if not self.commits_own_term:
            raise NotController("This controller has not committed an entry of its term yet",
                                self.node_id)  # fmt: skip
        self.round += 1
        self.pending_reads.append((token, self.log.commit_index, self.round))
        self._confirm_reads()
        if self.pending_reads:
            self.broadcast(even_empty=True)

    def _confirm_reads(self) -> None:
        if not self.pending_reads:
            return
        confirmed = self._reached_by_quorum(lambda progress: progress.round, self.round)
        done = [read for read in self.pending_reads if read[2] <= confirmed]
        if done:
            self.reads += ((token, index) for token, index, _ in done)
            del self.pending_reads[: len(done)]

    def _reached_by_quorum(self, of: Callable[[Progress], int], mine: int) -> int:
        """The largest value that a majority of the voters has reached; ``mine`` is this node's."""
        values: list[int] = []
        for voter in self.membership.voters:
            if voter.node_id == self.node_id:
                values.append(mine if voter.directory_id == self.directory_id else 0)
            else:
                progress = self.progress.get(voter.node_id)
                same = progress is not None and progress.directory_id == voter.directory_id
                values.append(of(progress) if progress is not None and same else 0)
        return sorted(values, reverse=True)[self.membership.quorum - 1]

    # Time.

    def tick_leader(self) -> None:
        """One tick of a leader."""
        election = self.settings.election_ticks
        heard = self._reached_by_quorum(lambda progress: progress.heard_at, self.ticks)
        if self.ticks - heard > election:
            self.become_follower(self.term, NO_NODE)
            return
        if self.transferee != NO_NODE:
            self.transfer_elapsed += 1
            if self.transfer_elapsed > election:
                self.transferee = NO_NODE
        self.heartbeat_elapsed += 1
        if self.heartbeat_elapsed >= self.settings.heartbeat_ticks:
            self.heartbeat_elapsed = 0
            self._forget_silent_observers()
            self.round += 1
            for progress in self.progress.values():
                progress.paused = False
            self.broadcast(even_empty=True)

    def _forget_silent_observers(self) -> None:
        patience = self.settings.observer_ticks
        for node_id in [
            node_id
            for node_id, progress in self.progress.items()
            if self.ticks - progress.heard_at > patience and node_id not in self.membership.ids
        ]:
            del self.progress[node_id]

    # Sending.

    def broadcast(self, *, even_empty: bool) -> None:
        """Send to every follower what it lacks; ``even_empty``: a heartbeat if that is nothing."""
        for node_id in self.progress:
            self._send_append(node_id, even_empty=even_empty)

    def _send_append(self, to: int, *, even_empty: bool) -> bool:
        """Send the next entries, or a snapshot; returns whether anything was sent."""
        progress = self.progress[to]
        if progress.pace is Pace.SNAPSHOT:
            return even_empty and self._send_while_snapshot(to, progress)
        if progress.paused:
            return False
        prev_index = progress.next_index - 1
        prev_term = self.log.term_at(prev_index)
        if prev_term is None:
            return self._send_snapshot(to, progress)
        entries: tuple[Entry, ...] = ()
        if len(progress.inflight) < self.settings.max_inflight:
            end = self.log.last_index + 1
            entries = self.log.entries(progress.next_index, end, self.settings.max_append_bytes)
        if not entries and not even_empty:
            return False
        self.send(
            Append(
                **self.head(to),
                prev_index=prev_index,
                prev_term=prev_term,
                entries=entries,
                commit_index=self.log.commit_index,
                round=self.round,
                acknowledged=progress.match_index,
                acknowledged_by=progress.directory_id,
            )
        )
        progress.sent_commit = self.log.commit_index
        progress.paused = progress.pace is Pace.PROBE
        if entries:
            progress.sent(entries[-1].index)
        return True

    def _send_snapshot(self, to: int, progress: Progress) -> bool:
        snapshot = self.take_snapshot()
        progress.pace = Pace.SNAPSHOT
        progress.inflight.clear()
        progress.next_index = snapshot.index + 1
        progress.snapshot_at = self.ticks
        self.send(
            InstallSnapshot(
                **self.head(to),
                last_index=snapshot.index,
                last_term=snapshot.term,
                image_bytes=snapshot.data,
                voters=snapshot.voters,
                round=self.round,
            )
        )
        return True

    def _send_while_snapshot(self, to: int, progress: Progress) -> bool:
        """A heartbeat that fits every log; the snapshot again if it was not answered for long."""
        if self.ticks - progress.snapshot_at > self.settings.snapshot_ticks:
            progress.probe(progress.match_index + 1)
            return self._send_append(to, even_empty=True)
        self.send(Append(**self.head(to), prev_index=0, prev_term=0, round=self.round))
        return True

    # Answers.

    def handle_append_reply(self, reply: AppendReply | SnapshotReply) -> None:
        """A follower answered."""
        progress = self.progress.get(reply.sender)
        if progress is None:
            return
        if reply.match_index > self.log.last_index or reply.round > self.round:
            return  # nobody can have that, or have heard of it
        if progress.directory_id != reply.directory_id:
            if self._is_heard_voter(reply.sender, progress):
                return
            # Another disk than the voters' record names follows: what it has does not count.
            progress = Progress(reply.directory_id, self.log.last_index + 1, self.ticks)
            self.progress[reply.sender] = progress
        progress.heard_at = self.ticks
        progress.round = max(progress.round, reply.round)
        if isinstance(reply, AppendReply) and not reply.accepted:
            meets, _ = self.log.last_of_term(reply.hint_index, reply.hint_term)
            if progress.refused(reply.match_index, meets + 1):
                self._send_append(reply.sender, even_empty=True)
        else:
            self._accepted(reply.sender, progress, reply.match_index)
        self._confirm_reads()

    def _is_heard_voter(self, node_id: int, progress: Progress) -> bool:
        """Whether the disk that votes answers: then another one under that id is a stranger's."""
        silent = self.ticks - progress.heard_at
        votes = self.membership.has(node_id, progress.directory_id)
        return votes and silent <= 2 * self.settings.heartbeat_ticks

    def _accepted(self, sender: int, progress: Progress, match_index: int) -> None:
        news = progress.accepted(match_index, self.log.base_index)
        if news:
            self.maybe_commit()
        if self._role is not Role.LEADER:
            return
        if news and progress.sent_commit < self.log.commit_index:
            self._send_append(sender, even_empty=True)
        while self._send_append(sender, even_empty=False):
            pass
        if sender == self.transferee:
            self._transfer_when_ready()

    def maybe_commit(self) -> None:
        """Commit what a majority has on disk, if that reaches into this term."""
        reached = self._reached_by_quorum(
            lambda progress: progress.match_index, self.log.stable_index
        )
        if reached <= self.log.commit_index or self.log.term_at(reached) != self.term:
            return
        first = self.log.commit_index + 1
        self.uncommitted_bytes -= sum(
            size_bytes(self.log.entry(index)) for index in range(first, reached + 1)
        )
        self.uncommitted_bytes = max(0, self.uncommitted_bytes)
        self.log.commit_to(reached)
        self.membership.committed(reached)
        if not self.is_voter and self.membership.changed_at <= reached:
            self._leave()
        else:
            self.broadcast(even_empty=True)

    def _leave(self) -> None:
        """This node was voted out, and that is committed."""
        self.broadcast(even_empty=True)
        self.hand_over()

    @property
    def successor(self) -> int:
        """Of the other voters that seem alive, the one that has most of the log; NO_NODE: none."""
        election = self.settings.election_ticks
        alive = {
            voter.node_id: self.progress[voter.node_id].match_index
            for voter in self.membership.voters
            if voter.node_id in self.progress
            and voter.node_id not in self.down
            and self.ticks - self.progress[voter.node_id].heard_at <= election
        }
        return max(alive, key=lambda node_id: alive[node_id], default=NO_NODE)

    def hand_over(self) -> None:
        """Stop leading; the best of the other voters takes over."""
        follows = [v.node_id for v in self.membership.voters if v.node_id in self.progress]
        if follows:
            best = max(follows, key=lambda node_id: self.progress[node_id].match_index)
            self.send(TimeoutNow(**self.head(best)))
        self.become_follower(self.term, NO_NODE)

    def handle_observe(self, message: Observe | PreVote) -> None:
        """A node asks for the log: send it, from where the logs meet."""
        known = self.progress.get(message.sender)
        if known is not None and known.directory_id == message.directory_id:
            known.heard_at = self.ticks
            if known.pace is Pace.SNAPSHOT:
                return
            known.probe(min(known.next_index, message.last_index + 1))
        elif self._takes_no(message.sender, known):
            return
        else:
            meets, _ = self.log.last_of_term(message.last_index, message.last_term)
            self.progress[message.sender] = Progress(message.directory_id, meets + 1, self.ticks)
        self._send_append(message.sender, even_empty=True)

    def _takes_no(self, node_id: int, known: Progress | None) -> bool:
        """Whether the log is not sent to a node: too many have it already, or the voter of that id
        is there, on its own disk.
        """
        if known is None:
            return len(self.progress) >= self.settings.max_observers
        return self._is_heard_voter(node_id, known)

    def forget_sent(self, node_id: int) -> None:
        """What was on its way to a node that died did not arrive."""
        progress = self.progress.get(node_id)
        if progress is not None:
            progress.probe(progress.match_index + 1)
