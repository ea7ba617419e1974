"""Who watches a node's health is told when it moves, however many they are."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kept.node.admin.readiness import Readiness
from kept.node.grpc import health

# isort: split
import grpc

STATES = health_pb2.HealthCheckResponse
DEADLINE_S = 60.0


class Node:
    """A node whose health a test changes; ``looks`` counts how often it is read."""

    def __init__(self):
        self.stopping, self.looks = False, 0
        self.readiness = Readiness(0)

    def unready(self):
        self.looks += 1
        return "stopping" if self.stopping else None

    def moves(self, stopping):
        self.stopping = stopping
        self.readiness.on_change()


def test_a_ready_node_serves(rpc):
    stub = health_pb2_grpc.HealthStub(rpc.channel)
    for service in ("", "broker.Broker"):
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request, timeout=60).status == STATES.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == STATES.SERVING
    watch.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "broker.Broker" in caught.value.details()


def test_watches_are_told_of_what_moves_and_share_one_look():
    asyncio.run(watched(Node()))


async def watched(node):
    face = health.Health(node, node.readiness, ("broker.Broker",))
    node.readiness.on_change()
    assert node.looks == 0, "nobody watches"

    def watch(service):
        return face._watch(health_pb2.HealthCheckRequest(service=service), None)

    watches = [watch(name) for name in ["", "broker.Broker"] * 50]

    async def following(all_):
        told = await asyncio.wait_for(asyncio.gather(*(anext(one) for one in all_)), DEADLINE_S)
        return {one.status for one in told}

    assert await following(watches) == {STATES.SERVING}
    unknown = watch("none")
    assert await following([unknown]) == {STATES.SERVICE_UNKNOWN}
    for stopping, state in ((True, STATES.NOT_SERVING), (False, STATES.SERVING)):
        waiting = asyncio.ensure_future(following(watches))
        await asyncio.sleep(0)
        node.looks = 0
        for _ in range(1000):  # thousands of partitions move
            node.moves(stopping)
        assert await waiting == {state}
        assert node.looks <= 2
    for one in (*watches, unknown):
        await one.aclose()
    node.looks = 0
    node.readiness.on_change()
    await asyncio.sleep(2 * health.PAUSE_S)
    assert node.looks == 0, "nobody watches any more"
