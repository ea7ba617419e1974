"""Three real nodes under checked load while one of them dies: nothing acknowledged is lost.

The load is librdkafka's idempotent producer with acks=all; what it was told is acknowledged is read
back afterwards, from whoever leads then, and must be there once and in order.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kept.testing import Cluster

PARTITIONS = 3


class Load:
    """Numbers in rising order to one topic, until stopped."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.failed: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": 60_000,
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            self._producer.produce(
                self.topic,
                str(number),
                partition=number % PARTITIONS,
                on_delivery=self._delivered,
            )
            number += 1
            self._producer.poll(0.002)
        self._producer.flush(60)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            place = (message.partition(), message.offset())
            self.acknowledged[place] = int(message.value())

    def goes_on(self, cluster: Cluster) -> None:
        """Wait until more was acknowledged."""
        before = len(self.acknowledged)
        cluster.wait_until(lambda: len(self.acknowledged) > before + 100, "more acknowledged")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def read_all(bootstrap: str, topic: str) -> dict[tuple[int, int], int]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "checker", "enable.auto.commit": False}
    )
    places = [TopicPartition(topic, number, 0) for number in range(PARTITIONS)]
    ends = {
        place.partition: consumer.get_watermark_offsets(place, timeout=20)[1] for place in places
    }
    consumer.assign(places)
    found: dict[tuple[int, int], int] = {}
    while len(found) < sum(ends.values()):
        messages = consumer.consume(1000, 20)
        assert messages, f"{len(found)} of {ends} read"
        for message in messages:
            assert message.error() is None, message.error()
            found[message.partition(), message.offset()] = int(message.value())
    consumer.close()
    return found


def check(cluster: Cluster, load: Load) -> None:
    """Everything acknowledged is there, where it was said to be, once and in order."""
    assert not load.failed
    found = read_all(cluster.bootstrap, load.topic)
    lost = {place: n for place, n in load.acknowledged.items() if found.get(place) != n}
    assert not lost
    assert len(set(found.values())) == len(found)
    for number in range(PARTITIONS):
        values = [found[place] for place in sorted(found) if place[0] == number]
        assert values == sorted(values)


@pytest.mark.parametrize(
    "victim",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
)
def test_a_killed_node_loses_nothing_and_comes_back(kept_cluster, victim):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(partitions=PARTITIONS)
    load = Load(cluster.bootstrap, topic)
    try:
        load.goes_on(cluster)
        cluster.kill(victim)
        load.goes_on(cluster)
        cluster.start(victim)
        load.goes_on(cluster)
    finally:
        load.stop()
    check(cluster, load)


@pytest.mark.slow
def test_all_nodes_killed_at_once(kept_cluster):
    cluster = kept_cluster(nodes=3)
    topic = cluster.create_topic(partitions=PARTITIONS)
    load = Load(cluster.bootstrap, topic)
    try:
        load.goes_on(cluster)
        for i in range(3):
            cluster.kill(i)
        starting = [threading.Thread(target=cluster.start, args=(i,)) for i in range(3)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        load.goes_on(cluster)
    finally:
        load.stop()
    check(cluster, load)
