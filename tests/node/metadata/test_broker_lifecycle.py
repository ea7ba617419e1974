"""Whether a broker is in touch with its controllers, as its shell counts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from time import perf_counter
from typing import Any
from uuid import UUID

from kept.cluster.controller import broker_lifecycle
from kept.cluster.controller.brokers import RegisterRequest, register_broker
from kept.cluster.controller.heartbeats import HeartbeatReply, PartitionKey, ReplicaLog
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NoOpRecord
from kept.node.config.live_config import LiveConfig
from kept.node.config.node_config import NodeConfig
from kept.node.metadata.broker_lifecycle import BrokerLifecycleManager
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.metadata.serving_lease import NEVER, ServingLease
from kept.node.runtime import clock
from kept.node.runtime.shutdown import Shutdown
from tests.support.given import Given

SESSION_S = 9.0


class Loop:
    """A clock that the test moves."""

    now = 100.0

    def time(self) -> float:
        return self.now


class Replicas:
    """What is hosted here: nothing. ``suspended`` counts how often serving was suspended."""

    suspended = 0

    def suspend(self) -> None:
        self.suspended += 1

    def resume(self, image: Image) -> None:
        pass

    def led_up_to(self, index: int) -> int:
        return index

    async def mark_running(self, broker_epoch: int) -> None:
        pass

    def replica_logs(self, partitions: Iterable[PartitionKey]) -> list[ReplicaLog]:
        return []


def new_lifecycle(heartbeat, loop: Any = None) -> tuple[Any, BrokerLifecycleManager]:
    loop = Loop() if loop is None else loop
    given = {"node.id": "1", "kept.stall.ms": "2000"}
    lifecycle = BrokerLifecycleManager(
        runtime=Given(loop=loop),
        config=LiveConfig(NodeConfig.load(None, given, {})),
        metadata=Given(leader_id=None),
        identity=NodeIdentity(1),
        peers=Given(heartbeat=heartbeat),
        lease=ServingLease(),
        shutdown=Shutdown(),
        replicas=Replicas(),
        registration=RegisterRequest(1, UUID(int=1), ()),
    )
    return loop, lifecycle


def beat(number: int) -> broker_lifecycle.SendHeartbeat:
    return broker_lifecycle.SendHeartbeat(number, 1, 1, 0, False, False, ())


def test_a_session_begins_when_the_heartbeat_is_sent():
    async def heartbeat(request, timeout_s):
        loop.now += 5
        return HeartbeatReply(False)

    loop, broker = new_lifecycle(heartbeat)
    asyncio.run(broker._heartbeat(beat(1)))
    loop.now = 100 + SESSION_S - 0.1
    assert not broker.out_of_touch
    loop.now = 100 + SESSION_S + 0.1
    assert broker.out_of_touch, "the controller may have waited since it was sent"


def test_a_controller_that_is_new_fences_sooner():
    """It takes two heartbeats (2 s) off, and the one before it may still answer for a second."""

    async def heartbeat(request, timeout_s):
        return HeartbeatReply(False)

    loop, broker = new_lifecycle(heartbeat)
    asyncio.run(broker._heartbeat(beat(1)))
    loop.now = 100 + SESSION_S - 2 * 2 - 1 - 0.1
    assert not broker.may_be_fenced
    loop.now += 0.1
    assert broker.may_be_fenced and not broker.out_of_touch


def test_an_answer_counts_when_the_image_is_as_new():
    async def heartbeat(request, timeout_s):
        return HeartbeatReply(False, False, 1)

    loop, broker = new_lifecycle(heartbeat)
    loop.now += 5
    asyncio.run(broker._heartbeat(beat(1)))
    loop.now = 100 + SESSION_S + 1
    assert broker.out_of_touch, "entry 1 may say that another one leads"
    image, _ = Image().apply([NoOpRecord()])
    broker.image_acted_on(image)
    assert not broker.out_of_touch


def test_a_machine_that_slept_is_noticed_though_its_clock_stood_still(monkeypatch):
    """``perf_counter``, by which requests are timed, does not count sleep."""
    slept = 0.0
    real = clock._elapsed_s
    monkeypatch.setattr(clock, "_elapsed_s", lambda: real() + slept)

    async def heartbeat(request, timeout_s):
        await asyncio.sleep(3600)

    async def scene() -> None:
        nonlocal slept
        _, broker = new_lifecycle(heartbeat, asyncio.get_running_loop())
        lease, replicas = broker._lease, broker._replicas
        broker.start()
        image, _ = Image().apply(register_broker(Image(), broker.core.registration))
        broker.image_acted_on(image)
        lease.check()
        assert 0 < lease.until - perf_counter() <= 2
        slept = 3600
        lease.check()
        assert replicas.suspended == 1
        assert lease.until == NEVER, "partitions refuse by themselves"
        await broker.close()

    asyncio.run(scene())


def test_the_clock_counts_sleep_where_the_system_can_tell():
    began = perf_counter()
    booted_ms = 1000 * time.clock_gettime(time.CLOCK_BOOTTIME)
    now_ms = clock.elapsed_ms()
    assert booted_ms - 1 <= now_ms <= 1000 * time.clock_gettime(time.CLOCK_BOOTTIME)
    in_five_s = clock.by_perf_counter(now_ms + 5000)
    assert began - 0.01 < in_five_s - 5 < perf_counter() + 0.01


def test_a_new_broker_epoch_is_known_before_its_effects_are_done():
    """What leads again when serving resumes proposes its ISR with it, and is refused else."""

    async def scene() -> None:
        _, broker = new_lifecycle(None, asyncio.get_running_loop())
        seen: list[int] = []
        broker._replicas.resume = lambda _: seen.append(broker._identity.broker_epoch)
        broker.core.broker_epoch = 7
        broker._perform((broker_lifecycle.ResumeServing(),))
        assert seen == [7]
        await broker.close()

    asyncio.run(scene())
