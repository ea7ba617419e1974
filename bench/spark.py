"""Spark on one kept node: the data source ``kept`` and Spark's Kafka connector, on the same topics.

    python bench/spark.py [--records 2000000] [--quick] [--kept-only]

Also the section ``spark`` of ``run.py``. Needs the extra ``spark`` and Java 17. The connector runs
under a Python of its own, whose PySpark (4.0.0) matches its jars (:mod:`connector`), made once by
pip and Maven. Prints a table and writes ``results/spark.json``: rows per second of a warm run, and
the CPU of Spark's processes (JVM and Python workers) in seconds per million rows (medians of
five), for

count    the rows of a topic; for kept with a schema of one column as well
values   an aggregate over the length of the values, the offsets and the timestamps, by codec;
         "longer" on four times the records, "made beforehand" on as many rows of a source in
         Python that has them ready (:mod:`ready`): the least that such a source takes
stream   a query over all of it, once (AvailableNow): its start is a good part of that, so "once
         started" is what the rows of a longer topic cost beyond it, "start, stream" a query over an
         empty topic, and "start, stream of nothing" one over a source in Python that does nothing;
         "longer" and "made beforehand" as above
write    rows that Spark makes (half as many) into a topic; "thrown away": into a sink in Python
         that does nothing
start    seconds that a count of an empty topic takes longer than one of an empty frame
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import connector
from harness import Bench

from kept.client.client import Client
from kept.storage.records import build_batch
from kept.storage.types import Codec
from kept.testing import Cluster

HERE = Path(__file__).resolve().parent
PARTITIONS = 2
RECORDS = 2_000_000
BATCH_RECORDS = 500
VALUE_BYTES = 100
KEYS = 100_000
LONGER = 4
"""So many times the records has the topic that shows what rows cost once a query is started."""


def fill(client: Client, topic: str, records: int, codec: Codec) -> None:
    """Records of a 16-byte key and 100 bytes, half of them random, in one codec."""
    client.create_topic(topic, partitions=PARTITIONS)
    made = []
    for _ in range(20):
        rows = [
            (
                1_790_000_000_000,
                b"%016d" % secrets.randbelow(KEYS),
                secrets.token_bytes(VALUE_BYTES // 2) + b"x" * (VALUE_BYTES // 2),
                (),
            )
            for _ in range(BATCH_RECORDS)
        ]
        made.append(build_batch(rows, codec=codec))
    client.topic(topic)
    for n in range(records // BATCH_RECORDS // PARTITIONS):
        client.append(topic, dict.fromkeys(range(PARTITIONS), made[n % len(made)]))


def job(python: str, jars: str | None, spec: dict[str, Any]) -> dict[str, Any]:
    """Run ``spark_job.py`` under a Python; what it measured."""
    environ = {**os.environ, "PYSPARK_PYTHON": python, "PYTHONPATH": str(HERE)}
    command = [python, str(HERE / "spark_job.py"), json.dumps({**spec, "jars": jars})]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{spec['format']}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(records: int, *, kept_only: bool) -> dict[str, dict[str, Any]]:
    """``kept`` and ``connector`` -> what their job measured. Raises RuntimeError."""
    results: dict[str, dict[str, Any]] = {}
    with Cluster(log_retention_ms=-1) as cluster, cluster.client() as client:  # fixed timestamps
        topics = {codec.name.lower(): f"bench-{codec.name.lower()}" for codec in Codec}
        for codec in Codec:
            fill(client, topics[codec.name.lower()], records, codec)
        fill(client, "bench-long", records * LONGER, Codec.NONE)
        for topic in ("bench-written", "bench-empty"):
            client.create_topic(topic, partitions=PARTITIONS)
        spec = {
            "bootstrap": cluster.bootstrap,
            "topics": topics,
            "long": "bench-long",
            "longer": LONGER,
        }
        results["kept"] = job(sys.executable, None, {**spec, "format": "kept"})
        if not kept_only:
            python, jars = connector.install()
            results["connector"] = job(python, jars, {**spec, "format": "kafka"})
    return results


def missing() -> str | None:
    """Why Spark cannot be measured here; None when it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed (pip install '.[spark]')"
    return None if shutil.which("java") else "java not found"


def spark(bench: Bench, names: list[str]) -> None:
    """The section of ``run.py``: the connector's figures stand in Kafka's column."""
    why = missing()
    if why is not None:
        print(f"  left out: {why}", flush=True)
        return
    with bench.attempt("spark"):
        found = measured(int(RECORDS * bench.scale), kept_only="kafka" not in names)
        for source, broker in (("kept", "kept"), ("connector", "kafka")):
            for what, run in found.get(source, {"runs": {}})["runs"].items():
                for name, unit, figure in figures(what, run):
                    bench.add("Spark, of its own processes", name, broker, unit, figure)


STARTS = {
    "start": "Spark: start of a read over an empty job",
    "start, stream": "Spark: a query over an empty topic",
    "start, stream of nothing": "Spark: a query over a source in Python that does nothing",
}


def figures(what: str, run: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """(name, unit, value) of one measurement; less is better."""
    if what in STARTS:
        found = [(STARTS[what], "s", run["seconds"])]
        return found + ([(f"{STARTS[what]}, CPU", "CPU-s", run["cpu_s"])] if "cpu_s" in run else [])
    us = 1e6 / run["rows_per_s"]
    return [
        (f"Spark {what}: time", "us/row", us),
        (f"Spark {what}: CPU", "CPU-us/row", run["cpu_s_per_m"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    parser.add_argument("--kept-only", action="store_true", help="without the connector")
    given = parser.parse_args()
    results = measured(given.records // (10 if given.quick else 1), kept_only=given.kept_only)
    show(results)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "spark.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def show(results: dict[str, dict[str, Any]]) -> None:
    """A line for each measurement, a column for each source."""
    print(f"{'':24}" + "".join(f"{name:>34}" for name in results))
    for what in results["kept"]["runs"]:
        cells = []
        for found in results.values():
            run = found["runs"].get(what)
            text = "-"
            if run is not None and what in STARTS:
                text = f"{run['seconds']:.3f} s"
                text += f" {run['cpu_s']:.2f} CPU-s" if "cpu_s" in run else ""
            elif run is not None:
                text = f"{run['rows_per_s'] / 1e6:.2f} M rows/s {run['cpu_s_per_m']:.2f} CPU-s/M"
            cells.append(f"{text:>34}")
        print(f"{what:24}" + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
