"""What a client sent before it closed is served: with acks=0 it hears of nothing that is not."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kept.client.protocol import messages as protocol
from kept.client.security.tls import client_context, tls_config
from kept.node.kafka import connection as connections
from kept.node.kafka.codec import produce as codec
from kept.node.kafka.request_handlers import RequestHandlers
from kept.storage.types import Codec, TopicPartition
from tests.node.conftest import Lone
from tests.support.certificates import Authority
from tests.support.loops import until
from tests.support.request_values import one_batch, produce_values

FRAMES = 150
API_VERSIONS = protocol.encode_request(18, 0, 7, "c", {})
Hear = Callable[[Any], None]


def produced(batch: bytes) -> bytes:
    return protocol.encode_request(0, 9, 1, "c", produce_values("t", batch, acks=0))


def notify(sock: Any) -> None:
    """The end of TLS, and that of TCP behind it."""
    sock.settimeout(0)
    with suppress(ssl.SSLWantReadError):  # the node's end is not waited for
        sock.unwrap()
    sock.close()


def fin(sock: Any) -> None:
    """The end of TCP alone."""
    sock.close()


class Client:
    """A client of a node in this process, on whose loop it says all that it has to say at once."""

    def __init__(self, runner: asyncio.Runner, directory: Path, protocol_name: str) -> None:
        authority = Authority(directory)
        self.lone = Lone(
            runner,
            str(directory / "data"),
            listeners=f"{protocol_name}://127.0.0.1:0",
            ssl_keystore_location=authority.issue("node", "localhost"),
        )
        self.lone.create("t")
        self.context = None
        if protocol_name == "SSL":
            self.context = client_context(tls_config({"ssl.truststore.location": authority.ca}))
        (self.listener,) = self.lone.node.parts.listeners

    @property
    def end_offset(self) -> int:
        return int(self.lone.node.parts.table.partitions[TopicPartition("t", 0)].log_end_offset)

    async def connected(self) -> tuple[Any, connections.Connection]:
        """A socket that was answered, and the node's end of it."""

        def connect() -> Any:
            sock: Any = socket.create_connection(("127.0.0.1", self.lone.port), 60)
            if self.context is not None:
                sock = self.context.wrap_socket(sock, server_hostname="localhost")
            sock.sendall(API_VERSIONS)
            while not sock.recv(65_536):
                pass
            return sock

        sock = await asyncio.to_thread(connect)
        (connection,) = self.listener.connections
        return sock, connection

    async def gone(self) -> None:
        await until(lambda: not self.listener.connections)
        assert (
            not self.listener.quota.count and not self.lone.node.parts.memory.in_flight.used_bytes
        )


@pytest.fixture
def connect_by(tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """A client by a protocol: on uvloop, as nodes are, whose TLS ends otherwise than asyncio's."""
    clients: list[Client] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def start(protocol_name: str) -> Client:
            clients.append(Client(runner, tmp_path, protocol_name))
            return clients[-1]

        yield start
        for client in clients:
            client.lone.stop()


ENDS = [("SSL", notify), ("SSL", fin), ("PLAINTEXT", fin)]


@pytest.mark.parametrize(("protocol_name", "end"), ENDS)
def test_all_frames_are_served_whose_client_has_gone(
    connect_by: Callable[[str], Client],
    monkeypatch: pytest.MonkeyPatch,
    protocol_name: str,
    end: Hear,
) -> None:
    """Though the first takes the connection's turn."""
    monkeypatch.setattr(connections, "TURN_S", 0.0)
    client = connect_by(protocol_name)

    async def go() -> None:
        sock, _ = await client.connected()
        sock.sendall(produced(one_batch(1, 1000)) * FRAMES + produced(one_batch())[:-1])
        end(sock)
        await client.gone()
        assert client.end_offset == FRAMES

    client.lone.run(go())


@pytest.mark.parametrize(("protocol_name", "end"), ENDS)
def test_so_are_those_behind_a_batch_that_a_thread_checks(
    connect_by: Callable[[str], Client],
    monkeypatch: pytest.MonkeyPatch,
    protocol_name: str,
    end: Hear,
) -> None:
    monkeypatch.setattr(codec, "IN_THREAD_BYTES", 10)
    client = connect_by(protocol_name)

    async def go() -> None:
        sock, _ = await client.connected()
        compressed = produced(one_batch(10, 1000, codec=Codec.GZIP))
        sock.sendall(compressed + produced(one_batch(1, 1000)) * FRAMES)
        end(sock)
        await client.gone()
        assert client.end_offset == 10 + FRAMES

    client.lone.run(go())


@pytest.mark.parametrize(("protocol_name", "end"), ENDS)
def test_so_are_those_of_a_client_that_a_quota_holds_back(
    connect_by: Callable[[str], Client], protocol_name: str, end: Hear
) -> None:
    client = connect_by(protocol_name)

    async def go() -> None:
        sock, connection = await client.connected()
        connection.mute(50, "produce")
        sock.sendall(produced(one_batch(1, 1000)) * FRAMES)
        end(sock)
        await client.gone()
        assert client.end_offset == FRAMES

    client.lone.run(go())


def test_no_more_of_them_wait_at_a_time_than_the_budget_allows(
    connect_by: Callable[[str], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears their answers, but each holds memory until it has one."""
    client = connect_by("SSL")
    waiting: list[asyncio.Future[bytes]] = []

    def wait(*_: object) -> asyncio.Future[bytes]:
        waiting.append(client.lone.node.parts.runtime.loop.create_future())
        return waiting[-1]

    async def go() -> None:
        sock, connection = await client.connected()
        monkeypatch.setattr(RequestHandlers, "_handler", lambda *_: wait)
        connection.waiting_account.limit_bytes = 1
        connection.mute(50, "request")
        sock.sendall(protocol.encode_request(3, 4, 1, "c", {"topics": []}) * FRAMES)
        notify(sock)
        for served in range(1, FRAMES + 1):
            await until(lambda served=served: len(waiting) >= served)
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(waiting) == served
            waiting[-1].set_result(b"")
        await client.gone()
        await until(lambda: not client.lone.node.parts.memory.waiting.used_bytes)

    client.lone.run(go())


def test_who_reset_his_connection_before_it_was_accepted_is_not_served(
    connect_by: Callable[[str], Client],
) -> None:
    """The system does not tell his address any more: he would be denied nothing by it, nor count.
    What he sent it does tell.
    """
    client = connect_by("PLAINTEXT")

    async def go() -> None:
        sock = socket.create_connection(("127.0.0.1", client.lone.port), 60)
        sock.sendall(produced(one_batch()))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        sock, _ = await client.connected()  # which is accepted behind it
        assert client.end_offset == 0
        fin(sock)
        await client.gone()

    client.lone.run(go())


def test_whom_the_node_closes_is_served_no_more(connect_by: Callable[[str], Client]) -> None:
    """As one whose user was deleted: also once his own end was seen."""
    client = connect_by("SSL")

    async def go() -> None:
        sock, connection = await client.connected()
        connection.mute(60_000, "produce")
        sock.sendall(produced(one_batch(1, 1000)) * FRAMES)
        notify(sock)
        await until(lambda: connection._lost)
        assert client.listener.quota.count == 1, "it counts until it is let go"
        client.listener.end_sessions(lambda _: True)
        await client.gone()
        assert client.end_offset == 0

    client.lone.run(go())
