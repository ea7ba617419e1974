"""The leader: replication, commit, read barriers, transfer, changes of voters, observers.

An entry commits when a majority of the voters has it on disk and it is of the leader's own term;
older entries commit with it (Raft 5.4.2). A leader that no quorum answers for an election timeout
steps down (check-quorum). A read barrier is confirmed when a quorum answered a heartbeat sent after
it was asked for, and only by a leader that has committed an entry of its term (thesis 6.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kept.cluster.metadata.records import NoOpRecord, encode_batch
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import MAX_ENTRY_BYTES, Entry
from kept.cluster.raft.log import size_bytes
from kept.cluster.raft.messages import (
    NO_NODE,
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    Observe,
    PreVote,
    SnapshotReply,
    TimeoutNow,
)
from kept.cluster.raft.progress import Progress, ProgressState
from kept.cluster.raft.ready import Role, Snapshot
from kept.cluster.raft.state import RaftState
from kept.cluster.raft.voter_set import check_change, voters_entry
from kept.storage.errors import InvalidRequest, MessageTooLarge, NotController, RequestTimedOut

NO_OP = encode_batch([NoOpRecord()])
"""The data of the entry with which a leader begins its term."""


class Replicator:
    """What a node does while it leads: it brings the followers' logs to the end of its own."""

    def __init__(self, state: RaftState, take_snapshot: Callable[[], Snapshot]) -> None:
        """``take_snapshot`` gives the state after the last entry that was applied."""
        self.state = state
        self.take_snapshot = take_snapshot
        self.first_entry = b""
        """What the first leader of a new cluster writes in place of the no-op."""
        self.first_of_term = 0
        """The entry with which this node began to lead."""
        self.round = 0
        """Counts heartbeats; replies repeat it."""
        self.uncommitted_bytes = 0
        self.heartbeat_elapsed = 0
        self.transfer_elapsed = 0

    @property
    def commits_own_term(self) -> bool:
        """Whether it leads and an entry of its term is committed: only then may it decide."""
        return self.state.leads and self.state.log.commit_index >= self.first_of_term

    def start_leading(self) -> None:
        """Elected: a first entry of this term, and every follower gets it."""
        state = self.state
        state.role = Role.LEADER
        state.leader_id = state.node_id
        state.predecessor, state.last_leader = state.last_leader, (state.node_id, state.ticks)
        state.election.campaign_in_ticks = None
        state.election.attempts_left = 0
        state.election.suspect = NO_NODE
        state.election.deferred_pre_votes.clear()
        state.forget_vouched()
        state.progress = {
            v.node_id: Progress(v.directory_id, state.log.last_index + 1, state.ticks)
            for v in state.voter_set.voters
            if v.node_id != state.node_id
        }
        self.round = self.heartbeat_elapsed = self.uncommitted_bytes = 0
        self.first_of_term = state.log.last_index + 1
        new_cluster = state.log.last_index == 0 and self.first_entry
        self.append_own(self.first_entry if new_cluster else NO_OP)

    def append_own(self, data: bytes) -> int:
        """Add an entry of this term and send it on; returns its index."""
        state = self.state
        entry = Entry(state.term, state.log.last_index + 1, data)
        state.log.append((entry,))
        state.voter_set.appended((entry,))
        self.uncommitted_bytes += size_bytes(entry)
        self._track_voters()
        self.broadcast(even_empty=False)
        return entry.index

    def _track_voters(self) -> None:
        """Every voter has its progress, also one that just joined."""
        state = self.state
        for voter in state.voter_set.voters:
            progress = state.progress.get(voter.node_id)
            if voter.node_id != state.node_id and progress is None:
                state.progress[voter.node_id] = Progress(
                    voter.directory_id, state.log.last_index, state.ticks
                )

    # Calls of the shell.

    def propose(self, data: bytes) -> int:
        """Add an entry; returns the index it has if it is committed.

        Raises NotController where this node does not lead or is handing leadership over,
        MessageTooLarge, RequestTimedOut while too much waits for a majority.
        """
        state = self.state
        self._check_leads()
        if state.transferee != NO_NODE:
            raise NotController(f"Leadership goes to node {state.transferee}", NO_NODE)
        if len(data) > MAX_ENTRY_BYTES:
            raise MessageTooLarge(f"An entry of {len(data)} bytes; {MAX_ENTRY_BYTES} is the limit")
        waiting = self.uncommitted_bytes
        if waiting and waiting + len(data) > state.settings.max_uncommitted_bytes:
            raise RequestTimedOut(f"Entries of {waiting} bytes wait for a majority of the voters")
        return self.append_own(data)

    def _check_leads(self) -> None:
        state = self.state
        if not state.leads:
            known = f"node {state.leader_id} is" if state.leader_id != NO_NODE else "none is known"
            raise NotController(
                f"Node {state.node_id} is not the active controller; {known}", state.leader_id
            )

    def change_voters(self, voters: tuple[Voter, ...]) -> int:
        """Let one voter join or leave; returns the index of the change.

        Raises NotController, InvalidRequest: while another change or this term's first entry is not
        committed, for more than one voter at once, for a joining one that does not follow yet.
        """
        state = self.state
        self._check_leads()
        if not self.commits_own_term or state.voter_set.changed_at > state.log.commit_index:
            raise InvalidRequest("The last change of the voters is not committed yet; try again")
        check_change(state.voter_set.voters, voters)
        for voter in voters:
            if state.voter_set.has(voter.node_id, voter.directory_id):
                continue
            follows = state.progress.get(voter.node_id)
            if (
                follows is None
                or follows.directory_id != voter.directory_id
                or follows.state is not ProgressState.REPLICATE
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
        state = self.state
        self._check_leads()
        if to == state.node_id:
            return
        if to not in state.voter_set.ids or to not in state.progress:
            raise InvalidRequest(f"Node {to} is no voter; voters are {state.voter_set.ids}")
        state.transferee = to
        self.transfer_elapsed = 0
        self._transfer_when_ready()

    def _transfer_when_ready(self) -> None:
        state = self.state
        to = state.transferee
        if to != NO_NODE and state.progress[to].match_index == state.log.last_index:
            state.send(TimeoutNow(**state.head(to)))

    def read_barrier(self, token: object) -> None:
        """Confirm that this node leads; ``reads`` or ``lost_reads`` of a Ready name ``token`` then.

        Raises NotController.
        """
        state = self.state
        self._check_leads()
        if not self.commits_own_term:
            raise NotController(
                "This controller has not committed an entry of its term yet", state.node_id
            )
        self.round += 1
        state.reads.pending.append((token, state.log.commit_index, self.round))
        self._confirm_reads()
        if state.reads.pending:
            self.broadcast(even_empty=True)

    def _confirm_reads(self) -> None:
        state = self.state
        if not state.reads.pending:
            return
        confirmed = self._quorum_reached(lambda progress: progress.round, self.round)
        done = [read for read in state.reads.pending if read[2] <= confirmed]
        if done:
            state.reads.confirmed += ((token, index) for token, index, _ in done)
            del state.reads.pending[: len(done)]

    def _quorum_reached(self, of: Callable[[Progress], int], mine: int) -> int:
        """The largest value that a majority of the voters has reached; ``mine`` is this node's."""
        state = self.state
        values: list[int] = []
        for voter in state.voter_set.voters:
            if voter.node_id == state.node_id:
                values.append(mine if voter.directory_id == state.directory_id else 0)
            else:
                progress = state.progress.get(voter.node_id)
                same = progress is not None and progress.directory_id == voter.directory_id
                values.append(of(progress) if progress is not None and same else 0)
        return sorted(values, reverse=True)[state.voter_set.quorum - 1]

    # Time.

    def tick(self) -> None:
        """One tick of a leader."""
        state = self.state
        election = state.settings.election_ticks
        last_contact = self._quorum_reached(lambda progress: progress.last_contact, state.ticks)
        if state.ticks - last_contact > election:
            state.become_follower(state.term, NO_NODE)
            return
        if state.transferee != NO_NODE:
            self.transfer_elapsed += 1
            if self.transfer_elapsed > election:
                state.transferee = NO_NODE
        self.heartbeat_elapsed += 1
        if self.heartbeat_elapsed >= state.settings.heartbeat_ticks:
            self.heartbeat_elapsed = 0
            self._drop_silent_observers()
            self.round += 1
            for progress in state.progress.values():
                progress.paused = False
            self.broadcast(even_empty=True)

    def _drop_silent_observers(self) -> None:
        state = self.state
        patience = state.settings.observer_ticks
        for node_id in [
            node_id
            for node_id, progress in state.progress.items()
            if state.ticks - progress.last_contact > patience and node_id not in state.voter_set.ids
        ]:
            del state.progress[node_id]

    # Sending.

    def broadcast(self, *, even_empty: bool) -> None:
        """Send to every follower what it lacks; ``even_empty``: a heartbeat if that is nothing."""
        for node_id in self.state.progress:
            self._send_append(node_id, even_empty=even_empty)

    def _send_append(self, to: int, *, even_empty: bool) -> bool:
        """Send the next entries, or a snapshot; returns whether anything was sent."""
        state = self.state
        progress = state.progress[to]
        if progress.state is ProgressState.SNAPSHOT:
            return even_empty and self._send_while_snapshot(to, progress)
        if progress.paused:
            return False
        prev_index = progress.next_index - 1
        prev_term = state.log.term_at(prev_index)
        if prev_term is None:
            return self._send_snapshot(to, progress)
        entries: tuple[Entry, ...] = ()
        if len(progress.inflight) < state.settings.max_inflight:
            end = state.log.last_index + 1
            entries = state.log.entries(progress.next_index, end, state.settings.max_append_bytes)
        if not entries and not even_empty:
            return False
        state.send(
            AppendEntries(
                **state.head(to),
                prev_index=prev_index,
                prev_term=prev_term,
                entries=entries,
                commit_index=state.log.commit_index,
                round=self.round,
                acknowledged=progress.match_index,
                acknowledged_by=progress.directory_id,
            )
        )
        progress.sent_commit = state.log.commit_index
        progress.paused = progress.state is ProgressState.PROBE
        if entries:
            progress.sent(entries[-1].index)
        return True

    def _send_snapshot(self, to: int, progress: Progress) -> bool:
        state = self.state
        snapshot = self.take_snapshot()
        progress.state = ProgressState.SNAPSHOT
        progress.inflight.clear()
        progress.next_index = snapshot.index + 1
        progress.snapshot_at = state.ticks
        state.send(
            InstallSnapshot(
                **state.head(to),
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
        state = self.state
        if state.ticks - progress.snapshot_at > state.settings.snapshot_ticks:
            progress.probe(progress.match_index + 1)
            return self._send_append(to, even_empty=True)
        state.send(AppendEntries(**state.head(to), prev_index=0, prev_term=0, round=self.round))
        return True

    # Replies.

    def handle_append_reply(self, reply: AppendEntriesReply | SnapshotReply) -> None:
        """A follower answered."""
        state = self.state
        progress = state.progress.get(reply.sender)
        if progress is None:
            return
        if reply.match_index > state.log.last_index or reply.round > self.round:
            return  # nobody can have that, or have heard of it
        if progress.directory_id != reply.directory_id:
            if self._voter_is_active(reply.sender, progress):
                return
            # Another disk than the voters' record names follows: what it has does not count.
            progress = Progress(reply.directory_id, state.log.last_index + 1, state.ticks)
            state.progress[reply.sender] = progress
        progress.last_contact = state.ticks
        progress.round = max(progress.round, reply.round)
        if isinstance(reply, AppendEntriesReply) and not reply.accepted:
            meets, _ = state.log.last_of_term(reply.hint_index, reply.hint_term)
            if progress.refused(reply.match_index, meets + 1):
                self._send_append(reply.sender, even_empty=True)
        else:
            self._accepted(reply.sender, progress, reply.match_index)
        self._confirm_reads()

    def _voter_is_active(self, node_id: int, progress: Progress) -> bool:
        """Whether the disk that votes replies: then another one under that id is no voter's."""
        state = self.state
        silent = state.ticks - progress.last_contact
        votes = state.voter_set.has(node_id, progress.directory_id)
        return votes and silent <= 2 * state.settings.heartbeat_ticks

    def _accepted(self, sender: int, progress: Progress, match_index: int) -> None:
        state = self.state
        news = progress.accepted(match_index, state.log.base_index)
        if news:
            self.maybe_commit()
        if not state.leads:
            return
        if news and progress.sent_commit < state.log.commit_index:
            self._send_append(sender, even_empty=True)
        while self._send_append(sender, even_empty=False):
            pass
        if sender == state.transferee:
            self._transfer_when_ready()

    def maybe_commit(self) -> None:
        """Commit what a majority has on disk, if that reaches into this term."""
        state = self.state
        reached = self._quorum_reached(
            lambda progress: progress.match_index, state.log.stable_index
        )
        if reached <= state.log.commit_index or state.log.term_at(reached) != state.term:
            return
        first = state.log.commit_index + 1
        self.uncommitted_bytes -= sum(
            size_bytes(state.log.entry(index)) for index in range(first, reached + 1)
        )
        self.uncommitted_bytes = max(0, self.uncommitted_bytes)
        state.log.commit_to(reached)
        state.voter_set.committed(reached)
        if not state.is_voter and state.voter_set.changed_at <= reached:
            # This node was voted out, and that is committed.
            self.broadcast(even_empty=True)
            self.hand_over()
        else:
            self.broadcast(even_empty=True)

    @property
    def successor(self) -> int:
        """Of the other voters that seem alive, the one that has most of the log; NO_NODE: none."""
        return self._longest_log(filter(self.state.is_alive, self.state.voter_set.ids))

    def _longest_log(self, node_ids: Iterable[int]) -> int:
        """The follower that has most of the log; NO_NODE where there is none."""
        progress = self.state.progress
        return max(node_ids, key=lambda n: progress[n].match_index, default=NO_NODE)

    def hand_over(self) -> None:
        """Stop leading; the best of the other voters that seem alive takes over. Where none does,
        the best of all is told: the evidence may be wrong, and a dead one loses nothing by it.
        """
        state = self.state
        best = self.successor
        if best == NO_NODE:
            best = self._longest_log(n for n in state.voter_set.ids if n in state.progress)
        if best != NO_NODE:
            state.send(TimeoutNow(**state.head(best)))
        state.become_follower(state.term, NO_NODE)

    def handle_observe(self, message: Observe | PreVote) -> None:
        """A node requests the log: send it, from where the logs meet."""
        state = self.state
        progress = state.progress.get(message.sender)
        if progress is not None and progress.directory_id == message.directory_id:
            progress.last_contact = state.ticks
            if progress.state is ProgressState.SNAPSHOT:
                return
            progress.probe(min(progress.next_index, message.last_index + 1))
        elif self._refuses_observer(message.sender, progress):
            return
        else:
            meets, _ = state.log.last_of_term(message.last_index, message.last_term)
            state.progress[message.sender] = Progress(message.directory_id, meets + 1, state.ticks)
        self._send_append(message.sender, even_empty=True)

    def _refuses_observer(self, node_id: int, known: Progress | None) -> bool:
        """Whether a node gets no log: too many have it, or its id is a voter's on another disk."""
        if known is None:
            return len(self.state.progress) >= self.state.settings.max_observers
        return self._voter_is_active(node_id, known)

    def restart_probe(self, node_id: int) -> None:
        """What was on its way to a node that died did not arrive."""
        progress = self.state.progress.get(node_id)
        if progress is not None:
            progress.probe(progress.match_index + 1)
