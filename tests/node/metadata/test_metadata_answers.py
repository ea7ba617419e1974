"""What clients are told of leaders around the death of one."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    BrokerChangeRecord,
    BrokerRecord,
    Endpoint,
    PartitionRecord,
    TopicRecord,
)
from kept.node.config.live_config import LiveConfig
from kept.node.config.node_config import NodeConfig
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.cluster import metadata
from kept.node.kafka.handlers.cluster.metadata import MetadataHandler
from kept.node.metadata.address_book import AddressBook
from kept.node.metadata.failure_detector import FailureDetector
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.counters import Counters
from kept.node.runtime.time_slices import TimeSlices
from kept.node.security.session import node_session
from tests.support.given import Given

TOPIC_IDS = {"t": UUID(int=1), "u": UUID(int=2)}


def led_by(name: str, leader: int) -> PartitionRecord:
    return PartitionRecord(TOPIC_IDS[name], 0, (0, 1, 2), (0, 1, 2), leader, 4, 0)


class Cluster:
    """Node 0 of four brokers. Partition 0 of t is led by node 1, which seems to be gone until the
    image names another leader; that of u by node 2. Node 3 was fenced a moment ago.
    """

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.elects = True
        image = Image()
        for n in range(4):
            endpoints = (Endpoint("X", "PLAINTEXT", "h", n),)
            broker = BrokerRecord(n, image.index + 1, UUID(int=n), endpoints, fenced=False)
            image, _ = image.apply([broker])
        topics = [TopicRecord(name, topic_id) for name, topic_id in TOPIC_IDS.items()]
        image, _ = image.apply([*topics, led_by("t", 1), led_by("u", 2)])
        loop = asyncio.get_running_loop()
        self.metadata = Given(image=image, acted=self.acted)
        runtime = Given(loop=loop, slices=TimeSlices(loop))
        self.detector = FailureDetector(runtime, self.metadata, Given(), Counters())
        self.detector.image_changed(image)
        fenced = BrokerChangeRecord(3, image.brokers[3].broker_epoch, fenced=True)
        self.metadata.image, _ = image.apply([fenced])
        self.detector.image_changed(self.metadata.image)
        self.detector.peer_down(1)
        config = LiveConfig(NodeConfig.load(None, {"auto.create.topics.enable": "false"}, {}))
        addresses = AddressBook(config, self.metadata)
        addresses.set_port("PLAINTEXT", 9092)
        self.slices = runtime.slices
        topics: Any = None
        self.handler = MetadataHandler(
            config=config,
            metadata=self.metadata,
            addresses=addresses,
            detector=self.detector,
            table=ReplicaTable(),
            topics=topics,
        )

    async def acted(self, index: int) -> None:
        self.waited.append(index)
        if not self.elects:
            await asyncio.sleep(3600)
        record = self.metadata.image.topics["t"].partitions[0]
        moved = replace(record, leader=2, leader_epoch=5, partition_epoch=1)
        gone = BrokerChangeRecord(1, self.metadata.image.brokers[1].broker_epoch, fenced=True)
        self.metadata.image, _ = self.metadata.image.apply([moved, gone])


def ask(name: str, *, elects: bool = True) -> tuple[int, int, list[int], list[int]]:
    """(leader, error code, brokers listed, entries waited for) of the answer for a topic."""

    async def scene() -> tuple[int, int, list[int], list[int]]:
        cluster = Cluster()
        cluster.elects = elects
        ctx = RequestContext(3, 9, None, node_session("X"))
        found: Any = cluster.handler.metadata(ctx, Given(topics=[Given(name=name, topic_id=None)]))
        while not isinstance(found, dict):
            found = await found if inspect.isawaitable(found) else cluster.slices.run(found)
        partition = found["topics"][0]["partitions"][0]
        brokers = [broker["node_id"] for broker in found["brokers"]]
        return partition["leader_id"], partition["error_code"], brokers, cluster.waited

    return asyncio.run(scene())


def test_an_answer_waits_for_the_next_leader():
    leader, error, _, waited = ask("t")
    assert (leader, error) == (2, 0)
    assert waited == [7], "the entry after the image"


def test_it_waits_for_nobody_else():
    leader, error, _, waited = ask("u")
    assert (leader, error) == (2, 0)
    assert not waited


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "DECISION_S", 0.01)
    assert ask("t", elects=False)[:2] == (-1, 5)


def test_one_that_was_just_fenced_is_still_listed():
    assert ask("u")[2] == [0, 1, 2, 3]
