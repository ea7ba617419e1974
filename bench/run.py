"""``make bench``: kept and Apache Kafka side by side, in one run, on one machine.

Prints one table and writes ``results/bench.json`` and ``results/bench.png``. CPU is the broker
process's own (user and system), as CPU seconds per GB of requests or microseconds per request; the
load comes from ``load.c``, whose CPU is not in the figures. ``--quick`` moves a tenth of the data;
``--only kept`` leaves Kafka out (which needs Java 17 and Maven); ``--rows a,b`` picks groups.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import brokers
import cleaning
import frames
from brokers import Broker

from kept.client.blocking import Client
from kept.storage.types import Codec

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
GB = 1e9

Row = dict[str, object]


class Bench:
    """One run: the load program, how much to move, and the rows so far."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.scale = scale
        self.rows: list[Row] = []
        self.load = folder / "load"
        subprocess.run(["gcc", "-O2", "-o", self.load, HERE / "load.c"], check=True)

    def run_load(self, mode: str, broker: Broker, frame: bytes, *args: object) -> dict[str, float]:
        """Run ``load.c`` with a frame and return what it measured."""
        path = self.folder / "frame"
        path.write_bytes(frame)
        command = [self.load, mode, broker.host, broker.port, path, *args]
        done = subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{broker.name}: {done.stderr.strip()}")
        return dict(json.loads(done.stdout))

    def add(self, group: str, name: str, broker: Broker, unit: str, value: float) -> None:
        """Note one figure."""
        row = {"group": group, "name": name, "broker": broker.name, "unit": unit, "value": value}
        self.rows.append(row)
        print(f"  {broker.name:6} {name:42} {value:10.3f} {unit}", flush=True)


def measure_start(bench: Bench, broker: Broker) -> None:
    """Ready time (files formatted) and resident memory, idle."""
    bench.add("start", "ready", broker, "s", broker.ready_seconds)
    bench.add("start", "resident, idle", broker, "MB", broker.resident_bytes() / 1e6)


def create(broker: Broker, topic: str, **config: str) -> None:
    """A topic of one partition."""
    with Client(broker.bootstrap) as client:
        client.create_topic(
            topic, partitions=1, config={k.replace("_", "."): v for k, v in config.items()}
        )


def measure_produce(bench: Bench, broker: Broker) -> None:
    """acks=1, eight requests in flight on one connection."""
    now_ms = int(time.time() * 1000)
    for size, total in ((1024, 0.2e9), (16_384, 1.5e9), (65_536, 2e9), (1_048_000, 3e9)):
        topic = f"produce-{size}"
        create(broker, topic, max_message_bytes="4000000")
        data = frames.batch(size, 1000, Codec.NONE, now_ms)
        frame = frames.produce(topic, data)
        count = (
            max(2000, int(total * bench.scale / len(frame)))
            if size < 100_000
            else int(max(200, total * bench.scale / len(frame)))
        )
        bench.run_load("send", broker, frame, 1, 8, max(200, count // 4))
        before = broker.cpu_seconds()
        got = bench.run_load("send", broker, frame, 1, 8, count)
        cpu = broker.cpu_seconds() - before
        name = f"produce {size // 1024} KiB, acks=1"
        bench.add("produce", name, broker, "CPU-s/GB", cpu / (got["bytes"] / GB))
        bench.add("produce", name, broker, "us/request", cpu / got["requests"] * 1e6)
        bench.add("produce", name, broker, "MB/s", got["bytes"] / got["seconds"] / 1e6)
    bench.add("produce", "resident, loaded", broker, "MB", broker.resident_bytes() / 1e6)


def measure_codecs(bench: Bench, broker: Broker) -> None:
    """64 KiB of records, compressed: per GB of uncompressed records."""
    now_ms = int(time.time() * 1000)
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        topic = f"codec-{codec.name.lower()}"
        create(broker, topic)
        frame = frames.produce(topic, frames.batch(65_536, 1000, codec, now_ms))
        count = max(500, int(1e9 * bench.scale / 65_536))
        bench.run_load("send", broker, frame, 1, 8, count // 4)
        before = broker.cpu_seconds()
        bench.run_load("send", broker, frame, 1, 8, count)
        cpu = broker.cpu_seconds() - before
        name = f"produce 64 KiB {codec.name.lower()}"
        bench.add("codecs", name, broker, "CPU-s/GB", cpu / (count * 65_536 / GB))


def measure_fetch(bench: Bench, broker: Broker) -> None:
    """A log of 64 KiB batches in the page cache, read again and again."""
    topic = "fetch"
    create(broker, topic)
    data = frames.batch(65_536, 1000, Codec.NONE, int(time.time() * 1000))
    count = int(0.5e9 * max(bench.scale, 0.2) / len(data))
    bench.run_load("send", broker, frames.produce(topic, data), 1, 8, count)
    for size, total in ((65_536, 4e9), (262_144, 8e9), (1_048_576, 12e9)):
        frame, at = frames.fetch(topic, size + 2048)
        bench.run_load("fetch", broker, frame, at, 1, total * bench.scale / 4)
        before = broker.cpu_seconds()
        got = bench.run_load("fetch", broker, frame, at, 1, total * bench.scale)
        cpu = broker.cpu_seconds() - before
        name = f"fetch {size // 1024} KiB"
        bench.add("fetch", name, broker, "CPU-s/GB", cpu / (got["bytes"] / GB))
        bench.add("fetch", name, broker, "MB/s", got["bytes"] / got["seconds"] / 1e6)


def measure_latency(bench: Bench, broker: Broker, group: str = "latency") -> None:
    """1 KiB, acks=1, 500 requests a second on one connection."""
    topic = f"{group}-topic"
    create(broker, topic)
    frame = frames.produce(topic, frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000)))
    count = max(2500, int(20_000 * bench.scale))
    bench.run_load("pace", broker, frame, 500, 2500)
    got = bench.run_load("pace", broker, frame, 500, count)
    for quantile in ("p50_ms", "p99_ms", "p999_ms"):
        bench.add(group, f"{group} {quantile[:-3]}, 500/s", broker, "ms", got[quantile])


def measure_cleaner(bench: Bench, broker: Broker) -> None:
    """One pass inside the broker, and the p99 of producers while another one runs."""
    gigabytes = max(0.6, bench.scale)
    cpu, wall = cleaning.cpu_of_a_pass(broker, gigabytes)
    bench.add("cleaner", "cleaner, all dirty", broker, "CPU-s/GB", cpu)
    bench.add("cleaner", "cleaner, all dirty", broker, "s", wall)
    create(broker, "aside")
    frame = frames.produce("aside", frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000)))
    quiet, during = cleaning.latency_during_a_pass(broker, bench.load, frame, gigabytes)
    bench.add("cleaner", "p99 without a pass, 500/s", broker, "ms", quiet)
    bench.add("cleaner", "p99 during a pass, 500/s", broker, "ms", during)
    bench.add("cleaner", "p99 during / without", broker, "ratio", during / quiet)


