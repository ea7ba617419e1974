"""A cluster of containers under two checked loads, and what was seen of each fault as a table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.faults import FAULTS, Fault, happen
from tests.chaos.keyed import CONFIG, KeyedLoad
from tests.chaos.keyed import PARTITIONS as KEYED_PARTITIONS
from tests.chaos.probe import PARTITIONS as PROBED
from tests.chaos.probe import Probe
from tests.deploy.containers import Compose, docker, image
from tests.deploy.files import ROOT
from tests.failover.load import PARTITIONS, Load, under_load

FILES: Final = ("compose.yaml", str(ROOT / "tests" / "chaos" / "compose.yaml"))
ROUND_S: Final = 120.0
"""After so long at random everything is checked, and new topics begin."""


@dataclass(frozen=True)
class Seen:
    """Longest times without acknowledgements while a fault lasted."""

    cluster_s: float
    producer_s: float


class Run:
    """What happens to one cluster, and what was seen."""

    def __init__(self, cluster: Compose) -> None:
        self.cluster = cluster
        self.seen: dict[str, list[Seen]] = {}

    def checked(self, seed: int, events: Callable[[Load], None]) -> int:
        """Let something happen under both loads, then check them; the cleaner's passes so far."""
        log = self.cluster.topic("log", PARTITIONS)
        keyed_topic = self.cluster.topic("table", KEYED_PARTITIONS, CONFIG)
        keyed = KeyedLoad(self.cluster.bootstrap, keyed_topic, seed)
        try:
            under_load(self.cluster, log, events)
        finally:
            keyed.stop()
        keyed.check()
        self.verify(keyed_topic)
        return compactions(self.cluster)

    def verify(self, topic: str) -> None:
        """All replicas of a topic are equal on disk: ``kept compact verify``, in a container."""
        said = docker(
            "run", "--rm", f"--network={self.cluster.project}_default", image(),
            "compact", "verify", topic, "--bootstrap=kept-0:9092",
        )  # fmt: skip
        print(said, flush=True)

    def one_by_one(self, faults: Iterable[Fault]) -> Callable[[Load], None]:
        """Each fault once, to a leader."""

        def events(load: Load) -> None:
            for fault in faults:
                self._happen(fault, self.cluster.leader(load.topic), load)

        return events

    def at_random(self, draw: random.Random) -> Callable[[Load], None]:
        """Any fault to any node, often to a leader, for the time of a round."""

        def events(load: Load) -> None:
            end = time.monotonic() + ROUND_S
            while time.monotonic() < end:
                fault = draw.choice(FAULTS)
                any_node, leads = draw.randrange(len(self.cluster)), draw.random() < 0.5
                node = self.cluster.leader(load.topic) if leads else any_node
                self._happen(fault, node, load)

        return events

    def _happen(self, fault: Fault, node: int, load: Load) -> None:
        probe = Probe(self.cluster.bootstrap, self.cluster.topic("probe", PROBED))
        try:
            begun, over = happen(fault, self.cluster, node, load)
        finally:
            probe.stop()
        seen = Seen(probe.gap_s(begun, over), load.gap_s(begun, over))
        print(
            f"node {node} {fault.name}: nothing acknowledged for {seen.cluster_s:.2f} s, "
            f"to the patient producer for {seen.producer_s:.2f} s", flush=True,
        )  # fmt: skip
        self.seen.setdefault(fault.name, []).append(seen)

    def table(self) -> str:
        """What was seen, as Markdown."""
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
