"""Decisions of the active controller: one after the other, whoever waits for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kept.node.controlling import Controlling
from kept.storage.errors import InvalidRequest


class FakeMetadata:
    """Leads; a proposal is in the image once it is let go."""

    leads = True
    leader_id = 0

    def __init__(self) -> None:
        self.image: Any = SimpleNamespace(index=5)
        self.committed = asyncio.Event()

    async def propose(self, _records: Any) -> int:
        index = self.image.index + 1
        await self.committed.wait()
        self.image = SimpleNamespace(index=index)
        return int(index)


def controlling(metadata: FakeMetadata) -> Controlling:
    node: Any = SimpleNamespace(metadata=metadata, loop=asyncio.get_running_loop())
    made = Controlling.__new__(Controlling)
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
