"""Metrics of three real nodes: each moves when what it is about happens, and back."""

from __future__ import annotations

import urllib.request
from collections import Counter
from uuid import UUID

import pytest
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from kept.cluster.metadata.image import Delta, Image, PartitionChange
from kept.cluster.metadata.records import BrokerRecord, PartitionRecord
from kept.node.runtime.cluster_counters import ClusterCounters
from kept.storage.types import TopicPartition
from kept.testing import Cluster

PATIENT = {"broker_session_timeout_ms": 200_000, "controller_quorum_fetch_timeout_ms": 30_000}
"""Who is slow is not gone: what is counted is what a death brought about."""


def scrape(cluster: Cluster, node: int) -> dict[str, float]:
    """Metrics of a node; those with labels as ``name{value,…}``."""
    with urllib.request.urlopen(f"{cluster.url(node)}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def total(cluster: Cluster) -> Counter[str]:
    """The sums over the nodes that run."""
    sums: Counter[str] = Counter()
    for node in range(len(cluster)):
        if cluster.running(node):
            sums.update(scrape(cluster, node))
    return sums


def become(cluster: Cluster, **wanted: float) -> None:
    """Wait until sums over all nodes are as wanted."""
    seen: Counter[str] = Counter()

    def there() -> bool:
        nonlocal seen
        seen = total(cluster)
        return all(seen[f"kept_{name}"] == value for name, value in wanted.items())

    try:
        cluster.wait_until(there, f"{wanted}")
    except Exception as error:
        got = {name: seen[f"kept_{name}"] for name in wanted}
        raise AssertionError(f"{got} instead of {wanted}") from error


@pytest.mark.slow
def test_a_node_dies_and_comes_back(kept_cluster):
    cluster = kept_cluster(nodes=3, **PATIENT)
    cluster.create_topic(partitions=6)
    cluster.create_topic(partitions=3, replication_factor=1)
    cluster.create_topic(partitions=3, config={"min.insync.replicas": "3"})
    become(
        cluster,
        under_replicated_partitions=0,
        under_min_isr_partitions=0,
        offline_partitions=0,
        controller_offline_partitions=0,
        controller_fenced_brokers=0,
        controller_active=1,
        leader_partitions=12,
        isr_shrinks_total=0,
    )
    before = total(cluster)
    assert before["kept_raft_elections_total"] == before["kept_raft_election_seconds_count"] == 3
    victim = int(scrape(cluster, 0)["kept_raft_leader"])
    led = int(scrape(cluster, victim)["kept_leader_partitions"])
    assert led == 4
    cluster.kill(victim)
    become(
        cluster,
        under_replicated_partitions=9,
        under_min_isr_partitions=3,
        isr_shrinks_total=9,
        controller_offline_partitions=1,
        controller_fenced_brokers=1,
        controller_active=1,
        leader_partitions=11,
        failover_seconds_count=3,
    )
    after = total(cluster)
    assert after["kept_raft_elections_total"] == after["kept_raft_election_seconds_count"] == 4
    assert 0 < after["kept_failover_seconds_sum"] < 60
    survivor = (victim + 1) % 3
    term = scrape(cluster, survivor)["kept_raft_term"]
    assert term > before["kept_raft_term"] / 3
    assert scrape(cluster, survivor)["kept_raft_leader"] != victim
    cluster.start(victim)
    become(
        cluster,
        under_replicated_partitions=0,
        under_min_isr_partitions=0,
        controller_offline_partitions=0,
        controller_fenced_brokers=0,
        isr_expands_total=9,
    )


def test_a_follower_that_stands_still_lags(kept_cluster):
    cluster = kept_cluster(nodes=3, broker_session_timeout_ms=200_000)
    topic = cluster.create_topic()
    with cluster.client() as client:
        leader = client.topic(topic).partitions[0].leader
    follower = (leader + 1) % 3
    lag = f"kept_replica_lag_max{{{follower}}}"
    cluster.wait_until(lambda: scrape(cluster, leader).get(lag) == 0, "no lag")
    cluster.pause(follower)
    producer = Producer({"bootstrap.servers": f"localhost:{cluster.port(leader)}", "acks": 1})
    for number in range(100):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(60) == 0
    cluster.wait_until(lambda: scrape(cluster, leader)[lag] == 100, "100 behind")
    cluster.resume(follower)
    cluster.wait_until(lambda: scrape(cluster, leader)[lag] == 0, "caught up")


# The counters by themselves.


def test_an_election_lasts_from_the_loss_of_the_last_controller():
    metrics = ClusterCounters()
    metrics.controller_is(None, 0, 1.0)
    metrics.controller_is(2, 1, 1.5)
    metrics.controller_is(2, 1, 7.0)
    metrics.node_gone(0, 8.0)
    metrics.node_gone(2, 9.0)
    metrics.controller_is(None, 2, 9.5)
    metrics.controller_is(0, 3, 9.75)
    assert (metrics.elections, metrics.election_seconds.total) == (2, 0.5 + 0.75)
    metrics.controller_is(0, 4, 10.0)  # in office again, without a break
    assert (metrics.elections, metrics.election_seconds.count) == (3, 2)


ID = UUID(int=1)


def image(**fenced: bool) -> Image:
    records = [BrokerRecord(int(name[1:]), 1, ID, (), fenced=now) for name, now in fenced.items()]
    return Image().apply(records)[0]


def test_a_failover_lasts_from_the_leader_s_death():
    metrics = ClusterCounters()
    assert metrics.failover(image(b1=False), 1, 5.0) is None  # alive: it hands over
    assert metrics.failover(image(), -1, 5.0) is None  # a new partition
    metrics.node_gone(1, 3.0)
    assert metrics.failover(image(b1=True), 1, 5.0) == 3.0
    assert metrics.failover(image(b2=True), 2, 5.0) == 5.0  # the controller noticed before us
    metrics.acting_on(image(b1=False), Delta(brokers=frozenset([1])), 0)  # it is back
    assert metrics.failover(image(b1=True), 1, 9.0) == 9.0
    metrics.failed_over(3.0, 5.5)
    metrics.failed_over(None, 5.5)
    assert (metrics.failover_seconds.count, metrics.failover_seconds.total) == (1, 2.5)


@pytest.mark.parametrize(
    ("before", "after", "leader", "shrinks", "expands"),
    [
        ((0, 1, 2), (0, 2), 0, 1, 0),
        ((0, 1), (0, 1, 2), 0, 0, 1),
        ((0, 1), (0, 2), 0, 1, 1),
        ((0, 1, 2), (1, 2), 1, 0, 0),  # its leader counts it
    ],
)
def test_members_of_isrs_are_counted_by_the_leader(before, after, leader, shrinks, expands):
    metrics = ClusterCounters()
    old, new = (PartitionRecord(ID, 0, (0, 1, 2), isr, leader, 0, 0) for isr in (before, after))
    change = PartitionChange(TopicPartition("t", 0), old, new)
    created = PartitionChange(TopicPartition("t", 1), None, new)
    metrics.acting_on(image(), Delta(partitions=(change, created)), 0)
    assert (metrics.isr_shrinks, metrics.isr_expands) == (shrinks, expands)
