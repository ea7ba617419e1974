"""What clients are told of leaders around the death of one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kept.node.kafka.handlers import metadata
from kept.node.runtime.yielding import Slices


class Members:
    """Node 1 seems to be gone until the image names another leader."""

    doubts_anybody = True

    def seems_gone(self, node_id: int) -> bool:
        return node_id == 1

    def lingers(self, _node_id: int) -> bool:
        return True


class Node:
    """Partition 0 of t is led by node 1; of u by node 2."""

    cluster_id = "c"
    node_id = 0
    config = SimpleNamespace(auto_create_topics_enable=False)
    slices = Slices(SimpleNamespace())  # type: ignore[arg-type]

    def __init__(self) -> None:
        self.cluster_link = Members()
        self.waited: list[int] = []
        self.elects = True
        self.metadata = SimpleNamespace(acted=self.acted)
        self.image = SimpleNamespace(index=7, brokers={}, topics_by_id={}, topics={})
        self.lead("t", 1)
        self.lead("u", 2)
        brokers = {n: SimpleNamespace(fenced=n == 3, rack=None) for n in range(4)}
        self.image.brokers = brokers

    def lead(self, name: str, leader: int) -> None:
        record = SimpleNamespace(
            partition=0, leader=leader, leader_epoch=4, replicas=(0, 1, 2), isr=(0, 1, 2)
        )
        self.image.topics[name] = SimpleNamespace(name=name, topic_id=None, partitions=(record,))

    async def acted(self, index: int) -> None:
        self.waited.append(index)
        if not self.elects:
            await asyncio.sleep(3600)
        self.lead("t", 2)

    def broker_endpoint(self, node_id: int, _listener: str) -> tuple[str, int]:
        return "h", node_id

    def is_offline(self, *_: object) -> bool:
        return False


def ask(node: Node, name: str):
    ctx = SimpleNamespace(node=node, api_version=9, listener_name="X")
    topic = SimpleNamespace(name=name, topic_id=None)
    found = metadata.metadata(ctx, SimpleNamespace(topics=[topic]))  # type: ignore[arg-type]
    if asyncio.iscoroutine(found):
        found = asyncio.run(found)
    partition = found["topics"][0]["partitions"][0]  # type: ignore[index]
    return partition["leader_id"], partition["error_code"], found


def test_an_answer_waits_for_the_next_leader():
    node = Node()
    assert ask(node, "t")[:2] == (2, 0)
    assert node.waited == [8]


def test_it_waits_for_nobody_else():
    node = Node()
    assert ask(node, "u")[:2] == (2, 0)
    assert not node.waited


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "DECISION_S", 0.01)
    node = Node()
    node.elects = False
    assert ask(node, "t")[:2] == (-1, 5)


def test_one_that_was_just_fenced_is_still_listed():
    assert [broker["node_id"] for broker in ask(Node(), "u")[2]["brokers"]] == [0, 1, 2, 3]
