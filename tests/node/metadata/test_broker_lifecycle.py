"""Whether a broker is in touch with its controllers, as its shell counts it."""

from __future__ import annotations

import asyncio
import time
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from kept.cluster.controller import broker_lifecycle
from kept.cluster.controller.brokers import Registration, register_broker
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NoOpRecord
from kept.node.internode.controller_rpc import HeartbeatReply
from kept.node.metadata.broker_lifecycle import NEVER, BrokerLifecycleManager
from kept.node.runtime import clock

SESSION_S = 9.0


class Loop:
    """A clock that the test moves."""

    now = 100.0

    def time(self) -> float:
        return self.now


def brokering(heartbeat) -> tuple[Loop, BrokerLifecycleManager]:
    loop = Loop()
    config = SimpleNamespace(
        broker_session_timeout_ms=9000, broker_heartbeat_interval_ms=2000, stall_ms=2000,
        shutdown_timeout_ms=30_000, controlled_shutdown_enable=True,
        controller_quorum_request_timeout_ms=2000,
    )  # fmt: skip
    changes = SimpleNamespace(led_up_to=lambda index: index)
    node = SimpleNamespace(
        loop=loop, config=config, peers=SimpleNamespace(heartbeat=heartbeat), serve_until=0.0,
        replica_manager=SimpleNamespace(changes=changes),
    )  # fmt: skip
    return loop, BrokerLifecycleManager(node, Registration(1, UUID(int=1), ()))


def beat(number: int) -> SimpleNamespace:
    return SimpleNamespace(
        number=number, broker_id=1, broker_epoch=1, applied_index=0, wants_fence=False,
        wants_shutdown=False, report=(),
    )  # fmt: skip


def test_a_session_begins_when_the_heartbeat_is_sent():
    async def heartbeat(request, timeout_s):
        loop.now += 5
        return HeartbeatReply(False)

    loop, broker = brokering(heartbeat)
    asyncio.run(broker._heartbeat(beat(1)))
    loop.now = 100 + SESSION_S - 0.1
    assert not broker.out_of_touch
    loop.now = 100 + SESSION_S + 0.1
    assert broker.out_of_touch, "the controller may have waited since it was sent"


def test_a_controller_that_is_new_fences_sooner():
    """It takes two heartbeats (2 s) off, and the one before it may still answer for a second."""

    async def heartbeat(request, timeout_s):
        return HeartbeatReply(False)

    loop, broker = brokering(heartbeat)
    asyncio.run(broker._heartbeat(beat(1)))
    loop.now = 100 + SESSION_S - 2 * 2 - 1 - 0.1
    assert not broker.may_be_fenced
    loop.now += 0.1
    assert broker.may_be_fenced and not broker.out_of_touch


def test_an_answer_counts_when_the_image_is_as_new():
    async def heartbeat(request, timeout_s):
        return HeartbeatReply(False, False, 1)

    loop, broker = brokering(heartbeat)
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

    async def scene() -> None:
        nonlocal slept
        _, broker = brokering(None)
        broker._spawn = lambda work: work.close()  # type: ignore[method-assign]
        node: Any = broker._node
        suspended: list[str] = []
        roles = SimpleNamespace(suspend=lambda: suspended.append("now"), resume=lambda image: None)
        node.replica_manager.roles = roles
        me = broker.core.registration
        image, _ = Image().apply(register_broker(Image(), me))
        broker._step(broker_lifecycle.Start(clock.elapsed_ms()))
        broker.image_acted_on(image)
        broker.check_stalled()
        assert 0 < node.serve_until - perf_counter() <= 2
        slept = 3600
        broker.check_stalled()
        assert suspended == ["now"]
        assert node.serve_until == NEVER, "partitions refuse by themselves"

    asyncio.run(scene())


def test_the_clock_counts_sleep_where_the_system_can_tell():
    began = perf_counter()
    booted_ms = 1000 * time.clock_gettime(time.CLOCK_BOOTTIME)
    now_ms = clock.elapsed_ms()
    assert booted_ms - 1 <= now_ms <= 1000 * time.clock_gettime(time.CLOCK_BOOTTIME)
    in_five_s = clock.by_perf_counter(now_ms + 5000)
    assert began - 0.01 < in_five_s - 5 < perf_counter() + 0.01
