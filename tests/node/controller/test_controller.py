"""Decisions of the active controller: one after the other, whoever waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kept.node.controller.controller import Controller
from kept.node.runtime.clock import elapsed_ms
from kept.node.runtime.yielding import Slices
from kept.storage.errors import InvalidRequest, NetworkException


class FakeMetadata:
    """Leads; a proposal is in the image once it is let go."""

    leads = True
    leader_id = 0

    def __init__(self) -> None:
        self.image: Any = SimpleNamespace(index=5)
        self.committed = asyncio.Event()
        self.confirmed = asyncio.Event()

    async def read_barrier(self) -> int:
        await self.confirmed.wait()
        return 5

    async def propose(self, _records: Any) -> int:
        index = self.image.index + 1
        await self.committed.wait()
        self.image = SimpleNamespace(index=index)
        return int(index)


def controlling(metadata: FakeMetadata) -> Controller:
    loop = asyncio.get_running_loop()
    node: Any = SimpleNamespace(metadata=metadata, loop=loop, slices=Slices(loop))
    made = Controller.__new__(Controller)
    made._node, made._turn, made._tasks = node, asyncio.Lock(), set()
    return made


def test_a_decision_keeps_its_turn_when_whoever_asked_has_gone() -> None:
    """A broker whose call ran out of time asks again: that is decided on what came of the first."""
    asyncio.run(_asked_twice())


async def _asked_twice() -> None:
    metadata = FakeMetadata()
    controller = controlling(metadata)
    seen: list[int] = []

    def change(image: Any) -> Any:
        seen.append(image.index)
        return ["a record"]

    first = asyncio.create_task(controller.decide(change))
    while not seen:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(controller.decide(change))
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen == [5]
    metadata.committed.set()
    assert await second == 7
    assert seen == [5, 6]
    assert not controller._tasks


def test_what_a_decision_raises_is_told() -> None:
    def change(_image: Any) -> Any:
        raise InvalidRequest("no")

    async def ask() -> None:
        await controlling(FakeMetadata()).decide(change)

    with pytest.raises(InvalidRequest):
        asyncio.run(ask())


class Heard:
    """Sessions that note what they hear."""

    active = True
    settings = SimpleNamespace(stall_ms=60_000)

    def __init__(self) -> None:
        self.events: list[str] = []

    def heartbeat(self, *_: Any, **__: Any) -> Any:
        self.events.append("heartbeat")
        return SimpleNamespace(fenced=False, should_shut_down=False, index=5), ()

    def connection_lost(self, *_: Any) -> tuple[()]:
        self.events.append("lost")
        return ()


@pytest.mark.parametrize("dies", [True, False])
def test_a_heartbeat_that_waited_while_its_broker_died_does_not_revive_it(dies: bool) -> None:
    """A controller that stood still asks a majority first, and the broker may be killed then."""

    async def scene() -> list[str]:
        metadata = FakeMetadata()
        controller, sessions = controlling(metadata), Heard()
        controller.sessions = sessions  # type: ignore[assignment]
        controller._gaps, controller._sure_since, controller._awake_ms = 1, 0, elapsed_ms()
        controller._broken = Counter()
        request: Any = SimpleNamespace(
            broker_id=3, broker_epoch=1, applied_index=5, wants_shutdown=False, wants_fence=False,
            logs=(),
        )  # fmt: skip
        waiting = asyncio.create_task(controller._heartbeat(request))
        await asyncio.sleep(0)
        if dies:
            controller.peer_down(3)
        metadata.confirmed.set()
        if dies:
            with pytest.raises(NetworkException, match="broker 3 has hung up"):
                await waiting
        else:
            assert (await waiting).index == 5
        return sessions.events

    assert asyncio.run(scene()) == (["lost"] if dies else ["heartbeat"])
