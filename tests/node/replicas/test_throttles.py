"""KIP-73 on real nodes: what a throttled move takes, against one of the same size that is not."""

from __future__ import annotations

import os

import pytest
from confluent_kafka import Producer

from kept.client.admin import cluster as operations
from kept.storage.types import TopicPartition
from tests.support.slow import rest_slow

MIB = 1 << 20
TOPIC_MIB = 24
RATE = 64 * 1024
"""Of this 11 s may pass at once; half of the topic takes minutes."""


def fill(cluster, topic: str) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for _ in range(TOPIC_MIB * 8):
        producer.produce(topic, os.urandom(MIB // 8))
        producer.poll(0)
    assert producer.flush(60) == 0


def size(cluster, node: int, topic: str) -> int:
    directory = os.path.join(cluster.log_dir(node), f"{topic}-0")
    found = (os.path.join(directory, name) for name in os.listdir(directory))
    return sum(os.path.getsize(path) for path in found if path.endswith(".log"))


def leader(client, topic: str) -> int:
    return client.metadata([topic]).topics[topic].partitions[0].leader


@pytest.mark.parametrize("side", rest_slow(["leader", "follower"], 1))
def test_a_throttled_move_takes_its_share_and_no_more(kept_cluster, side) -> None:
    cluster = kept_cluster(nodes=3, replica_fetch_response_max_bytes=MIB)
    free, throttled = (
        cluster.create_topic(name, replication_factor=1, config={"min.insync.replicas": "1"})
        for name in ("free", "throttled")
    )
    with cluster.client() as client:
        source = leader(client, throttled)
        target = (source + 1) % 3
        elsewhere = leader(client, free)
        fill(cluster, free)
        fill(cluster, throttled)
        broker = str(source if side == "leader" else target)
        rate = {f"{side}.replication.throttled.rate": str(RATE)}
        replicas = {f"{side}.replication.throttled.replicas": f"0:{broker}"}
        client.alter_broker(broker, rate)
        client.alter_topic(throttled, replicas)
        plan = {
            TopicPartition(throttled, 0): (source, target),
            TopicPartition(free, 0): (elsewhere, (elsewhere + 1) % 3),
        }
        client.run(operations.reassign(plan, client.timeout_ms))

        def moving() -> set[str]:
            found = client.run(operations.list_reassignments(client.timeout_ms))
            return {tp.topic for tp in found}

        cluster.wait_until(lambda: free not in moving(), "the move without a throttle ended")
        assert moving() == {throttled}
        assert size(cluster, target, throttled) < TOPIC_MIB * MIB / 2
        # New records of the topic's own in-sync replicas are not held up by it.
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "log_level": 0})
        producer.produce(throttled, b"more")
        assert producer.flush(60) == 0
        client.alter_broker(broker, {}, tuple(rate))
        client.alter_topic(throttled, {}, tuple(replicas))
        cluster.wait_until(lambda: not moving(), "the move ended without its throttle")
        assert size(cluster, target, throttled) == size(cluster, source, throttled)
