"""A leader from outside the ISR, where that is allowed: the controller says what may be lost."""

from __future__ import annotations

import urllib.request

import pytest

from kept.client.client import OutRecord
from kept.testing import Cluster

COUNT = "kept_controller_unclean_elections_total"


def counted(cluster: Cluster, node: int) -> float:
    with urllib.request.urlopen(f"{cluster.url(node)}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(COUNT + " "))


@pytest.mark.slow
def test_an_election_that_nobody_asked_for_is_told_and_counted():
    with Cluster(nodes=3) as cluster:
        allowed = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
        topic = cluster.create_topic(replication_factor=2, config=allowed)
        with cluster.client() as client:
            view = client.topic(topic).partitions[0]
            leader, follower = view.leader, next(n for n in view.replicas if n != view.leader)
            third = next(n for n in range(3) if n not in view.replicas)
            cluster.kill(follower)
            client.produce(topic, [OutRecord(key=b"k", value=b"lost")])
            cluster.kill(leader)
            cluster.start(follower)
            cluster.wait_until(
                lambda: client.metadata([topic]).topics[topic].partitions[0].leader == follower,
                "it leads",
            )
        told = "".join(cluster.log(node) for node in (follower, third))
        assert told.count("unclean election") == 1
        assert f"{topic}-0: elected {follower} in epoch" in told
        assert f"without all of the ISR [{leader}]; acknowledged records may be lost" in told
        assert sum(counted(cluster, node) for node in (follower, third)) == 1
