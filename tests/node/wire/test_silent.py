"""Connections that never say what they speak, and those that stop half-way."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time

import pytest

from kept.testing import Cluster

DEADLINE_S = 60.0
CROWD = 250
CROWDS = 5


def opened(port, data=b""):
    found = socket.create_connection(("127.0.0.1", port))
    found.settimeout(DEADLINE_S)
    found.sendall(data)
    return found


def resident_kib(cluster):
    with open(f"/proc/{cluster.pid()}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def warmed_up(cluster):
    """Wait until a node's memory has not changed for a second."""
    end, since, before = time.monotonic() + DEADLINE_S, time.monotonic(), 0
    while time.monotonic() - since < 1:
        assert time.monotonic() < end, "its memory goes on changing"
        if (now := resident_kib(cluster)) != before:
            since, before = time.monotonic(), now
        time.sleep(0.02)


def test_who_does_not_say_four_bytes_is_closed(kept_cluster, connect):
    cluster = kept_cluster(kept_silent_ms=1000)
    spoken = connect(cluster.port())
    assert spoken.ask(18, 0).error_code == 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        several = [
            stack.enter_context(opened(cluster.port(), said)) for said in (b"", b"PR", b"\0\0\0")
        ]
        for silent in several:
            assert silent.recv(1) == b"", "closed by the node"
            assert time.monotonic() - began > 0.9
    # Whoever spoke may be idle for longer than that.
    assert spoken.ask(18, 0).error_code == 0


@pytest.mark.parametrize(
    ("said", "limit_kib"), [(b"", 12), (b"\0\0\0\x40", 32), (b"\0\x0f\0\0\0\0\0\0", 32)]
)
def test_half_open_connections_cost_little(connect, said, limit_kib):
    """Silent, in the middle of a small request, in the middle of one of a megabyte.

    In a node of its own, by what the memory grows from one crowd to the next, which is about 6 and
    21 KiB for each connection. A node loads modules in its first seconds: crowds come once its
    memory does not grow any more. What the modules left free falls into some of the crowds, and
    their median knows nothing of it.
    """
    with (
        Cluster(socket_listen_backlog_size=1000) as cluster,
        contextlib.ExitStack() as stack,
    ):
        warmed_up(cluster)
        resident = []
        for _ in range(CROWDS + 1):
            for _ in range(CROWD):
                stack.enter_context(opened(cluster.port(), said))
            assert connect(cluster.port()).ask(18, 0).error_code == 0
            resident.append(resident_kib(cluster))
        grown = [(b - a) / CROWD for a, b in itertools.pairwise(resident)]
        assert statistics.median(grown) < limit_kib, grown
