"""What only a deposed leader has is cut off when it comes back, by leader epoch.

And the judge of what is left: Apache Kafka's DumpLogSegments shows the same records in the files of
all three replicas.
"""

from __future__ import annotations

import re

import pytest
from confluent_kafka import Producer

from tests.failover.load import Load, read_all
from tests.failover.nodes import CATCH_UP_S, Nodes
from tests.tools import kafka_dist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TAIL = 50
TAIL_VALUE = 1_000_000
PATIENT = {"broker_session_timeout_ms": 120_000, "kept_stall_ms": 60_000}
"""A leader that hears of nobody serves on for as long as it takes to write its tail."""
RECORD = re.compile(r"^\| offset: (\d+) .*payload: (\d+)$")
BATCH = re.compile(r"^baseOffset: .*partitionLeaderEpoch: (\d+)")


def produce_to_leader_alone(bootstrap: str, topic: str, count: int) -> list[int]:
    """Records that only the leader confirms, each waited for; their offsets."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "1", "linger.ms": 0})
    offsets: list[int] = []

    def delivered(error, message):
        assert error is None, error
        offsets.append(message.offset())

    for number in range(count):
        producer.produce(topic, str(TAIL_VALUE + number), partition=0, on_delivery=delivered)
        assert producer.flush(60) == 0
    return offsets


def load_for_a_while(cluster, nodes, topic, segments):
    """Goes on until every replica that is there has so many segments of what was acknowledged."""
    load = Load(cluster.bootstrap, topic, partitions=1)
    try:
        load.goes_on(cluster)
        cluster.wait_until(
            lambda: all(len(nodes.segments(i, topic, 0)) >= segments for i in nodes.present()),
            f"{topic} has {segments} segments",
            CATCH_UP_S,
        )
    finally:
        load.stop()
    return load


def dumped(nodes: Nodes, node: int, topic: str) -> tuple[list[tuple[int, int]], list[int]]:
    """A replica as DumpLogSegments shows it: (offset, value) of every record; epochs of batches."""
    records, epochs = [], []
    for path in nodes.segments(node, topic, 0):
        said = kafka_dist.dump([path], "--print-data-log", "--deep-iteration").splitlines()
        records += [(int(m[1]), int(m[2])) for m in map(RECORD.match, said) if m is not None]
        epochs += [int(m[1]) for m in map(BATCH.match, said) if m is not None]
    return records, epochs


def deposed_leader(cluster, nodes, topic, segments=1):
    """A leader with a tail of its own died, the others went on without, and it is back."""
    first = load_for_a_while(cluster, nodes, topic, segments)
    nodes.await_in_sync(topic)
    leader = nodes.leader(topic)
    followers = [i for i in nodes.numbers if i != leader]
    with nodes.stalled(*followers):
        offsets = produce_to_leader_alone(f"localhost:{cluster.port(leader)}", topic, TAIL)
        nodes.kill(leader)
    _, end = max(first.acknowledged)
    assert offsets == list(range(end + 1, end + 1 + TAIL))
    path = nodes.segments(leader, topic, 0)[-1]
    assert str(TAIL_VALUE + TAIL - 1).encode() in path.read_bytes()
    second = load_for_a_while(cluster, nodes, topic, segments)
    nodes.start(leader)
    nodes.check_replicas(topic, 1)
    return first, second


def check_what_is_left(cluster, nodes, topic, first, second):
    """All of both loads, and of the tail at most what was on its way when the others stalled."""
    found = [number for _, number in sorted(read_all(cluster.bootstrap, topic, 1).items())]
    assert not first.failed
    assert not second.failed
    tail = [n for n in found if n >= TAIL_VALUE]
    assert tail == list(range(TAIL_VALUE, TAIL_VALUE + len(tail)))
    assert len(tail) <= 1, "one fetch may have been answered before the others stood still"
    assert [n for n in found if n < TAIL_VALUE] == [*range(first.sent), *range(second.sent)]
    for node in nodes.numbers:
        content = b"".join(path.read_bytes() for path in nodes.segments(node, topic, 0))
        assert str(TAIL_VALUE + 1).encode() not in content
    assert nodes.false_fences() == []


@pytest.mark.parametrize("config", [None, {"flush.messages": "1"}])
def test_the_tail_of_a_deposed_leader_is_cut_off(kept_cluster, config):
    cluster = kept_cluster(nodes=3, **PATIENT)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=1, config=config)
    first, second = deposed_leader(cluster, nodes, topic)
    check_what_is_left(cluster, nodes, topic, first, second)


@pytest.mark.java
def test_kafka_sees_the_same_records_in_all_replicas(kept_cluster):
    """Also over several segments and leaders."""
    cluster = kept_cluster(nodes=3, log_segment_bytes=8192, **PATIENT)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=1)
    loads = [load for n in (2, 3) for load in deposed_leader(cluster, nodes, topic, segments=n)]
    replicas = [dumped(nodes, node, topic) for node in nodes.numbers]
    records, epochs = replicas[0]
    assert replicas[1] == replicas[2] == replicas[0]
    assert [offset for offset, _ in records] == list(range(len(records)))
    left = sum(load.sent for load in loads)
    assert left <= len(records) <= left + 2, "of each tail one record may have been on its way"
    assert all(len(nodes.segments(node, topic, 0)) > 1 for node in nodes.numbers)
    assert epochs == sorted(epochs)
    assert len(set(epochs)) >= 3
    for node in nodes.numbers:
        logs = nodes.segments(node, topic, 0)
        made = [log.with_suffix(kind) for log in logs for kind in (".index", ".timeindex")]
        indexes = [path for path in made if path.exists() and path.stat().st_size]
        said = kafka_dist.dump(indexes, "--index-sanity-check")
        assert indexes
        assert said.count("passed sanity check.") == len(indexes), said
