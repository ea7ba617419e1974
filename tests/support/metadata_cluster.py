"""Metadata nodes on simulated disks, joined by a network that loses nothing."""

from __future__ import annotations

from random import Random
from uuid import UUID

from kept.cluster.metadata.metadata_node import MetadataNode, Outcome
from kept.cluster.metadata.records import (
    ConfigRecord,
)
from kept.cluster.metadata.voters import Voter
from kept.cluster.raft.messages import Message
from kept.storage.disk import Disk
from tests.support.simulated_disk import SimulatedDisk

DIR = "/data/meta"
NOWHERE = UUID(int=0)


def setting(number: int, size: int = 1) -> list[ConfigRecord]:
    return [ConfigRecord(4, "", f"k{number:04d}", "v" * size)]


def listed(*node_ids: int) -> tuple[Voter, ...]:
    return tuple(Voter(i, NOWHERE, f"node-{i}", 10092) for i in node_ids)


def open_member(
    disk: Disk, node_id: int = 0, voters: tuple[Voter, ...] = (), **more
) -> MetadataNode:
    more.setdefault("directory_id", UUID(int=100 + node_id))
    return MetadataNode.open(
        DIR, disk, node_id=node_id, voters=voters, random=Random(node_id).randrange, **more
    )


def settle(member: MetadataNode) -> list[Outcome]:
    outcomes = []
    while (work := member.work()) is not None:
        work.run()
        outcomes.append(member.done(work))
        member.check_invariants()
    return outcomes


class Cluster:
    """Members with a network that loses nothing, and disks that outlive them."""

    def __init__(self, voters: int = 3, observers: int = 0, **more) -> None:
        self.listed = listed(*range(voters))
        self.more = more
        self.disks = {i: SimulatedDisk(seed=i) for i in range(voters + observers)}
        self.voters = range(voters)
        self.members: dict[int, MetadataNode] = {}
        self.outcomes: dict[int, list[Outcome]] = {i: [] for i in self.disks}
        self.cut: set[int] = set()

    def start(self, *node_ids: int, **more) -> None:
        for i in node_ids:
            self.members[i] = open_member(
                self.disks[i],
                i,
                self.listed,
                observer=i not in self.voters,
                **{**self.more, **more},
            )

    def deliver(self) -> None:
        while True:
            sent: list[Message] = []
            for i, member in self.members.items():
                sent += member.drain_messages()
                for outcome in settle(member):
                    sent += outcome.messages
                    self.outcomes[i].append(outcome)
            sent = [m for m in sent if not {m.sender, m.to} & self.cut]
            if not sent:
                return
            for message in sent:
                if message.to in self.members:
                    self.members[message.to].receive(message)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            for member in self.members.values():
                member.tick()
            self.deliver()

    def leader(self) -> MetadataNode:
        for _ in range(60):
            leading = [m for m in self.members.values() if m.controller_ready]
            if leading and not {leading[0].node_id} & self.cut:
                return leading[0]
            self.tick()
        raise AssertionError("nobody leads")
