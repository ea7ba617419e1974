"""The follower: appends and snapshots of the leader."""

from __future__ import annotations

from kept.cluster.raft.messages import (
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    SnapshotReply,
)
from kept.cluster.raft.ready import Snapshot
from kept.cluster.raft.state import RaftState


class Follower:
    """What a node does while another one leads."""

    def __init__(self, state: RaftState) -> None:
        self.state = state
        self.log_regression: AppendEntries | None = None
        """Shows that this node's log has lost entries since it acknowledged them: it must end."""

    def handle_append(self, message: AppendEntries) -> None:
        """Entries of the leader, or a heartbeat.

        What is there already stays, however old the message is: only an entry of another term in
        the same place is replaced, and everything after it.
        """
        state = self.state
        self._follow_sender(message)
        log = state.log
        if message.acknowledged > log.last_index and message.acknowledged_by == state.directory_id:
            self.log_regression = message
            return
        last = message.prev_index + len(message.entries)
        if message.prev_index < log.commit_index:
            self._accept(message, log.commit_index)
            return
        if not log.matches(message.prev_index, message.prev_term):
            hint_index, hint_term = log.last_of_term(message.prev_index, message.prev_term)
            state.send(
                AppendEntriesReply(
                    **state.head(message.sender),
                    accepted=False,
                    match_index=message.prev_index,
                    hint_index=hint_index,
                    hint_term=hint_term,
                    round=message.round,
                )
            )
            return
        for entry in message.entries:
            if not log.matches(entry.index, entry.term):
                if entry.index <= log.last_index:
                    log.truncate_from(entry.index)
                    state.voter_set.truncate_from(entry.index)
                rest = message.entries[entry.index - message.prev_index - 1 :]
                log.append(rest)
                state.voter_set.appended(rest)
                break
        if log.commit_to(min(message.commit_index, last)):
            state.voter_set.committed(log.commit_index)
        self._accept(message, last)

    def _accept(self, message: AppendEntries, match_index: int) -> None:
        """Acknowledge what is durable at once, and the rest when it is."""
        state = self.state
        durable = min(match_index, state.log.stable_index)
        head = state.head(message.sender)
        if durable < match_index and message.entries:
            state.send(
                AppendEntriesReply(
                    **head, accepted=True, match_index=match_index, round=message.round
                ),
                after_write=True,
            )
        else:
            state.send(
                AppendEntriesReply(**head, accepted=True, match_index=durable, round=message.round)
            )

    def handle_snapshot(self, message: InstallSnapshot) -> None:
        """The leader no longer has the entries that are missing here."""
        state = self.state
        self._follow_sender(message)
        log = state.log
        if message.last_index > log.commit_index:
            if log.matches(message.last_index, message.last_term):
                log.commit_to(message.last_index)
                state.voter_set.committed(message.last_index)
            else:
                snapshot = Snapshot(
                    message.last_index, message.last_term, message.image_bytes, message.voters
                )
                log.restore(snapshot)
                state.voter_set.restore(snapshot)
        state.send(
            SnapshotReply(
                **state.head(message.sender), match_index=message.last_index, round=message.round
            ),
            after_write=log.stable_index < message.last_index,
        )

    def _follow_sender(self, message: AppendEntries | InstallSnapshot) -> None:
        """The sender leads this term."""
        state = self.state
        state.follow(message.sender)
        state.leader_directory = message.directory_id
        if state.voter_set.has(message.sender, message.directory_id):
            state.forget_vouched()
