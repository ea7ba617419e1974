"""One Spark session that reads and writes what ``spark.py`` tells it, and prints what that took.

Runs under any PySpark from 4.0 on, for the connector without kept.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

RUNS = 5
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU of all processes below this one, those that they have waited for too."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(used[pid] for pid in below if pid in used)


def measure(rows: int, act: Callable[[], Any], found: Any) -> dict[str, float]:
    """The medians of some warm runs; every run must find what it should."""
    seconds, cpu = [], []
    for number in range(RUNS + 1):
        used, began = cpu_seconds(), time.perf_counter()
        answer = act()
        if number:
            seconds.append(time.perf_counter() - began)
            cpu.append(cpu_seconds() - used)
        if found is not None and answer != found:
            raise RuntimeError(f"{answer} is not {found}")
    took = statistics.median(seconds)
    return {
        "rows_per_s": rows / took,
        "cpu_s_per_m": statistics.median(cpu) / rows * 1e6,
        "seconds": took,
    }


def beyond(
    whole: dict[str, float], rows: int, part: dict[str, float], part_rows: int
) -> dict[str, float]:
    """What the rows cost that one run had more than the other: without what a run costs once."""
    more, seconds = rows - part_rows, whole["seconds"] - part["seconds"]
    cpu = whole["cpu_s_per_m"] * rows - part["cpu_s_per_m"] * part_rows
    return {"rows_per_s": more / seconds, "cpu_s_per_m": cpu / more, "seconds": seconds}


def median(act: Callable[[], int], times: int) -> float:
    """Seconds that a read of nothing takes."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        assert act() == 0
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def start_up(spark: SparkSession, count_of_nothing: Callable[[], int]) -> float:
    """How much longer a read of an empty topic takes than an empty job: medians of nine each."""
    empty = spark.createDataFrame([], "partition int")
    return median(count_of_nothing, 9) - median(empty.count, 9)


COLUMNS = "value binary, offset bigint, timestamp timestamp"


def options(spec: dict[str, Any], topic: str) -> dict[str, str]:
    """How a source is told what to read."""
    if spec["format"] == "ready":
        return {"rows": str(spec["ready"])}
    return {"kafka.bootstrap.servers": spec["bootstrap"], "subscribe": topic}


def follow(spark: SparkSession, spec: dict[str, Any], topic: str, schema: str | None = None) -> int:
    """One query over all of a topic; the rows that it took."""
    reader = spark.readStream.format(spec["format"]).options(**options(spec, topic))
    if schema is not None:
        reader = reader.schema(schema)
    frame = reader.option("startingOffsets", "earliest").load()
    frame = frame.selectExpr("length(value) size", "offset", "timestamp")
    with tempfile.TemporaryDirectory() as checkpoint:
        query = frame.writeStream.format("noop").trigger(availableNow=True)
        query = query.option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
        return sum(p.numInputRows for p in query.recentProgress)


def start_of_streams(spark: SparkSession, spec: dict[str, Any]) -> dict[str, float]:
    """What a query over nothing takes, on average: seconds, and CPU seconds with those of the
    processes that Spark starts for it and that are gone by then.
    """
    assert follow(spark, spec, "bench-empty") == 0
    cpu, began, times = cpu_seconds(), time.perf_counter(), 5
    for _ in range(times):
        follow(spark, spec, "bench-empty")
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    return {"seconds": seconds / times, "cpu_s": cpu / times}


