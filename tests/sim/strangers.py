"""Somebody who is no node of the cluster speaks to its nodes, as the listener between nodes would
pass it on: Raft messages into the metadata cores, Fetch requests of replicas into the leaders.

A stranger knows everything but what it cannot know or be: it has a node id that no voter has, or a
voter's id with another directory, or says in a voter's name what no voter says (fields that
contradict each other, terms that no election reaches); as a replica it has a follower's id and all
the leader has, and not that broker's epoch. Whoever has all of that right is the node, for its
peers: that one is told from others by who may reach the listener (SECURITY.md).

Every rule must hold beside it, and it must not keep the cluster from coming to rest.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.message_guard import MAX_TERM, TERM_STEP
from kept.cluster.raft.messages import (
    Append,
    AppendReply,
    LeaderHint,
    Message,
    PreVoteReply,
    TimeoutNow,
    Vote,
    VoteReply,
)
from kept.replication.fetch_messages import FetchRequest, PartitionRequest
from tests.cluster.raft.forged import forged
from tests.cluster.raft.trial import data
from tests.sim.cluster import CORE_KINDS, ClusterHistory
from tests.sim.node import SimNode
from tests.sim.world import MS

if TYPE_CHECKING:
    from kept.replication.partition import Partition

UNKNOWN = (9, 1000, 2**31 - 1, -1, 2**31)
"""Node ids that nobody has."""
ELSEWHERE = UUID(int=10**6)
"""The directory of no node."""


class Strangers:
    """See the module."""

    def __init__(self, history: StrangersHistory) -> None:
        self.history = history
        self.world = history.world
        self.random = Random(f"strangers {history.seed}")
        self.pace_ms = self.random.choice((5, 50, 300))

    def start(self) -> None:
        """Until all is healed."""
        if self.history.nemesis.healed:
            return
        self.world.after(self.random.randint(1, 2 * self.pace_ms) * MS, self.start)
        machine = self.random.choice(self.history.machines)
        if isinstance(machine.app, SimNode) and not machine.stalled:
            self.random.choice((self.unknown, self.another_disk, self.impossible, self.replica))(
                machine.app
            )

    def say(self, app: SimNode, message: Message, what: str) -> None:
        """Let a node hear it."""
        self.world.note(app.machine.name, f"<- {what}", message)
        self.world.counts[f"messages of {what}"] += 1
        app.machine.deliver("receive", message.sender, message)

    def forge(self, app: SimNode, sender: int, directory_id: UUID) -> Message:
        """Any message, of that sender; half of them are those that would do most."""
        core = app.member.core
        head: dict[str, Any] = {
            "to": app.node_id, "sender": sender, "directory_id": directory_id,
        }  # fmt: skip
        if self.random.random() < 0.5:
            return forged(self.random, core, **head)
        term, end, last = core.term, core.log.last_index, core.log.last_term
        later, entry = term + 1, Entry(term + 1, end + 1, data("forged"))
        messages: tuple[Message, ...] = (
            Append(
                term=later, prev_index=end, prev_term=last, entries=(entry,), commit_index=end + 1,
                **head,
            ),
            AppendReply(term=term, accepted=True, match_index=end, **head),
            Vote(term=later, last_index=end + 9, last_term=term, transfer=True, **head),
            VoteReply(term=term, granted=True, **head),
            PreVoteReply(term=later, granted=True, **head),
            TimeoutNow(term=term, **head),
            LeaderHint(
                term=term, leader_id=sender, last_index=end + 9, voters=(max(sender, 0),), **head
            ),
        )  # fmt: skip
        return self.random.choice(messages)

    def unknown(self, app: SimNode) -> None:
        """A node that nobody knows."""
        self.say(app, self.forge(app, self.random.choice(UNKNOWN), ELSEWHERE), "an unknown node")

    def another_disk(self, app: SimNode) -> None:
        """A voter's id on another disk. Whose log is empty knows no disks yet, and who hears no
        leader and lags believes what voters say of ids.
        """
        core = app.member.core
        if core.log.last_index and core.state.in_lease:
            self.say(app, self.forge(app, self.voter(app), ELSEWHERE), "another disk")

    def voter(self, app: SimNode) -> int:
        return self.random.choice(
            [v.node_id for v in self.history.voters if v.node_id != app.node_id]
        )

    def impossible(self, app: SimNode) -> None:
        """A voter's id and directory, and what no voter says."""
        sender = self.voter(app)
        head: dict[str, Any] = {
            "sender": sender, "to": app.node_id, "directory_id": UUID(int=sender + 1),
        }  # fmt: skip
        term, end = app.member.term, app.member.core.log.last_index
        far = self.random.choice((TERM_STEP + 1, MAX_TERM - term, MAX_TERM, 2**63 - 1 - term))
        one, later = Entry(term, end + 1, b"x"), Entry(term + 1, end + 1, b"x")
        last = app.member.core.log.last_term
        messages: tuple[Message, ...] = (
            Append(term=term, prev_index=end, prev_term=last, entries=(later,), **head),
            Append(term=term, prev_index=end, prev_term=last, entries=(one, one), **head),
            Append(term=term, prev_index=-1, prev_term=last, entries=(one,), **head),
            Append(term=term, prev_index=end, prev_term=last, commit_index=-(2**63), **head),
            Vote(term=term + 1, last_index=2**63 - 1, last_term=term, transfer=True, **head),
            Vote(term=term + 1, last_index=end + 9, last_term=term + 2, transfer=True, **head),
            AppendReply(term=term, accepted=False, match_index=-1, hint_index=-1, **head),
            Append(term=-1, prev_index=0, prev_term=0, **head),
            Append(term=term + far, prev_index=end, prev_term=last, entries=(one,), **head),
            VoteReply(term=term + far, granted=False, **head),
        )
        self.say(app, self.random.choice(messages), "a voter that says what none does")

    def replica(self, app: SimNode) -> None:
        """A follower that has all, in another life than that broker's."""
        led = [p for p in app.replicas.partitions.values() if p.is_leader]
        if not led:
            return
        partition = self.random.choice(led)
        record = app.image.partition(partition.topic_id, partition.topic_partition.partition)
        replicas = () if record is None else record.replicas
        replica = self.random.choice([r for r in (*replicas, *UNKNOWN) if r != app.node_id])
        broker = app.image.brokers.get(replica)
        known = -1 if broker is None else broker.broker_epoch
        epoch = self.random.choice((-1, 0, known - 1, known + 1, 2**62, 2**63 - 1))
        if replica in replicas and epoch == known:
            return
        self.world.note(app.machine.name, f"<- forged fetch of n{replica}, epoch {epoch}")
        self.world.counts["forged fetches"] += 1
        asked = (self.fetch(partition), epoch)
        app.machine.deliver("serve_fetch", replica, asked, lambda _: None)

    @staticmethod
    def fetch(partition: Partition) -> FetchRequest:
        """All that there is, held."""
        wanted = PartitionRequest(
            partition.topic_partition, partition.topic_id, partition.leader_epoch,
            partition.log_end_offset, partition.leader_epoch, 0, 1000,
        )  # fmt: skip
        return FetchRequest(0, 0, 0, 0, 1000, (wanted,))


class StrangersHistory(ClusterHistory):
    """No fault of disks, and somebody else who reaches the nodes."""

    stage = "strangers"
    kinds = CORE_KINDS

    def __init__(self, seed: int, **given: Any) -> None:
        self.seed = seed
        super().__init__(seed, **given)
        self.strangers = Strangers(self)

    def suffer(self) -> None:
        """With strangers, too."""
        self.strangers.start()
        super().suffer()
