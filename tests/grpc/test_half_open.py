"""Thousands of connections of each kind that stop half-way, and what Kafka's clients feel of it."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from kept.client.client import OutRecord
from kept.node.runtime.fd_quota import raise_file_limit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 2000
REQUESTS = 1500
ACCEPTING_S = 0.0015
"""CPU seconds for each of the connections: on a loaded machine they are accepted only while it is
measured, and gRPC takes the most, 0.7 ms."""
KINDS = {
    "silent": b"",
    "Kafka": b"\0\0\0\x40\0\x12",
    "HTTP": b"GET /metrics HTTP/1.1\r\nHost: loc",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM",
}


def resident_mb(cluster):
    with open(f"/proc/{cluster.pid()}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def cpu_s(cluster):
    """What the node has used: all its threads."""
    with open(f"/proc/{cluster.pid()}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def latencies(cluster, client, topic):
    """Of a produced record: (median, 99th percentile) in milliseconds, the node's CPU seconds."""
    taken, before = [], cpu_s(cluster)
    for _ in range(REQUESTS):
        began = time.perf_counter()
        client.produce(topic, [OutRecord(b"k", b"v" * 100)], acks=1)
        taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    return taken[REQUESTS // 2], taken[REQUESTS * 99 // 100], cpu_s(cluster) - before


def open_half(port, data, stack):
    """One connection, whatever becomes of it."""
    found = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        found.sendall(data)
    return found


def is_open(found):
    """Whether the node has not closed it."""
    found.setblocking(False)
    try:
        return bool(found.recv(1 << 16))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_kafka_clients_do_not_feel_half_open_connections(kept_cluster, dial):
    raise_file_limit()
    cluster = kept_cluster(socket_listen_backlog_size=4096, kept_silent_ms=600_000)
    topic = cluster.create_topic()
    dial(cluster.port()).produce(topic, payload=b"gRPC is loaded")
    with cluster.client() as client:
        latencies(cluster, client, topic)
        print()
        for kind, data in KINDS.items():
            memory = resident_mb(cluster)
            p50, p99, cpu = latencies(cluster, client, topic)
            with contextlib.ExitStack() as stack:
                opened = [open_half(cluster.port(), data, stack) for _ in range(COUNT)]
                _, _, accepting_cpu = latencies(cluster, client, topic)
                during50, during99, during_cpu = latencies(cluster, client, topic)
                grown = resident_mb(cluster) - memory
                left = sum(is_open(found) for found in opened)
            print(
                f"{COUNT} {kind}: p50 {p50:.2f} -> {during50:.2f} ms ({during50 / p50:.2f}), "
                f"p99 {p99:.2f} -> {during99:.2f} ms ({during99 / p99:.2f}), "
                f"CPU {cpu:.2f} -> {accepting_cpu:.2f} -> {during_cpu:.2f} s, {grown:+.1f} MB, "
                f"{left} left"
            )
            assert left == COUNT, kind
            # Other work on the machine moves the times, and the CPU seconds hardly.
            assert accepting_cpu < 4 * cpu + COUNT * ACCEPTING_S, kind
            assert during_cpu < 4 * cpu, kind
            assert grown < 64, kind
        assert client.read(topic)
