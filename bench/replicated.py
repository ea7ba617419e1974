"""Three nodes: what acks=all costs over all of them, how soon it answers, memory, start.

One partition with three replicas, two of them wanted in sync; its leader is not the active
controller. Each connection keeps five requests in flight. CPU is that of the three processes and
their children (user and system), less what they use when nothing is asked of them. Costs, rates and
latencies are medians of five measurements after a warm-up. Start, CPU when idle and memory are
those of five clusters one after the other; *loaded*: after 160 MB of requests of 16 KiB.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import baseline
import frames
from harness import GB, Bench
from three_node_clusters import NODES, Trio

from kept.storage.types import Codec

SIZES = (16_384, 65_536, 1_040_000)
CONNECTIONS = (1, 4, 16)
IN_FLIGHT = 5
REPEATS = 5
WARM_REQUESTS = 4000
WARM_TURNS = 9
WARM_ENOUGH = 0.9
"""Before anything is measured, such turns are run until one costs more than 0.9 of the cheapest
before it, at least three and at most nine: Java's compiler takes some 20,000 requests."""
MEASURE_S = 1.0
IDLE_S = 5.0
LEAST_REQUESTS = 48
LOADED_REQUESTS = 10_000
CELL_BYTES = 0.1e9
"""No more than so much in one measurement: what is written is to find memory that was used a moment
ago (:func:`baseline.use_memory`)."""
SETTINGS = {"log_segment_delete_delay_ms": "500"}
DELETED_S = 1.5
LATENCY_RATE = 500
LATENCY_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement: CPU seconds per GB of requests by role, and megabytes a second."""

    leader: float
    followers: float
    kernel: float
    rate: float

    @property
    def total(self) -> float:
        return self.leader + self.followers


class Load:
    """acks=all against one partition of one cluster."""

    def __init__(self, bench: Bench, trio: Trio) -> None:
        self.bench, self.trio = bench, trio
        self.idle = [0.0] * NODES

    def measure_idle(self) -> None:
        """CPU a second of each node when nothing is asked of it."""
        before, started = self.trio.cpu_seconds(), time.monotonic()
        time.sleep(IDLE_S)
        took = time.monotonic() - started
        self.idle = [(b - a) / took for a, b in zip(before, self.trio.cpu_seconds(), strict=True)]

    def place(self, topic: str) -> tuple[int, int]:
        """A new topic's (partition, leader) whose leader is not the controller."""
        self.trio.create_topic(topic, max_message_bytes="4000000")
        controller = self.trio.controller()
        return self.trio.partition_led_by(topic, lambda node: node != controller)

    def drop(self, topic: str) -> None:
        """Delete a topic and give the nodes time to remove its files."""
        self.trio.delete_topic(topic)
        time.sleep(DELETED_S)

    def send(self, leader: int, frame: bytes, connections: int, count: int) -> dict[str, float]:
        """So many requests, to the leader."""
        port = self.trio.nodes.port(leader)
        return self.bench.run_load("send", port, frame, connections, IN_FLIGHT, count)

    def cost(self, leader: int, frame: bytes, connections: int, count: int) -> Cost:
        """What so many requests cost."""
        before, kernel = self.trio.cpu_seconds(), self.trio.kernel_seconds()
        got = self.send(leader, frame, connections, count)
        after, kernel = self.trio.cpu_seconds(), self.trio.kernel_seconds() - kernel
        spent = [
            (b - a - idle * got["seconds"]) / (got["bytes"] / GB)
            for a, b, idle in zip(before, after, self.idle, strict=True)
        ]
        return Cost(
            leader=spent[leader],
            followers=sum(spent) - spent[leader],
            kernel=kernel / (got["bytes"] / GB),
            rate=got["bytes"] / got["seconds"] / 1e6,
        )

    def warm(self, leader: int, frame: bytes) -> None:
        """Until it gets no cheaper."""
        cheapest = float("inf")
        for turn in range(WARM_TURNS):
            total = self.cost(leader, frame, 2, WARM_REQUESTS).total
            if turn >= 2 and total > WARM_ENOUGH * cheapest:
                return
            cheapest = min(cheapest, total)

    def count_for(self, leader: int, frame: bytes, connections: int, seconds: float) -> int:
        """Requests for about so long, by a short trial that also warms up."""
        trial = max(LEAST_REQUESTS, 4 * connections * IN_FLIGHT)
        while True:
            got = self.send(leader, frame, connections, trial)
            if got["seconds"] >= seconds / 4 or got["bytes"] >= CELL_BYTES / 2:
                break
            trial *= 2
        most = min(got["requests"] / got["seconds"] * seconds, CELL_BYTES / len(frame))
        return max(LEAST_REQUESTS, int(most))


