"""Who watches a node's health is told when it moves, however many they are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from grpc_health.v1 import health_pb2

from kept.node.rpc import health

STATES = health_pb2.HealthCheckResponse
DEADLINE_S = 60.0


class Node:
    """What readiness looks at in a node that is a controller alone."""

    is_broker, metadata = False, SimpleNamespace(leader_id=1)

    def __init__(self):
        self.stopping, self.looks = False, 0

    @property
    def ready(self):
        self.looks += 1
        return not self.stopping


def test_watches_share_one_look(monkeypatch):
    monkeypatch.setattr(health, "LOOK_S", 0.01)
    asyncio.run(watched(Node()))


async def watched(node):
    face = health.Health(node, ("broker.Broker",))

    def watch(service):
        return face._watch(health_pb2.HealthCheckRequest(service=service), None)

    watches = [watch(name) for name in ["", "broker.Broker"] * 50]

    async def following(all_):
        told = await asyncio.wait_for(asyncio.gather(*(anext(one) for one in all_)), DEADLINE_S)
        return {one.status for one in told}

    assert await following(watches) == {STATES.SERVING}
    unknown = watch("none")
    assert await following([unknown]) == {STATES.SERVICE_UNKNOWN}
    node.stopping = True
    assert await following(watches) == {STATES.NOT_SERVING}
    node.stopping = False
    assert await following(watches) == {STATES.SERVING}
    node.looks = 0
    waiting = [asyncio.ensure_future(anext(one)) for one in watches]
    while node.looks < 5:
        await asyncio.sleep(0)
    assert node.looks < len(watches)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await unknown.aclose()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait_for(asyncio.gather(*left), DEADLINE_S)  # nobody watches: no more looks
