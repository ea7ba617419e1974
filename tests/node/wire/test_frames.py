"""Garbage, unknown APIs and versions, limits: the connection closes, the node lives."""

from __future__ import annotations

import random
import re
import struct

import pytest

from kept.client.protocol import messages as protocol
from tests.support.request_values import one_batch, produce_values


def alive(connect, broker):
    """The node serves others."""
    assert connect(broker.port()).ask(18, 0).error_code == 0


def refusals(broker):
    """Lines of the log about connections that were closed."""
    return len(re.findall('event="(?:not a |speaks TLS)', broker.log()))


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
    before = refusals(kept_broker)
    wire = connect(kept_broker.port())
    wire.raw(data)
    assert wire.is_closed()
    alive(connect, kept_broker)
    assert refusals(kept_broker) == before + 1


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


def test_frames_above_the_limit_are_refused_wherever_they_stand(kept_cluster, connect):
    """Both come whole in one reading: the size of the second counts all the same."""
    cluster = kept_cluster(socket_request_max_bytes=10_000)
    alone = connect(cluster.port())
    alone.raw(struct.pack(">i", 10_001))
    assert alone.is_closed()
    topic = cluster.create_topic()
    wire = connect(cluster.port())
    assert wire.produce(topic, one_batch()).error_code == 0

    def framed(size):
        return protocol.encode_request(
            0, 9, size, "me", produce_values(topic, one_batch(size=size))
        )

    wire.raw(framed(10) + framed(10_000))
    assert wire.response(0, 9)[0] == 10
    assert wire.is_closed()
    assert connect(cluster.port()).end_offset(topic) == 2


def test_a_request_may_come_byte_by_byte(kept_broker, connect):
    wire = connect(kept_broker.port())
    frame = protocol.encode_request(3, 12, 5, "slow", {"topics": None})
    for byte in frame:
        wire.raw(bytes([byte]))
    correlation_id, response = wire.response(3, 12)
    assert correlation_id == 5
    assert response.cluster_id
