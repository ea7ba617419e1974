"""Limits and back-pressure of a real node: every one has a setting, and memory stays bounded."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time

import pytest

from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch
from kept.storage.types import Codec
from tests.support.request_values import fetch_values, now_ms, one_batch, produce_values

GARBAGE_CONNECTIONS = 500


def resident_kib(cluster):
    with open(f"/proc/{cluster.pid()}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_batch_above_segment_bytes_is_refused_as_kafka_does(kept_broker, wire, codec):
    topic = kept_broker.create_topic(config={"segment.bytes": "2000"})
    assert wire.produce(topic, one_batch(1)).base_offset == 0
    value = random.Random(5).randbytes(400_000 if codec else 2000)
    batch = build_batch(
        [(now_ms(), b"k", value, ())], codec=codec, producer_id=7, producer_epoch=0, base_sequence=0
    )
    refused = wire.produce(topic, batch)
    assert (int(refused.error_code), refused.base_offset) == (18, -1)
    assert "segment.bytes" in refused.error_message
    assert wire.end_offset(topic) == 1
    # Neither the log nor the producer's sequence moved.
    fits = build_batch(
        [(now_ms(), b"k", b"v", ())], producer_id=7, producer_epoch=0, base_sequence=0
    )
    assert wire.produce(topic, fits).base_offset == 1


def test_fetch_max_bytes_limits_a_response(kept_cluster, connect):
    cluster = kept_cluster(fetch_max_bytes=2000)
    wire = connect(cluster.port())
    topics = [cluster.create_topic() for _ in range(3)]
    for topic in topics:
        for _ in range(4):
            wire.produce(topic, one_batch(1, 700))
        wire.produce(topic, one_batch(1, 5000))
    values = fetch_values(topics[0], 0, max_bytes=1 << 24)
    for topic in topics[1:]:
        values["topics"] += fetch_values(topic, 0)["topics"]
    response = wire.ask(1, 11, **values)
    sizes = [len(bytes(t.partitions[0].records or b"")) for t in response.responses]
    assert 700 < sum(sizes) <= 2000
    first = bytes(wire.fetch(topics[0], 4).records)
    assert len(first) > 5000, "a first batch that is larger is sent whole"


def test_answers_that_nobody_takes_stay_bounded_and_come_in_order(kept_cluster, connect):
    limit = 200_000
    cluster = kept_cluster(kept_connection_inflight_max_bytes=limit)
    cluster.create_topic(partitions=1000)
    wire = connect(cluster.port())
    wire.ask(3, 9, topics=None)
    one = len(protocol.encode_request(3, 9, 1, "wire", {"topics": None}))
    wire.send(3, 9, topics=None)
    answer = len(wire.frame())
    assert answer > 25_000
    before = resident_kib(cluster)
    deaf = connect(cluster.port())
    count = 250_000 // one  # as much as the node reads at once
    sent = b"".join(
        protocol.encode_request(3, 9, n, "wire", {"topics": None}) for n in range(count)
    )
    try:
        deaf.raw(sent)
    except TimeoutError:
        pytest.fail("the node takes what fits into its buffer")
    assert connect(cluster.port()).ask(18, 0).error_code == 0
    assert resident_kib(cluster) - before < 40_000, f"{count} answers of {answer} bytes"
    for n in range(60):
        assert struct.unpack(">i", deaf.frame()[:4]) == (n,)
    deaf.close()
    assert connect(cluster.port()).ask(18, 0).error_code == 0


def test_unanswered_requests_are_limited(kept_cluster, connect):
    cluster = kept_cluster(kept_connection_inflight_max_requests=5)
    topic = cluster.create_topic()
    wire = connect(cluster.port())
    first = wire.send(1, 11, **fetch_values(topic, 0, max_wait=200_000))
    appends = [wire.send(0, 9, **produce_values(topic, one_batch(1))) for _ in range(50)]
    # The first produce wakes the fetch; all else follows in order.
    assert wire.response(1, 11)[0] == first
    for n, wanted in enumerate(appends):
        correlation_id, response = wire.response(0, 9)
        found = response.responses[0].partition_responses[0]
        assert (correlation_id, found.base_offset) == (wanted, n)
    # With five that wait for something else, the sixth is not served.
    other = cluster.create_topic()
    for _ in range(5):
        wire.send(1, 11, **fetch_values(other, 0, max_wait=300))
    wire.send(0, 9, **produce_values(other, one_batch(1)))
    fetched = [wire.response(1, 11)[1].responses[0].partitions[0] for _ in range(5)]
    assert not bytes(fetched[0].records or b""), "the produce came when a place was free"
    assert wire.response(0, 9)[1].responses[0].partition_responses[0].base_offset == 0


def test_a_client_that_takes_nothing_is_closed_when_idle(kept_cluster, connect):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    wire = connect(cluster.port())
    for _ in range(4):
        wire.produce(topic, one_batch(1, 900_000))
    wire.close()
    cluster.stop()
    cluster.start(connections_max_idle_ms=500)
    fetch = protocol.encode_request(
        1, 11, 1, "deaf", fetch_values(topic, 0, partition_max_bytes=10_000_000)
    )
    deaf = connect(cluster.port())
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.raw(fetch * 10)

    def open_connections():
        listing = f"/proc/{cluster.pid()}/net/tcp"
        port = f":{cluster.port():04X}"
        with open(listing) as lines:
            rows = [line.split() for line in lines]
        return sum(1 for row in rows[1:] if row[1].endswith(port) and row[3] == "01")

    cluster.wait_until(lambda: open_connections() == 0, "the deaf connection is closed")


def test_frames_in_flight_share_one_budget(kept_cluster, connect):
    cluster = kept_cluster(kept_inflight_max_bytes=2_000_000, message_max_bytes=1_500_000)
    topic = cluster.create_topic()
    holder = connect(cluster.port())
    frame = protocol.encode_request(0, 9, 1, "w", produce_values(topic, one_batch(1, 1_200_000)))
    holder.raw(frame[:1_100_000])  # reserves what comes, and with that room for the rest
    assert connect(cluster.port()).ask(18, 0).error_code == 0
    second = connect(cluster.port())
    second.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        second.raw(frame * 8)  # more than sockets hold: nobody reads it
        second.frame()
    third = connect(cluster.port())
    assert third.produce(topic, one_batch(1)).base_offset == 0, "small requests go on"
    holder.raw(frame[1_100_000:])
    assert holder.response(0, 9)[1].responses[0].partition_responses[0].base_offset == 1


def test_memory_is_bounded_under_garbage_from_500_connections(kept_cluster, connect):
    cluster = kept_cluster(kept_inflight_max_bytes=64 << 20)
    topic = cluster.create_topic()
    draw = random.Random(17)
    with cluster.client() as client:
        client.metadata([topic])
    before = resident_kib(cluster)
    held, peak = [], 0
    bomb = build_batch([(now_ms(), b"k", bytes(4_000_000), ())], codec=Codec.GZIP)
    kinds = [
        lambda: struct.pack(">ihh", 104_857_600, 0, 9) + draw.randbytes(3000),
        lambda: struct.pack(">ihh", 30_000_000, 3, 9),
        lambda: struct.pack(">ihh", 250_000, 1, 11) + draw.randbytes(100_000),
        lambda: struct.pack(">i", draw.choice([-1, 0, 2**31 - 1, 7])) + draw.randbytes(2000),
        lambda: draw.randbytes(draw.randrange(1, 9000)),
        lambda: b"GET /" + b"x" * 20_000,
        lambda: b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        lambda: protocol.encode_request(0, 9, 1, "w", produce_values(topic, bomb)),
        lambda: protocol.encode_request(3, 9, 1, "w", {"topics": None})[: draw.randrange(2, 20)],
        lambda: b"",
    ]
    served = []

    def produce_large():
        wire = connect(cluster.port())
        for _ in range(3):
            served.append(int(wire.produce(topic, one_batch(1, 1_000_000)).error_code))

    # Requests that are right, and need more than is free, among those that are not.
    busy = [threading.Thread(target=produce_large) for _ in range(20)]
    for thread in busy:
        thread.start()
    for n in range(GARBAGE_CONNECTIONS):
        sock = socket.create_connection(("127.0.0.1", cluster.port()), 20)
        sock.setblocking(False)
        held.append(sock)
        try:
            sock.send(kinds[n % len(kinds)]())
        except OSError:
            continue
        if n % 50 == 0:
            peak = max(peak, resident_kib(cluster))
    for round_ in range(20):  # slow bytes on what is still open
        for sock in held[round_ % 2 :: 2]:
            try:
                sock.send(draw.randbytes(3))
            except OSError:
                continue
        peak = max(peak, resident_kib(cluster))
    for thread in busy:
        thread.join(120)
    peak = max(peak, resident_kib(cluster))
    with cluster.client() as client:
        assert client.metadata([topic])
    peak = max(peak, resident_kib(cluster))
    for sock in held:
        sock.close()
    assert served == [0] * 60, "every one that is right is served"
    # The budget, and room for base buffers and the allocator.
    assert peak - before < (64 << 10) + 30_000, (before, peak)
    assert "Traceback" not in cluster.log() and "handler failed" not in cluster.log()


def test_one_client_does_not_keep_the_others_waiting(kept_cluster, connect):
    cluster = kept_cluster()
    cluster.create_topic(partitions=300)
    busy, other = connect(cluster.port()), connect(cluster.port())
    busy.ask(3, 9, topics=None)
    count = 250
    busy.socket.settimeout(60)
    frames = b"".join(
        protocol.encode_request(3, 9, n, "wire", {"topics": None}) for n in range(count)
    )
    answers = threading.Thread(target=lambda: [busy.frame() for _ in range(count)])
    answers.start()
    busy.raw(frames)
    taken = []
    while answers.is_alive():
        started = time.monotonic()
        assert other.ask(18, 0).error_code == 0
        taken.append(time.monotonic() - started)
    # Whoever had to wait for the busy one would have been answered once or twice.
    taken.sort()
    assert len(taken) > 10
    assert taken[len(taken) * 9 // 10] < sum(taken) / 4


def test_many_small_answers_that_nobody_takes_are_limited(kept_cluster, connect):
    cluster = kept_cluster(kept_connection_inflight_max_requests=10)
    frame = protocol.encode_request(18, 0, 1, "w", {})

    def fill() -> int:
        deaf = connect(cluster.port())
        deaf.socket.settimeout(2)
        with pytest.raises(TimeoutError):
            for _ in range(2000):
                deaf.raw(frame * 1000)
        return resident_kib(cluster)

    first = fill()  # a node that has just begun still imports
    assert fill() - first < 10_000
    assert connect(cluster.port()).ask(18, 0).error_code == 0


def test_a_request_that_drips_gives_its_reservation_back(kept_cluster, connect):
    cluster = kept_cluster(kept_inflight_max_bytes=2_000_000, kept_request_receive_ms=500)
    topic = cluster.create_topic()
    drip = connect(cluster.port())
    drip.raw(struct.pack(">ihhih", 100_000_000, 0, 9, 1, -1) + bytes(1_900_000))
    waiting = connect(cluster.port())
    waiting.send(0, 9, **produce_values(topic, one_batch(1, 900_000)))
    drip.socket.settimeout(0.05)
    deadline = time.monotonic() + 60
    closed = False
    while not closed and time.monotonic() < deadline:
        try:
            drip.raw(b"x")
            closed = drip.socket.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            closed = True
    assert closed
    found = waiting.response(0, 9)[1].responses[0].partition_responses[0]
    assert found.base_offset == 0
    assert "kept.request.receive.ms" in cluster.log()
