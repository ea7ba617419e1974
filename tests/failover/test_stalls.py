"""Nodes that stand still (SIGSTOP) and go on: they must not act on what they were."""

from __future__ import annotations

import pytest

from tests.failover.load import PARTITIONS, under_load
from tests.failover.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORT = {
    "broker_session_timeout_ms": 5000,
    "broker_heartbeat_interval_ms": 500,
    "kept_stall_ms": 2500,
}
"""So that a stalled node is fenced soon, and one that a loaded machine lets wait is not."""


@pytest.mark.parametrize(
    ("which", "settings"),
    [
        ("leader", SHORT),
        ("controller", SHORT),
        ("both", SHORT),
        ("leader", {}),
        ("both", {}),
    ],
)
def test_a_stalled_node_is_replaced_and_comes_back(kept_cluster, which, settings):
    cluster = kept_cluster(nodes=3, **settings)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS)

    def events(load):
        controller = nodes.controller()
        leaders = {number: nodes.leader(topic, number) for number in range(PARTITIONS)}
        if which == "leader":
            chosen = next(node for node in leaders.values() if node != controller)
        else:
            chosen = controller
            assert which == "controller" or chosen in leaders.values()
        with nodes.stalled(chosen):
            load.goes_on(cluster)  # so every partition that it led has another leader
            assert chosen not in {nodes.leader(topic, number) for number in range(PARTITIONS)}
        load.goes_on(cluster)
        nodes.await_isr(topic)

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


def test_a_leader_without_followers_acknowledges_nothing(kept_cluster):
    """It dies with records that it alone has; the others have never heard of them."""
    cluster = kept_cluster(nodes=3)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS)

    def events(load):
        leader = nodes.leader(topic)
        with nodes.stalled(*(node for node in nodes.numbers if node != leader)):
            load.goes_quiet()
            nodes.kill(leader)
        load.goes_on(cluster)
        nodes.start(leader)

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []
