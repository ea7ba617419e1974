"""Nodes that speak with each other over real sockets, and what happens when one does not.

Long because all of it needs the same pair of nodes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid

import pytest

from kept.cluster.controller.heartbeats import HeartbeatReply, HeartbeatRequest
from kept.cluster.raft.messages import AppendEntriesReply, InstallSnapshot
from kept.node.config.listeners import ConfiguredVoter
from kept.node.internode import hello as greeting
from kept.node.internode import peer_channel as channel
from kept.node.internode.controller_rpc import (
    AllocateProducerIdsReply,
    AllocateProducerIdsRequest,
    ForwardReply,
    ForwardRequest,
)
from kept.storage.errors import (
    InvariantViolation,
    NetworkException,
    NotController,
    PolicyViolation,
    RequestTimedOut,
    StaleBrokerEpoch,
    UnsupportedVersion,
)
from kept.testing.ports import free_port
from tests.node.internode.raw import append, until

# Messages.


async def test_messages_arrive_both_ways_in_order(net):
    one, two = await net.node(1), await net.node(2)
    for n in range(500):
        one.peers.send(append(1, 2, n, b"x" * 100))
        two.peers.send(AppendEntriesReply(term=1, sender=2, to=1, accepted=True, match_index=n))
    assert [(await two.messages.get()).prev_index for _ in range(500)] == list(range(500))
    assert [(await one.messages.get()).match_index for _ in range(500)] == list(range(500))


async def test_a_message_that_comes_after_the_death_of_its_sender_does_not_revive_it(net):
    one, two = await net.node(1), await net.node(2)
    two.peers.send(append(2, 1, 1))
    await one.messages.get()
    await two.die()
    assert await one.down.get() == 2
    one.peers.received(append(2, 1, 2))
    one.peers.send(append(1, 2, 1))
    assert await asyncio.wait_for(one.down.get(), 20) == 2


async def test_a_message_of_some_megabytes_arrives(net):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 1, os.urandom(20_000_000)))
    assert len((await two.messages.get()).entries[0].data) == 20_000_000


async def test_a_peer_that_comes_later_or_again_is_reached(net):
    one = await net.node(1)
    two = await net.node(2)
    await two.die()
    one.peers.send(append(1, 2, 1))  # lost: nobody is there
    for _ in range(3):
        two = await net.node(2, at=net.ports[2][1])
        while two.messages.empty():
            one.peers.send(append(1, 2, 7))
            await asyncio.sleep(0.01)
        assert one.peers.is_connected(2)
        await two.die()
        assert await one.down.get() == 2


async def test_a_peer_that_presents_itself_is_not_waited_for_any_longer(net, monkeypatch):
    """Nodes that start side by side find each other as soon as the last one is there."""
    monkeypatch.setattr(channel, "BACKOFF_S", 3600.0)
    one = await net.node(1)
    net.ports[2] = ("127.0.0.1", free_port())
    with pytest.raises(NetworkException):
        await one.peers.call(2, "Forward", ForwardRequest(3, 12, b"", "P"))
    two = await net.node(2, at=net.ports[2][1])
    one.peers.send(append(1, 2, 1))  # it waits for the back-off to end
    two.peers.send(append(2, 1, 2))
    assert (await two.messages.get()).prev_index == 1


async def test_a_message_that_pretends_to_come_from_another_ends_the_stream(net):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 1))
    await two.messages.get()
    one.peers.channel(2).send(append(3, 2, 2))
    await until(lambda: not one.peers.is_connected(2))
    assert two.messages.empty()


async def test_an_error_of_whoever_listens_does_not_break_the_stream(net, capsys):
    one, two = await net.node(1), await net.node(2)
    heard = []

    def listen(message):
        heard.append(message.prev_index)
        if message.prev_index == 1:
            raise ValueError("a bug")

    two.peers.on_message = listen
    for n in (1, 2):
        one.peers.send(append(1, 2, n))
    await until(lambda: heard == [1, 2])
    assert "a bug" in capsys.readouterr().err


# Snapshots.


async def test_a_large_snapshot_arrives_whole_and_heartbeats_do_not_wait_for_it(net, monkeypatch):
    image = os.urandom(30_000_000)
    snapshot = InstallSnapshot(
        term=1, sender=1, to=2, last_index=9, last_term=1, image_bytes=image, voters=()
    )
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 0))
    await two.messages.get()
    one.peers.send(snapshot)
    one.peers.send(snapshot)  # Raft is impatient: one is under way
    heartbeats = 0
    while True:
        one.peers.send(append(1, 2, 1))
        message = await two.messages.get()
        if isinstance(message, InstallSnapshot):
            break
        heartbeats += 1
    assert message == snapshot
    assert heartbeats > 20, "they went by while the image came"
    one.peers.send(append(1, 2, 5))
    while (message := await two.messages.get()).prev_index != 5:
        assert not isinstance(message, InstallSnapshot)


async def test_a_small_snapshot_goes_with_the_others(net):
    one, two = await net.node(1), await net.node(2)
    snapshot = InstallSnapshot(
        term=1, sender=1, to=2, last_index=9, last_term=1, image_bytes=b"i" * 1000, voters=()
    )
    for message in (append(1, 2, 1), snapshot, append(1, 2, 2)):
        one.peers.send(message)
    first, second, third = [await two.messages.get() for _ in range(3)]
    assert (first.prev_index, second, third.prev_index) == (1, snapshot, 2)


# Calls.


async def test_calls_are_answered_here_and_there(net):
    one, two = await net.node(1), await net.node(2)

    async def allocate(request):
        return AllocateProducerIdsReply(1000 * request.broker_epoch, 1000)

    for node in (one, two):
        node.peers.serve("AllocateProducerIds", allocate)
    for node_id in (1, 2):
        request = AllocateProducerIdsRequest(1, node_id)
        reply = await one.peers.call(node_id, "AllocateProducerIds", request)
        assert reply == AllocateProducerIdsReply(1000 * node_id, 1000)


async def test_a_forwarded_body_of_megabytes(net):
    one, two = await net.node(1), await net.node(2)

    async def forward(request):
        return ForwardReply(request.body[::-1])

    two.peers.serve("Forward", forward)
    body = os.urandom(10_000_000)
    reply = await one.peers.call(2, "Forward", ForwardRequest(19, 7, body, "P"), 20.0)
    assert reply.body == body[::-1]


@pytest.mark.parametrize(
    ("raised", "arrives", "words"),
    [
        (StaleBrokerEpoch("broker 1 has epoch 7, not 5 – für alle"), StaleBrokerEpoch, "für alle"),
        (NotController("node 3 is", 3), NotController, "node 3 is"),
        (KeyError("x"), InvariantViolation, "KeyError"),
        (InvariantViolation("x"), InvariantViolation, "x"),
    ],
)
async def test_what_the_handler_raises_is_raised_at_the_caller(net, capsys, raised, arrives, words):
    one, two = await net.node(1), await net.node(2)

    async def fail(_):
        raise raised

    two.peers.serve("AllocateProducerIds", fail)
    with pytest.raises(arrives, match=words) as caught:
        await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(1, 5))
    assert type(caught.value) is arrives
    assert ("Traceback" in capsys.readouterr().err) is (arrives is InvariantViolation)
    if arrives is NotController:
        assert caught.value.leader_id == 3


async def test_calls_that_nobody_answers(net):
    one, two = await net.node(1), await net.node(2)
    request = AllocateProducerIdsRequest(1, 5)
    with pytest.raises(UnsupportedVersion, match="node 2 does not answer AllocateProducerIds"):
        await one.peers.call(2, "AllocateProducerIds", request)

    async def never(_):
        await asyncio.Event().wait()

    two.peers.serve("AllocateProducerIds", never)
    with pytest.raises(RequestTimedOut, match=r"no answer within 0\.1 s"):
        await one.peers.call(2, "AllocateProducerIds", request, 0.1)
    call = asyncio.ensure_future(one.peers.call(2, "AllocateProducerIds", request, 20.0))
    await asyncio.sleep(0)
    await two.die()
    with pytest.raises(NetworkException):
        await call
    await one.down.get()
    with pytest.raises(NetworkException, match="connection refused"):
        await one.peers.call(2, "AllocateProducerIds", request, 20.0)
    with pytest.raises(NetworkException, match="address is not known"):
        await one.peers.call(9, "AllocateProducerIds", request, 20.0)
    await one.peers.stop()
    with pytest.raises(NetworkException, match="stops"):
        await one.peers.call(2, "AllocateProducerIds", request)


async def test_a_bug_in_connecting_is_told_to_who_waits_and_is_not_the_end(net, capsys):
    one, two = await net.node(1), await net.node(2)

    async def allocate(_):
        return AllocateProducerIdsReply(0, 1000)

    def broken(_):
        raise ValueError("a bug")

    two.peers.serve("AllocateProducerIds", allocate)
    request = AllocateProducerIdsRequest(1, 5)
    one.peers._addresses = broken
    for _ in range(2):
        with pytest.raises(NetworkException, match="a bug"):
            await one.peers.call(2, "AllocateProducerIds", request, 20.0)
    assert capsys.readouterr().err.count("Traceback") == 1
    one.peers._addresses = net.addresses
    reply = await one.peers.call(2, "AllocateProducerIds", request, 20.0)
    assert reply == AllocateProducerIdsReply(0, 1000)


async def test_a_caller_that_is_cancelled_is_cancelled(net):
    one, two = await net.node(1), await net.node(2)
    asked = asyncio.Event()

    async def never(_):
        asked.set()
        await asyncio.Event().wait()

    two.peers.serve("AllocateProducerIds", never)
    request = AllocateProducerIdsRequest(1, 5)
    call = asyncio.ensure_future(one.peers.call(2, "AllocateProducerIds", request, 20.0))
    await asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


# Strangers.


VOTERS = (ConfiguredVoter(1, "127.0.0.1", 1), ConfiguredVoter(2, "127.0.0.1", 2))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"cluster_id": "c2"}, "belongs to cluster c2"),
        (
            {"voters": VOTERS, "cluster_id": ""},
            {"voters": VOTERS[:1], "cluster_id": ""},
            "give every node the same list at the first start",
        ),
        (
            {"voters": VOTERS, "has_log": True},
            {"voters": (ConfiguredVoter(7, "h", 1),), "cluster_id": ""},
            "names no current voter: the cluster has 1@127.0.0.1:1,2@127.0.0.1:2",
        ),
    ],
)
async def test_strangers_are_refused_and_told_why(net, capsys, first, second, words):
    one, two = await net.node(1, **first), await net.node(2, **second)
    request = AllocateProducerIdsRequest(1, 5)
    for here, there in ((one, 2), (two, 1)):
        with pytest.raises(PolicyViolation) as caught:
            await here.peers.call(there, "AllocateProducerIds", request)
        assert words in str(caught.value) or "belongs to cluster c1" in str(caught.value)
        here.peers.send(append(here.peers.node_id, there, 1))
        assert there in here.peers.refusals
    await asyncio.sleep(0.05)
    assert one.messages.empty()
    assert two.messages.empty()
    said = capsys.readouterr().err
    assert "peer refused" in said
    assert words in said


async def test_a_refusal_ends_with_its_reason(net, capsys):
    one, two = await net.node(1), await net.node(2, cluster_id="c2")
    request = AllocateProducerIdsRequest(1, 5)
    with pytest.raises(PolicyViolation):
        await one.peers.call(2, "AllocateProducerIds", request)
    two.peers.cluster_id = "c1"
    with pytest.raises(UnsupportedVersion):
        await one.peers.call(2, "AllocateProducerIds", request)
    assert one.peers.refusals == {}


async def test_a_node_that_has_no_cluster_id_yet_is_welcome(net):
    one, two = await net.node(1, cluster_id=""), await net.node(2)
    one.peers.send(append(1, 2, 1))
    await two.messages.get()


async def test_another_node_at_the_address(net, capsys):
    one, three = await net.node(1), await net.node(3)
    net.ports[2] = net.ports[3]
    with pytest.raises(PolicyViolation, match="this is node 3, not node 2"):
        await one.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(1, 5))
    assert await one.peers.probe(2) == "timeout"
    assert await one.peers.probe(3) == three.peers.incarnation


@pytest.mark.parametrize("occupied", [False, True])
async def test_a_peer_that_moved_is_found_at_its_other_address(net, occupied):
    one, two, three = [await net.node(number) for number in (1, 2, 3)]
    net.before[2] = net.ports[3] if occupied else ("127.0.0.1", free_port())
    one.peers.send(append(1, 2, 7))
    assert (await two.messages.get()).prev_index == 7
    assert one.down.empty(), "nobody died, there or here"
    assert three.messages.empty()
    assert one.peers.refusals == {}


async def test_ones_own_id_at_another_node(net, capsys):
    one = await net.node(1)
    twin = await net.node(1, known=False)
    with pytest.raises(PolicyViolation, match="node id 1 is used twice"):
        net.ports[2] = ("127.0.0.1", one.port)
        await twin.peers.call(2, "AllocateProducerIds", AllocateProducerIdsRequest(1, 5))


async def test_a_second_process_with_the_id_of_a_live_one_is_refused(net, capsys):
    one, two = await net.node(1), await net.node(2)
    two.peers.send(append(2, 1, 1))
    await one.messages.get()
    twin = await net.node(2, known=False)
    twin.peers.send(append(2, 1, 2))
    await until(lambda: 1 in twin.peers.refusals)
    assert "belongs to another process that is alive" in twin.peers.refusals[1]
    assert one.messages.empty()
    await twin.die()
    await two.die()
    again = await net.node(2, at=net.ports[2][1])
    while one.messages.empty():
        again.peers.send(append(2, 1, 3))
        await asyncio.sleep(0.005)


# Who is gone.


async def test_a_dead_process_is_noticed_at_once_on_either_end_of_a_stream(net, monkeypatch):
    """By the stream's end: nobody writes to it any more, and nobody tries to reach it again."""
    monkeypatch.setattr(channel, "BACKOFF_S", 3600.0)
    one, two, three = await net.node(1), await net.node(2), await net.node(3)
    one.peers.send(append(1, 2, 1))
    two.peers.send(append(2, 3, 1))
    await two.messages.get()
    await three.messages.get()
    await two.die()
    assert await one.down.get() == 2
    assert await three.down.get() == 2
    assert await one.peers.probe(2) is None
    await asyncio.sleep(0.1)
    assert one.down.empty(), "once"


