"""What strangers say on the listener between nodes: refused, and nothing of it remembered."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from msgspec.structs import replace

from kept.cluster.controller.heartbeats import HeartbeatReply, HeartbeatRequest
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.messages import AppendEntries, InstallSnapshot, Vote
from kept.node.config.listeners import ConfiguredVoter
from kept.node.internode import connection as internode_connection
from kept.node.internode import hello as greeting
from kept.node.internode import protobuf_conversion, server
from kept.node.internode.controller_rpc import AllocateProducerIdsReply, AllocateProducerIdsRequest
from kept.node.internode.frames import CHUNK_BYTES, FrameKind, LongBody
from kept.node.internode.identity import Hello, check
from kept.node.internode.parse_limits import MAX_ITEMS
from kept.node.internode.protobuf_conversion import codecs
from kept.storage.errors import CorruptMessage, PolicyViolation
from tests.node.internode.raw import RawConnection, append, send_messages

STRANGER = Hello("", 9, uuid.UUID(int=9), directory_id=uuid.UUID(int=99))


def vote(**head) -> Vote:
    return Vote(**{"term": 5, "sender": 9, "to": 1, "last_index": 9, "last_term": 4, **head})


async def test_a_connection_names_the_cluster_once_there_is_one(net):
    one = await net.node(1)
    why = await send_messages(one.port, STRANGER, vote())
    assert "names no cluster, node 1 belongs to c1" in why
    other = replace(STRANGER, cluster_id="c2")
    async with await RawConnection.to(one.port) as connection:
        refused = await connection.greet(other)
        assert "belongs to cluster c2" in refused.refusal
        await connection.closed()
    assert one.messages.empty()
    young = await net.node(2, cluster_id="")
    await send_messages(young.port, STRANGER, vote(to=2, directory_id=uuid.UUID(int=99)))
    assert (await young.messages.get()).term == 5, "where there is none yet, none is wanted"


async def test_who_turns_out_to_be_of_another_cluster_is_refused(net):
    """It was let in before this node knew its own cluster."""
    one = await net.node(1, cluster_id="")
    async with await RawConnection.to(one.port) as connection:
        hello = replace(STRANGER, cluster_id="c2")
        assert not (await connection.open(hello)).refusal
        one.peers.cluster_id = "c1"
        frame = await connection.call("AllocateProducerIds", b"")
        assert frame.kind is FrameKind.OPEN
        assert "belongs to cluster c2" in greeting.hello_from(frame.body).refusal
        await connection.closed()


async def test_a_new_node_learns_the_cluster_from_whom_it_greets(net):
    one, new = await net.node(1), await net.node(2, cluster_id="")
    new.peers.send(append(2, 1, 7))
    assert (await one.messages.get()).prev_index == 7
    assert one.peers.refusals == {} and new.peers.cluster_id == ""


async def test_a_message_from_another_disk_than_the_hellos_ends_the_connection(net, capsys):
    one = await net.node(1)
    await send_messages(one.port, replace(STRANGER, cluster_id="c1"), vote())
    assert one.messages.empty()
    assert "a message from another disk than that of 9" in capsys.readouterr().err


async def test_an_append_of_very_many_entries_ends_the_connection(net, capsys):
    one = await net.node(1)
    entries = tuple(Entry(1, n, b"") for n in range(MAX_ITEMS + 1))
    head = {"term": 5, "sender": 9, "to": 1, "directory_id": STRANGER.directory_id}
    many = AppendEntries(**head, prev_index=0, prev_term=0, entries=entries)
    await send_messages(one.port, replace(STRANGER, cluster_id="c1"), many)
    assert one.messages.empty()
    assert f"RaftMessage: more than {MAX_ITEMS} items" in capsys.readouterr().err


async def test_a_node_speaks_in_its_own_name(net):
    one, two = await net.node(1), await net.node(2)

    async def allocate(request):
        return AllocateProducerIdsReply(1, 1)

    two.peers.serve("AllocateProducerIds", allocate)
    with pytest.raises(PolicyViolation, match="in the name of node 3, from node 1"):
        await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(3, 5))
    await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(1, 5))


async def test_heartbeats_are_in_ones_own_name(net):
    one, two = await net.node(1), await net.node(2)

    async def heartbeat(request):
        return HeartbeatReply(False, False, 1)

    two.peers.serve("Heartbeat", heartbeat)
    one.peers.hold_control(2)
    await one.peers.heartbeat(HeartbeatRequest(1, 1, 5))
    with pytest.raises(PolicyViolation, match="in the name of node 3, from node 1"):
        await one.peers.heartbeat(HeartbeatRequest(3, 1, 5))


@pytest.mark.parametrize(("sender", "to"), [(3, 2), (1, 3)], ids=["from another", "to another"])
async def test_a_snapshot_in_the_name_of_another_is_refused_before_it_is_taken(net, sender, to):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 0))
    await two.messages.get()
    snapshot = InstallSnapshot(
        term=1, sender=sender, to=to, last_index=9, last_term=1, image_bytes=b"x", voters=()
    )
    with pytest.raises(CorruptMessage, match=f"a snapshot from {sender} to {to}"):
        await one.peers._channels[2]._send_snapshot(snapshot)
    assert two.messages.empty()


async def test_a_snapshot_of_who_is_no_voter_is_refused_before_it_is_taken(net):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 0))
    await two.messages.get()
    two.peers.may_lead = lambda _: False
    snapshot = InstallSnapshot(
        term=1, sender=1, to=2, last_index=9, last_term=1, image_bytes=b"x", voters=()
    )
    with pytest.raises(CorruptMessage, match="from node 1, which is no voter"):
        await one.peers._channels[2]._send_snapshot(snapshot)
    assert two.messages.empty()


@pytest.mark.parametrize("greets", [False, True])
async def test_a_connection_that_is_never_opened_is_closed(net, monkeypatch, greets):
    """Whatever else it does: it counts among those of nodes."""
    monkeypatch.setattr(server, "OPEN_S" if greets else "HELLO_S", 0.2)
    monkeypatch.setattr(internode_connection, "KEEPALIVE_S", 3600)  # nothing else closes it
    one = await net.node(1)
    async with await RawConnection.to(one.port) as connection:
        if greets:
            assert not (await connection.greet(replace(STRANGER, cluster_id="c1"))).refusal
            for _ in range(5):
                connection.send(FrameKind.PING)  # neither silent nor open
        else:
            connection.writer.write(greeting.PREFACE)
        await connection.closed()
    while len(one.peers._server):
        await asyncio.sleep(0.01)
    assert all(transport.is_closing() for transport in one.connections)


async def test_an_open_connection_stays(net, monkeypatch):
    monkeypatch.setattr(server, "OPEN_S", 1)
    one = await net.node(1)
    async with await RawConnection.to(one.port) as connection:
        await connection.open(replace(STRANGER, cluster_id="c1"))
        await asyncio.sleep(1.1)
        connection.send(FrameKind.PING)
        assert (await connection.receive()).kind is FrameKind.PONG


@pytest.mark.parametrize(
    "kind", [kind for kind in FrameKind if kind not in (FrameKind.PING, FrameKind.PONG)]
)
async def test_nothing_is_served_before_the_connection_is_open(net, capsys, kind):
    one = await net.node(1)
    async with await RawConnection.to(one.port) as connection:
        await connection.greet(replace(STRANGER, cluster_id="c1"))
        connection.send(kind, body=b"\xff\xff\xff")
        await connection.closed()
    two = await net.node(2)
    two.peers.send(append(2, 1, 1))
    await one.messages.get()  # it still serves
    said = capsys.readouterr().err
    wrong = (
        "not a Hello" if kind is FrameKind.OPEN else f"a {kind.name} before the connection is open"
    )
    assert "connection between nodes closed" in said and wrong in said
    assert said.count("\n") == 1 and "127.0.0.1:" in said


async def test_nothing_long_is_put_together_before_the_connection_is_open(net, capsys):
    """A body that is not whole never reaches who would refuse it, and may have many megabytes."""
    one = await net.node(1)
    async with await RawConnection.to(one.port) as connection:
        await connection.greet(replace(STRANGER, cluster_id="c1"))
        body = LongBody(FrameKind.REQUEST, 1, 1, bytes(3 * CHUNK_BYTES))
        connection.writer.write(body.next_frame())
        await connection.closed()
    assert "a REQUEST in several frames" in capsys.readouterr().err
    async with await RawConnection.to(one.port) as connection:
        await connection.open(replace(STRANGER, cluster_id="c1"))
        connection.writer.write(body.next_frame())
        connection.send(FrameKind.PING)
        assert (await connection.receive()).kind is FrameKind.PONG, "afterwards it may be long"


WRONG = [
    {"port": 65_536},
    {"port": -1},
    {"port": 2**31 - 1},
    {"host": "a\0b"},
    {"host": "a\nb"},
    {"host": "x" * 256},
    {"node_id": -1},
    {"node_id": -(2**31)},
    {"voters": (ConfiguredVoter(1, "a", 70_000),)},
    {"voters": (ConfiguredVoter(-1, "a", 1),)},
    {"voters": (ConfiguredVoter(1, "a\0", 1),)},
    {"voters": tuple(ConfiguredVoter(n, "a", 1) for n in range(1025))},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_hello_that_no_node_says(wrong):
    with pytest.raises(CorruptMessage, match="a Hello with"):
        check(replace(STRANGER, **wrong))
    with pytest.raises(CorruptMessage):
        greeting.unpacked(greeting.packed(replace(STRANGER, **wrong)))


async def test_an_address_that_cannot_be_dialled_is_not_remembered(net, capsys):
    """Whoever says where node 2 is could otherwise end the way to it for good."""
    one, two = await net.node(1), await net.node(2)
    forged = Hello("c1", 2, uuid.UUID(int=7), host="h", port=99_999)
    async with await RawConnection.to(one.port) as connection:
        await connection.greet(replace(forged, port=1))
        connection.send(FrameKind.OPEN, body=codecs().hello.to_bytes(forged))
        await connection.closed()
    one.peers.send(append(1, 2, 3))
    assert (await asyncio.wait_for(two.messages.get(), 20)).prev_index == 3
    assert "a Hello with the address 'h':99999" in capsys.readouterr().err


async def test_strangers_that_went_are_forgotten(net, monkeypatch):
    monkeypatch.setattr("kept.node.internode.peers.MAX_NODES", 5)
    one, two = await net.node(1), await net.node(2)
    two.peers.send(append(2, 1, 7))
    await one.messages.get()
    for node_id in range(10, 30):
        hello = Hello("c1", node_id, uuid.uuid4(), host="127.0.0.1", port=1)
        assert await send_messages(one.port, hello) == ""
        assert len(one.peers._connections) <= 5
        while one.peers._connections.get(node_id):
            await asyncio.sleep(0.001)
    assert 2 in one.peers._connections


async def test_raft_messages_after_a_refusal_change_nothing(net):
    """Who is refused says that it votes, all the same, before the connection is closed."""
    one = await net.node(1)
    for refused in (STRANGER, replace(STRANGER, cluster_id="c2")):
        async with await RawConnection.to(one.port) as connection:
            await connection.greet(refused)
            connection.send(FrameKind.OPEN, body=codecs().hello.to_bytes(refused))
            for _ in range(3):
                message = vote(directory_id=STRANGER.directory_id)
                body = protobuf_conversion.encode_raft(message)
                connection.send(FrameKind.MESSAGE, body=body)
            await connection.closed()
    assert one.messages.empty()


async def test_a_hello_with_the_id_of_another_node_changes_nothing(net):
    """Node 2 is alive: whoever says that he is node 2 is refused, and so is what he says."""
    one, two = await net.node(1), await net.node(2)
    two.peers.send(append(2, 1, 1))
    await one.messages.get()
    imitated = Hello("c1", 2, uuid.UUID(int=7), directory_id=uuid.UUID(int=77))
    why = await send_messages(one.port, imitated, vote(sender=2, directory_id=uuid.UUID(int=77)))
    assert "belongs to another process that is alive" in why
    assert one.messages.empty()
    two.peers.send(append(2, 1, 2))
    assert (await one.messages.get()).prev_index == 2, "node 2 goes on"
