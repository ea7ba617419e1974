"""Connections are counted in every protocol until they are closed, clients' and nodes' apart.

A refused connection is told from one that was closed for another reason by the line that names the
setting, and by time: ``kept.silent.ms`` is an hour here.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kept.client import protocol
from kept.node.connection_quota import ConnectionQuota
from kept.node.handlers import voters
from kept.node.listener import may_change_voters
from kept.storage.errors import ClusterAuthorizationFailed
from kept.testing import Cluster

HOUR_MS = 3_600_000
HTTP = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
KAFKA = protocol.encode_request(18, 0, 1, "w", {})
PROTOCOLS = {"kafka": KAFKA, "http": HTTP, "grpc": HTTP2}
NODE_PORT_OFFSET = 1000


def opened(port: int, said: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), 60, (host, 0))
    found.sendall(said)
    return found


def spoken(port: int, said: bytes, host: str = "127.0.0.1") -> socket.socket:
    """A connection that was answered."""
    found = opened(port, said, host)
    assert found.recv(1 << 16)
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


@pytest.mark.parametrize("said", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_protocol_counts_until_it_is_closed(
    kept_cluster: Any, held: Any, said: bytes
) -> None:
    cluster = kept_cluster(max_connections=4, kept_silent_ms=HOUR_MS)
    port = cluster.port()
    for _ in range(20):  # what is over counts no more
        spoken(port, said).close()
    cluster.wait_until(lambda: served(port), "closed connections are forgotten")
    cluster.wait_until(lambda: served(port), "and this one")
    several: list[socket.socket] = []

    def full() -> bool:
        if len(several) < 4 and served(port, said):
            with contextlib.suppress(AssertionError, ConnectionError):
                several.append(held.enter_context(spoken(port, said)))
        return len(several) == 4

    cluster.wait_until(full, "four are open")
    assert is_closed(held.enter_context(opened(port))), "it need not even speak"
    assert "setting=max.connections limit=4" in cluster.log()
    several.pop().close()
    cluster.wait_until(lambda: served(port), "there is room again")


@pytest.mark.parametrize("said", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_protocol_counts_for_its_address(kept_cluster: Any, held: Any, said: bytes) -> None:
    cluster = kept_cluster(max_connections_per_ip=3, kept_silent_ms=HOUR_MS)
    port, mine, other = cluster.port(), "127.0.0.9", "127.0.0.8"
    several = [held.enter_context(spoken(port, said, mine)) for _ in range(3)]
    assert "setting=max.connections.per.ip" not in cluster.log()
    assert is_closed(held.enter_context(opened(port, b"", mine))), "it need not even speak"
    assert "setting=max.connections.per.ip limit=3" in cluster.log()
    assert served(port, KAFKA, other)
    several.pop().close()
    cluster.wait_until(lambda: served(port, KAFKA, mine), "there is room again")


# The listener between nodes.


def await_isr(three: Cluster, topic: str, at: int, count: int) -> None:
    def complete() -> bool:
        from kept.client.blocking import Client

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


@pytest.mark.parametrize(
    "said",
    [
        b"", b"KE", b"KEPT", b"KEPT\0\0\1\0half", KAFKA, KAFKA[:-3], HTTP[:-5],
        struct.pack(">ihhih", 100_000_000, 0, 9, 1, -1), b"PRI * HT",
    ],
    ids=["silent", "two bytes", "greeting", "half a greeting", "idle", "half a request",
         "half of HTTP", "announced", "half of gRPC"],
)  # fmt: skip
def test_who_waits_on_the_node_port_is_closed(three: Cluster, said: bytes) -> None:
    with opened(three.port() + NODE_PORT_OFFSET, said) as sock:
        sock.settimeout(45)
        while sock.recv(1 << 16):
            pass


def test_clients_and_strangers_keep_no_node_from_the_others(three: Cluster) -> None:
    """All places of clients are taken, and strangers sit on the ports between nodes: a follower
    that is killed comes back, and joins the ISR."""
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


# Counting, and who may change the voters.


def test_a_quota_counts_in_all_and_for_each_address() -> None:
    quota = ConnectionQuota()
    for host in ("a", "a", "b"):
        quota.enter(host)
    assert (quota.count, quota.of("a"), quota.of("b"), quota.of("c")) == (3, 2, 1, 0)
    quota.leave("a")
    quota.leave("b")
    assert (quota.count, quota.of("a"), quota.of("b")) == (1, 1, 0)


@pytest.mark.parametrize(
    ("between_nodes", "host", "allowed"),
    [
        (False, "127.0.0.1", True), (False, "127.8.8.8", True), (False, "::1", True),
        (False, "10.1.2.3", False), (False, "192.168.0.1", False), (False, "", False),
        (False, "fe80::1", False), (False, "localhost.evil", False), (True, "10.1.2.3", True),
    ],
)  # fmt: skip
def test_who_votes_is_not_for_every_client(between_nodes: bool, host: str, allowed: bool) -> None:
    assert may_change_voters(between_nodes, host) is allowed


@pytest.mark.parametrize(
    ("listener", "host"), [("CLIENTS", "10.1.2.3"), ("NODES", "10.1.2.3"), ("CLIENTS", "127.0.0.1")]
)
def test_requests_for_other_voters_are_refused_where_everybody_can_ask(listener, host) -> None:
    voting = object()
    node = SimpleNamespace(
        cluster_id="c",
        config=SimpleNamespace(node_listener=SimpleNamespace(name="NODES")),
        membership=SimpleNamespace(controlling=SimpleNamespace(voting=voting)),
        node_endpoint=lambda: ("here", 9192),
    )
    ctx: Any = SimpleNamespace(node=node, listener_name=listener, client_host=host)
    request = SimpleNamespace(cluster_id="c")
    if (listener, host) == ("CLIENTS", "10.1.2.3"):
        with pytest.raises(ClusterAuthorizationFailed, match="here:9192"):
            voters._voting(ctx, request)
    else:
        assert voters._voting(ctx, request) is voting
