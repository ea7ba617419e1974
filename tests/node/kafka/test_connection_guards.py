"""Connections that are gone, that may stay idle for ever, and whose request gets no response."""

from __future__ import annotations

import asyncio
import struct

import pytest

from kept.node.kafka.request_handlers import RequestHandlers


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


def in_place(*_):
    return None


def in_steps(*_):
    yield


def in_many_steps(*_):
    for _ in range(1000):
        yield


async def later(*_):
    return None


@pytest.mark.parametrize("handler", [in_place, in_steps, in_many_steps, later])
async def test_a_handler_without_response_closes_the_connection(lone, handler, monkeypatch, capfd):
    monkeypatch.setattr(RequestHandlers, "handler", lambda *_: handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    writer.write(struct.pack(">ihhihi", 14, 3, 1, 7, -1, 0))
    assert await asyncio.wait_for(reader.read(1), 60) == b""
    writer.close()
    assert "metadata: no response" in capfd.readouterr().err
