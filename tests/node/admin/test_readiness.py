"""``/readyz``: every replica in its ISR once; then only fencing and offline disks count."""

from __future__ import annotations

import uuid

import pytest

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    BrokerChangeRecord,
    BrokerRecord,
    PartitionRecord,
    TopicRecord,
)
from kept.node.admin.readiness import Readiness
from kept.storage.errors import MachineError
from kept.storage.types import TopicPartition

TOPIC = uuid.UUID(int=7)
EPOCHS = {1: 11, 2: 12}


def broker(number: int) -> BrokerRecord:
    return BrokerRecord(number, EPOCHS[number], uuid.UUID(int=number), (), None)


def partition(number: int, *, isr=(1, 2), leader=2, replicas=(1, 2), epoch=0) -> PartitionRecord:
    return PartitionRecord(TOPIC, number, replicas, isr, leader, 0, epoch)


def after(image: Image, *records) -> Image:
    return image.apply(records)[0]


@pytest.fixture
def image() -> Image:
    """Two brokers; this node (1) is in one of its two ISRs."""
    known = after(Image(), broker(1), broker(2), TopicRecord("t", TOPIC))
    known = after(known, partition(0), partition(1, isr=(2,)))
    return after(known, *(unfenced(n) for n in EPOCHS))


def unfenced(number: int, fenced: bool = False) -> BrokerChangeRecord:
    return BrokerChangeRecord(number, EPOCHS[number], fenced, False)


def unready(readiness: Readiness, image: Image, **offline: str) -> str | None:
    return readiness.unready(image, EPOCHS[1], offline)


def test_a_replica_that_catches_up_makes_it_ready_for_good(image):
    readiness = Readiness(1)
    assert unready(readiness, image) == "1 replica is not in its ISR yet: t:1"
    caught_up = after(image, partition(1, isr=(2, 1), epoch=1))
    assert unready(readiness, caught_up) is None
    behind = after(caught_up, partition(0, isr=(2,), epoch=1))
    assert unready(readiness, behind) is None
    assert unready(readiness, after(behind, unfenced(1, fenced=True))) == "fenced by the controller"
    assert unready(readiness, behind, d="EIO") == "log directory d is offline: EIO"


def test_a_replica_that_an_error_took_offline_is_not_waited_for(image):
    readiness = Readiness(1)
    failed = {TopicPartition("t", 1)}
    assert unready(readiness, image) == "1 replica is not in its ISR yet: t:1"
    assert readiness.unready(image, EPOCHS[1], {}, failed=failed) is None
    assert Readiness(1).unready(image, EPOCHS[1], {}, failed=failed) is None


def test_each_replica_is_asked_for_once_only(image):
    readiness = Readiness(1)
    shrunk = after(image, partition(0, isr=(2,), epoch=1))
    assert "1 replica " in unready(readiness, image)
    assert unready(readiness, after(shrunk, partition(1, isr=(1, 2), epoch=1))) is None


def test_a_partition_whose_leader_is_away_is_not_waited_for(image):
    assert unready(Readiness(1), after(image, unfenced(2, fenced=True))) is None
    without = after(image, partition(1, isr=(2,), leader=-1, epoch=1))
    assert unready(Readiness(1), without) is None


def test_replicas_that_are_gone_are_not_waited_for(image):
    readiness = Readiness(1)
    assert unready(readiness, image) is not None
    moved = after(image, partition(1, isr=(2,), replicas=(2,), epoch=1))
    assert unready(readiness, moved) is None


def test_what_an_earlier_start_left_does_not_count(image):
    assert Readiness(1).unready(image, 99, {}) == "not registered with the controller yet"
    assert Readiness(3).unready(image, 99, {}) == "not registered with the controller yet"


def test_the_node_says_when_its_readiness_may_have_moved(lone_node):
    lone = lone_node()
    node, calls = lone.node, []
    health = node.parts.admin.health
    node.parts.readiness.on_change = lambda: calls.append(health.unready())

    def said():
        found, calls[:] = list(calls), []
        return found

    lone.create("t")
    assert None in said()
    (directory,) = node.parts.table.directories

    async def fail():
        error = MachineError(directory.name, "open", OSError(5, "EIO"))
        node.parts.failures.fail(directory, error)

    lone.run(fail())
    assert any("is offline" in why for why in said())
    lone.stop()
    assert "starting or stopping" in said()
