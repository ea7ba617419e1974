"""Readers that take nothing: what a node holds for them has a bound, and others get their turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kept.node.admin.results import Remote
from kept.node.admin.views.topic_view import TopicView
from kept.node.http import response_limiter, server
from kept.node.metrics.lazy_metrics import LazyMetrics

GET = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASKED = GET.format("/api/v1/topics/large").encode()


@pytest.fixture
def counted(lone, monkeypatch):
    """A node whose answers about a topic are of 8 MB; how many were begun."""
    begun: list[str] = []

    async def topic(_self, name: str, **_given):
        begun.append(name)
        return Remote({"name": name, "partitions": ["x" * 1000] * 8000})

    monkeypatch.setattr(TopicView, "topic", topic)
    monkeypatch.setattr(response_limiter, "MOST", 2)
    return lone, begun


async def connect(port: int, asked: bytes = ASKED) -> socket.socket:
    """A client that will read when it is asked to, and not before."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, asked)
    return client


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_those_who_take_nothing_make_room_and_no_more_answers_are_held(counted):
    lone, begun = counted

    async def ask():
        silent = [await connect(lone.port) for _ in range(2)]
        await until(lambda: len(begun) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, limit=1 << 24)
        writer.write(ASKED)
        writer.write(GET.format("/healthz").encode())
        probe, prober = await asyncio.open_connection("127.0.0.1", lone.port)
        prober.write(GET.format("/healthz").encode())
        await probe.readuntil(b"ok\n")
        assert len(begun) == 2, "health was asked for later, and is answered before"
        whole = await asyncio.wait_for(reader.readuntil(b"ok\n"), 60)
        assert len(whole) > 8_000_000 and len(begun) == 3
        for one in (writer, prober):
            one.close()
            await one.wait_closed()
        for client in silent:
            client.close()

    lone.run(ask())


def test_who_takes_nothing_of_an_answer_that_needs_no_turn_is_left_alone(counted, monkeypatch):
    """It holds up nobody who waits for one."""
    monkeypatch.setattr(response_limiter, "STALLED_S", 0.01)
    lone, begun = counted

    async def render(*_given: Any) -> AsyncIterator[bytes]:
        for _ in range(128):
            yield bytes(1 << 16)

    monkeypatch.setattr(LazyMetrics, "render", render)

    async def ask():
        metrics = await connect(lone.port, GET.format("/metrics").encode())
        await until(lambda: lone.node.parts.http._server)
        connections = lone.node.parts.http._server._connections
        await until(lambda: any(not one._writable.is_set() for one in connections.members()))
        silent = [await connect(lone.port) for _ in range(2)]
        await until(lambda: len(begun) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port, limit=1 << 24)
        writer.write(ASKED)
        await asyncio.wait_for(reader.readuntil(b"]}"), 60)
        writer.close()
        await writer.wait_closed()
        read, loop = 0, asyncio.get_running_loop()
        while read < 8 << 20:
            data = await loop.sock_recv(metrics, 1 << 20)
            assert data, "the node gave it up"
            read += len(data)
        for client in (metrics, *silent):
            client.close()

    lone.run(ask())


@pytest.mark.parametrize("path", ["topics", "topics/t", "groups", "groups/g", "transactions"])
def test_lists_of_what_clients_make_have_their_turn(path):
    assert server._is_held(f"/api/v1/{path}")


@pytest.mark.parametrize(
    ("path", "is_held"),
    [
        ("cleaner", True),
        ("compaction", True),
        ("compaction/lost", True),
        ("compaction/explain", False),  # a dry run of each partition
        ("compaction/now", False),  # it may wait for passes
    ],
)
def test_lists_of_compaction_have_their_turn_if_they_are_soon_made(path, is_held):
    assert server._is_held(f"/api/v1/{path}") is is_held


def test_while_nobody_waits_a_slow_reader_is_left_alone(counted, monkeypatch):
    monkeypatch.setattr(response_limiter, "STALLED_S", 0.01)
    lone, begun = counted

    async def ask():
        client = await connect(lone.port)
        await until(lambda: begun)
        await asyncio.sleep(0.2)
        read, loop = 0, asyncio.get_running_loop()
        while read < 8_000_000:
            data = await loop.sock_recv(client, 1 << 20)
            assert data, "the node gave it up"
            read += len(data)
        client.close()

    lone.run(ask())
