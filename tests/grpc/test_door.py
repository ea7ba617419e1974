"""The door: one port for three protocols, gRPC loaded for whoever speaks it, limits, the end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.request

import grpc
import pytest

from kept.client.client import OutRecord

Code = grpc.StatusCode
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def mapped(cluster, name="cygrpc"):
    with open(f"/proc/{cluster.pid()}/maps") as maps:
        return any(name in line for line in maps)


def resident_kib(cluster):
    with open(f"/proc/{cluster.pid()}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def socket_directories(pid: int) -> set[str]:
    """The directories of unix sockets that a process holds, by the lock in each."""
    held = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if "/kept-peers-" in path and path.endswith("/lock"):
                held.add(os.path.dirname(path))
    return held


def test_one_port_and_grpc_only_for_those_who_speak_it(kept_cluster, dial):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port()}/healthz", timeout=60) as got:
        assert got.read() == b"ok\n"
    assert not mapped(cluster)
    rpc = dial(cluster.port())
    rpc.produce(topic, payload=b"v")
    assert mapped(cluster)
    with cluster.client() as client:
        assert [record.value for record in client.read(topic)] == [b"v"]
    pid = cluster.pid()
    (directory,) = socket_directories(pid)
    cluster.stop()
    assert not os.path.exists(directory)


@pytest.mark.slow
def test_a_node_that_stops_ends_streams(kept_cluster, dial):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    rpc = dial(cluster.port())
    rpc.produce(topic, payload=b"v")
    stream = rpc.consume(topic, follow=True)
    next(stream)
    cluster.stop()
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() in (Code.UNAVAILABLE, Code.CANCELLED)
    cluster.start()
    assert [record.payload for record in rpc.consume(topic)] == [b"v"]


def test_connections_and_calls_are_limited(kept_cluster, dial, wait_until):
    cluster = kept_cluster(kept_grpc_max_connections=2, kept_grpc_max_requests=3)
    topic = cluster.create_topic()
    rpc = dial(cluster.port())
    rpc.produce(topic, payload=b"v")
    other = dial(cluster.port())
    streams = [client.consume(topic, follow=True) for client in (rpc, rpc, other)]
    for stream in streams:
        assert next(stream).payload == b"v"
    code, _ = other.refusal("broker.Broker/Produce", topic=topic, payload=b"v")
    assert code is Code.RESOURCE_EXHAUSTED
    with socket.create_connection(("127.0.0.1", cluster.port())) as third:
        third.settimeout(20)
        third.sendall(PREFACE)
        with contextlib.suppress(ConnectionResetError):
            assert third.recv(1) == b""
    assert "kept.grpc.max.connections" in cluster.log()
    for stream in streams:
        stream.cancel()

    def again():
        try:
            return other.produce(topic, payload=b"v").offset == 1
        except grpc.RpcError:
            return False

    wait_until(again, "a place for another call")


@pytest.mark.slow
def test_half_spoken_http2_is_closed(kept_broker):
    with socket.create_connection(("127.0.0.1", kept_broker.port())) as half:
        half.settimeout(20)
        half.sendall(PREFACE[:10])
        answered = b""
        try:
            while data := half.recv(4096):
                answered += data
        except ConnectionResetError:
            pass
        assert len(answered) < 1000


@pytest.mark.slow
def test_a_message_above_the_limit(kept_cluster, dial):
    cluster = kept_cluster(kept_grpc_request_max_bytes=10_000)
    topic = cluster.create_topic()
    rpc = dial(cluster.port())
    assert rpc.produce(topic, payload=bytes(9_000)).offset == 0
    code, why = rpc.refusal("broker.Broker/Produce", topic=topic, payload=bytes(20_000))
    assert code is Code.RESOURCE_EXHAUSTED and "10000" in why


@pytest.mark.slow
def test_a_reader_that_takes_nothing_costs_little(kept_cluster, dial):
    """30 MB wait for it, and the node goes on."""
    cluster = kept_cluster()
    topic = cluster.create_topic()
    with cluster.client() as client:
        for _ in range(30):
            client.produce(topic, [OutRecord(None, bytes(10_000)) for _ in range(100)])
    rpc = dial(cluster.port())
    rpc.produce(topic, payload=b"v")
    before = resident_kib(cluster)
    streams = [rpc.consume(topic) for _ in range(4)]
    for stream in streams:
        next(stream)
    time.sleep(0.5)  # time to do wrong in: nothing announces that too much was read
    assert resident_kib(cluster) - before < 4 * 5_000
    assert rpc.produce(topic, payload=b"v").offset == 3001
    counts = []
    taking = [
        threading.Thread(target=lambda s=s: counts.append(sum(1 for _ in s))) for s in streams[:1]
    ]
    for thread in taking:
        thread.start()
    for thread in taking:
        thread.join(60)
    assert counts == [3000]


def test_a_cancelled_poll_leaves_nothing_behind(kept_cluster, dial, wait_until):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    rpc = dial(cluster.port())
    rpc.produce(topic, payload=b"v")

    def descriptors():
        return len(os.listdir(f"/proc/{cluster.pid()}/fd"))

    before = descriptors()
    for _ in range(20):
        stream = rpc.consume(topic, follow=True)
        next(stream)
        stream.cancel()
    wait_until(lambda: descriptors() <= before + 1, "the end of their connections")
