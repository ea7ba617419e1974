"""Three real nodes under checked load while they are killed and started again."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from tests.failover.load import PARTITIONS, under_load
from tests.failover.nodes import CATCH_UP_S, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLUSH_EACH = {"flush.messages": "1"}


def made(kept_cluster, config=None, **settings):
    cluster = kept_cluster(nodes=3, **settings)
    return cluster, Nodes(cluster), cluster.create_topic(partitions=PARTITIONS, config=config)


def finish(nodes, topic):
    """What must hold whatever was done."""
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == []


@pytest.mark.parametrize(
    ("victim", "config"),
    [
        ("leader", None),
        ("leader", FLUSH_EACH),
        ("controller", None),
        ("controller", FLUSH_EACH),
        ("neither", None),
    ],
)
def test_a_killed_node_loses_nothing_and_comes_back(kept_cluster, victim, config):
    cluster, nodes, topic = made(kept_cluster, config)

    def events(load):
        controller = nodes.controller()
        leader = nodes.leader(topic)
        (other, *_) = (i for i in nodes.numbers if i not in (leader, controller))
        chosen = {"leader": leader, "controller": controller, "neither": other}[victim]
        nodes.kill(chosen)
        load.goes_on(cluster)
        nodes.start(chosen)

    under_load(cluster, topic, events)
    finish(nodes, topic)
    brokers = [answer["brokers"] for answer in nodes.answers("cluster")]
    told = [[broker["endpoints"] for broker in some] for some in brokers]
    assert told[0] == told[1] == told[2]


def test_controller_and_leader_die_in_one_node(kept_cluster):
    cluster, nodes, topic = made(kept_cluster)

    def events(load):
        victim = nodes.controller()
        assert victim in {nodes.leader(topic, number) for number in range(PARTITIONS)}
        killed_at = time.monotonic()
        nodes.kill(victim)
        load.goes_on(cluster)
        print(f"longest gap {load.gap_s(killed_at):.2f} s")
        nodes.start(victim)

    under_load(cluster, topic, events)
    finish(nodes, topic)


@pytest.mark.boot_id
@pytest.mark.parametrize("third", ["killed", "silent"])
def test_two_of_three_that_were_killed_together_go_on_without_the_third(kept_cluster, third):
    """The machine runs still, so neither has lost what it wrote: they need not wait for the third
    one's log, nor for the end of its session, also where it neither answers nor refuses.
    """
    cluster, nodes, topic = made(kept_cluster)

    def events(load):
        away = nodes.leader(topic)
        others = [node for node in nodes.numbers if node != away]
        with nodes.stalled(away) if third == "silent" else contextlib.nullcontext():
            nodes.kill(*(others if third == "silent" else nodes.numbers))
            nodes.start(*others)
            load.goes_on(cluster)
        if third == "killed":
            nodes.start(away)

    under_load(cluster, topic, events)
    finish(nodes, topic)


@pytest.mark.parametrize("config", [None, FLUSH_EACH], ids=["default", "flush.messages=1"])
def test_all_nodes_killed_at_once_start_in_any_order(kept_cluster, config):
    cluster, nodes, topic = made(kept_cluster, config)
    draw = random.Random(4)

    def events(load):
        for round_number in range(3):
            nodes.kill(*nodes.numbers)
            order = draw.sample(nodes.numbers, len(nodes.numbers))
            for node in order:
                # only two of them can be ready; whoever is first waits for the second
                cluster.start(node, wait=False)
                time.sleep(draw.random() if round_number else 0)
            cluster.await_ready(CATCH_UP_S)
            nodes.back(*nodes.numbers)
            load.goes_on(cluster)

    under_load(cluster, topic, events)
    finish(nodes, topic)


def test_two_nodes_killed_one_after_the_other(kept_cluster):
    """The last one left has no majority and acknowledges nothing, until one is back."""
    cluster, nodes, topic = made(kept_cluster)

    def events(load):
        for first, second, back in ((0, 1, 1), (2, 1, 2)):
            nodes.kill(first)
            load.goes_on(cluster)
            nodes.kill(second)
            before = load.sent
            cluster.wait_until(lambda b=before: load.sent > b + 100, "records wait")
            nodes.start(back)
            load.goes_on(cluster)
            nodes.start(*nodes.absent)
            load.goes_on(cluster)
            nodes.await_isr(topic)

    under_load(cluster, topic, events)
    finish(nodes, topic)


def test_a_rolling_restart_is_no_error_to_anybody(kept_cluster):
    """TERM: leaders are handed over before the process ends."""
    cluster, nodes, topic = made(kept_cluster)
    gaps = []

    def events(load):
        for node in nodes.numbers:
            nodes.await_isr(topic)
            began = time.monotonic()
            nodes.stop(node)
            load.goes_on(cluster)
            nodes.start(node)
            load.goes_on(cluster)
            gaps.append(load.gap_s(began))

    load = under_load(cluster, topic, events)
    print("longest gaps", [f"{gap:.2f} s" for gap in gaps])
    assert not load.failed
    finish(nodes, topic)
