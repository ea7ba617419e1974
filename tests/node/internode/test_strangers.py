"""What strangers say on the listener between nodes: refused, and nothing of it remembered."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import grpc.aio
import pytest

from kept.cluster.raft.messages import InstallSnapshot, Vote
from kept.node.config.listeners import Voter
from kept.node.internode import grpc_options, protobuf_conversion
from kept.node.internode import hello as greeting
from kept.node.internode.controller_rpc import (
    AllocateProducerIdsReply,
    AllocateProducerIdsRequest,
    HeartbeatReply,
    HeartbeatRequest,
)
from kept.node.internode.hello import HELLO
from kept.node.internode.identity import Hello, check
from kept.node.proto import peers_pb2
from kept.storage.errors import CorruptMessage, NetworkException, PolicyViolation
from tests.node.internode.test_peers import append

STRANGER = Hello("", 9, uuid.UUID(int=9), directory_id=uuid.UUID(int=99))


async def raft_stream(port: int, *frames: peers_pb2.RaftFrame) -> str:
    """How the node ends a Raft stream that consists of these frames."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=grpc_options.CLIENT) as to:
        call = to.stream_stream(
            grpc_options.RAFT,
            request_serializer=peers_pb2.RaftFrame.SerializeToString,
            response_deserializer=peers_pb2.RaftFrame.FromString,
        )()
        try:
            for frame in frames:
                await call.write(frame)
            if frames:
                await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it was ended before all was said
        return str(await call.details())


def hello_frame(hello: Hello) -> peers_pb2.RaftFrame:
    return peers_pb2.RaftFrame(hello=HELLO.encode(hello))


def vote_frame(**head) -> peers_pb2.RaftFrame:
    vote = Vote(**{"term": 5, "sender": 9, "to": 1, "last_index": 9, "last_term": 4, **head})
    return peers_pb2.RaftFrame(messages=[protobuf_conversion.encode_raft(vote)])


def test_a_stream_names_the_cluster_once_there_is_one(play):
    async def scene(net):
        one = await net.node(1)
        why = await raft_stream(one.port, hello_frame(STRANGER), vote_frame())
        assert "names no cluster, node 1 belongs to c1" in why
        other = replace(STRANGER, cluster_id="c2")
        assert "belongs to cluster c2" in await raft_stream(one.port, hello_frame(other))
        assert one.messages.empty()
        young = await net.node(2, cluster_id="")
        await raft_stream(
            young.port, hello_frame(STRANGER), vote_frame(to=2, directory_id=uuid.UUID(int=99))
        )
        assert (await young.messages.get()).term == 5, "where there is none yet, none is wanted"

    play(scene)


def test_a_call_names_the_cluster_once_there_is_one(play):
    async def scene(net):
        one = await net.node(1)
        hello = ((grpc_options.HELLO_KEY, HELLO.to_bytes(STRANGER)),)
        method = f"/{grpc_options.CONTROLLER}/AllocateProducerIds"
        target = f"127.0.0.1:{one.port}"
        async with grpc.aio.insecure_channel(target, options=grpc_options.CLIENT) as to:
            with pytest.raises(grpc.aio.AioRpcError, match="names no cluster"):
                await to.unary_unary(method)(b"", metadata=hello)

    play(scene)


def test_a_new_node_learns_the_cluster_from_whom_it_greets(play):
    async def scene(net):
        one, new = await net.node(1), await net.node(2, cluster_id="")
        new.peers.send(append(2, 1, 7))
        assert (await one.messages.get()).prev_index == 7
        assert one.peers.refusals == {} and new.peers.cluster_id == ""

    play(scene)


def test_a_message_from_another_disk_than_the_hellos_ends_the_stream(play):
    async def scene(net):
        one = await net.node(1)
        frames = hello_frame(replace(STRANGER, cluster_id="c1")), vote_frame()
        assert "from another disk" in await raft_stream(one.port, *frames)
        assert one.messages.empty()

    play(scene)


def test_a_node_speaks_in_its_own_name(play):
    async def scene(net):
        one, two = await net.node(1), await net.node(2)

        async def allocate(request):
            return AllocateProducerIdsReply(1, 1)

        two.peers.serve("AllocateProducerIds", allocate)
        with pytest.raises(PolicyViolation, match="in the name of node 3, from node 1"):
            await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(3, 5))
        await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(1, 5))

    play(scene)


def test_heartbeats_are_in_ones_own_name(play):
    async def scene(net):
        one, two = await net.node(1), await net.node(2)

        async def heartbeat(request):
            return HeartbeatReply(False, False, 1)

        two.peers.serve("Heartbeat", heartbeat)
        one.peers.hold_control(2)
        await one.peers.heartbeat(HeartbeatRequest(1, 1, 5))
        with pytest.raises(PolicyViolation, match="in the name of node 3, from node 1"):
            await one.peers.heartbeat(HeartbeatRequest(3, 1, 5))

    play(scene)