def _frame(topic: str, partition: int, size: int) -> bytes:
    data = frames.batch(size, 1000, Codec.NONE, int(time.time() * 1000))
    return frames.produce(topic, data, acks=-1, partition=partition)


def _kib(size: int) -> str:
    return "1 MB" if size > 1_000_000 else f"{size // 1024} KiB"


def throughput(bench: Bench, trio: Trio) -> None:
    """Every batch size on every number of connections."""
    load = Load(bench, trio)
    load.measure_idle()
    partition, leader = load.place("warm")
    frame = _frame("warm", partition, SIZES[0])
    load.warm(leader, frame)
    load.drop("warm")
    for size in SIZES:
        for connections in CONNECTIONS:
            what = f"acks=all {_kib(size)}, {connections} conn."
            with bench.attempt(f"{what}, {trio.name}"):
                cell(load, what, size, connections)


def cell(load: Load, what: str, size: int, connections: int) -> None:
    """One batch size on one number of connections."""
    bench, name = load.bench, load.trio.name
    topic = f"all-{size}-{connections}"
    partition, leader = load.place(topic)
    frame = _frame(topic, partition, size)
    count = load.count_for(leader, frame, connections, MEASURE_S * bench.scale)
    baseline.use_memory(bench, NODES * REPEATS * count * len(frame))
    costs = [load.cost(leader, frame, connections, count) for _ in range(REPEATS)]
    load.drop(topic)
    middle = sorted(costs, key=lambda cost: cost.total)[REPEATS // 2]
    bench.add("cluster", what, name, "CPU-s/GB", middle.total)
    bench.add("cluster", f"{what}, leader", name, "CPU-s/GB", middle.leader)
    bench.add("cluster", f"{what}, two followers", name, "CPU-s/GB", middle.followers)
    bench.add("cluster", f"{what}, in the kernel", name, "CPU-s/GB", middle.kernel)
    bench.add("cluster", what, name, "MB/s", statistics.median(cost.rate for cost in costs))


def latency(bench: Bench, trio: Trio) -> None:
    """1 KiB, acks=all, 500 requests a second on one connection."""
    load = Load(bench, trio)
    partition, leader = load.place("paced")
    frame = _frame("paced", partition, LATENCY_BATCH)
    port = trio.nodes.port(leader)
    bench.run_load("pace", port, frame, LATENCY_RATE, 2500)
    count = max(1500, int(4000 * bench.scale))
    got = [bench.run_load("pace", port, frame, LATENCY_RATE, count) for _ in range(REPEATS)]
    for quantile in ("p50_ms", "p99_ms", "p999_ms"):
        value = statistics.median(one[quantile] for one in got)
        name = f"acks=all latency {quantile[:-3]}, {LATENCY_RATE}/s"
        bench.add("cluster", name, trio.name, "ms", value)
    load.drop("paced")


def memory(bench: Bench, trio: Trio, when: str) -> None:
    """RSS and PSS of a node: the mean of the three."""
    for kind, values in zip(("RSS", "PSS"), trio.memory(), strict=True):
        name = f"memory of a node of three, {when}, {kind}"
        bench.add("cluster-start", name, trio.name, "MB", statistics.mean(values) / 1e6)


def start(bench: Bench, trio: Trio) -> None:
    """A section: what a cluster takes that was started just now, before a load and after it."""
    bench.add("cluster-start", "three nodes ready", trio.name, "s", trio.ready_seconds)
    time.sleep(2)
    memory(bench, trio, "idle")
    load = Load(bench, trio)
    load.measure_idle()
    idle = 1e3 * sum(load.idle)
    bench.add("cluster-start", "CPU when idle, three nodes", trio.name, "CPU-ms/s", idle)
    partition, leader = load.place("loaded")
    load.send(leader, _frame("loaded", partition, SIZES[0]), 4, int(LOADED_REQUESTS * bench.scale))
    memory(bench, trio, "loaded")


def cluster(bench: Bench, trio: Trio) -> None:
    """A section: costs and latencies."""
    time.sleep(2)
    throughput(bench, trio)
    latency(bench, trio)
