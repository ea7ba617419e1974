"""Garbage, unknown APIs and versions, limits: the connection closes, the node lives."""

from __future__ import annotations

import random
import struct

import pytest

from kept.client.protocol import messages as protocol


def alive(connect, broker):
    """The node serves others."""
    assert connect(broker.port()).ask(18, 0).error_code == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        struct.pack(">i", 7) + b"1234567",
        struct.pack(">ihhih", 10, 99, 0, 1, -1),
        struct.pack(">ihhih", 10, 3, 99, 1, -1),
        struct.pack(">ihhih", 10, 0, 2, 1, -1),  # Produce v2 is advertised, and refused
        struct.pack(">ihhih", 10, 3, 1, 1, 5000),  # a client id longer than the request
        struct.pack(">ihhih", 10, 0, 9, 1, -1),  # nothing after the header
        struct.pack(">ihhih", 12, 1, 4, 1, -1) + b"ab",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),  # TLS
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
def test_what_is_no_request_closes_the_connection(kept_broker, connect, data):
    wire = connect(kept_broker.port())
    wire.raw(data)
    assert wire.is_closed()
    alive(connect, kept_broker)


def test_random_bytes_of_every_length(kept_broker, connect):
    draw = random.Random(7)
    for size in [1, 2, 3, 5, 13, 100, 4096, 70_000]:
        wire = connect(kept_broker.port())
        try:
            wire.raw(bytes([draw.randrange(128, 256)]) + draw.randbytes(size))
            if size >= 4:
                assert wire.is_closed()
        except ConnectionError:
            pass
    alive(connect, kept_broker)


def test_random_bodies_for_every_api(kept_broker, connect):
    draw = random.Random(11)
    answer = connect(kept_broker.port()).ask(18, 0)
    for api in answer.api_keys:
        for version in range(api.min_version, api.max_version + 1):
            wire = connect(kept_broker.port())
            body = struct.pack(">hhih", api.api_key, version, 1, -1) + draw.randbytes(60)
            wire.raw(struct.pack(">i", len(body)) + body)
            wire.close()
    alive(connect, kept_broker)
    assert "Traceback" not in kept_broker.log()
    assert "handler failed" not in kept_broker.log()


def test_a_closed_connection_has_one_line(kept_cluster, connect):
    cluster = kept_cluster()
    wire = connect(cluster.port())
    wire.raw(b"\xff\xff\xff\xff")
    assert wire.is_closed()
    alive(connect, cluster)
    lines = [line for line in cluster.log().splitlines() if "not a Kafka request" in line]
    assert len(lines) == 1


def test_a_large_frame_is_not_allocated_before_its_bytes_come(kept_cluster, connect):
    cluster = kept_cluster()

    def resident():
        with open(f"/proc/{cluster.pid()}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    connect(cluster.port()).ask(18, 0)
    before = resident()
    held = [connect(cluster.port()) for _ in range(4)]
    for wire in held:
        wire.raw(struct.pack(">ihh", 100_000_000, 0, 9) + bytes(1000))
    alive(connect, cluster)
    assert resident() - before < 30_000


def test_frames_above_the_limit_are_refused(kept_cluster, connect):
    cluster = kept_cluster(socket_request_max_bytes=10_000)
    wire = connect(cluster.port())
    wire.raw(struct.pack(">i", 10_001))
    assert wire.is_closed()
    alive(connect, cluster)


def test_frames_above_the_limit_are_refused_behind_another_request(kept_cluster, connect, tools):
    """Both come whole in one reading: the size of the second counts all the same."""
    cluster = kept_cluster(socket_request_max_bytes=10_000)
    topic = cluster.create_topic()
    wire = connect(cluster.port())
    assert wire.produce(topic, tools.batch()).error_code == 0

    def framed(size):
        return protocol.encode_request(
            0, 9, size, "me", tools.produce_values(topic, tools.batch(size=size))
        )

    wire.raw(framed(10) + framed(10_000))
    assert wire.receive(0, 9)[0] == 10
    assert wire.is_closed()
    assert connect(cluster.port()).end_offset(topic) == 2


def test_a_request_may_come_byte_by_byte(kept_broker, connect):
    wire = connect(kept_broker.port())
    frame = protocol.encode_request(3, 12, 5, "slow", {"topics": None})
    for byte in frame:
        wire.raw(bytes([byte]))
    correlation_id, response = wire.receive(3, 12)
    assert correlation_id == 5
    assert response.cluster_id


def test_more_connections_than_allowed(kept_cluster, connect):
    cluster = kept_cluster(max_connections=3)
    held = [connect(cluster.port()) for _ in range(3)]
    for wire in held:
        wire.ask(18, 0)
    assert connect(cluster.port()).is_closed()
    held[0].close()

    def served() -> bool:
        try:
            return connect(cluster.port()).ask(18, 0).error_code == 0
        except (EOFError, ConnectionError):
            return False

    cluster.wait_until(served, "the place of a closed connection is free")


def test_connections_per_address(kept_cluster, connect):
    cluster = kept_cluster(max_connections_per_ip=2)
    for _ in range(2):
        connect(cluster.port()).ask(18, 0)
    assert connect(cluster.port()).is_closed()


def test_idle_connections_are_closed(kept_cluster, connect):
    cluster = kept_cluster(connections_max_idle_ms=1500)
    wire = connect(cluster.port())
    wire.ask(18, 0)
    assert wire.is_closed()
