"""Nodes of a cluster that stop together, or last: there is nobody to hand over to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.testing import Cluster

PATIENCE = "kept.shutdown.timeout.ms"
"""Of minutes here: who waits for it fails the test by its deadline."""


def clean(cluster: Cluster, node: int) -> bool:
    return (Path(cluster.log_dir(node)) / ".kafka_cleanshutdown").exists()


def records(number: int) -> list[OutRecord]:
    return [OutRecord(key=b"k%d" % n, value=b"v" * 100) for n in range(number)]


@pytest.mark.slow
def test_three_nodes_that_are_told_to_stop_at_once_stop_cleanly():
    with Cluster(nodes=3, **{PATIENCE: 200_000}) as cluster:
        topic = cluster.create_topic(partitions=6)
        with cluster.client() as client:
            client.produce(topic, records(100))
        for node in range(3):
            os.kill(cluster.pid(node), signal.SIGTERM)
        assert [cluster.wait(node) for node in range(3)] == [0, 0, 0]
        assert all(clean(cluster, node) for node in range(3))
        for node in range(3):
            cluster.start(node, wait=False)
        cluster.await_ready()
        with cluster.client() as client:
            client.produce(topic, records(100))


def test_the_last_node_stops_cleanly_without_the_others():
    with Cluster(nodes=3, **{PATIENCE: 200_000}) as cluster:
        cluster.create_topic(partitions=6)
        cluster.kill(0)
        assert cluster.stop(1) == 0
        assert cluster.stop(2) == 0
        assert clean(cluster, 1) and clean(cluster, 2) and not clean(cluster, 0)
        assert "no majority of the controllers is left" in cluster.log(1) + cluster.log(2)


@pytest.mark.slow
def test_a_node_that_waits_for_a_majority_stops_when_it_is_told():
    with Cluster(nodes=3, **{PATIENCE: 200_000}) as cluster:
        cluster.create_topic(partitions=3)
        for node in range(3):
            cluster.kill(node)
        cluster.start(1, wait=False)
        cluster.wait_until(lambda: "joining" in cluster.log(1).rpartition(" ready on ")[2], "")
        assert cluster.stop(1) == 0
        assert not clean(cluster, 1), "nobody has looked through its logs since it was killed"


@pytest.mark.slow
def test_a_controller_that_stops_hands_over_before_it_ends():
    with Cluster(nodes=3, **{PATIENCE: 200_000}) as cluster:
        topic = cluster.create_topic(partitions=3)
        api = [JsonApi(Endpoint(cluster.host(i), cluster.port(i))) for i in range(3)]
        first = api[0].get("cluster")["controller_id"]
        others = [i for i in range(3) if i != first]
        assert cluster.stop(first) == 0
        told = {api[i].get("cluster")["controller_id"] for i in others}
        assert len(told) == 1 and told < set(others), "nobody needs to find out that it is gone"
        assert f'event="controller handed over" to={told.pop()}' in cluster.log(first)
        with cluster.client() as client:
            client.create_topic("u", partitions=1)
            client.produce(topic, records(10))
