"""How consumers of kafka-python join a group whatever the pace of the machine."""

from __future__ import annotations

from kafka import KafkaConsumer


def knows(consumer: KafkaConsumer, *topics: str) -> KafkaConsumer:
    """The consumer, which has learned of its topics before it joins its group.

    By itself 3.0.12 joins before, and again when it knows them; where a poll ends meanwhile, it
    forgets that second join for good and waits without partitions.
    """
    for topic in topics:
        consumer.partitions_for_topic(topic)
    return consumer
