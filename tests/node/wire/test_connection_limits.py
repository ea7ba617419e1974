"""Connections are counted in every protocol until they are closed, clients' and nodes' apart.

Where clients are counted ``kept.silent.ms`` is an hour: nothing else closes a connection. What the
log says of it, and each bound by itself, is in ``tests/node/kafka/test_listener.py``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.config.live_config import LiveConfig
from kept.node.config.node_config import NodeConfig
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.cluster.raft_voters import RaftVotersHandler
from kept.node.security.session import Session
from kept.storage.errors import ClusterAuthorizationFailed
from kept.testing import Cluster
from tests.support.given import Given

HOUR_MS = 3_600_000
HTTP = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
KAFKA = protocol.encode_request(18, 0, 1, "w", {})
PROTOCOLS = {"kafka": KAFKA, "http": HTTP, "grpc": HTTP2}
NODE_PORT_OFFSET = 1000


def opened(port: int, said: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), 60, (host, 0))
    try:
        found.sendall(said)
    except BaseException:
        found.close()
        raise
    return found


def spoken(port: int, said: bytes, host: str = "127.0.0.1") -> socket.socket:
    """A connection that was answered."""
    found = opened(port, said, host)
    try:
        assert found.recv(1 << 16)
    except BaseException:
        found.close()
        raise
    return found


def is_closed(sock: socket.socket) -> bool:
    """Wait until the node closes it without a word."""
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def served(port: int, said: bytes = KAFKA, host: str = "127.0.0.1") -> bool:
    try:
        with opened(port, said, host) as sock:
            return sock.recv(1 << 16) != b""
    except ConnectionError:
        return False


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def few() -> Iterator[Cluster]:
    """Four connections, three of them from one address; nothing but that closes one."""
    with Cluster(
        max_connections=4,
        max_connections_per_ip=3,
        kept_silent_ms=HOUR_MS,
        kept_http_idle_ms=HOUR_MS,
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("said", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_protocol_counts_until_it_is_closed(few: Cluster, held: Any, said: bytes) -> None:
    port = few.port()
    several: list[socket.socket] = []
    mine, other, third = ("127.0.0.9", "127.0.0.8", "127.0.0.7")

    def fill(host: str, count: int) -> None:
        def filled() -> bool:
            with contextlib.suppress(AssertionError, ConnectionError):
                several.append(held.enter_context(spoken(port, said, host)))
            return len(several) == count

        few.wait_until(filled, f"{count} are open: those before, and of {host}, are forgotten")

    for _ in range(8):  # what is over counts no more
        with contextlib.suppress(ConnectionError):
            opened(port, said, mine).close()
    fill(mine, 3)
    assert is_closed(held.enter_context(opened(port, b"", mine))), "it need not even speak"
    fill(other, 4)
    assert is_closed(held.enter_context(opened(port, b"", third))), "it need not even speak"
    assert not served(port, KAFKA, third)
    for path in (b"/healthz", b"/readyz"):
        with opened(port, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path, third) as probe:
            answer = b"".join(iter(partial(probe.recv, 1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b"\r\nConnection: close\r\n" in answer
    for _ in range(8):  # places of probes, which nobody keeps by half of one
        held.enter_context(opened(port, HTTP[:-2], third))
    few.wait_until(lambda: served(port, HTTP, third), "probes are answered again")
    several[0].close()
    few.wait_until(lambda: served(port, KAFKA, mine), "there is room again")


# The listener between nodes.


def await_isr(three: Cluster, topic: str, at: int, count: int) -> None:
    def complete() -> bool:
        from kept.client.client import Client

        with Client(f"{three.host(at)}:{three.port(at)}", client_id="isr") as client:
            return len(client.topic(topic).partitions[0].isr) == count

    three.wait_until(complete, f"{count} replicas are in sync")


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(
        3,
        max_connections=30,
        kept_node_max_connections=40,
        connections_max_idle_ms=2000,
        kept_request_receive_ms=500,
        kept_silent_ms=1500,
        kept_http_idle_ms=1000,
    ) as cluster:
        yield cluster


def test_who_waits_on_the_node_port_is_closed(three: Cluster, held: Any) -> None:
    half = [
        b"",
        b"KE",
        b"KEPT",
        b"KEPT\0\0\1\0half",
        KAFKA,
        KAFKA[:-3],
        HTTP[:-5],
        struct.pack(">ihhih", 100_000_000, 0, 9, 1, -1),
        b"PRI * HT",
    ]
    port = three.port() + NODE_PORT_OFFSET
    several = {said: held.enter_context(opened(port, said)) for said in half}
    for said, sock in several.items():
        sock.settimeout(45)
        try:
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            pytest.fail(f"who said {said!r} stays")


def test_clients_and_strangers_keep_no_node_from_the_others(three: Cluster) -> None:
    """All places of clients are taken, and strangers sit on the ports between nodes: a follower
    that is killed comes back, and joins the ISR. Nobody is closed for being silent meanwhile."""
    patience = dict.fromkeys(
        (
            "connections_max_idle_ms",
            "kept_request_receive_ms",
            "kept_silent_ms",
            "kept_http_idle_ms",
        ),
        HOUR_MS,
    )
    for node in (0, 1):
        three.stop(node)
        three.start(node, **patience)
    topic = three.create_topic()
    await_isr(three, topic, 0, 3)
    hold: list[socket.socket] = []

    def crowd(port: int, count: int, said: bytes) -> None:
        for _ in range(count):
            with contextlib.suppress(OSError):
                hold.append(opened(port, said))

    three.kill(2)
    await_isr(three, topic, 0, 2)
    try:
        for node in (0, 1):
            crowd(three.port(node), 40, KAFKA)
            crowd(three.port(node) + NODE_PORT_OFFSET, 60, KAFKA)
        three.start(2)
        await_isr(three, topic, 2, 3)
        assert "setting=max.connections" in three.log(0)
    finally:
        for sock in hold:
            sock.close()


# Who may change the voters.


@pytest.mark.parametrize(
    ("listener", "host"), [("CLIENTS", "10.1.2.3"), ("NODES", "10.1.2.3"), ("CLIENTS", "127.0.0.1")]
)
def test_requests_for_other_voters_are_refused_where_everybody_can_ask(listener, host) -> None:
    quorum_reconfiguration = object()
    voters = {
        "node.id": "0",
        "listeners": "CLIENTS://127.0.0.1:10000,NODES://127.0.0.1:10001",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,NODES:PLAINTEXT",
        "controller.listener.names": "NODES",
        "controller.quorum.voters": "0@127.0.0.1:10001,1@127.0.0.1:10002",
    }
    config = NodeConfig.load(None, voters, {}, port=None, data_dir="/nowhere")
    metadata: Any = Given(image__cluster_id="c")
    addresses: Any = Given(own_node_address=lambda: ("here", 9192))
    controller: Any = Given(quorum_reconfiguration=quorum_reconfiguration)
    handler = RaftVotersHandler(LiveConfig(config), metadata, addresses, controller)
    ctx = RequestContext(ApiKey.ADD_RAFT_VOTER, 0, "c", Session(host=host, listener=listener))
    request = Given(cluster_id="c")
    if (listener, host) == ("CLIENTS", "10.1.2.3"):
        with pytest.raises(ClusterAuthorizationFailed, match="here:9192"):
            handler._reconfiguration(ctx, request)
    else:
        assert handler._reconfiguration(ctx, request) is quorum_reconfiguration
