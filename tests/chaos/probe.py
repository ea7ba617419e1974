"""How long a cluster acknowledges nothing, seen by clients that do not wait for lost ones.

The checked load's producer is idempotent and has patience, so that its pauses are longer than the
cluster's: it gives a silent node up after socket.timeout.ms and asks for metadata now and then.
This one tries ten times a second, asks anew every half second and forgets what takes longer than
one; what becomes of its records is nobody's concern.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

PARTITIONS: Final = 3
EVERY_S: Final = 0.1


class Probe:
    """Records to each partition of a topic until stopped, and when they were acknowledged."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._acknowledged: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "linger.ms": 0,
                "retries": 0,
                "message.timeout.ms": 1000,
                "request.timeout.ms": 1000,
                "socket.timeout.ms": 1500,
                "topic.metadata.refresh.interval.ms": 500,
                "topic.metadata.refresh.fast.interval.ms": 100,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for partition in range(PARTITIONS):
                try:
                    self._producer.produce(
                        self._topic, b"", partition=partition, on_delivery=self._delivered
                    )
                except (BufferError, KafkaException):  # it knows of no leader, or is full
                    continue
            self._producer.poll(EVERY_S)
            self._stop.wait(EVERY_S / 10)
        self._producer.flush(5)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self._acknowledged[message.partition()].append(time.monotonic())

    def gap_s(self, since: float, until: float) -> float:
        """The longest time between two acknowledgements that any partition had."""
        longest = 0.0
        for times in self._acknowledged:
            moments = [since, *(t for t in times if since < t < until), until]
            longest = max(longest, *(b - a for a, b in pairwise(moments)))
        return longest

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()