async def test_whoever_is_told_of_a_death_may_fail(net):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 1))
    await two.messages.get()
    told = []

    def fail(node_id):
        told.append(node_id)
        raise InvariantViolation("a bug of ours")

    one.peers.on_peer_down = fail
    one.peers.process_gone(2)
    assert told == [2]


@pytest.mark.parametrize("refused_first", [True, False])
async def test_a_process_whose_address_went_with_it_is_noticed(net, monkeypatch, refused_first):
    """As a container's: a probe in time is refused, a later one finds no such name."""
    name = "kept-2.invalid"
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo
    known = {name}

    async def getaddrinfo(host, port, **more):
        if host == name and name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await real("127.0.0.1" if host == name else host, port, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    one, two = await net.node(1), await net.node(2, own_address=(name, 0))
    two.peers.own_address = net.ports[2] = (name, two.port)
    one.peers.send(append(1, 2, 1))
    two.peers.send(append(2, 1, 1))
    await two.messages.get()
    await one.messages.get()
    known.clear()
    with pytest.raises(greeting.AddressGone):
        await one.peers.identify(*net.ports[2])
    assert await one.peers.probe(2) == "timeout", "its streams are there: its name is not"
    if refused_first:
        known.add(name)
    await two.die()
    assert await one.down.get() == 2
    known.clear()
    assert await one.peers.probe(2) is None
    known.add(name)
    again = await net.node(2, at=two.port, known=False)
    while again.messages.empty():
        one.peers.send(append(1, 2, 7))
        await asyncio.sleep(0.01)
    known.clear()
    assert await one.peers.probe(2) == "timeout", "it is there again"


async def test_silence_is_no_evidence(net):
    one, two = await net.node(1), await net.node(2)
    one.peers.send(append(1, 2, 1))
    await two.messages.get()
    two.silent = True  # it accepts and says nothing, like a process that is stopped
    for transport in two.connections:
        transport.abort()
    await until(lambda: not one.peers.is_connected(2))
    assert await one.peers.probe(2, 0.2) == "timeout"
    assert one.down.empty()
    two.silent = False
    assert await one.peers.probe(2) == two.peers.incarnation


async def test_a_broken_stream_of_a_live_process_is_no_evidence(net):
    one, two = await net.node(1), await net.node(2)
    for _ in range(3):
        one.peers.send(append(1, 2, 1))
        await two.messages.get()
        for transport in two.connections:
            transport.abort()
        await until(lambda: not one.peers.is_connected(2))
        while not one.peers.is_connected(2):
            one.peers.send(append(1, 2, 1))
            await asyncio.sleep(0.005)
        await two.messages.get()
    assert one.down.empty()


async def test_probes_of_nobody(net):
    one = await net.node(1)
    assert await one.peers.probe(5) == "timeout"
    net.ports[6] = ("no-such-host.invalid", 1)
    assert await one.peers.probe(6) == "timeout"

    async def drops(reader, writer):
        writer.close()

    busy = await asyncio.start_server(drops, "127.0.0.1", 0)
    net.ports[7] = busy.sockets[0].getsockname()
    assert await one.peers.probe(7, 0.1) == "timeout", "somebody listens, whoever it is"
    busy.close()


async def test_who_said_wrongly_that_it_is_a_node_does_not_make_it_dead(net):
    one, two = await net.node(1), await net.node(2)
    liar = await net.node(2, known=False, own_address=("127.0.0.1", free_port()))
    liar.peers.send(append(2, 1, 1))
    await one.messages.get()
    await liar.die()
    assert one.peers.addresses(2)[0] == liar.peers.own_address, "nobody is there"
    assert await one.peers.probe(2) == two.peers.incarnation
    await two.die()
    assert await one.peers.probe(2) is None


async def test_voters_are_found_where_a_node_with_a_log_says(net):
    three = await net.node(3, known=False)
    voters = (ConfiguredVoter(2, "two", 1), ConfiguredVoter(3, "127.0.0.1", three.port))
    two = await net.node(2, voters=voters)
    one = await net.node(1)
    one.peers.send(append(1, 2, 1))
    await two.messages.get()
    assert one.peers.addresses(3) == (), "without a log it is but its settings"
    await two.die()
    two = await net.node(2, at=two.port, voters=voters, has_log=True)
    await until(lambda: not one.peers.is_connected(2))
    while not one.peers.is_connected(2):
        one.peers.send(append(1, 2, 1))
        await asyncio.sleep(0.005)
    assert one.peers.addresses(3) == (("127.0.0.1", three.port),)
    one.peers.send(append(1, 3, 1))
    await three.messages.get()


async def test_a_probe_tells_who_serves_an_address(net):
    disk = uuid.uuid4()
    one = await net.node(1)
    two = await net.node(2, voters=VOTERS, has_log=True, directory_id=disk)
    hello = await one.peers.identify("127.0.0.1", two.port)
    assert (hello.node_id, hello.has_log, hello.directory_id) == (2, True, disk)
    assert hello.voters == VOTERS


# Heartbeats.


async def test_heartbeats_go_over_a_connection_whose_end_is_heard(net):
    one, two = await net.node(1), await net.node(2)

    async def heartbeat(request):
        if request.broker_epoch == 0:
            raise StaleBrokerEpoch("epoch 0")
        return HeartbeatReply(False, False, request.applied_index)

    two.peers.serve("Heartbeat", heartbeat)
    with pytest.raises(NetworkException, match="no controller is known"):
        await one.peers.heartbeat(HeartbeatRequest(1, 1, 5))
    one.peers.hold_control(2)
    for n in range(20):
        assert (await one.peers.heartbeat(HeartbeatRequest(1, 1, n))).index == n
    with pytest.raises(StaleBrokerEpoch):
        await one.peers.heartbeat(HeartbeatRequest(1, 0, 5))
    replies = [one.peers.heartbeat(HeartbeatRequest(1, 1, n)) for n in range(3)]
    assert [reply.index for reply in await asyncio.gather(*replies)] == [0, 1, 2]
    assert two.lost.empty()
    await one.die()
    assert await two.lost.get() == 1
    assert await two.down.get() == 1


async def test_heartbeats_follow_the_controller(net):
    one, two, three = await net.node(1), await net.node(2), await net.node(3)

    def answering(index):
        async def heartbeat(_):
            return HeartbeatReply(False, False, index)

        return heartbeat

    for index, node in enumerate((one, two, three), 1):
        node.peers.serve("Heartbeat", answering(index))
    for controller in (2, 3, 1, 2):
        one.peers.hold_control(controller)
        assert (await one.peers.heartbeat(HeartbeatRequest(1, 1, 5))).index == controller
    assert await two.lost.get() == 1
    assert await three.lost.get() == 1
    await two.die()
    with pytest.raises((NetworkException, RequestTimedOut)):
        await one.peers.heartbeat(HeartbeatRequest(1, 1, 5), 0.3)
    two = await net.node(2, at=net.ports[2][1])
    two.peers.serve("Heartbeat", answering(22))
    reply = None
    while reply is None:
        try:
            reply = await one.peers.heartbeat(HeartbeatRequest(1, 1, 5), 1.0)
        except (NetworkException, RequestTimedOut):
            await asyncio.sleep(0.01)
    assert reply.index == 22
