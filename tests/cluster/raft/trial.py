"""A few Raft cores, each with a disk of its own and a network between them that does as it is told.

The disk of a node is what its shell wrote: a restarted node has that and nothing else. Messages
are delivered in order unless they are kept back, lost, or repeated by the test.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from kept.cluster.metadata.records import ConfigRecord, encode_batch
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry, HardState
from kept.cluster.raft.core import RaftCore
from kept.cluster.raft.messages import AppendEntries, Message
from kept.cluster.raft.ready import RaftSettings, Ready, Role, Snapshot
from kept.cluster.raft.voter_set import voters_in

SETTINGS = RaftSettings(max_append_bytes=200, max_inflight=4)


def directory(node_id: int, disk: int = 0) -> UUID:
    return UUID(int=1 + node_id + 100 * disk)


def voter(node_id: int, disk: int = 0) -> Voter:
    return Voter(node_id, directory(node_id, disk), f"node-{node_id}", 10092)


def data(text: str) -> bytes:
    """An entry's content that is recognised."""
    return encode_batch([ConfigRecord(4, "", text, text)])


class Stored:
    """What a node's disk holds."""

    def __init__(self, voters: tuple[Voter, ...]) -> None:
        self.hard_state = HardState()
        self.base_index = self.base_term = 0
        self.log: list[Entry] = []
        self.voters = voters
        self.snapshot = b""

    def entries(self, first: int, max_bytes: int) -> list[Entry]:
        return self.log[first - self.base_index - 1 :]

    def write(self, ready: Ready) -> None:
        if ready.hard_state is not None:
            assert ready.hard_state.term >= self.hard_state.term
            self.hard_state = ready.hard_state
        if ready.snapshot is not None:
            self.base_index, self.base_term = ready.snapshot.index, ready.snapshot.term
            self.voters, self.snapshot = ready.snapshot.voters, ready.snapshot.data
            self.log = []
        if ready.truncate_from is not None:
            assert ready.truncate_from > self.base_index
            del self.log[ready.truncate_from - self.base_index - 1 :]
        for entry in ready.entries:
            assert entry.index == self.base_index + len(self.log) + 1
            self.log.append(entry)

    def voters_at(self, index: int) -> tuple[Voter, ...]:
        """Who votes after an entry that is here."""
        set_by = [voters_in(entry.data) for entry in self.log if entry.index <= index]
        return next((voters for voters in reversed(set_by) if voters is not None), self.voters)

    def compact(self, index: int) -> None:
        if index > self.base_index:
            self.voters = self.voters_at(index)
            self.base_term = self.log[index - self.base_index - 1].term
            del self.log[: index - self.base_index]
            self.base_index = index


class Node:
    """A process over its disk. While ``slow``, its disk does not finish what it is given."""

    def __init__(
        self,
        node_id: int,
        stored: Stored,
        random: Callable[[int], int],
        *,
        directory_id: UUID,
        contacts: tuple[int, ...],
        settings: RaftSettings,
    ) -> None:
        self.node_id = node_id
        self.stored = stored
        self.slow = False
        self.writing: Ready | None = None
        self.applied: list[tuple[int, bytes]] = []
        self.applied_to = stored.base_index
        self.reads: list[tuple[object, int]] = []
        self.lost_reads: list[object] = []
        self.core = RaftCore(
            node_id=node_id,
            directory_id=directory_id,
            voters=stored.voters,
            log=stored,
            hard_state=stored.hard_state,
            random=random,
            take_snapshot=self.take_snapshot,
            settings=settings,
            contacts=contacts,
        )

    def take_snapshot(self) -> Snapshot:
        term = self.core.log.term_at(self.applied_to)
        assert term is not None
        return Snapshot(
            self.applied_to,
            term,
            b"image %d" % self.applied_to,
            self.stored.voters_at(self.applied_to),
        )

    def pump(self) -> list[Message]:
        """The shell's duties; returns what may be sent."""
        sent = list(self.core.drain_messages())
        while self.core.has_ready or self.writing is not None:
            if self.writing is None:
                self.writing = self.core.ready()
            if self.slow and (self.writing.blocks):
                return sent
            ready, self.writing = self.writing, None
            self.stored.write(ready)
            self.core.advance(ready)
            sent += ready.messages
            sent += self.core.drain_messages()
            if ready.snapshot is not None:
                self.applied_to = ready.snapshot.index
            self.apply()
            self.reads += ready.reads
            self.lost_reads += ready.lost_reads
        self.core.check_invariants()
        return sent

    def apply(self) -> None:
        for index in range(self.applied_to + 1, self.core.committed_to + 1):
            assert index <= self.stored.base_index + len(self.stored.log), "applied, not durable"
            self.applied.append((index, self.core.log.entry(index).data))
            self.applied_to = index


