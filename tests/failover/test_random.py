"""Nodes are killed, stalled, stopped and started again at random, under a checked load.

A short run by default; ``MINUTES=10 pytest -m slow -s tests/failover/test_random.py`` is a long
one. ``SEED`` repeats the order of events (not their timing); it is printed first.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from tests.failover.load import PARTITIONS, Load, under_load
from tests.failover.nodes import CATCH_UP_S, Nodes

SECONDS = 60 * float(os.environ.get("MINUTES", "0.4"))
"""For each of two runs, one of which flushes each batch."""
STALL_S = (0.2, 12.0)
"""Shorter and longer than the session of a broker."""
PAUSE_S = 2.0


class Chaos:
    """What may happen to the nodes, by a seed."""

    def __init__(self, nodes: Nodes, load: Load, topic: str, seed: int) -> None:
        self.nodes, self.load, self.topic = nodes, load, topic
        self.draw = random.Random(seed)
        self.gaps: dict[str, list[float]] = {}
        self.actions = {
            self.kill: 4,
            self.stall: 3,
            self.stop: 2,
            self.kill_two: 1,
            self.kill_all: 1,
            self.kill_during_stall: 1,
        }

    def step(self) -> None:
        """One event, until the load goes on after it."""
        (action,) = self.draw.choices(list(self.actions), list(self.actions.values()))
        began = time.monotonic()
        what = action()
        self.load.goes_on(self.nodes.cluster)
        if self.draw.random() < 0.3:
            self.nodes.await_isr(self.topic)
        gap = self.load.gap_s(began)
        self.gaps.setdefault(action.__name__, []).append(gap)
        print(f"{what}: longest gap {gap:.2f} s of {time.monotonic() - began:.1f} s", flush=True)

    def target(self) -> int:
        """A node: often the one that matters most."""
        kind = self.draw.choice(["leader", "controller", "any"])
        chosen = self.draw.choice(self.nodes.numbers)
        if kind == "leader":
            return self.nodes.leader(self.topic, self.draw.randrange(PARTITIONS))
        return self.nodes.controller() if kind == "controller" else chosen

    def rest(self) -> None:
        """Some time; often the load has gone on after it, sometimes not yet."""
        time.sleep(self.draw.random() * PAUSE_S)

    def kill(self) -> str:
        node = self.target()
        self.nodes.kill(node)
        self.rest()
        self.nodes.start(node)
        return f"node {node} killed"

    def stall(self) -> str:
        node = self.target()
        seconds = self.draw.uniform(*STALL_S)
        with self.nodes.stalled(node):
            time.sleep(seconds)
        return f"node {node} stalled for {seconds:.1f} s"

    def stop(self) -> str:
        node = self.target()
        self.nodes.stop(node)
        self.rest()
        self.nodes.start(node)
        return f"node {node} stopped in order"

    def kill_two(self) -> str:
        some = self.draw.sample(self.nodes.numbers, 2)
        for node in some:
            self.nodes.kill(node)
            self.rest()
        self.start_in_any_order(some)
        return f"nodes {some} killed"

    def kill_all(self) -> str:
        self.nodes.kill(*self.nodes.numbers)
        self.start_in_any_order(list(self.nodes.numbers))
        return "all nodes killed at once"

    def kill_during_stall(self) -> str:
        """One stands still, another dies: nobody is left to acknowledge for a while."""
        still, dead = self.draw.sample(self.nodes.numbers, 2)
        with self.nodes.stalled(still):
            self.nodes.kill(dead)
            self.rest()
        self.nodes.start(dead)
        return f"node {dead} killed while node {still} stood still"

    def start_in_any_order(self, some: list[int]) -> None:
        """Start them with pauses; the first of three can not be ready before the second."""
        self.draw.shuffle(some)
        for node in some:
            self.nodes.cluster.start(node, wait=False)
            self.rest()
        self.nodes.cluster.await_ready(CATCH_UP_S)
        self.nodes.back(*some)

    def report(self) -> None:
        """What was seen."""
        for name, gaps in sorted(self.gaps.items()):
            ordered = sorted(gaps)
            middle = ordered[len(ordered) // 2]
            print(f"{name}: {len(gaps)} times, gap median {middle:.2f} s, most {ordered[-1]:.2f} s")
        load = self.load
        known = len(load.acknowledged)
        print(f"{known} records acknowledged, {load.repeated} more as known, errors: {load.failed}")
        reasons = Counter(fence.reason for fence in self.nodes.fences())
        print(f"fenced: {dict(reasons)}; false: {self.nodes.false_fences()}")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize("config", [None, {"flush.messages": "1"}], ids=["default", "flush=1"])
def test_random_events(kept_cluster, config):
    seed = int(os.environ.get("SEED", random.randrange(1_000_000)))
    print(f"\nSEED={seed}")
    cluster = kept_cluster(nodes=3)
    nodes = Nodes(cluster)
    topic = cluster.create_topic(partitions=PARTITIONS, config=config)

    def events(load: Load) -> None:
        chaos = Chaos(nodes, load, topic, seed)
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end:
                chaos.step()
        finally:
            chaos.report()

    under_load(cluster, topic, events)
    nodes.check_replicas(topic, PARTITIONS)
    assert nodes.false_fences() == [], f"SEED={seed}"
