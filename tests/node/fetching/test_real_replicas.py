"""Real nodes: what followers do with the leader's records, seen from outside."""

from __future__ import annotations

from confluent_kafka import Producer

from kept.client.blocking import Client


def at(cluster, node: int) -> str:
    return f"localhost:{cluster.port(node)}"


def described(cluster, topic: str, *, ask: int = 0):
    """Partition 0 as a node tells it."""
    with Client(at(cluster, ask)) as client:
        return client.metadata([topic]).topics[topic].partitions[0]


def isr(cluster, topic: str, *, ask: int = 0) -> set[int]:
    return set(described(cluster, topic, ask=ask).isr)


def produced(cluster, topic: str, count: int, **settings) -> int:
    """Produce with acks=all, one after another; how many were acknowledged."""
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 0, "log_level": 0}
        | settings
    )
    acknowledged = []
    for number in range(count):
        producer.produce(
            topic, str(number), partition=0, on_delivery=lambda e, _: acknowledged.append(e)
        )
        if producer.flush(20):
            break
    return acknowledged.count(None)


def test_a_follower_flushes_what_flush_messages_asks_for(kept_cluster) -> None:
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(config={"flush.messages": "1", "min.insync.replicas": "3"})
    assert produced(cluster, topic, 20) == 20
    # Restarted with a tail that its recovery point does not cover: it goes on, too.
    cluster.kill(1)
    cluster.start(1)
    assert produced(cluster, topic, 5) == 5


def test_a_follower_that_lags_leaves_the_isr_and_comes_back(kept_cluster) -> None:
    """It is registered all the time: nothing but its lag tells."""
    cluster = kept_cluster(
        nodes=3,
        broker_session_timeout_ms=60_000,
        replica_lag_time_max_ms=1000,
        replica_fetch_wait_max_ms=200,
    )
    topic = cluster.create_topic()
    leader = described(cluster, topic).leader
    lagging = (leader + 1) % 3
    assert produced(cluster, topic, 1) == 1
    cluster.pause(lagging)
    try:
        assert produced(cluster, topic, 3, **{"bootstrap.servers": at(cluster, leader)}) == 3
        assert isr(cluster, topic, ask=leader) == {0, 1, 2} - {lagging}
    finally:
        cluster.resume(lagging)
    cluster.wait_until(lambda: isr(cluster, topic) == {0, 1, 2}, "back in the ISR")