class Trial:
    """The cluster of one test."""

    def __init__(
        self,
        voters: int,
        observers: int = 0,
        *,
        settings: RaftSettings = SETTINGS,
        random: Callable[[int, int], int] | None = None,
    ) -> None:
        self.settings = settings
        self.random = random or (lambda node_id, n: node_id % n)
        self.voters = tuple(voter(i) for i in range(voters))
        self.disks = dict.fromkeys(range(voters + observers), 0)
        self.stored = {i: Stored(self.voters if i < voters else ()) for i in self.disks}
        self.nodes: dict[int, Node] = {}
        self.network: list[Message] = []
        self.kept: list[Message] = []
        self.cut: set[tuple[int, int]] = set()
        self.keep: set[tuple[int, int]] = set()
        self.mute: set[int] = set()
        """Nodes whose appends are lost."""
        self.leaders: dict[int, int] = {}
        self.committed: dict[int, Entry] = {}
        for node_id in self.disks:
            self.start(node_id)

    def start(self, node_id: int) -> None:
        self.nodes[node_id] = Node(
            node_id,
            self.stored[node_id],
            lambda n: self.random(node_id, n),
            directory_id=directory(node_id, self.disks[node_id]),
            contacts=tuple(v.node_id for v in self.voters),
            settings=self.settings,
        )

    def crash(self, node_id: int) -> None:
        del self.nodes[node_id]
        self.network = [m for m in self.network if node_id not in (m.to, m.sender)]

    def wipe(self, node_id: int) -> None:
        """A new, empty disk in the place of the old one."""
        self.disks[node_id] += 1
        self.stored[node_id] = Stored(())

    def pump(self, node_id: int) -> None:
        for message in self.nodes[node_id].pump():
            link = (message.sender, message.to)
            if link in self.keep:
                self.kept.append(message)
            elif link not in self.cut and not (
                message.sender in self.mute and isinstance(message, AppendEntries)
            ):
                self.network.append(message)
        self.check()

    def deliver(self, limit: int = 10_000) -> None:
        """Deliver until nothing is on its way."""
        for node_id in tuple(self.nodes):
            self.pump(node_id)
        while self.network and limit:
            limit -= 1
            self.hand(self.network.pop(0))
        assert limit, "they never stop talking"

    def hand(self, message: Message) -> None:
        node = self.nodes.get(message.to)
        if node is not None:
            node.core.step(message)
            self.pump(message.to)

    def tick(self, count: int = 1, *node_ids: int) -> None:
        for _ in range(count):
            for node_id in node_ids or tuple(self.nodes):
                self.nodes[node_id].core.tick()
                self.pump(node_id)
            self.deliver()

    def elect(self, node_id: int) -> None:
        """The others have lost patience with their leader; time passes for this node until it
        leads."""
        for node in self.nodes.values():
            node.core.state.election.elapsed = max(
                node.core.state.election.elapsed, self.settings.election_ticks
            )
        for _ in range(3 * self.settings.election_ticks):
            if self.core(node_id).role is Role.LEADER:
                break
            self.tick(1, node_id)
        else:
            raise AssertionError(f"{node_id} was not elected")
        self.deliver()

    def core(self, node_id: int) -> RaftCore:
        return self.nodes[node_id].core

    def propose(self, node_id: int, *texts: str) -> list[int]:
        indexes = [self.core(node_id).propose(data(text)) for text in texts]
        self.pump(node_id)
        return indexes

    # Raft's five properties, judged from outside.

    def check(self) -> None:
        for node in self.nodes.values():
            core = node.core
            if core.role is Role.LEADER:
                known = self.leaders.setdefault(core.term, node.node_id)
                assert known == node.node_id, f"two leaders in term {core.term}"
                self._check_complete(core)
            for index in range(core.log.base_index + 1, core.commit_index + 1):
                entry = core.log.entry(index)
                held = self.committed.setdefault(index, entry)
                assert held == entry, f"entry {index} committed twice: {held}, {entry}"
        self._check_matching()

    def _check_complete(self, core: RaftCore) -> None:
        for index, entry in self.committed.items():
            if entry.term < core.term and index > core.log.base_index:
                assert core.log.term_at(index) == entry.term, f"leader lacks entry {index}"

    def _check_matching(self) -> None:
        """Two logs that agree on an entry agree on all before it."""
        logs = [node.core.log for node in self.nodes.values()]
        for number, one in enumerate(logs):
            for other in logs[number + 1 :]:
                last = min(one.last_index, other.last_index)
                first = max(one.base_index, other.base_index) + 1
                agree = False
                for index in range(last, first - 1, -1):
                    same = one.entry(index) == other.entry(index)
                    assert same or not agree, f"logs agree above entry {index} and not on it"
                    assert same or one.term_at(index) != other.term_at(index)
                    agree = agree or same
