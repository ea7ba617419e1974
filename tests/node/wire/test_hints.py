"""Answers that send a client elsewhere: to the leader (KIP-951), to a replica near it (KIP-392)."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Consumer, TopicPartition

from kept.client.client import Client
from tests.support.request_values import fetch_values, one_batch, produce_values

NOT_LEADER_OR_FOLLOWER = 6


def described(cluster, topic: str):
    with Client(f"localhost:{cluster.port(0)}") as client:
        found = client.metadata([topic]).topics[topic]
        return found.topic_id, found.partitions[0]


@pytest.fixture(scope="module")
def cluster():
    from kept.testing import Cluster

    selector = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
    with Cluster(
        nodes=3, replica_selector_class=selector, replica_fetch_wait_max_ms=28_000
    ) as made:
        for node in range(3):
            made.stop(node)
            made.start(node, broker_rack=f"rack-{node}")
        made.await_ready()
        yield made


@pytest.mark.parametrize("replication_factor", [1, 3])
def test_a_produce_that_went_wrong_is_told_who_leads(cluster, connect, replication_factor):
    topic = cluster.create_topic(replication_factor=replication_factor)
    topic_id, partition = described(cluster, topic)
    wrong = (partition.leader + 1) % 3
    where = (partition.leader, "localhost", cluster.port(partition.leader))
    for version in (10, 12, 13):
        named = {"topic_id": topic_id} if version >= 13 else {}
        values = produce_values(topic, one_batch(), **named)
        answer = connect(cluster.port(wrong)).ask(0, version, **values)
        told = answer.responses[0].partition_responses[0]
        assert told.error_code == NOT_LEADER_OR_FOLLOWER
        leader = told.current_leader
        assert (leader.leader_id, leader.leader_epoch) == (partition.leader, partition.leader_epoch)
        (node,) = answer.node_endpoints
        assert (node.node_id, node.host, node.port) == where
        assert node.rack == f"rack-{partition.leader}"
    older = connect(cluster.port(wrong)).produce(topic, one_batch(), version=9)
    assert older.error_code == NOT_LEADER_OR_FOLLOWER
    right = connect(cluster.port(partition.leader)).ask(0, 12, **produce_values(topic, one_batch()))
    assert right.responses[0].partition_responses[0].error_code == 0
    assert not right.node_endpoints


def test_a_fetch_that_went_wrong_is_told_who_leads(cluster, connect):
    topic = cluster.create_topic(replication_factor=1)
    topic_id, partition = described(cluster, topic)
    wrong = (partition.leader + 1) % 3
    for version in (13, 16, 17):
        values = fetch_values(topic, 0, topic_id=topic_id)
        answer = connect(cluster.port(wrong)).ask(1, version, **values)
        told = answer.responses[0].partitions[0]
        assert told.error_code == NOT_LEADER_OR_FOLLOWER
        if version < 16:
            assert told.current_leader.leader_id == -1
            continue
        leader = told.current_leader
        assert (leader.leader_id, leader.leader_epoch) == (partition.leader, partition.leader_epoch)
        (node,) = answer.node_endpoints
        assert (node.node_id, node.port) == (partition.leader, cluster.port(partition.leader))


def test_a_consumer_is_sent_to_the_replica_in_its_rack(cluster, connect):
    topic = cluster.create_topic()
    _, partition = described(cluster, topic)
    leader = connect(cluster.port(partition.leader))
    assert leader.produce(topic, one_batch(), acks=-1).error_code == 0
    follower = (partition.leader + 1) % 3

    def sent(rack: str, version: int = 11):
        return leader.fetch(topic, 0, version=version, rack_id=rack)

    cluster.wait_until(
        lambda: sent(f"rack-{follower}").preferred_read_replica == follower, "sent elsewhere"
    )
    assert not sent(f"rack-{follower}").records
    for rack in ("", "rack-of-nobody", f"rack-{partition.leader}"):
        answer = sent(rack)
        assert (answer.preferred_read_replica, bool(answer.records)) == (-1, True)
    there = connect(cluster.port(follower))
    cluster.wait_until(
        lambda: bool(there.fetch(topic, 0, rack_id=f"rack-{follower}").records),
        "read there, long before the follower's fetch would have ended",
        10,
    )


def test_librdkafka_reads_in_its_rack(cluster, connect):
    topic = cluster.create_topic()
    _, partition = described(cluster, topic)
    leader = connect(cluster.port(partition.leader))
    follower = (partition.leader + 1) % 3
    from_whom = []

    def told(statistics: str) -> None:
        seen = json.loads(statistics)["topics"].get(topic, {}).get("partitions", {})
        from_whom.append(seen.get("0", {}).get("broker"))

    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "rack",
            "client.rack": f"rack-{follower}",
            "statistics.interval.ms": 100,
            "stats_cb": told,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    offsets = []

    def read() -> bool:
        assert leader.produce(topic, one_batch(), acks=-1).error_code == 0
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            offsets.append(message.offset())
        return len(offsets) > 20 and from_whom[-1] == follower

    try:
        cluster.wait_until(read, "read from the replica in its rack")
    finally:
        consumer.close()
    assert offsets == list(range(len(offsets)))
