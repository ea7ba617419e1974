"""What holds a node's loop: the longest stalls, and what ran in them.

Nodes run with a probe inside (``probe.py``): three of them keep many partitions, first idle and
then under 50 requests a second with acks=all; or (``--clean``) one node is sent 500 requests a
second without a cleaner's pass and during one.

    python bench/loop_stalls.py [--partitions 3000] [--seconds 15] [--set K=V ...]
    python bench/loop_stalls.py --clean [--gb 0.5] [--runs 3] [--partitions N] [--set K=V ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cleaning
import frames
from brokers import Broker
from harness import Bench
from three_node_clusters import HOST, NODES, Trio

from kept.storage.types import Codec
from kept.testing import Cluster

HERE = Path(__file__).resolve().parent
PARTITIONS = 3000
"""On three nodes, each of which has a copy of every one."""
TOPIC_PARTITIONS = 300
SECONDS = 15.0
SETTLE_S = 8.0
RATE = 500
TRICKLE = 50
"""A load that three nodes with many partitions can keep up with."""
ANSWER_DEADLINE_S = 20.0

Report = dict[str, Any]


@contextlib.contextmanager
def probed(nodes: int, settings: dict[str, str], *, niced: bool = False) -> Iterator[Cluster]:
    """Nodes of kept with a probe inside."""
    with tempfile.TemporaryDirectory(prefix="bench-probe-") as folder:
        path = os.pathsep.join(filter(None, [str(HERE / "probed"), os.environ.get("PYTHONPATH")]))
        environ = {"PYTHONPATH": path, "PROBE_DIR": folder}
        if niced:
            environ["PROBE_NICED"] = "1"
        with Cluster(nodes, environ=environ, **settings) as cluster:
            cluster.probe_directory = folder  # type: ignore[attr-defined]
            yield cluster


def node_reports(cluster: Cluster) -> list[Report]:
    """Each node's report of the time since the last one."""
    found = []
    for i in range(len(cluster)):
        path = Path(cluster.probe_directory) / str(cluster.pid(i))  # type: ignore[attr-defined]
        path.unlink(missing_ok=True)
        os.kill(cluster.pid(i), signal.SIGUSR2)
        cluster.wait_until(path.exists, f"a report of node {i}", ANSWER_DEADLINE_S)
        found.append(dict(json.loads(path.read_text())))
    for i in range(len(cluster)):
        os.kill(cluster.pid(i), signal.SIGUSR1)
    return found


def _frame(topic: str, acks: int, partition: int = 0) -> bytes:
    batch = frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000))
    return frames.produce(topic, batch, acks, partition)


def housekeeping(
    bench: Bench, partitions: int, seconds: float, settings: dict[str, str]
) -> dict[str, list[Report]]:
    """Three nodes with many partitions: reports when idle, and under a small load."""
    with probed(NODES, settings) as cluster:
        trio = Trio("kept", cluster, 0.0)
        for number in range(partitions // TOPIC_PARTITIONS):
            trio.create_topic(f"many-{number}", partitions=TOPIC_PARTITIONS)
        trio.create_topic("paced")
        partition, leader = trio.partition_led_by("paced", lambda _: True)
        time.sleep(SETTLE_S)
        node_reports(cluster)
        time.sleep(seconds)
        idle = node_reports(cluster)
        frame = _frame("paced", -1, partition)
        bench.run_load("pace", trio.nodes.port(leader), frame, TRICKLE, int(TRICKLE * seconds))
        return {"idle": idle, f"{TRICKLE}/s": node_reports(cluster)}


def stalls(bench: Bench) -> None:
    """The section."""
    seconds = max(5.0, SECONDS * bench.scale)
    for when, reports in housekeeping(bench, PARTITIONS, seconds, {}).items():
        what = f"{PARTITIONS} partitions, {when}"
        count = sum(report["own_stalls"] for report in reports)
        longest = max(report["own_longest_ms"] for report in reports)
        minutes = seconds * NODES / 60
        bench.add("stalls", f"longest stall of a loop, {what}", "kept", "ms", longest)
        bench.add("stalls", f"stalls over 2 ms, {what}", "kept", "1/min/node", count / minutes)


def clean(bench: Bench, options: argparse.Namespace) -> tuple[Any, Any, Report, Report]:
    """One node: latencies without and during a pass, and the reports of both."""
    with probed(1, _settings(options.set), niced=options.niced) as cluster:
        broker = Broker("kept", HOST, cluster.port(), cluster.pid(), 0.0, Path(cluster.log_dir()))
        with cluster.client() as client:
            client.create_topic("paced", partitions=1)
            if options.partitions:
                client.create_topic("many", partitions=options.partitions)
        cleaning.fill(broker, "aside", options.gb * 1e9)
        time.sleep(2)
        frame = _frame("paced", 1)
        bench.run_load("pace", broker.port, frame, RATE, 1000)
        node_reports(cluster)
        quiet = bench.run_load("pace", broker.port, frame, RATE, 2500)
        (without,) = node_reports(cluster)
        cleaning.release(broker, "aside")
        during = bench.run_load("pace", broker.port, frame, RATE, options.requests)
        (inside,) = node_reports(cluster)
        cleaning.await_pass(broker, "aside")
        return quiet, during, without, inside


def _settings(given: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in given)


def _print(name: str, report: Report) -> None:
    print(name, {k: v for k, v in report.items() if k != "worst"})
    for gap in report["worst"]:
        print("   ", gap)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clean", action="store_true", help="one node, during a cleaner's pass")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--partitions", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="K=V")
    parser.add_argument("--niced", action="store_true", help="workers are niced and not idle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), 1.0)
        if not options.clean:
            partitions = PARTITIONS if options.partitions is None else options.partitions
            found = housekeeping(bench, partitions, options.seconds, _settings(options.set))
            for when, reports in found.items():
                for i, report in enumerate(reports):
                    _print(f"{when}, node {i}", report)
            return
        ratios = []
        for _ in range(options.runs):
            quiet, during, without, inside = clean(bench, options)
            ratios.append(during["p99_ms"] / quiet["p99_ms"])
            print(json.dumps({"quiet": quiet, "during": during, "ratio": round(ratios[-1], 2)}))
            _print("without a pass", without)
            _print("during", inside)
        middle = statistics.median(ratios)
        print(f"p99 during / without: median {middle:.2f} of {len(ratios)} runs")


if __name__ == "__main__":
    main()
