"""Topics that are deleted and made again at once under the same name, while nodes are killed."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from kept.client.blocking import OutRecord
from kept.storage.errors import KeptError
from tests.failover.load import PARTITIONS, under_load
from tests.failover.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = 3
KILLS = 4
DONE = ("TopicExists", "TopicAlreadyExists", "UnknownTopicOrPartition")
"""What a repeated CreateTopics or DeleteTopics hears whose first answer was lost."""


class Lives(threading.Thread):
    """One name that lives again and again. In each life only its own records are there, all of
    those that were acknowledged.
    """

    def __init__(self, cluster, name):
        super().__init__()
        self.client, self.name = cluster.client(), name
        self.lives, self.failed = 0, []
        self.ending = threading.Event()

    def run(self):
        try:
            while not self.ending.is_set():
                self._live()
        except Exception as error:  # noqa: BLE001 -- the test tells of it
            self.failed.append(repr(error))
        finally:
            self.client.close()

    def _until_done(self, action):
        end = time.monotonic() + 90
        while True:
            try:
                return action()
            except KeptError as error:
                if type(error).__name__ in DONE:
                    return None
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _live(self):
        self.lives += 1
        self._until_done(
            lambda: self.client.create_topic(self.name, partitions=2, replication_factor=3)
        )
        values = [f"{self.name} {self.lives} {number}".encode() for number in range(20)]
        for number, value in enumerate(values):
            record = OutRecord(key=None, value=value, partition=number % 2)
            self._until_done(lambda record=record: self.client.produce(self.name, [record]))
        found = self._until_done(lambda: {r.value for r in self.client.read(self.name)})
        if found != set(values):
            strange, lost = found - set(values), set(values) - found
            self.failed.append(f"life {self.lives}: strange {strange}, lost {lost}")
        self._until_done(lambda: self.client.delete_topics([self.name]))


def test_a_name_has_only_the_records_of_its_life(kept_cluster):
    cluster = kept_cluster(nodes=3, log_segment_delete_delay_ms=1000)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS)
    several = [Lives(cluster, f"again-{number}") for number in range(NAMES)]
    draw = random.Random(1)

    def events(load):
        for lives in several:
            lives.start()
        try:
            for number in range(KILLS):
                load.goes_on(cluster)
                victim = nodes.leader(topic) if number % 2 else nodes.controller()
                nodes.kill(victim)
                time.sleep(draw.uniform(0, 1))
                nodes.start(victim)
            load.goes_on(cluster)
        finally:
            for lives in several:
                lives.ending.set()
            for lives in several:
                lives.join()

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert [lives.failed for lives in several] == [[]] * NAMES
    assert all(lives.lives > 1 for lives in several)

    def left():
        return [
            name
            for node in nodes.numbers
            for name in os.listdir(cluster.log_dir(node))
            if name.startswith("again-")
        ]

    # Logs that a start found in deletion wait for the default of file.delete.delay.ms, a minute.
    cluster.wait_until(lambda: not left(), "nothing is left of deleted topics", 120)
