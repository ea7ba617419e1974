"""Connections that are gone, that may stay idle for ever, and whose request gets no response."""

from __future__ import annotations

import asyncio
import struct

import pytest

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.kafka.connection import SMALL_FRAME_BYTES
from kept.node.kafka.handlers.records.delayed_produce import DelayedProduceRun
from kept.node.kafka.request_handlers import RequestHandlers
from kept.node.kafka.response_slot import WAITING_ENTRY_BYTES, WAITING_REQUEST_BYTES
from kept.node.security.session import Session
from kept.storage.log.log import AppendInfo
from tests.support.given import Given


@pytest.mark.parametrize("aborted", [None, False, True])
def test_a_connection_that_is_gone_is_not_gone_on_with(lone, aborted, monkeypatch):
    """A batch's check in a thread may end after its connection did; None: long after."""
    from kept.node.kafka.connection import Connection

    connection = Connection(lone.node.parts.listeners[0], Session())
    connection.transport = None if aborted is None else object()
    connection._blocked, connection._aborted = True, bool(aborted)
    served = []
    monkeypatch.setattr(connection, "process", lambda: served.append(1))
    connection.unblock()
    assert served == ([1] if aborted is False else [])
    assert connection._blocked is (aborted is not False)


async def test_produced_batches_of_a_connection_that_is_gone_give_back_what_they_held(lone):
    """Once their time is up: no commit calls them back then, only the fsync does."""
    flushes = []
    hosted = Given(
        sync=True,
        flush=lambda _, callback: flushes.append(callback),
        partition__high_watermark=0,
        partition__when_committed=lambda *_: 1,
        partition__forget_commit=lambda _: None,
    )
    context = Given(
        runtime=lone.node.parts.runtime,
        cluster_link__out_of_touch=False,
        hints__endpoints=lambda *_: [],
    )
    (listener,), waiting = lone.node.parts.listeners, lone.node.parts.memory.waiting
    _, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    await until(lambda: listener.connections)
    (connection,) = listener.connections
    run = connection.open_run(DelayedProduceRun(context, connection, acks=-1, timeout_ms=60_000))
    one = (9, 1, -1, 60_000, b"t", 0, 0, 0)
    run.entries.append((one, hosted, AppendInfo(0, 0, -1, 0, False)))
    run.sync = True
    writer.close()
    await until(lambda: not listener.connections)
    run.written({})
    assert waiting.used_bytes
    run._expire()
    assert waiting.used_bytes, "what an fsync will call is kept"
    flushes.pop()(None)
    assert not waiting.used_bytes


class Introduced(asyncio.Protocol):
    """Serves a socket until its peer has said who it is, in one line."""

    def __init__(self, listener):
        self.listener, self.bytes = listener, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        name, ends, unread = (self.bytes + data).partition(b"\n")
        self.bytes += data
        if ends:
            session = self.listener.session(self.transport, f"User:{name.decode()}", "line")
            self.listener.open(self.transport, session, unread)


