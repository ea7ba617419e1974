"""How consumers of kafka-python join a group whatever the pace of the machine."""

from __future__ import annotations

import time

from kafka import KafkaConsumer
from kafka.errors import KafkaError

DEADLINE_S = 60


def knows(consumer: KafkaConsumer, *topics: str) -> KafkaConsumer:
    """The consumer, which has learned of its topics before it joins its group.

    By itself 3.0.12 joins before, and again when it knows them; where a poll ends meanwhile, it
    forgets that second join for good and waits without partitions. Nodes may be killed meanwhile.
    """
    deadline = time.monotonic() + DEADLINE_S
    for topic in topics:
        while True:
            try:
                consumer.partitions_for_topic(topic)
                break
            except KafkaError:
                if time.monotonic() > deadline:
                    raise
    return consumer
