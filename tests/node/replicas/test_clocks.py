"""The time of day jumps on a real node: replication does not notice."""

from __future__ import annotations

import itertools

import pytest
from confluent_kafka import Producer

from kept.client.client import Client
from kept.testing import Cluster

JUMPING = '''
"""time.time() with an offset that a test writes into a file named by the process."""
import os
import time

real = time.time
path = os.path.join(os.path.dirname(__file__), str(os.getpid()))


def jumping():
    try:
        with open(path) as source:
            return real() + float(source.read() or 0)
    except FileNotFoundError:
        return real()


time.time = jumping
'''
HOUR_S = 3600


@pytest.fixture
def jumping(tmp_path):
    """Three nodes, and ``jump(node, seconds)``."""
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(JUMPING)
    with Cluster(
        nodes=3,
        environ={"PYTHONPATH": str(clock)},
        replica_socket_timeout_ms=1000,
        broker_session_timeout_ms=200_000,
    ) as cluster:

        def jump(node: int, seconds: float) -> None:
            new = clock / "new"
            new.write_text(str(seconds))
            new.rename(clock / str(cluster.pid(node)))

        yield cluster, jump


class Load:
    """acks=all, one record at a time."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "log_level": 0}
        )
        self._topic = topic

    def goes_on(self, count: int = 200) -> None:
        errors = []
        for number in range(count):
            self._producer.produce(
                self._topic,
                str(number),
                partition=0,
                on_delivery=lambda error, _: errors.append(error),
            )
            assert self._producer.flush(60) == 0
        assert set(errors) == {None}


@pytest.mark.slow
def test_a_follower_that_waits_does_not_wait_for_the_time_of_day(jumping) -> None:
    """Its leader is silent, so it asks in vain, later and later, while its clock is set back."""
    cluster, jump = jumping
    topic = cluster.create_topic(config={"min.insync.replicas": "3"})
    load = Load(cluster.bootstrap, topic)
    load.goes_on()
    with Client(cluster.bootstrap) as client:
        leader = client.metadata([topic]).topics[topic].partitions[0].leader
    follower = (leader + 1) % 3
    cluster.pause(leader)
    try:
        hours = itertools.count(1)

        def complains() -> bool:
            jump(follower, -next(hours) * HOUR_S)
            return cluster.log(follower).count("leader does not answer") > 0

        cluster.wait_until(complains, "the follower asked in vain")
    finally:
        cluster.resume(leader)
    load.goes_on(20)
