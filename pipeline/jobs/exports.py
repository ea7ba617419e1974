"""A topic to Parquet and back, and the compaction of what was exported.

An export is a directory: ``records`` is Parquet, a folder for each partition, with the columns of a
read (``topic, partition, offset, timestamp, timestampType, key, value, headers``), and
``_kept.json`` says which topic it was, between which offsets, with which settings, and when.

:func:`restore` writes an export into a topic that is empty: each record into the partition it came
from, in its order, with its timestamp and headers. Offsets begin anew, without gaps. The table is
the same.

:func:`compact` reduces an export as the cleaner would have: the same strategies, the same records.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.strategy import Strategy, rules
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs import survivors
from kept.pipeline.jobs.job_directory import BEGUN, JobDirectory
from kept.pipeline.lazy_imports import f
from kept.pipeline.session import TopicBounds, bounds_of, connect, reach, records, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kept.client.bootstrap import Bootstrap

RECORDS: Final = "records"
STATE: Final = "_kept.json"
FORMAT: Final = 1
COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "key",
    "value",
    "headers",
)


@dataclass(frozen=True, slots=True)
class Export:
    """What an export is of. ``taken_ms`` is when it began: it has no tombstone, perhaps, that was
    written after that. ``compacted_to`` is where :func:`compact` stopped, by partition.
    """

    path: str
    topic: str
    topic_id: str | None
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    config: Mapping[str, str]
    taken_ms: int
    records: int
    compacted_to: Mapping[int, int] | None = None


def export(spark: SparkSession, bootstrap: str | Bootstrap, topic: str, path: str) -> Export:
    """Write all of a topic to a new directory, each partition until it has caught up.

    One that fails leaves the directory empty; one that was killed leaves what is no export.
    """
    register(spark)
    began_ms = time.time_ns() // 1_000_000
    with connect(bootstrap) as client:
        bounds = bounds_of(client, topic)
    store = _new(spark, path)
    with _written_whole(store):
        _write(records(spark, bootstrap, bounds, until_caught_up=True), store)
        return _finish(store, bounds, began_ms)


def load(spark: SparkSession, path: str) -> tuple[Export, DataFrame]:
    """An export and its records. Raises BadOption where there is none, or not a whole one: killed
    before it ended, or with files that are gone since.
    """
    store = JobDirectory(spark, path)
    said = store.note(STATE, FORMAT, "ends", "an export")
    if said is None:
        raise BadOption(f"{path} is no export: {STATE} is not there (an export ends with it)")
    del said["format"]
    try:
        for name in ("starts", "ends", "compacted_to"):
            if said[name] is not None or name != "compacted_to":
                said[name] = {int(p): int(o) for p, o in said[name].items()}
        description = Export(**{**said, "path": path})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadOption(f"{path}: {STATE} is damaged: {error}") from error
    rows = _rows(store)
    if (count := rows.count()) != description.records:
        raise BadOption(
            f"{path} is damaged: {RECORDS} has {count} records, {STATE} says {description.records}"
        )
    return description, rows


def restore(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    path: str,
    topic: str,
    *,
    replication_factor: int = -1,
) -> int:
    """Write an export into a topic, which is made where it is not there; how many records.

    Raises BadOption for a topic that is not empty or has another number of partitions. When it
    fails in the middle, delete the topic and begin again.
    """
    register(spark)
    description, rows = load(spark, path)
    with connect(bootstrap) as client:
        if topic not in client.metadata(None).topics:
            client.create_topic(
                topic,
                partitions=len(description.ends),
                replication_factor=replication_factor,
                config=dict(description.config),
            )
        bounds = bounds_of(client, topic)
    if set(bounds.ends) != set(description.ends):
        raise BadOption(
            f"{topic} has {len(bounds.ends)} partitions, the export {len(description.ends)}: "
            "restore into a new topic"
        )
    if any(bounds.ends.values()):
        raise BadOption(f"{topic} is not empty: restore into a new topic")
    ordered = rows.repartition(len(description.ends), "partition").sortWithinPartitions(
        "partition", "offset"
    )
    (
        ordered.select("partition", "key", "value", "headers", "timestamp")
        .write.format("kept")
        .mode("append")
        .options(**reach(bootstrap))
        .option("topic", topic)
        .option("includeTimestamps", "true")
        .save()
    )
    with connect(bootstrap) as client:
        written = sum(bounds_of(client, topic).ends.values())
    if written != description.records:
        raise BadOption(
            f"{topic} has {written} records after the restore, the export has "
            f"{description.records}: a task was repeated or somebody else writes; delete the topic "
            "and restore again"
        )
    return written


def compact(
    spark: SparkSession,
    path: str,
    target: str,
    *,
    config: Mapping[str, str] | None = None,
    below: Mapping[int, int] | None = None,
) -> Export:
    """Reduce an export to a new one by the topic's strategy, or by the one that ``config`` names.

    ``below`` gives for each partition where the cleaner would stop: records from there on stay as
    they are. Winning tombstones stay. Raises InvalidConfig for a strategy that is not here, and
    BadOption where ``below`` does not fit the export.
    """
    description, rows = load(spark, path)
    strategy = survivors.strategy_of({**description.config, **(config or {})})
    ends = dict(description.ends if below is None else below)
    if set(ends) != set(description.ends):
        raise BadOption(
            f"below names the partitions {sorted(ends)}, the export has {sorted(description.ends)}"
        )
    bounds = TopicBounds(
        description.topic,
        description.topic_id,
        description.starts,
        description.ends,
        description.config,
    )
    store = _new(spark, target)
    with _written_whole(store):
        _write(compacted(rows, strategy, ends), store)
        return _finish(store, bounds, description.taken_ms, ends)


def compacted(rows: DataFrame, strategy: Strategy, below: Mapping[int, int]) -> DataFrame:
    """The rows that are left when each partition is compacted up to that offset."""
    limit = f.create_map(*(f.lit(n) for pair in sorted(below.items()) for n in pair))
    rows = rows.withColumn("_clean", f.col("offset") < limit[f.col("partition")])
    old, new = rows.filter("_clean").drop("_clean"), rows.filter("not _clean").drop("_clean")
    known = rules(strategy)
    judged = old.withColumn("tombstone", f.col("value").isNull())
    if known is not None:
        judged = survivors.with_version(judged, known)
    left = survivors.judged(judged, strategy).filter("survives")
    return left.drop("tombstone", "version", "survives").unionByName(new)


def _new(spark: SparkSession, path: str) -> JobDirectory:
    """A directory to write to, which nobody else writes to."""
    store = JobDirectory(spark, path)
    there = store.names()
    if STATE not in there and BEGUN in there:
        raise BadOption(f"{path} has an export that is being written, or was given up: delete it")
    store.must_be_empty()
    if not store.claim(BEGUN):
        raise BadOption(f"{path}: another export has just begun there")
    return store


@contextlib.contextmanager
def _written_whole(store: JobDirectory) -> Iterator[None]:
    """Where the block fails, what it wrote goes."""
    with store.removed_on_failure(STATE, RECORDS, BEGUN):
        yield
    store.remove(BEGUN)


def _write(rows: DataFrame, store: JobDirectory) -> None:
    ordered = rows.select(*COLUMNS).sortWithinPartitions("partition", "offset")
    ordered.write.partitionBy("partition").parquet(store.at(RECORDS))


def _rows(store: JobDirectory) -> DataFrame:
    schema = (
        "topic string, offset bigint, timestamp timestamp_ltz, timestampType int, key binary, "
        "value binary, headers array<struct<key:string,value:binary>>, partition int"
    )
    return store.rows(RECORDS, schema).select(*COLUMNS)


def _finish(
    store: JobDirectory,
    bounds: TopicBounds,
    taken_ms: int,
    compacted_to: Mapping[int, int] | None = None,
) -> Export:
    """Count what was written, and say that the export is whole, and up to where."""
    rows = _rows(store).groupBy("partition")
    counted = rows.agg(f.count("*"), f.max("offset"))
    there = {partition: (count, last + 1) for partition, count, last in counted.collect()}
    ends = {p: max(end, there.get(p, (0, 0))[1]) for p, end in bounds.ends.items()}
    made = Export(
        store.path,
        bounds.topic,
        bounds.topic_id,
        bounds.starts,
        ends,
        bounds.config,
        taken_ms,
        sum(count for count, _ in there.values()),
        compacted_to,
    )
    said: dict[str, Any] = {"format": FORMAT, **asdict(made)}
    del said["path"]
    store.replace(STATE, json.dumps(said))
    return made
