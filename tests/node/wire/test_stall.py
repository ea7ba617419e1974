"""A leader that stands still (STOP) while another is elected must not act as leader when it wakes.

Its connections stay open, so requests wait in its sockets: they are the first thing it reads.
"""

from __future__ import annotations

import pytest

from kept.client.client import Client
from tests.support.request_values import (
    fetch_values,
    list_offsets_values,
    one_batch,
    produce_values,
)

pytestmark = pytest.mark.slow

NOT_LEADER_OR_FOLLOWER = 6


def leader_of(cluster, topic: str, ask: int) -> int:
    with Client(f"localhost:{cluster.port(ask)}") as client:
        return client.metadata([topic]).topics[topic].partitions[0].leader


@pytest.fixture
def cluster(kept_cluster):
    return kept_cluster(
        nodes=3,
        broker_session_timeout_ms=4000,
        broker_heartbeat_interval_ms=300,
        kept_stall_ms=2000,
        group_initial_rebalance_delay_ms=0,
    )


def stalled(cluster, topic: str) -> tuple[int, int]:
    """Stop the leader and wait for another: (old, new)."""
    old = leader_of(cluster, topic, 0)
    other = (old + 1) % 3
    cluster.pause(old)
    cluster.wait_until(lambda: leader_of(cluster, topic, other) not in (old, -1), "another leader")
    return old, leader_of(cluster, topic, other)


def produce_first(cluster, wire, topic, data, acks=1):
    """A leader takes records once its epoch is durable."""
    cluster.wait_until(
        lambda: wire.produce(topic, data, acks=acks).error_code == 0, "it takes records"
    )


@pytest.mark.parametrize("acks", [1, -1])
def test_what_a_deposed_leader_is_sent_in_its_sleep_is_refused(cluster, connect, acks):
    topic = cluster.create_topic(config={"min.insync.replicas": "1"})
    first = leader_of(cluster, topic, 0)
    waiting = [connect(cluster.port(first)) for _ in range(8)]
    for wire in waiting:
        produce_first(cluster, wire, topic, one_batch())
    old, new = stalled(cluster, topic)
    assert old == first
    values = produce_values(topic, one_batch(size=77), acks=acks)
    for wire in waiting:
        wire.send(0, 9, **values)
    elsewhere = connect(cluster.port(new))
    produce_first(cluster, elsewhere, topic, one_batch())
    cluster.resume(old)
    answers = [
        wire.response(0, 9)[1].responses[0].partition_responses[0].error_code for wire in waiting
    ]
    assert set(answers) == {NOT_LEADER_OR_FOLLOWER}


def test_a_deposed_leader_tells_consumers_nothing(cluster, connect):
    topic = cluster.create_topic()
    first = leader_of(cluster, topic, 0)
    waiting = [connect(cluster.port(first)) for _ in range(2)]
    produce_first(cluster, waiting[0], topic, one_batch(), acks=-1)
    old, _ = stalled(cluster, topic)
    assert old == first
    waiting[0].send(1, 11, **fetch_values(topic, 0))
    waiting[1].send(2, 5, **list_offsets_values(topic))
    cluster.resume(old)
    fetched = waiting[0].response(1, 11)[1].responses[0].partitions[0]
    assert fetched.error_code == NOT_LEADER_OR_FOLLOWER
    listed = waiting[1].response(2, 5)[1].topics[0].partitions[0]
    assert listed.error_code == NOT_LEADER_OR_FOLLOWER
