"""Spark on one kept node: the data source ``kept`` and Spark's Kafka connector, on the same topics.

    python bench/spark.py [--records 2000000] [--quick] [--connector-python P --jars A,B]

Needs the extra ``spark`` and Java 17. The connector runs under a Python of its own, whose PySpark
matches its jars (spark-sql-kafka-0-10_2.13, its token provider, kafka-clients, commons-pool2, by
Maven); without ``--connector-python`` only the source is measured. Prints a table and writes
``results/spark.json``: rows per second of a warm run (the best of three), and the CPU of Spark's
processes (JVM and Python workers) in seconds per million rows, for

count    the rows of a topic; for kept with a schema of one column as well
values   an aggregate over the length of the values, the offsets and the timestamps
write    rows that Spark makes into a topic
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from kept.client.blocking import Client
from kept.storage.records import build_batch
from kept.storage.types import Codec
from kept.testing import Cluster

HERE = Path(__file__).resolve().parent
PARTITIONS = 2
BATCH_RECORDS = 500
VALUE_BYTES = 100
KEYS = 100_000


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
    environ = {**os.environ, "PYSPARK_PYTHON": python}
    command = [python, str(HERE / "spark_job.py"), json.dumps({**spec, "jars": jars})]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{spec['format']}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    parser.add_argument("--connector-python", help="a Python with the PySpark of the connector")
    parser.add_argument("--jars", help="the connector's jars, separated by commas")
    given = parser.parse_args()
    records = given.records // (10 if given.quick else 1)
    results: dict[str, dict[str, Any]] = {}
    with Cluster() as cluster, cluster.client() as client:
        topics = {codec.name.lower(): f"bench-{codec.name.lower()}" for codec in Codec}
        for codec in Codec:
            fill(client, topics[codec.name.lower()], records, codec)
        client.create_topic("bench-written", partitions=PARTITIONS)
        spec = {"bootstrap": cluster.bootstrap, "topics": topics, "rows_written": records // 2}
        results["kept"] = job(sys.executable, None, {**spec, "format": "kept"})
        if given.connector_python:
            spec["format"] = "kafka"
            results["connector"] = job(given.connector_python, given.jars, spec)
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
            if run is not None:
                text = f"{run['rows_per_s'] / 1e6:.2f} M rows/s {run['cpu_s_per_m']:.2f} CPU-s/M"
            cells.append(f"{text:>34}")
        print(f"{what:24}" + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
