"""A cluster of containers under two checked loads, and what was seen of each fault as a table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos import machine
from tests.chaos.faults import FAULTS, Fault, happen
from tests.chaos.probe import PARTITIONS as PROBED
from tests.chaos.probe import Probe
from tests.deploy.containers import Compose, docker, image
from tests.deploy.files import ROOT
from tests.failover.load import PARTITIONS, Load, under_load
from tests.failover.nodes import Nodes
from tests.soak.load import PARTITIONS as TABLE_PARTITIONS
from tests.soak.load import Kind, Writer

HERE: Final = ROOT / "tests" / "chaos"
FILES: Final = ("compose.yaml", str(HERE / "compose.yaml"))
TABLE: Final = Kind("latest", "none")
TABLE_RECORDS_PER_S: Final = 500
ROUND_S: Final = 120.0
"""After so long at random everything is checked, and new topics begin."""


@contextmanager
def cluster_of(nodes: int, *, grows: bool = False) -> Iterator[Compose]:
    """A cluster for a run: all ``nodes`` found it, or three do and the others come later."""
    founders = range(3 if grows else nodes)
    environ = {
        "CHAOS": str(HERE),
        "VOTERS": ",".join(f"{node}@kept-{node}:10092" for node in founders),
        "ROLES": "broker" if grows else "broker,controller",
    }
    more = () if nodes == len(founders) == Compose.NODES else (str(HERE / "compose.five.yaml"),)
    cluster = Compose(files=(*FILES, *more), nodes=len(founders), **environ)
    with cluster:
        machine.hold(cluster)
        try:
            yield cluster
        except BaseException:
            print(*(cluster.log(node)[-4000:] for node in range(len(cluster))), sep="\n\n")
            raise
        finally:
            machine.let_go(cluster)


@dataclass(frozen=True)
class Seen:
    """Longest times without acknowledgements while a fault lasted."""

    cluster_s: float
    producer_s: float


class Run:
    """What happens to one cluster, and what was seen."""

    def __init__(self, cluster: Compose) -> None:
        self.cluster, self.nodes = cluster, Nodes(cluster)
        self.seen: dict[str, list[Seen]] = {}
        self.topics: list[str] = []
        """What else is written to."""

    def checked(self, seed: int, events: Callable[[Load], None]) -> int:
        """Let something happen under both loads, then check them; the cleaner's passes so far."""
        log = self.cluster.topic("log", PARTITIONS)
        table = self.cluster.topic("table", TABLE_PARTITIONS, TABLE.config)
        self.topics = [table]
        writer = Writer(self.cluster.bootstrap, table, TABLE, str(seed), TABLE_RECORDS_PER_S)
        writer.start()
        try:
            under_load(self.cluster, log, events)
        finally:
            writer.pause()
        writer.check()
        self.verify(table)
        return compactions(self.cluster)

    def verify(self, topic: str) -> None:
        """All replicas of a topic are equal on disk: ``kept compact verify``, in a container."""
        print(self.command("compact", "verify", topic, "--patience", "240"), flush=True)

    def command(self, *arguments: str, check: bool = True) -> str:
        """What ``kept`` says in a container beside the nodes."""
        network = f"--network={self.cluster.project}_default"
        command = ("run", "--rm", network, image(), *arguments, "--bootstrap=kept-0:9092")
        return docker(*command, check=check)

    def one_by_one(self, faults: Iterable[Fault]) -> Callable[[Load], None]:
        """Each fault once, to a leader."""

        def events(load: Load) -> None:
            for fault in faults:
                node = self.nodes.leader(load.topic) if fault.node is None else fault.node
                self._happen(fault, node, load)

        return events

    def at_random(self, draw: random.Random) -> Callable[[Load], None]:
        """Any fault to any node, often to a leader, for the time of a round."""

        def events(load: Load) -> None:
            end = time.monotonic() + ROUND_S
            while time.monotonic() < end:
                fault = draw.choice(FAULTS)
                any_node, leads = draw.randrange(len(self.cluster)), draw.random() < 0.5
                node = self.nodes.leader(load.topic) if leads else any_node
                node = node if fault.node is None else fault.node
                self._happen(fault, node, load)

        return events

    def growth(self, load: Load) -> None:
        """Two more brokers come, and get their share of everything, while it is written to."""
        topics = [load.topic, *self.topics]
        began = time.monotonic()
        self.cluster.grow(Compose.MOST)
        self.command("cluster", "reassign", *topics, "--to", "3,4,0,1,2", "--wait")
        over = time.monotonic()
        load.goes_on(self.cluster)
        assert self._hosts(topics) >= {3, 4}
        print(
            f"from three nodes to five in {over - began:.0f} s: nothing acknowledged for "
            f"{load.gap_s(began, over):.2f} s to the patient producer",
            flush=True,
        )

    def _hosts(self, topics: list[str]) -> set[int]:
        """Who has a replica in sync."""
        found: set[int] = set()
        for topic in topics:
            answer: dict[str, Any] = self.nodes.ask(0, f"topics/{topic}")
            found.update(node for partition in answer["partitions"] for node in partition["isr"])
        return found

    def _happen(self, fault: Fault, node: int, load: Load) -> None:
        probe = Probe(self.cluster.bootstrap, self.cluster.topic("probe", PROBED))
        try:
            begun, over = happen(fault, self.cluster, node, load)
        finally:
            probe.stop()
        seen = Seen(probe.gap_s(begun, over), load.gap_s(begun, over))
        print(
            f"node {node} {fault.name}: nothing acknowledged for {seen.cluster_s:.2f} s, "
            f"to the patient producer for {seen.producer_s:.2f} s",
            flush=True,
        )
        self.seen.setdefault(fault.name, []).append(seen)

    def table(self) -> str:
        """What was seen, as Markdown; how often, where it was more than once."""
        lines = [
            "| A node is … | Times | No acknowledgement, median | Most | Goal | Patient producer |",
            "|---|---|---|---|---|---|",
        ]
        for fault in FAULTS:
            if found := self.seen.get(fault.name):
                goal = "-" if fault.goal_s is None else f"{fault.goal_s:.0f} s"
                gaps = sorted(seen.cluster_s for seen in found)
                patient = max(seen.producer_s for seen in found)
                lines.append(
                    f"| {fault.name} | {len(gaps)} | {gaps[len(gaps) // 2]:.1f} s "
                    f"| {gaps[-1]:.1f} s | {goal} | {patient:.1f} s |"
                )
        return "\n".join(lines)


def compactions(cluster: Compose) -> int:
    """Passes since the nodes started, of all that run."""
    total = 0.0
    for node in range(len(cluster)):
        for family in text_string_to_metric_families(cluster.get(node, "/metrics")):
            if family.name == "kept_log_cleaner_compactions":
                total += sum(sample.value for sample in family.samples)
    return int(total)
