"""Kafka Streams: a word count with its store, changelog and repartition topic, on three nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from confluent_kafka import Producer

from kept.testing import Cluster
from tests.compat.scenario import leader
from tests.compat.streams import Application

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 150


class Lines:
    """Lines of words to a topic, and how often each word must be counted."""

    def __init__(self, cluster: Cluster) -> None:
        self.words: Counter[str] = Counter()
        self._sent = 0
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "enable.idempotence": True,
                "log_level": 0,
            }
        )

    def send(self, count: int) -> None:
        for number in range(self._sent, self._sent + count):
            line = f"word-{number % 7} word-{number % 11} all"
            self.words.update(line.split())
            self._producer.produce("lines", line, partition=number % 2)
        self._sent += count
        assert self._producer.flush(60) == 0


def counted(cluster: Cluster) -> Counter[str]:
    """The latest count of every word."""
    found: Counter[str] = Counter()
    with cluster.client() as client:
        for record in client.read("words"):
            found[bytes(record.key).decode()] = int(bytes(record.value))
    return found


def test_a_word_count_lives_through_a_killed_leader_and_restores_its_store(kept_cluster, tmp_path):
    cluster = kept_cluster(nodes=3)
    with cluster.client() as client:
        client.create_topic("lines", partitions=2)
        client.create_topic("words", partitions=2, config={"cleanup.policy": "compact"})
    lines = Lines(cluster)

    def all_counted() -> bool:
        """At least: a commit that was lost with a node has records counted again."""
        found = counted(cluster)
        return set(found) == set(lines.words) and found >= lines.words

    def wait() -> None:
        cluster.wait_until(all_counted, "all words are counted", DEADLINE_S)

    application = Application("WordCount", cluster.bootstrap, "lines", "words")
    with application.running(tmp_path / "first"):
        lines.send(200)
        wait()
        assert counted(cluster) == lines.words
        victim = leader(cluster, "lines")
        cluster.kill(victim)
        lines.send(200)
        wait()
        cluster.start(victim)
        cluster.await_ready()
        lines.send(100)
        wait()
    before = counted(cluster)
    with application.running(tmp_path / "second"):  # nothing but the changelog knows the counts
        lines.words = before
        lines.send(50)
        wait()
        assert counted(cluster) == lines.words