async def test_a_connection_begins_when_its_session_is_known_with_what_was_read_behind(lone):
    listener = lone.node.parts.listeners[0]
    listener.new_protocol = Introduced
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    many = [f"none-{number:04}" for number in range(100)]
    writer.write(b"ada\n" + metadata_of(*many) + metadata_of("none"))
    for topics in (100, 1):
        (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 60))
        frame = await asyncio.wait_for(reader.readexactly(size), 60)
        _, response = protocol.decode_response(ApiKey.METADATA, 4, frame)
        assert len(response.topics) == topics
    (connection,) = listener.connections
    session = connection.session
    assert (session.principal, session.mechanism) == ("User:ada", "line")
    assert (session.host, session.listener, session.is_node) == ("127.0.0.1", listener.name, False)
    assert listener.quota.count == 1
    writer.close()
    await until(lambda: not listener.quota.count)


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
    monkeypatch.setattr(RequestHandlers, "_handler", lambda *_: handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    writer.write(struct.pack(">ihhihi", 14, 3, 1, 7, -1, 0))
    assert await asyncio.wait_for(reader.read(1), 60) == b""
    writer.close()
    assert "metadata: no response" in capfd.readouterr().err


def metadata_of(*topics: str) -> bytes:
    """A Metadata request for topics that do not exist."""
    values = {"topics": [{"name": name} for name in topics], "allow_auto_topic_creation": False}
    return protocol.encode_request(ApiKey.METADATA, 4, 1, "c", values)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
def answer(lone, monkeypatch):
    """What all requests of the lone node wait for."""
    future = lone.node.parts.runtime.loop.create_future()
    monkeypatch.setattr(RequestHandlers, "_handler", lambda *_: lambda *_: future)
    return future


async def test_a_connection_whose_request_was_cancelled_is_closed(lone, answer, capfd):
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    writer.write(metadata_of("none"))
    await until(lambda: lone.node.parts.memory.waiting.used_bytes)
    answer.cancel()
    assert await asyncio.wait_for(reader.read(1), 60) == b""
    writer.close()
    assert not lone.node.parts.memory.waiting.used_bytes
    assert 'event="request cancelled"' in capfd.readouterr().err


async def test_behind_what_waits_nobody_is_served_while_waiting_memory_is_used_up(lone, answer):
    waiting, listener = lone.node.parts.memory.waiting, lone.node.parts.listeners[0]
    _, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    writer.write(metadata_of("none"))
    await until(lambda: waiting.used_bytes)
    (connection,) = listener.connections
    assert connection._room() > 0
    waiting.overdraw(waiting.limit_bytes)
    writer.write(metadata_of("none"))
    await until(lambda: connection._stalled)
    assert connection._room() == 0 and len(connection._replies) == 1
    listener.between_nodes = True
    assert connection._room() > 0, "replicas fetch whatever waits for them"
    listener.between_nodes = False
    waiting.release(waiting.limit_bytes)
    await until(lambda: len(connection._replies) == 2)
    writer.close()
    await until(lambda: not listener.connections)
    assert waiting.used_bytes, "it goes on, though its client has gone"
    answer.set_result(b"")
    await until(lambda: not waiting.used_bytes)


async def test_a_large_request_waits_until_waiting_memory_comes_back(lone):
    waiting, listener = lone.node.parts.memory.waiting, lone.node.parts.listeners[0]
    waiting.overdraw(waiting.limit_bytes)
    large = metadata_of(*(f"none-{number:04}" for number in range(100)))
    small = metadata_of("none")
    assert len(small) <= SMALL_FRAME_BYTES < len(large)
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    writer.write(small)
    (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 60))
    await reader.readexactly(size)
    writer.write(large)
    await until(lambda: waiting._waiters)
    (stays,) = listener.connections
    gone = (await asyncio.open_connection("127.0.0.1", lone.port))[1]
    gone.write(large)
    await until(lambda: len(waiting._waiters) == 2)
    for connection in set(listener.connections) - {stays}:
        connection.abort()
    await until(lambda: len(listener.connections) == 1)
    assert len(waiting._waiters) == 1, "who is gone is not remembered"
    gone.close()
    waiting.release(waiting.limit_bytes)
    assert len(await asyncio.wait_for(reader.readexactly(4), 60)) == 4
    writer.close()


@pytest.mark.parametrize("key", [ApiKey.METADATA, ApiKey.JOIN_GROUP])
async def test_an_answer_that_is_waited_for_is_counted_by_its_entries(lone, answer, key):
    """But for members of groups, which are counted as such."""
    waiting, listener = lone.node.parts.memory.waiting, lone.node.parts.listeners[0]
    _, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    if key == ApiKey.METADATA:
        frame = metadata_of(*(f"none-{number:04}" for number in range(100)))
    else:
        frame = protocol.encode_request(key, 0, 1, "c", JOINING)
    writer.write(frame)
    await until(lambda: any(connection._replies for connection in listener.connections))
    held = WAITING_REQUEST_BYTES + len(frame) - 4 - 10 - 1 + 100 * WAITING_ENTRY_BYTES
    assert waiting.used_bytes == (held if key == ApiKey.METADATA else 0)
    writer.close()


JOINING = {
    "group_id": "g",
    "session_timeout": 6000,
    "member_id": "",
    "protocol_type": "consumer",
    "protocols": [{"name": f"p{number}", "metadata": b"x" * 10} for number in range(100)],
}
