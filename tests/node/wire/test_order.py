"""Responses leave in request order, appends happen in request order (rule 41)."""

from __future__ import annotations

import random
import socket

import pytest

from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch, records
from kept.storage.types import Codec
from kept.testing import Cluster
from tests.support.request_values import fetch_values, now_ms, one_batch, produce_values


@pytest.fixture(scope="module")
def roomy():
    with Cluster(message_max_bytes=16_000_000) as cluster:
        yield cluster


def test_a_parked_fetch_holds_back_what_comes_after(wire, kept_broker, connect):
    topic = kept_broker.create_topic()
    fetch = wire.send(1, 11, **fetch_values(topic, 0, max_wait=200_000))
    versions = wire.send(18, 0)
    produce = wire.send(0, 9, **produce_values(topic, one_batch(1)))
    metadata = wire.send(3, 9, topics=[{"name": topic}])
    # The produce behind the fetch wakes it.
    correlation_id, response = wire.response(1, 11)
    assert correlation_id == fetch
    assert len(bytes(response.responses[0].partitions[0].records)) > 61
    assert wire.response(18, 0)[0] == versions
    assert wire.response(0, 9)[0] == produce
    assert wire.response(3, 9)[0] == metadata


def test_pipelined_requests_of_all_kinds(wire, kept_broker):
    topic = kept_broker.create_topic()
    draw = random.Random(3)
    sent = []
    for _ in range(300):
        kind = draw.choice(["produce", "produce all", "fetch", "metadata", "list", "versions"])
        if kind.startswith("produce"):
            acks = -1 if kind.endswith("all") else 1
            sent.append((wire.send(0, 9, **produce_values(topic, one_batch(1), acks=acks)), 0, 9))
        elif kind == "fetch":
            sent.append((wire.send(1, 11, **fetch_values(topic, 0, min_bytes=0)), 1, 11))
        elif kind == "metadata":
            sent.append((wire.send(3, 9, topics=[{"name": topic}]), 3, 9))
        elif kind == "list":
            topics = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -2}]}]
            values = {"replica_id": -1, "isolation_level": 0, "topics": topics}
            sent.append((wire.send(2, 5, **values), 2, 5))
        else:
            sent.append((wire.send(18, 2), 18, 2))
    offsets = []
    for wanted, key, version in sent:
        correlation_id, response = wire.response(key, version)
        assert correlation_id == wanted
        if key == 0:
            offsets.append(response.responses[0].partition_responses[0].base_offset)
    assert offsets == list(range(len(offsets)))


def test_appends_keep_order_while_a_batch_is_checked_in_a_thread(roomy, connect):
    wire = connect(roomy.port())
    topic = roomy.create_topic()
    large = random.Random(1).randbytes(600_000)
    stamp = now_ms()
    for number in range(12):
        value = large if number % 3 == 0 else b"small"
        data = build_batch(
            [(stamp, b"%d" % number, value, ())], codec=Codec.LZ4 if number % 3 == 0 else Codec.NONE
        )
        wire.send(0, 9, **produce_values(topic, data))
    offsets = [
        wire.response(0, 9)[1].responses[0].partition_responses[0].base_offset for _ in range(12)
    ]
    assert offsets == list(range(12))
    found, offset = [], 0
    while offset < 12:
        batch = list(records(bytes(wire.fetch(topic, offset).records)))
        found += [int(r.key) for r in batch if r.offset >= offset]
        offset = batch[-1].offset + 1
    assert found == list(range(12))


def test_a_client_that_does_not_read_holds_nobody_back(kept_cluster, connect):
    cluster = kept_cluster()
    wire = connect(cluster.port())
    topic = cluster.create_topic()
    for _ in range(20):
        wire.produce(topic, one_batch(1, 500_000))
    deaf = connect(cluster.port())
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.socket.settimeout(1)
    try:
        for _ in range(3000):
            deaf.send(1, 11, **fetch_values(topic, 0, partition_max_bytes=10_000_000))
    except TimeoutError:
        pass  # the node stopped reading from it
    assert len(bytes(wire.fetch(topic, 0).records)) > 500_000
    with open(f"/proc/{cluster.pid()}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident < 150_000


def test_large_and_small_responses_are_whole(roomy, connect):
    wire = connect(roomy.port())
    topic = roomy.create_topic()
    values = [
        random.Random(i).randbytes(size) for i, size in enumerate([1, 70_000, 300, 3_000_000])
    ]
    for value in values:
        data = build_batch([(now_ms(), b"k", value, ())])
        assert int(wire.produce(topic, data).error_code) == 0
    for limit in (1, 70_100, 1 << 20, 8 << 20):
        found = []
        while len(found) < len(values):
            data = bytes(wire.fetch(topic, len(found), partition_max_bytes=limit).records)
            found += [r.value for r in records(data)]
        assert found == values


@pytest.mark.parametrize("acks", [0, 1, -1])
def test_a_connection_sees_what_it_produced_before(wire, kept_broker, acks):
    topic = kept_broker.create_topic()
    produce = protocol.encode_request(0, 9, 1, "w", produce_values(topic, one_batch(5), acks=acks))
    partition = {"partition_index": 0, "timestamp": -1}
    latest = {"replica_id": -1, "isolation_level": 0, "timeout": 1000}
    latest["topics"] = [{"name": topic, "partitions": [partition]}]
    gone = [{"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}]
    wire.raw(
        produce
        + protocol.encode_request(2, 5, 2, "w", latest)
        + protocol.encode_request(1, 11, 3, "w", fetch_values(topic, 0, min_bytes=0))
        + protocol.encode_request(21, 2, 4, "w", {"topics": gone, "timeout": 1000})
    )
    if acks:
        assert wire.response(0, 9)[0] == 1
    assert wire.response(2, 5)[1].topics[0].partitions[0].offset == 5
    fetched = wire.response(1, 11)[1].responses[0].partitions[0]
    assert len(list(records(bytes(fetched.records)))) == 5
    assert wire.response(21, 2)[1].topics[0].partitions[0].low_watermark == 5
