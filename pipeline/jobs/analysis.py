"""What compaction would save, and what a topic is made of: measured by Spark from the records.

All frames come from one pass that judges every record by the topic's strategy
(:mod:`kept.pipeline.jobs.survivors`) over the whole log, up to its end: as if the active segment
were closed. Bytes are those of keys, values and headers, before compression. Tombstones that win
count as kept: when they expire is the cleaner's to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.strategy import rules
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs import survivors
from kept.pipeline.jobs.job_directory import BEGUN, JobDirectory
from kept.pipeline.lazy_imports import f
from kept.pipeline.session import bounds_of, connect, records, register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from kept.client.bootstrap import Bootstrap
    from kept.compaction.strategy import Strategy

HOTTEST: Final = 20
PREFIXES: Final = 50
SHOWN_AGES_S: Final = (60, 3600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)
AGES: Final = (
    "1 minute",
    "1 hour",
    "1 day",
    "1 week",
    "30 days",
    "1 year",
    "older",
    "in the future",
    "no timestamp",
)
"""In the future: by more than clocks differ."""
_FIGURES: Final = (
    "count(*) as records",
    "sum(bytes) as bytes",
    "sum(if(survives, 1, 0)) as kept_records",
    "sum(if(survives, bytes, 0)) as kept_bytes",
    "sum(if(tombstone, 1, 0)) as tombstones",
    "sum(if(tombstone and survives, 1, 0)) as winning_tombstones",
    "count(distinct key) as keys",
)


@dataclass(slots=True)
class Analysis:
    """What was measured: lists of rows, each a dict; ``totals`` is one."""

    topic: str
    taken_ms: int
    offsets: int
    totals: dict[str, Any]
    strategy: str = ""
    partitions: list[dict[str, Any]] = field(default_factory=list)
    prefixes: list[dict[str, Any]] = field(default_factory=list)
    hottest: list[dict[str, Any]] = field(default_factory=list)
    duplicates: list[dict[str, Any]] = field(default_factory=list)
    ages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def skew(self) -> float:
        """The largest partition's records against the mean; 1 is even."""
        counts = [partition["records"] for partition in self.partitions]
        mean = sum(counts) / len(counts) if counts else 0
        return max(counts) / mean if mean else 1.0


def analyze(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    topic: str,
    *,
    out: str | None = None,
    prefix_until: str = ".",
    config: Mapping[str, str] | None = None,
) -> Analysis:
    """Measure a topic; with ``out`` write each list to Parquet there, in a new directory.

    A key's prefix ends with the first ``prefix_until`` in it; keys without one share the empty
    prefix. ``config`` names another strategy than the topic's. One that is not built in is run as
    it is, and has to be installed where the executors run. Raises BadOption.
    """
    import time

    if not prefix_until:
        raise BadOption("the end of a prefix is empty; give a string such as '.' or '/'")
    register(spark)
    with connect(bootstrap) as client:
        bounds = bounds_of(client, topic)
    settings = {**bounds.config, **(config or {})}
    strategy = survivors.strategy_of(settings)
    store = None if out is None else _new(spark, out)
    taken_ms = time.time_ns() // 1_000_000
    rows = _judged(records(spark, bootstrap, bounds), strategy, prefix_until).cache()
    try:
        frames = _frames(rows, taken_ms, len(bounds.ends))
        if store is not None:
            with store.removed_on_failure(*frames):
                for name, frame in frames.items():
                    frame.write.mode("errorifexists").parquet(store.at(name))
        totals = _dicts(rows.selectExpr(*_FIGURES))[0]
        made = Analysis(topic, taken_ms, bounds.offsets, _zeroes(totals))
        made.strategy = settings.get("kept.compaction.strategy", "latest")
        for name, frame in frames.items():
            setattr(made, name, _dicts(frame))
    finally:
        rows.unpersist()
    return made


def _new(spark: SparkSession, path: str) -> JobDirectory:
    """A directory to write to: what is wrong with it is told before the topic is read."""
    store = JobDirectory(spark, path)
    store.must_be_empty()
    store.claim(BEGUN)
    store.remove(BEGUN)
    return store


