"""DeleteRecords over replicas: answered when every live one has moved its log start."""

from __future__ import annotations

import pytest

from kept.client.client import Client
from tests.support.request_values import one_batch

OFFSET_OUT_OF_RANGE = 1
NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7


def described(cluster, topic: str):
    with Client(f"localhost:{cluster.port(0)}") as client:
        return client.metadata([topic]).topics[topic].partitions[0]


def deletion(topic: str, offset: int, timeout_ms: int = 60_000):
    partition = {"partition_index": 0, "offset": offset}
    return {"topics": [{"name": topic, "partitions": [partition]}], "timeout": timeout_ms}


@pytest.fixture(scope="module")
def cluster():
    from kept.testing import Cluster

    with Cluster(nodes=3, broker_session_timeout_ms=200_000) as made:
        yield made


def filled(cluster, connect):
    topic = cluster.create_topic()
    leader = described(cluster, topic).leader
    wire = connect(cluster.port(leader))
    for _ in range(10):
        assert wire.produce(topic, one_batch(), acks=-1).error_code == 0
    return topic, leader, wire


def test_it_is_answered_when_all_replicas_have_moved(cluster, connect):
    topic, leader, wire = filled(cluster, connect)
    followers = [connect(cluster.port(node)) for node in range(3) if node != leader]
    for offset in (4, 7, -1):
        told = wire.ask(21, 2, **deletion(topic, offset)).topics[0].partitions[0]
        wanted = 10 if offset < 0 else offset
        assert (told.error_code, told.low_watermark) == (0, wanted)
        for follower in followers:
            below = follower.fetch(topic, wanted - 1)
            assert below.error_code == OFFSET_OUT_OF_RANGE
    refused = followers[0].ask(21, 2, **deletion(topic, 10)).topics[0].partitions[0]
    assert (refused.error_code, refused.low_watermark) == (NOT_LEADER_OR_FOLLOWER, -1)


def test_it_says_so_when_a_replica_does_not_follow_in_time(cluster, connect):
    topic, leader, wire = filled(cluster, connect)
    stopped = (leader + 1) % 3
    cluster.pause(stopped)
    try:
        told = wire.ask(21, 2, **deletion(topic, 4, timeout_ms=1500)).topics[0].partitions[0]
        assert (told.error_code, told.low_watermark) == (REQUEST_TIMED_OUT, 0)
    finally:
        cluster.resume(stopped)
    told = wire.ask(21, 2, **deletion(topic, 5)).topics[0].partitions[0]
    assert (told.error_code, told.low_watermark) == (0, 5)