def test_a_snapshot_of_who_is_no_voter_is_refused_before_it_is_taken(play):
    async def scene(net):
        one, two = await net.node(1), await net.node(2)
        one.peers.send(append(1, 2, 0))
        await two.messages.get()
        two.peers.believes = lambda _: False
        snapshot = InstallSnapshot(
            term=1, sender=1, to=2, last_index=9, last_term=1, image_bytes=b"x", voters=()
        )
        with pytest.raises((NetworkException, grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await one.peers._channels[2]._send_snapshot(snapshot)
        assert two.messages.empty()

    play(scene)


def test_a_stream_that_says_nothing_is_ended(play, monkeypatch):
    monkeypatch.setattr(grpc_options, "HELLO_S", 0.1)

    async def scene(net):
        one = await net.node(1)
        assert "no Hello within 0.1 s" in await raft_stream(one.port)

    play(scene)


def unfinished_call(to: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall:
    """A call that nodes answer once its request is there, which never is."""
    hello = ((grpc_options.HELLO_KEY, HELLO.to_bytes(replace(STRANGER, cluster_id="c1"))),)
    return to.stream_unary(f"/{grpc_options.CONTROLLER}/AllocateProducerIds")(metadata=hello)


def test_a_connection_with_nothing_but_an_unfinished_call_is_closed(play, monkeypatch):
    """gRPC's client answers SETTINGS and pings, so the connection is neither silent nor idle."""
    monkeypatch.setattr(grpc_options, "STREAM_S", 0.2)

    async def scene(net):
        one = await net.node(1)
        target = f"127.0.0.1:{one.port}"
        async with grpc.aio.insecure_channel(target, options=grpc_options.CLIENT) as to:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await unfinished_call(to)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        while len(one.peers._server.deadlines):
            await asyncio.sleep(0.01)
        assert all(transport.is_closing() for transport in one.connections)

    play(scene)


def test_a_connection_is_closed_after_its_last_stream_and_not_before(play, monkeypatch):
    async def scene(net):
        one = await net.node(1)
        deadlines, target = one.peers._server.deadlines, f"127.0.0.1:{one.port}"
        async with grpc.aio.insecure_channel(target, options=grpc_options.CLIENT) as to:
            stream = to.stream_stream(
                grpc_options.RAFT,
                request_serializer=peers_pb2.RaftFrame.SerializeToString,
                response_deserializer=peers_pb2.RaftFrame.FromString,
            )()
            await stream.write(hello_frame(replace(STRANGER, cluster_id="c1")))
            assert (await stream.read()).HasField("hello")
            (connection,) = deadlines._connections.values()
            assert connection.streams == 1 and connection._timer is None, "nothing closes it"
            unfinished = unfinished_call(to)
            monkeypatch.setattr(grpc_options, "STREAM_S", 0.2)
            await stream.done_writing()
            with pytest.raises(grpc.aio.AioRpcError):
                await unfinished

    play(scene)


WRONG = [
    {"port": 65_536}, {"port": -1}, {"port": 2**31 - 1}, {"host": "a\0b"}, {"host": "a\nb"},
    {"host": "x" * 256}, {"node_id": -1}, {"node_id": -(2**31)},
    {"voters": (Voter(1, "a", 70_000),)}, {"voters": (Voter(-1, "a", 1),)},
    {"voters": (Voter(1, "a\0", 1),)},
    {"voters": tuple(Voter(n, "a", 1) for n in range(1025))},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_hello_that_no_node_says(wrong):
    with pytest.raises(CorruptMessage, match="a Hello with"):
        check(replace(STRANGER, **wrong))
    with pytest.raises(CorruptMessage):
        greeting.unpacked(greeting.packed(replace(STRANGER, **wrong)))


def test_an_address_that_cannot_be_dialled_is_not_remembered(play):
    """Whoever says where node 2 is could otherwise end the way to it for good."""

    async def scene(net):
        one, two = await net.node(1), await net.node(2)
        forged = Hello("c1", 2, uuid.UUID(int=7), host="h", port=99_999)
        assert "a Hello with the address 'h':99999" in await raft_stream(
            one.port, hello_frame(forged)
        )
        one.peers.send(append(1, 2, 3))
        assert (await asyncio.wait_for(two.messages.get(), 20)).prev_index == 3

    play(scene)


def test_strangers_that_went_are_forgotten(play, monkeypatch):
    monkeypatch.setattr("kept.node.internode.peers.MAX_NODES", 5)

    async def scene(net):
        one, two = await net.node(1), await net.node(2)
        two.peers.send(append(2, 1, 7))
        await one.messages.get()
        for node_id in range(10, 30):
            hello = Hello("c1", node_id, uuid.uuid4(), host="127.0.0.1", port=1)
            assert await raft_stream(one.port, hello_frame(hello)) == ""
            assert len(one.peers._streams) <= 5
        assert 2 in one.peers._streams

    play(scene)
