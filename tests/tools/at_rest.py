"""What a topic holds once nobody writes to it, read by librdkafka."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

PATIENCE_S: Final = 180


def records_at_rest(bootstrap: str, topic: str, partitions: int) -> Iterator[Any]:
    """Every record of a topic, each partition in order, up to all ends as they are now.

    Errors of the client's are not the end: it finds another leader by itself.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "at-rest",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    ended: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"{topic}: ends seen of {sorted(ended)} only"
            for message in consumer.consume(1000, 0.2):
                if message.error() is None:
                    yield message
                elif message.error().name() == "_PARTITION_EOF":
                    ended.add(message.partition())
    finally:
        consumer.close()