def streams(spark: SparkSession, spec: dict[str, Any], rows: int) -> dict[str, dict[str, float]]:
    """Queries over a topic of that many rows, over a longer one and over nothing."""
    one = measure(rows, lambda: follow(spark, spec, spec["topics"]["none"]), rows)
    longer = rows * spec["longer"]
    whole = measure(longer, lambda: follow(spark, spec, spec["long"]), longer)
    runs = {"stream": one, "stream, longer": whole}
    runs["stream, once started"] = beyond(whole, longer, one, rows)
    if spec["format"] == "kept":
        runs["stream, longer, three columns"] = measure(
            longer, lambda: follow(spark, spec, spec["long"], COLUMNS), longer
        )
        ready = {**spec, "format": "ready", "ready": longer}
        runs["stream, longer, made beforehand"] = measure(
            longer, lambda: follow(spark, ready, ""), longer
        )
    runs["start, stream"] = start_of_streams(spark, spec)
    if spec["format"] == "kept":
        runs["start, stream of nothing"] = start_of_streams(spark, {**ready, "ready": 0})
    return runs


def writes(spark: SparkSession, spec: dict[str, Any], rows: int) -> dict[str, dict[str, float]]:
    """Rows that Spark makes, and more of them; those also into a sink that does nothing."""

    def write(count: int, into: str) -> None:
        made = spark.range(count).selectExpr("string(id) key", "repeat('x', 100) value")
        writer = made.write.format(into).mode("append")
        writer = writer.option("kafka.bootstrap.servers", spec["bootstrap"])
        writer.option("topic", "bench-written").save()

    runs = {"write": measure(rows // 2, lambda: write(rows // 2, spec["format"]), None)}
    longer = rows // 2 * spec["longer"]
    runs["write, longer"] = measure(longer, lambda: write(longer, spec["format"]), None)
    if spec["format"] == "kept":
        runs["write, longer, thrown away"] = measure(longer, lambda: write(longer, "ready"), None)
    return runs


def main() -> None:
    spec = json.loads(sys.argv[1])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.driver.memory", "2g")
    if spec["jars"]:
        builder = builder.config("spark.jars", spec["jars"])
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if spec["format"] == "kept":
        from ready import Ready

        from kept.pipeline.session import register

        register(spark)  # an editable install is not found by name
        spark.dataSource.register(Ready)

    def load(topic: str, schema: str | None = None) -> DataFrame:
        reader = spark.read.format(spec["format"]).options(**options(spec, topic))
        if schema is not None:
            reader = reader.schema(schema)
        return reader.load()

    runs: dict[str, Any] = {}
    plain = spec["topics"]["none"]
    rows = load(plain).count()
    runs["count"] = measure(rows, lambda: load(plain).count(), rows)
    if spec["format"] == "kept":
        runs["count, one column"] = measure(
            rows, lambda: load(plain, "partition int").count(), rows
        )
    wanted = ("sum(length(value))", "max(offset)", "max(timestamp)")
    for codec, topic in spec["topics"].items():
        runs[f"values, {codec}"] = measure(
            rows, lambda topic=topic: load(topic).selectExpr(*wanted).collect()[0][0], rows * 100
        )
        if spec["format"] == "kept" and codec == "none":
            runs["values, three columns"] = measure(
                rows,
                lambda: load(plain, COLUMNS).selectExpr(*wanted).collect()[0][0],
                rows * 100,
            )
    longer = rows * spec["longer"]
    schemas = {"values, longer": None}
    if spec["format"] == "kept":
        schemas["values, longer, three columns"] = COLUMNS
    for what, schema in schemas.items():
        runs[what] = measure(
            longer,
            lambda schema=schema: load(spec["long"], schema).selectExpr(*wanted).collect()[0][0],
            longer * 100,
        )
    if spec["format"] == "kept":
        ready = spark.read.format("ready").option("rows", longer)
        runs["values, longer, made beforehand"] = measure(
            longer, lambda: ready.load().selectExpr(*wanted).collect()[0][0], longer * 100
        )
    runs |= streams(spark, spec, rows)
    runs["start"] = {"seconds": start_up(spark, lambda: load("bench-empty").count())}
    runs |= writes(spark, spec, rows)
    print(json.dumps({"spark": spark.version, "rows": rows, "runs": runs}))
    spark.stop()


if __name__ == "__main__":
    main()
