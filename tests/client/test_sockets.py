"""Connections that do not work, and say nothing of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kept.client.client import Client, OutRecord
from kept.client.core.broker_errors import ConnectionFailed, NoResponse
from kept.client.core.connections import DEAD_MS
from kept.client.sockets import ADDRESS_MS, UNHEARD_S
from kept.storage.errors import InvalidRequest, NoNode
from kept.storage.types import MAX_INT64, TopicPartition
from tests.support.client_world import A, World, offsets


@pytest.fixture
def silent() -> Iterator[Any]:
    """An address where connecting takes forever: whoever listens takes nobody more."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(server.getsockname())
        yield server.getsockname()


def test_the_next_address_of_a_host_is_tried_when_one_does_not_answer(
    kept_broker, silent, monkeypatch
):
    there = ("127.0.0.1", kept_broker.port())
    known = socket.getaddrinfo

    def both(host: str, *rest: Any, **given: Any) -> Any:
        if host != "both":
            return known(host, *rest, **given)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in (silent, there)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with Client("both:9", timeout_ms=5 * ADDRESS_MS) as client:
        assert client.metadata([]).nodes


def test_an_address_without_use_here_does_not_hide_that_another_one_refused(monkeypatch):
    """In a container ``localhost`` is ``::1``, too, where there is no IPv6."""
    nobody = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    no_family = (socket.AF_INET + 97, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [nobody, no_family])
    with Client("both:9", timeout_ms=2000) as client, pytest.raises(NoNode, match="refused"):
        client.metadata([])


def test_nor_that_another_one_does_not_answer(silent, monkeypatch):
    monkeypatch.setattr("kept.client.sockets.ADDRESS_MS", 10)
    there = (socket.AF_INET, socket.SOCK_STREAM, 6, "", silent)
    no_family = (socket.AF_INET + 97, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [there, no_family])
    with (
        Client("both:9", timeout_ms=2000) as client,
        pytest.raises(ConnectionFailed, match=r"both:9: .*: no connection$"),
    ):
        client.metadata([])


def test_the_kernel_watches_connections(kept_broker):
    """tests/failover cuts networks; here is asked whether the kernel was told to look."""
    with kept_broker.client() as client:
        client.metadata([])
        (one,) = (s.socket for s in client._sockets._sockets.values())
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in (("TCP_KEEPIDLE", UNHEARD_S // 2), ("TCP_USER_TIMEOUT", 20_000)):
            if hasattr(socket, name):
                assert one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


class _InterruptedSend:
    """A socket whose sends end in an interrupt, behind the system call."""

    def __init__(self, real: socket.socket, interrupt: type[BaseException]) -> None:
        self.real, self.interrupt = real, interrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def send(self, data: memoryview) -> int:
        self.real.send(data)
        raise self.interrupt


class _Alarm(Exception):
    """What a signal handler raises, such as a timeout of a test."""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, _Alarm])
@pytest.mark.parametrize("where", ["send", "wait"])
def test_nothing_is_sent_twice_after_an_interrupt(kept_broker, monkeypatch, where, interrupt):
    topic = kept_broker.create_topic(partitions=1)
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"k", b"first")])
        sockets = client._sockets
        before = list(sockets._sockets.values())
        if where == "send":
            for one in before:
                one.socket = _InterruptedSend(one.socket, interrupt)
        else:
            select, turns = sockets._selector.select, iter([[], interrupt])

            def interrupted(pause: float) -> Any:
                turn = next(turns, None)
                if turn is interrupt:
                    raise interrupt
                return select(pause) if turn is None else turn

            monkeypatch.setattr(sockets._selector, "select", interrupted)
        with pytest.raises(interrupt):
            client.produce(topic, [OutRecord(b"k", b"interrupted")])
        assert not any(one in before for one in sockets._sockets.values())
        client.produce(topic, [OutRecord(b"k", b"last")])
        while sockets.core._waiting:  # what would be sent again backs off first
            client.metadata([])
        values = [record.value for record in client.read(topic, [0])]
        assert (values[0], values.count(b"last")) == (b"first", 1)
        assert values.count(b"interrupted") <= 1
        assert not sockets._finished


def test_what_nobody_takes_is_not_waited_for_forever(kept_cluster):
    cluster = kept_cluster()
    topic = cluster.create_topic(partitions=1)
    with Client(cluster.bootstrap) as client:
        client.produce(topic, [OutRecord(b"k", b"v")])
        cluster.pause(0)
        client.timeout_ms = 500
        try:
            with pytest.raises(NoResponse, match="not taken within"):
                for _ in range(20):
                    client.produce(topic, [OutRecord(b"k", bytes(900_000))], acks=0)
        finally:
            cluster.resume(0)


def test_a_request_that_cannot_be_written_ends_and_the_next_one_is_served(kept_broker):
    topic = kept_broker.create_topic(partitions=1)
    tp = TopicPartition(topic, 0)
    with kept_broker.client() as client:
        with pytest.raises(InvalidRequest, match=f"ListOffsets of {topic}:0: not a request: "):
            client.list_offsets({tp: MAX_INT64 + 1})
        assert client.list_offsets({tp: -1})[tp].offset == 0


def test_a_connection_on_which_all_waited_in_vain_is_not_used_again():
    world = World()
    world.nodes = (A,)
    offsets(world)
    before = set(world.connections)
    world.mute.add(A)
    call = offsets(world, timeout_ms=DEAD_MS - 1000)
    world.run(until_ms=world.now + DEAD_MS - 500)
    assert call.id in world.finished and set(world.connections) == before, "it may be slow"
    call = offsets(world, timeout_ms=DEAD_MS)
    world.run(until_ms=world.now + DEAD_MS + 500)
    with pytest.raises(NoResponse):
        world.result(call)
    assert not world.connections
    world.mute.clear()
    assert world.result(offsets(world)).topics[0].partitions[0].offset == 7


def test_a_connection_on_which_somebody_waits_stays():
    world = World()
    offsets(world)
    (connection,) = world.connections
    world.mute.add(A)
    patient = offsets(world, timeout_ms=3 * DEAD_MS)
    offsets(world, timeout_ms=DEAD_MS)
    world.run(until_ms=world.now + 2 * DEAD_MS)
    assert connection in world.connections and patient.id not in world.finished


class Forgetful:
    """Stands between, and forgets its connections when told: their bytes go nowhere."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.target = ("127.0.0.1", 0)
        self.forgotten = -1
        self.count = 0
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                other = socket.create_connection(self.target)
                self._open += (one, other)
                for pair in ((one, other), (other, one)):
                    given = (*pair, self.count)
                    threading.Thread(target=self._pass_on, args=given, daemon=True).start()
                self.count += 1

    def _pass_on(self, one: socket.socket, other: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if number > self.forgotten:
                    other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.mark.slow
def test_what_stands_between_has_forgotten_the_connection(kept_cluster):
    between = Forgetful()
    cluster = kept_cluster(**{"advertised.listeners": f"PLAINTEXT://127.0.0.1:{between.port}"})
    between.target = ("127.0.0.1", cluster.port())
    with (
        contextlib.closing(between),
        Client(f"127.0.0.1:{between.port}", timeout_ms=DEAD_MS + 1000) as client,
    ):
        client.metadata([])
        between.forgotten = between.count - 1
        with pytest.raises(NoResponse):
            client.metadata([])
        assert client.metadata([]).nodes