def _judged(rows: DataFrame, strategy: Strategy, prefix_until: str) -> DataFrame:
    """A narrow row for every record: no values, but what a strategy that is not built in reads."""
    size = f.length("key"), f.length("value")
    headers = f.aggregate(
        f.transform(
            "headers",
            lambda h: (
                f.octet_length(h.getField("key"))
                + f.coalesce(f.length(h.getField("value")), f.lit(0))
            ),
        ),
        f.lit(0),
        lambda total, one: total + one,
    )
    zero = f.lit(0)
    total = f.coalesce(size[0], zero) + f.coalesce(size[1], zero) + f.coalesce(headers, zero)
    made = rows.withColumn("tombstone", f.col("value").isNull()).withColumn("bytes", total)
    made = made.withColumn("prefix", _prefix(prefix_until))
    known = rules(strategy)
    if known is None:
        return survivors.judged(made, strategy).drop("value", "headers")
    made = survivors.with_version(made, known).drop("value", "headers")
    return survivors.judged(made, strategy)


def _prefix(until: str) -> Column:
    """Up to the first ``until`` in the key: found among its bytes, each a character of ISO-8859-1;
    shown as text where it is UTF-8.
    """
    end = until.encode("utf-8", "surrogateescape").decode("ISO-8859-1")
    key = f.decode("key", "ISO-8859-1")
    at = f.locate(end, key)
    prefix = f.when(at > 0, f.substring(key, f.lit(1), at + f.lit(len(end) - 1)))
    text = f.try_validate_utf8(f.encode(prefix, "ISO-8859-1").cast("string"))
    return f.coalesce(text, prefix, f.lit(""))


def _frames(rows: DataFrame, taken_ms: int, partitions: int) -> dict[str, DataFrame]:
    figures = [f.expr(figure) for figure in _FIGURES]
    by_key = rows.filter("key is not null").groupBy("partition", "key")
    keys = by_key.agg(
        f.count("*").alias("records"),
        f.sum("bytes").alias("bytes"),
        f.max_by("tombstone", "offset").alias("deleted"),
    )
    age = f.lit(taken_ms / 1000) - f.unix_micros("timestamp") / 1e6
    class_ = f.lit(len(SHOWN_AGES_S))
    for number, limit in reversed(list(enumerate(SHOWN_AGES_S))):
        class_ = f.when(age <= limit, f.lit(number)).otherwise(class_)
    class_ = f.when(age < -SHOWN_AGES_S[0], f.lit(AGES.index("in the future"))).otherwise(class_)
    class_ = f.when(f.unix_millis("timestamp") < 0, f.lit(AGES.index("no timestamp"))).otherwise(
        class_
    )
    bits = f.floor(f.log2("records")).cast("int")
    every = rows.sparkSession.range(partitions).selectExpr("int(id) partition")
    return {
        "partitions": every.join(rows.groupBy("partition").agg(*figures), "partition", "left")
        .na.fill(0)  # those without records; they count for the skew
        .orderBy("partition"),
        "prefixes": rows.groupBy("prefix")
        .agg(*figures)
        .orderBy(f.expr("bytes - kept_bytes").desc(), "prefix")
        .limit(PREFIXES),
        "hottest": keys.orderBy(f.desc("records"), f.desc("bytes"), "key").limit(HOTTEST),
        "duplicates": keys.groupBy(f.pow(f.lit(2), bits).cast("long").alias("from_records"))
        .agg(f.count("*").alias("keys"), f.sum("records").alias("records"))
        .orderBy("from_records"),
        "ages": rows.groupBy(class_.alias("age")).agg(*figures[:4]).orderBy("age"),
    }


def _dicts(frame: DataFrame) -> list[dict[str, Any]]:
    return [
        {n: bytes(v) if isinstance(v, bytearray) else v for n, v in row.asDict().items()}
        for row in frame.collect()
    ]


def _zeroes(totals: dict[str, Any]) -> dict[str, Any]:
    """Sums over no rows are null."""
    return {name: value or 0 for name, value in totals.items()}
