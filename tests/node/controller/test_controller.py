"""Decisions of the active controller: one after the other, whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kept.cluster.controller.broker_sessions import ConnectionLost, Event, HeartbeatRequest
from kept.cluster.controller.heartbeats import HeartbeatReply
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import ConfigRecord, MetadataRecord
from kept.node.config.live_config import LiveConfig
from kept.node.config.node_config import NodeConfig
from kept.node.controller.controller import Controller
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.runtime import Runtime
from kept.storage.errors import InvalidRequest, NetworkException
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

RECORD = ConfigRecord(4, "", "k", "v")


class FakeMetadata:
    """Leads; a proposal is in the image once it is let go."""

    leads = True
    leader_id = 0

    def __init__(self) -> None:
        self.image = Image(index=5)
        self.committed = asyncio.Event()
        self.confirmed = asyncio.Event()

    async def read_barrier(self) -> int:
        await self.confirmed.wait()
        return 5

    async def propose(self, _records: Sequence[MetadataRecord]) -> int:
        index = self.image.index + 1
        await self.committed.wait()
        self.image = Image(index=index)
        return index


def controller_of(metadata: Any) -> Controller:
    """A real controller; no part that these tests reach needs files, peers or counters."""
    nothing: Any = Given()
    return Controller(
        runtime=Runtime(SimulatedDisk(seed=1)),
        config=LiveConfig(NodeConfig({})),
        metadata=metadata,
        identity=NodeIdentity(0),
        peers=nothing,
        addresses=nothing,
        open_files=nothing,
        counters=nothing,
    )


def test_a_decision_keeps_its_turn_when_whoever_asked_has_gone() -> None:
    """A broker whose call ran out of time asks again: that is decided on what came of the first."""
    asyncio.run(_asked_twice())


async def _asked_twice() -> None:
    metadata = FakeMetadata()
    controller = controller_of(metadata)
    seen: list[int] = []

    def change(image: Any) -> Any:
        seen.append(image.index)
        return [RECORD]

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
    assert not controller._tasks._tasks


def test_what_a_decision_raises_is_told() -> None:
    def change(_image: Any) -> Any:
        raise InvalidRequest("no")

    async def ask() -> None:
        await controller_of(FakeMetadata()).decide(change)

    with pytest.raises(InvalidRequest):
        asyncio.run(ask())


class SessionsThatNote:
    """Sessions that note their events."""

    active = True

    def __init__(self, controller: Controller) -> None:
        self.events: list[Event] = []
        self.settings = controller.sessions.settings

    def step(self, event: Event, _now_ms: int) -> tuple[HeartbeatReply, ...]:
        self.events.append(event)
        answer = HeartbeatReply(fenced=False, should_shut_down=False, index=5)
        return (answer,) if isinstance(event, HeartbeatRequest) else ()


@pytest.mark.parametrize("dies", [True, False])
def test_a_heartbeat_that_waited_while_its_broker_died_does_not_revive_it(dies: bool) -> None:
    """A controller that stood still asks a majority first, and the broker may be killed then."""

    async def scene() -> list[Event]:
        metadata = FakeMetadata()
        controller = controller_of(metadata)
        sessions = controller.sessions = SessionsThatNote(controller)  # type: ignore[assignment]
        request = HeartbeatRequest(3, 1, 5, False, False, ())
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

    lost, heartbeat = ConnectionLost(3), HeartbeatRequest(3, 1, 5)
    assert asyncio.run(scene()) == [lost if dies else heartbeat]
