"""One of two log directories of a node fails: others lead what it led there, it leads the rest.

Needs root for a small tmpfs of its own.
"""

from __future__ import annotations

import errno
import os

import pytest
from confluent_kafka import Producer

from kept.client.client import Client
from tests.tools.small_disk import small_disk

PARTITIONS = 6


@pytest.fixture
def small(tmp_path):
    """A directory on a file system of 3 MiB."""
    with small_disk(tmp_path / "small") as path:
        yield path


def fill(path) -> None:
    with open(path / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.slow
def test_what_a_node_leads_on_a_failed_disk_is_led_elsewhere(kept_cluster, small) -> None:
    cluster = kept_cluster(nodes=3, replica_lag_time_max_ms=600_000)
    cluster.stop(0)
    cluster.start(0, log_dirs=f"{cluster.log_dir(0)},{small}/log")
    cluster.await_ready()
    topic = cluster.create_topic(partitions=PARTITIONS)
    with Client(f"localhost:{cluster.port(1)}") as client:

        def partitions():
            return client.metadata([topic]).topics[topic].partitions

        # Leadership is even once all are in sync; some that node 0 leads are on the small disk.
        on_small = {
            number for number in range(PARTITIONS) if (small / f"log/{topic}-{number}").exists()
        }
        led_there = {number for number in on_small if partitions()[number].leader == 0}
        led_well = {p for p in range(PARTITIONS) if partitions()[p].leader == 0} - led_there
        assert led_there and led_well
        fill(small)
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "log_level": 0})
        errors = []
        for number in range(20 * PARTITIONS):
            producer.produce(
                topic,
                bytes(2000),
                partition=number % PARTITIONS,
                on_delivery=lambda error, _: errors.append(error),
            )
        assert producer.flush(60) == 0
        assert set(errors) == {None}
        assert cluster.log(0).count("log directory offline") == 1
        now = partitions()
        assert {now[number].leader for number in led_there} <= {1, 2}
        assert {now[number].leader for number in led_well} == {0}
        cluster.wait_until(
            lambda: all(0 not in partitions()[number].isr for number in on_small),
            "what is lost is out of the ISR",
        )
        assert cluster.log(0).count('event="ISR changed"') < 5 * len(on_small)
    assert os.path.exists(cluster.data_dir(0)) and cluster.running(0)
