"""Real nodes: what followers do with the leader's records, seen from outside."""

from __future__ import annotations

from confluent_kafka import Producer


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
