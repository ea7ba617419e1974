"""Connections that are gone, and connections that may stay idle for ever."""

from __future__ import annotations

import asyncio

import pytest

from kept.client import protocol
from kept.client.api_keys import ApiKey
from kept.node.kafka.handlers.fetch import PARKED_BYTES


def fetch_of(topic: str, max_wait_ms: int) -> bytes:
    """A sessionless Fetch of a partition's beginning."""
    partition = {
        "partition": 0,
        "current_leader_epoch": -1,
        "fetch_offset": 0,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": 1000,
    }
    values = {
        "replica_id": -1,
        "max_wait": max_wait_ms,
        "min_bytes": 1,
        "max_bytes": 1000,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [partition]}],
        "forgotten_topics_data": (),
        "rack_id": "",
    }
    return protocol.encode_request(ApiKey.FETCH, 12, 1, "c", values)


class Transport:
    """As much of a transport as a connection looks at."""

    def __init__(self, closing):
        self.closing = closing

    def is_closing(self):
        return self.closing


@pytest.mark.parametrize("transport", [None, Transport(closing=True)])
def test_a_connection_that_is_gone_is_not_gone_on_with(lone, transport, monkeypatch):
    """A batch's check in a thread may end after its connection did."""
    from kept.node.kafka.connection import Connection

    connection = Connection(lone.node.parts.listeners[0])
    connection.transport = transport
    connection._blocked = True
    served = []
    monkeypatch.setattr(connection, "process", lambda: served.append(1))
    connection.unblock()
    assert not served and connection._blocked
    connection.transport = Transport(closing=False)
    connection.unblock()
    assert served == [1] and not connection._blocked


def test_a_request_that_waits_draws_on_the_budget_until_it_is_answered_or_given_up(lone):
    lone.create("t")
    budget, listener = lone.node.parts.budget, lone.node.parts.listeners[0]

    async def go():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        before = budget.used_bytes
        writer.write(fetch_of("t", max_wait_ms=100))
        while budget.used_bytes == before:
            await asyncio.sleep(0)
        (connection,) = listener.connections
        assert budget.used_bytes == before + PARKED_BYTES and connection._room() > 0
        budget.force(budget.limit_bytes)
        assert connection._room() == 0, "no further request is served while it waits"
        assert await asyncio.wait_for(reader.read(1), 60)
        assert connection._room() > 0, "it has nothing in the budget"
        budget.give(budget.limit_bytes)
        assert budget.used_bytes == before
        writer.write(fetch_of("t", max_wait_ms=3_600_000))
        while budget.used_bytes == before:
            await asyncio.sleep(0)
        writer.close()
        while budget.used_bytes != before:
            await asyncio.sleep(0)

    lone.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(("idle_ms", "stays"), [("-1", True), ("1000", False)])
def test_a_negative_idle_limit_is_none(lone_node, idle_ms, stays):
    lone = lone_node(connections_max_idle_ms=idle_ms)
    listener = lone.node.parts.listeners[0]

    async def go():
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        while not listener.connections:
            await asyncio.sleep(0)
        (connection,) = listener.connections
        connection.last_active = 0.0
        listener.close_idle()
        closed = connection.transport is None or connection.transport.is_closing()
        if not stays:
            assert await asyncio.wait_for(reader.read(1), 60) == b""
        writer.close()
        return closed

    assert lone.run(go()) is not stays
