"""``make bench``: kept and Apache Kafka side by side, in one run, on one machine.

Prints one table and writes ``results/bench.json``, ``bench.txt`` and ``bench.png``. CPU is the
broker processes' own (user and system), as CPU seconds per GB of requests or microseconds per
request; the load comes from ``load.c``, whose CPU is not in the figures. ``--quick`` moves a tenth
of the data; ``--broker kept`` leaves Kafka out, which needs Java 17 and Maven, and is left out with
a word where they are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import authorization
import baseline
import brokers
import compaction_x3
import failover
import loop_stalls
import machine
import replicated
import single
import size
import spark
import three_node_clusters
import tls
import transactions
from harness import Bench
from report import RESULT, lines, plot, table

Measure = Callable[[Bench, Any], None]
Opener = Callable[[], AbstractContextManager[Any]]
Section = Callable[[Bench, list[str]], None]


def each(openers: dict[str, Opener], measure: Measure) -> Section:
    """A section that measures one broker after the other."""

    def run(bench: Bench, names: list[str]) -> None:
        for name, opener in openers.items():
            if name in names:
                with bench.attempt(f"{measure.__name__}, {name}"), opener() as broker:
                    measure(bench, broker)

    return run


def ours(measure: Callable[[Bench], None]) -> Section:
    """A section that has no like in Kafka."""

    def run(bench: Bench, names: list[str]) -> None:
        if "kept" in names:
            with bench.attempt(measure.__name__):
                measure(bench)

    return run


ONE: dict[str, Opener] = {
    "kept": lambda: brokers.kept(log_cleaner_backoff_ms="200"),
    "kafka": lambda: brokers.kafka(log_cleaner_backoff_ms="200"),
}
THREE: dict[str, Opener] = {"kept": three_node_clusters.kept, "kafka": three_node_clusters.kafka}
THREE_TIDY: dict[str, Opener] = {
    "kept": lambda: three_node_clusters.kept(**replicated.SETTINGS),
    "kafka": lambda: three_node_clusters.kafka(**replicated.SETTINGS),
}
ONE_TRANSACTIONAL: dict[str, Opener] = {
    "kept": brokers.kept,
    "kafka": lambda: brokers.kafka(**transactions.SETTINGS),
}
ONE_SECURED: dict[str, Opener] = {
    "kept": lambda: tls.both("kept"),
    "kafka": lambda: tls.both("kafka"),
}
SECTIONS: dict[str, Section] = {
    **{name: each(ONE, measure) for name, measure in single.SECTIONS.items()},
    "cluster-start": each(THREE_TIDY, replicated.start),
    "cluster": each(THREE_TIDY, replicated.cluster),
    "failover": each(THREE, failover.failover),
    "transactions": each(ONE_TRANSACTIONAL, transactions.transactions),
    "transactions-three": each(THREE, transactions.transactions_of_three),
    "tls": each(ONE_SECURED, tls.tls),
    "partitions": each({"kept": three_node_clusters.kept}, size.partitions),
    "following": ours(compaction_x3.following),
    "thrice": ours(compaction_x3.thrice),
    "controller": ours(size.image),
    "authorization": ours(authorization.authorization),
    "stalls": ours(loop_stalls.stalls),
    "spark": spark.spark,
}

SECTION_LIMIT_S = 1500
REPEATED = {
    "start",
    "produce",
    "codecs",
    "fetch",
    "latency",
    "cleaner",
    "cluster-start",
    "transactions",
    "transactions-three",
    "tls",
    "partitions",
    "following",
    "thrice",
    "controller",
    "authorization",
    "stalls",
}
"""Sections that are measured several times, the brokers in turn; the others do it themselves."""
ROUNDS = 5
WRITING = {"produce", "codecs", "cleaner", "cluster-start", "cluster"}
"""Sections whose figures hold the page cache's memory."""


def brokers_here(asked: str | None) -> list[str]:
    """The brokers to measure: both, unless one was asked for or Kafka can not run here."""
    from tests.tools import kafka_dist

    if asked is not None:
        return [asked]
    missing = kafka_dist.missing()
    if missing is None:
        try:
            kafka_dist.install()
            return ["kept", "kafka"]
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            missing = str(error)
    print(f"without Apache Kafka: {missing}", flush=True)
    return ["kept"]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError in what runs inside for longer: a run that nobody watches comes to its end."""

    def end(*_: object) -> None:
        raise TimeoutError(f"the section took longer than {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def write(bench: Bench, noise: list[dict[str, object]]) -> str:
    """The results so far, as JSON, table and plot; the table."""
    text = table(bench.rows)
    result = {
        "machine": machine.describe(),
        "noise": noise,
        "scale": bench.scale,
        "failed": bench.failed,
        "rows": bench.rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".txt").write_text(text + "\n")
    plot(lines(bench.rows), RESULT.with_suffix(".png"))
    return text


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--broker", choices=("kept", "kafka"), help="one broker alone")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="NAME",
        help=f"some sections alone: {' '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"measurements of which the median counts  [{ROUNDS}; 1 with --quick]",
    )
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what runs is stopped
    names = brokers_here(options.broker)
    RESULT.parent.mkdir(exist_ok=True)
    noise: list[dict[str, object]] = []
    text = ""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), 0.1 if options.quick else 1.0)
        if not WRITING.isdisjoint(options.only):
            baseline.touch(bench)
        for section in options.only:
            print(section, flush=True)
            noise.append(machine.noise(section))
            started = time.monotonic()
            for _ in range(rounds if section in REPEATED else 1):
                with bench.attempt(section), limited(SECTION_LIMIT_S):
                    SECTIONS[section](bench, names)
            print(f"  ({section}: {time.monotonic() - started:.0f} s)", flush=True)
            text = write(bench, noise)
    print("\n" + text)
    if bench.failed:
        sys.exit("\n".join(["not measured:", *bench.failed]))


if __name__ == "__main__":
    main()
