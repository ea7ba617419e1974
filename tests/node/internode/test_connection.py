"""Connections whose other side is slow, silent, or sends what no node sends."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
import weakref

import pytest

from kept.node.internode import connection, server
from kept.node.internode.controller_rpc import (
    AllocateProducerIdsReply,
    AllocateProducerIdsRequest,
    ForwardReply,
    ForwardRequest,
)
from kept.node.internode.frames import CHUNK_BYTES, MORE, FrameKind, FrameReader, encode
from kept.node.internode.hello import PREFACE, packed
from kept.node.internode.identity import Hello
from kept.node.internode.protobuf_conversion import METHODS, codecs
from tests.node.internode.raw import RawConnection, append, until

PEER = Hello("c1", 9, uuid.UUID(int=9))
REQUEST = AllocateProducerIdsRequest(1, 5)


async def allocate(_):
    return AllocateProducerIdsReply(1, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff" * 11, "a frame of 4294967295 bytes"),
        (encode(FrameKind.SNAPSHOT_CHUNK, body=b"x"), "a SNAPSHOT_CHUNK on an open connection"),
        (encode(FrameKind.RESPONSE, 7), "a RESPONSE on an open connection"),
        (encode(FrameKind.MESSAGE, body=b"\xff\xff"), "not a RaftMessage"),
    ],
)
async def test_malformed_frames_end_the_connection_with_one_line(net, capsys, data, words):
    one, two = await net.node(1), await net.node(2)
    one.peers.serve("AllocateProducerIds", allocate)
    async with await RawConnection.to(one.port) as raw:
        await raw.open(PEER)
        raw.writer.write(data)
        await raw.closed()
    await two.peers.call(1, "AllocateProducerIds", AllocateProducerIdsRequest(2, 5))
    said = capsys.readouterr().err
    assert words in said and "node 9 at 127.0.0.1:" in said
    assert said.count("\n") == 1


async def test_a_silent_side_is_asked_and_then_given_up(net, monkeypatch, capsys):
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(connection, "KEEPALIVE_ANSWER_S", 1)
    one = await net.node(1)
    async with await RawConnection.to(one.port) as raw:
        await raw.open(PEER)
        for _ in range(3):
            assert (await raw.receive()).kind is FrameKind.PING
            raw.send(FrameKind.PONG)
        assert (await raw.receive()).kind is FrameKind.PING
        await raw.closed()
    await until(lambda: one.peers._connections[9] == {})
    assert "no sign of life" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["closed", "refused"])
async def test_what_came_in_part_is_forgotten_with_its_connection(net, monkeypatch, end):
    """At once, not when garbage is collected: it may be 65 MiB, and others come."""
    made = []

    class Noted(FrameReader):
        def __init__(self, **more):
            super().__init__(**more)
            made.append(weakref.ref(self))

    def held():
        return sum(reader._partial_bytes for note in made if (reader := note()) is not None)

    monkeypatch.setattr(connection, "FrameReader", Noted)
    one = await net.node(1)
    gc.disable()
    try:
        async with await RawConnection.to(one.port) as raw:
            await raw.open(PEER)
            for _ in range(4):
                raw.writer.write(encode(FrameKind.REQUEST | MORE, 7, body=bytes(CHUNK_BYTES)))
            await until(lambda: held() == 4 * CHUNK_BYTES)
            if end == "refused":
                raw.writer.write(b"\xff" * 11)
                await raw.closed()
        await until(lambda: held() == 0)
    finally:
        gc.enable()


async def test_calls_that_are_not_answered_yet_are_bounded(net, monkeypatch):
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    one, answering = await net.node(1), asyncio.Event()
    under_way = []

    async def wait(request):
        under_way.append(request)
        await answering.wait()
        return AllocateProducerIdsReply(7, 1)

    one.peers.serve("AllocateProducerIds", wait)
    method = "AllocateProducerIds"
    body = codecs().calls[method][0].to_bytes(AllocateProducerIdsRequest(PEER.node_id, 5))
    async with await RawConnection.to(one.port) as raw:
        await raw.open(PEER)
        for call_id in range(1, 5):
            raw.send(FrameKind.REQUEST, call_id, METHODS[method], body)
        refused = await raw.receive()
        assert (refused.kind, refused.correlation_id) == (FrameKind.ERROR, 4)
        assert (
            "3 calls of this node are under way"
            in codecs().failure.from_bytes(refused.body).message
        )
        assert len(under_way) == 3
        answering.set()
        answers = [await raw.receive() for _ in range(3)]
        assert {(answer.kind, answer.correlation_id) for answer in answers} == {
            (FrameKind.RESPONSE, call_id) for call_id in (1, 2, 3)
        }
        assert (await raw.call(method, body, 5)).kind is FrameKind.RESPONSE, "there is room again"


async def test_a_node_that_greets_and_says_nothing_more_is_given_up(net, monkeypatch):
    """A half-open connection: the peer answers the Hello and never opens."""
    from kept.node.internode import peer_channel
    from kept.storage.errors import NetworkException

    monkeypatch.setattr(peer_channel, "CONNECT_S", 0.2)
    one = await net.node(1)

    async def greets_only(reader, writer):
        writer.write(packed(Hello("c1", 2, uuid.UUID(int=2))))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greets_only, "127.0.0.1", 0)
    net.ports[2] = server.sockets[0].getsockname()
    with pytest.raises(NetworkException, match="no Hello came back"):
        await one.peers.call(2, "AllocateProducerIds", REQUEST, 5.0)
    assert one.down.empty()
    server.close()


async def test_answers_that_are_not_taken_stop_the_reading_of_requests(net, monkeypatch):
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 1_000_000)
    served = 0

    async def forward(_):
        nonlocal served
        served += 1
        return ForwardReply(bytes(1_000_000))

    one = await net.node(1)
    one.peers.serve("Forward", forward)
    body = codecs().calls["Forward"][0].to_bytes(ForwardRequest(19, 7, b"", "P"))
    async with await RawConnection.to(one.port) as raw:
        await raw.open(PEER)
        for call_id in range(1, 501):
            raw.send(FrameKind.REQUEST, call_id, METHODS["Forward"], body)
            await raw.writer.drain()
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert served < 300, "the rest waits in the connection"
        answered = set()
        while len(answered) < 500:
            answered.add((await raw.receive()).correlation_id)
        assert served == 500


async def test_a_flood_of_frames_leaves_the_loop_free_in_between(net):
    one = await net.node(1)
    async with await RawConnection.to(one.port) as raw:
        await raw.open(PEER)
        body = encode(FrameKind.CANCEL, 1) * 200_000
        raw.writer.write(body + encode(FrameKind.PING))
        longest, before = 0.0, time.thread_time()
        answer = asyncio.ensure_future(raw.receive())
        while not answer.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        assert answer.result().kind is FrameKind.PONG
        assert longest < 0.5


async def test_a_large_body_keeps_nobody_waiting(net):
    one, two = await net.node(1), await net.node(2)

    async def forward(request):
        return ForwardReply(request.body)

    two.peers.serve("Forward", forward)
    two.peers.serve("AllocateProducerIds", allocate)
    body = bytes(30_000_000)
    forwarded = asyncio.ensure_future(
        one.peers.call(2, "Forward", ForwardRequest(19, 7, body, "P"), 30.0)
    )
    calls = 0
    while not forwarded.done():
        await one.peers.call(2, "AllocateProducerIds", REQUEST)
        one.peers.send(append(1, 2, 1))
        calls += 1
    assert forwarded.result().body == body
    await until(lambda: two.messages.qsize() > 5)
    assert calls > 5, "they went by"


async def test_a_node_of_version_1_and_this_one_refuse_each_other(net, capsys):
    one = await net.node(1)
    async with await RawConnection.to(one.port) as raw:
        answer = await raw.greet(Hello("c1", 9, uuid.UUID(int=9), protocol=1))
        assert "run the same version of kept on both" in answer.refusal
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(PREFACE + (70_000).to_bytes(4, "big"))
    assert await reader.read() == b""
    writer.close()
    said = capsys.readouterr().err
    assert "speaks version 1" in said and "a Hello of 70000 bytes" in said
