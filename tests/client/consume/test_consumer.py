"""Reading on when a leader dies: nobody waits for the dead node."""

from __future__ import annotations

import time

import pytest

from kept.client.client import Client, OutRecord
from kept.client.consume.consumer import Consumer
from kept.storage.types import TopicPartition

PROMPTLY_S = 25.0
"""A call to a node waits longer for it."""


@pytest.mark.slow
def test_a_consumer_reads_on_from_the_next_leader(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(partitions=3)
    tps = [TopicPartition(topic, p) for p in range(3)]
    with Client(cluster.bootstrap) as client:
        client.produce(topic, [OutRecord(None, b"first", partition=p) for p in range(3)])
        consumer = Consumer(client, dict.fromkeys(tps, 0))
        seen: list[bytes] = []
        while len(seen) < 3:
            seen += [record.value for record in consumer.poll(200)]
        cluster.kill(client.metadata([topic]).topics[topic].partitions[0].leader)
        end = time.monotonic() + PROMPTLY_S
        with Client(cluster.bootstrap) as other:
            other.produce(topic, [OutRecord(None, b"next", partition=p) for p in range(3)])
        while len(seen) < 6:
            assert time.monotonic() < end, f"only {seen} came in time"
            seen += [record.value for record in consumer.poll(200)]
    assert seen == [b"first"] * 3 + [b"next"] * 3