GROUPS: dict[str, Callable[[Bench, Broker], None]] = {
    "start": measure_start,
    "produce": measure_produce,
    "codecs": measure_codecs,
    "fetch": measure_fetch,
    "latency": measure_latency,
    "cleaner": measure_cleaner,
}


def table(rows: list[Row]) -> str:
    """One line a figure, the brokers side by side."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        key = (str(row["name"]), str(row["unit"]))
        found.setdefault(key, {})[str(row["broker"])] = float(str(row["value"]))
    lines = [f"{'':44} {'kept':>10} {'kafka':>10}  unit        kafka/kept"]
    for (name, unit), values in found.items():
        ours, theirs = values.get("kept"), values.get("kafka")
        cells = " ".join("         -" if v is None else f"{v:10.3f}" for v in (ours, theirs))
        ratio = f"{theirs / ours:10.2f}" if ours and theirs else ""
        lines.append(f"{name:44} {cells}  {unit:11} {ratio}")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Bars of every row in CPU-s/GB and of the latencies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for axis, unit in zip(axes, ("CPU-s/GB", "ms"), strict=True):
        names = list(dict.fromkeys(str(r["name"]) for r in rows if r["unit"] == unit))
        for shift, broker in enumerate(("kept", "kafka")):
            values = {
                str(r["name"]): float(str(r["value"]))
                for r in rows
                if r["unit"] == unit and r["broker"] == broker
            }
            positions = [i + (shift - 0.5) * 0.38 for i, n in enumerate(names) if n in values]
            axis.barh(positions, [values[n] for n in names if n in values], 0.36, label=broker)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel(f"{unit} (less is better)")
        axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--only", choices=("kept", "kafka"), help="one broker alone")
    parser.add_argument("--rows", default=",".join(GROUPS), help="groups of rows, by comma")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    openers: dict[str, Callable[[], AbstractContextManager[Broker]]] = {
        "kept": lambda: brokers.kept(log_cleaner_backoff_ms="200"),
        "kafka": lambda: brokers.kafka(log_cleaner_backoff_ms="200"),
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), 0.1 if options.quick else 1.0)
        for group in options.rows.split(","):
            print(group, flush=True)
            for name, opener in openers.items():
                if options.only in (None, name):
                    with opener() as broker:
                        GROUPS[group](bench, broker)
    text = table(bench.rows)
    print("\n" + text)
    machine = {"cpus": len(brokers.os.sched_getaffinity(0)), "python": platform.python_version()}
    result = {"machine": machine, "scale": bench.scale, "rows": bench.rows}
    (RESULTS / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "bench.txt").write_text(text + "\n")
    plot(bench.rows, RESULTS / "bench.png")


if __name__ == "__main__":
    sys.exit(main())
