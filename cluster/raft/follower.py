"""The follower's part: appends and snapshots from the leader; and, without a vote, finding it."""

from __future__ import annotations

from kept.cluster.metadata.wal import NO_DIRECTORY
from kept.cluster.raft.election import Election
from kept.cluster.raft.messages import (
    NO_NODE,
    Append,
    AppendReply,
    InstallSnapshot,
    LeaderHint,
    Message,
    Observe,
    PreVote,
    SnapshotReply,
    TimeoutNow,
    Vote,
)
from kept.cluster.raft.ready import Snapshot


class Following(Election):
    """What a node does while another one leads."""

    contacts: tuple[int, ...] = ()
    """Nodes to ask for the leader, from configuration; the log's voters come on top."""
    cluster_id = ""
    """Told to those who ask; the core does not read it."""
    leader_directory = NO_DIRECTORY
    """The disk of the leader that was heard last."""
    inquired_at = -(1 << 62)
    """The tick at which voters were last asked about a node that is not known here."""
    observe_gap = 1
    observe_in = 0
    hinted = False
    set_back: Append | None = None
    """Shows that this node's log has lost entries since it acknowledged them: it must end."""

    def handle_append(self, message: Append) -> None:
        """Entries of the leader, or a heartbeat.

        What is there already stays, however old the message is: only an entry of another term in
        the same place is replaced, and everything after it.
        """
        self._hear(message)
        log = self.log
        if message.acknowledged > log.last_index and message.acknowledged_by == self.directory_id:
            self.set_back = message
            return
        last = message.prev_index + len(message.entries)
        if message.prev_index < log.commit_index:
            self._accept(message, log.commit_index)
            return
        if not log.matches(message.prev_index, message.prev_term):
            hint_index, hint_term = log.last_of_term(message.prev_index, message.prev_term)
            self.send(
                AppendReply(
                    **self.head(message.sender),
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
                    self.membership.truncate_from(entry.index)
                rest = message.entries[entry.index - message.prev_index - 1 :]
                log.append(rest)
                self.membership.see(rest)
                break
        if log.commit_to(min(message.commit_index, last)):
            self.membership.committed(log.commit_index)
        self._accept(message, last)

    def _accept(self, message: Append, match_index: int) -> None:
        """Acknowledge what is durable at once, and the rest when it is."""
        durable = min(match_index, self.log.stable_index)
        head = self.head(message.sender)
        if durable < match_index and message.entries:
            self.send(
                AppendReply(**head, accepted=True, match_index=match_index, round=message.round),
                after=True,
            )
        else:
            self.send(AppendReply(**head, accepted=True, match_index=durable, round=message.round))

    def handle_snapshot(self, message: InstallSnapshot) -> None:
        """The leader no longer has the entries that are missing here."""
        self._hear(message)
        log = self.log
        if message.last_index > log.commit_index:
            if log.matches(message.last_index, message.last_term):
                log.commit_to(message.last_index)
                self.membership.committed(message.last_index)
            else:
                snapshot = Snapshot(
                    message.last_index, message.last_term, message.image_bytes, message.voters
                )
                log.restore(snapshot)
                self.membership.restore(snapshot)
        self.send(
            SnapshotReply(
                **self.head(message.sender), match_index=message.last_index, round=message.round
            ),
            after=log.stable_index < message.last_index,
        )

    # Who is believed.

    def _hear(self, message: Append | InstallSnapshot) -> None:
        """The leader of this term speaks."""
        self.follow(message.sender)
        self.leader_directory = message.directory_id
        if self.membership.has(message.sender, message.directory_id):
            self.forget_vouched()

    def knows(self, message: Message) -> bool:
        """Whether the sender may lead, or be voted for: a voter of the log here, on its disk.

        A log that lags need not have all voters (Raft thesis 4.1: a new one may lead, or be the
        only one that can be elected). So where no leader is heard, the voters that are known are
        asked who votes, with :class:`Observe`; what they answer is believed of nodes that the log
        here does not name, and, from a voter with a longer log, of another disk, too, until a known
        leader is heard, or this node leads. An empty log names nobody: then the nodes of the
        settings are believed.
        """
        membership, sender = self.membership, message.sender
        if membership.has(sender, message.directory_id) or sender in self.vouched_disks:
            return True
        if sender in self.vouched and sender not in membership.ids:
            return True
        if (sender, message.directory_id, message.term) == (
            self.leader_id, self.leader_directory, self.term,
        ):  # fmt: skip
            return True  # a leader that was voted out goes on until that is committed
        if not membership.voters and (sender in self.contacts or not self.contacts):
            return True
        if not isinstance(message, Append | InstallSnapshot | PreVote | Vote | TimeoutNow):
            return False
        self.refuse(message, f"directory {message.directory_id} of node {sender} is no voter's")
        if not self.in_lease and self.ticks - self.inquired_at >= self.settings.election_ticks:
            self.inquired_at = self.ticks
            for node_id in sorted({*self.contacts, *membership.ids} - {self.node_id, sender}):
                self._observe(node_id)
        return False

    def vouch(self, hint: LeaderHint) -> None:
        """A node told who votes and who leads: believed of a voter, and, for nodes whose vote the
        log here does not know, of those in the settings.
        """
        membership = self.membership
        known = membership.directory_of(hint.sender)
        if known == hint.directory_id:
            longer = hint.last_index > self.log.last_index
        elif known is None and hint.sender in self.contacts:
            longer = False
        else:
            return
        named = {*hint.voters, hint.leader_id} - {NO_NODE, self.node_id}
        self.vouched |= named
        if longer:
            self.vouched_disks |= named.intersection(membership.ids)

    # Finding the leader, without a vote.

    def tick_observer(self) -> None:
        """One tick of a node that does not vote: ask for the leader while none is heard."""
        self.hinted = False
        if self.leader_id != NO_NODE and self.elapsed < self.settings.election_ticks:
            self.observe_gap, self.observe_in = 1, 0
            return
        self.leader_id = NO_NODE
        self.observe_in -= 1
        if self.observe_in <= 0:
            self.observe_in = self.observe_gap
            self.observe_gap = min(2 * self.observe_gap, self.settings.election_ticks)
            for node_id in sorted({*self.contacts, *self.membership.ids} - {self.node_id}):
                self._observe(node_id)

    def _observe(self, node_id: int) -> None:
        self.send(
            Observe(
                **self.head(node_id), last_index=self.log.last_index, last_term=self.log.last_term
            )
        )

    def answer_observe(self, message: Observe | PreVote) -> None:
        """Tell who leads; the leader sends the log, too."""
        self.send(
            LeaderHint(
                **self.head(message.sender),
                leader_id=self.leader_id,
                last_index=self.log.last_index,
                voters=self.membership.ids or self.contacts,
                cluster_id=self.cluster_id,
            )
        )

    def handle_hint(self, hint: LeaderHint) -> None:
        """Somebody told who leads: ask there, once a tick at most."""
        looks = self.leader_id == NO_NODE and not self.is_voter and not self.hinted
        if looks and hint.leader_id not in (NO_NODE, hint.sender, self.node_id):
            self.hinted = True
            self._observe(hint.leader_id)
