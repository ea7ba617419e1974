"""What partitions cost where nothing happens: memory of a node, memory of the controller's image.

Three nodes of kept hold 3,000 partitions with three replicas, so each node has a copy of every
partition and leads a third. The figure is what a node's resident memory grew by, per partition. The
image is that of ``controller.py``: 100,000 partitions on 300 brokers, in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import Bench
from three_node_clusters import NODES, Trio

HERE = Path(__file__).resolve().parent
PARTITIONS = 3000
TOPIC_PARTITIONS = 300
SETTLE_S = 5.0


def partitions(bench: Bench, trio: Trio) -> None:
    """Memory and idle CPU of a node by the partitions it holds."""
    trio.create_topic("first")
    time.sleep(SETTLE_S)
    before, _ = trio.memory()
    started = time.monotonic()
    for number in range(PARTITIONS // TOPIC_PARTITIONS):
        trio.create_topic(f"many-{number}", partitions=TOPIC_PARTITIONS)
    took = time.monotonic() - started
    time.sleep(SETTLE_S)
    after, _ = trio.memory()
    grown = statistics.mean(b - a for a, b in zip(before, after, strict=True)) / PARTITIONS
    cpu, began = sum(trio.cpu_seconds()), time.monotonic()
    time.sleep(SETTLE_S)
    idle = (sum(trio.cpu_seconds()) - cpu) / (time.monotonic() - began) / NODES
    what = f"{PARTITIONS} partitions on three nodes"
    bench.add("partitions", "memory of a node per idle partition", trio.name, "KB", grown / 1e3)
    bench.add("partitions", f"CPU of an idle node, {what}", trio.name, "CPU-ms/s", idle * 1e3)
    bench.add("partitions", f"made and written to, {what}", trio.name, "s", took)


def image(bench: Bench) -> None:
    """The figures of ``controller.py``."""
    run = [sys.executable, str(HERE / "controller.py"), "--json"]
    for row in json.loads(subprocess.check_output(run))["rows"]:
        bench.add(row["group"], row["name"], row["broker"], row["unit"], row["value"])
