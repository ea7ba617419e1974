"""The network between three nodes is cut, wholly or one way, under checked load, and heals.

Clients still reach every node, also one that nobody else hears and that believes to lead.
"""

from __future__ import annotations

import os

import pytest

from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from tests.failover.load import PARTITIONS, under_load
from tests.failover.network import SHORT, ApartCluster
from tests.failover.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(600)]

LEADER, CONTROLLER, OTHER = "leader", "controller", "other"
OTHERS = {
    LEADER: [CONTROLLER, OTHER],
    CONTROLLER: [LEADER, OTHER],
}


@pytest.fixture
def apart():
    with ApartCluster(**SHORT) as cluster:
        yield cluster


def roles(nodes: Nodes, topic: str) -> dict[str, int]:
    """Who is the controller, who leads a partition without being that, and who is neither."""
    controller = nodes.controller()
    leaders = {nodes.leader(topic, number) for number in range(PARTITIONS)}
    leader = min(leaders - {controller})
    (other,) = set(nodes.numbers) - {controller, leader}
    return {LEADER: leader, CONTROLLER: controller, OTHER: other}


def watermarks(nodes: Nodes, node: int, topic: str) -> list[int]:
    """What a node that leads, or thinks so, says that is acknowledged."""
    partitions = nodes.ask(node, f"topics/{topic}")["partitions"]
    return [p["high_watermark"] for p in partitions if p["leader"] == node]


@pytest.mark.parametrize("alone", [LEADER, CONTROLLER])
@pytest.mark.parametrize("way", ["both ways", "is not heard", "hears nobody"])
def test_one_node_is_cut_off(apart, alone, way):
    nodes = Nodes(apart)
    topic = apart.create_topic(partitions=PARTITIONS)

    def events(load):
        role = roles(nodes, topic)
        node, rest = role[alone], [role[name] for name in OTHERS[alone]]
        nodes.gone(node)
        if way == "hears nobody":
            apart.cut(rest, [node], both_ways=False)
        else:
            apart.cut([node], rest, both_ways=way == "both ways")
        nodes.elsewhere(topic, PARTITIONS, node)
        before = watermarks(nodes, node, topic)
        load.goes_on(apart)
        if way == "both ways":
            assert watermarks(nodes, node, topic) == before, "a minority acknowledges nothing"
            assert nodes.ask(node, "cluster")["controller_id"] != node
        apart.heal()
        nodes.back(node)
        load.goes_on(apart)
        nodes.await_isr(topic)

    under_load(apart, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


def test_the_leader_is_cut_from_the_controller(apart):
    """The third node hears both: it follows the leader of the newer epoch."""
    nodes = Nodes(apart)
    topic = apart.create_topic(partitions=PARTITIONS)

    def events(load):
        role = roles(nodes, topic)
        nodes.gone(role[LEADER], role[CONTROLLER])  # the other may elect one that the leader hears
        apart.cut([role[LEADER]], [role[CONTROLLER]])
        load.goes_on(apart)
        apart.heal()
        nodes.back(role[LEADER], role[CONTROLLER])
        load.goes_on(apart)
        nodes.await_isr(topic)

    under_load(apart, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


def test_the_leader_is_cut_from_a_follower(apart):
    """The follower lags and leaves the ISR; nobody is fenced, for the controller hears both."""
    nodes = Nodes(apart)
    topic = apart.create_topic(partitions=PARTITIONS)

    def events(load):
        role = roles(nodes, topic)
        apart.cut([role[LEADER]], [role[OTHER]])
        load.goes_on(apart)
        sides = {role[LEADER], role[OTHER]}
        for partition in nodes.ask(role[CONTROLLER], f"topics/{topic}")["partitions"]:
            if partition["leader"] in sides:
                assert set(partition["isr"]) == {partition["leader"], role[CONTROLLER]}
        apart.heal()
        load.goes_on(apart)
        nodes.await_isr(topic)

    under_load(apart, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.fences() == []


def test_three_nodes_that_hear_nobody_else(apart):
    """Nothing is acknowledged until the network heals; then everything is."""
    nodes = Nodes(apart)
    topic = apart.create_topic(partitions=PARTITIONS)

    def events(load):
        nodes.gone(*nodes.numbers)
        apart.cut([0], [1, 2])
        apart.cut([1], [2])
        load.goes_quiet()
        for node in nodes.numbers:
            apart.wait_until(lambda n=node: is_no_controller(apart, n), "all step down")
        before = len(load.acknowledged)
        sent = load.sent
        apart.wait_until(lambda: load.sent > sent + 500, "records wait")
        assert len(load.acknowledged) == before
        apart.heal()
        nodes.back(*nodes.numbers)
        load.goes_on(apart)
        nodes.await_isr(topic)

    under_load(apart, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


def is_no_controller(cluster, node: int) -> bool:
    api = JsonApi(Endpoint(cluster.host(node), cluster.port(node)))
    return api.get("cluster")["controller_id"] != node


def test_nothing_is_left_on_the_machine():
    with ApartCluster() as cluster:
        device = f"/sys/class/net/kept{os.getpid()}"
        assert os.path.exists(device)
        assert cluster.running(2)
    cluster.wait_until(lambda: not os.path.exists(device), "the device is gone")
