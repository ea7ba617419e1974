"""What every job starts with: a session, the records of a topic, offsets that stand still.

A job notes once where each partition begins and ends and reads that, so that its parts agree with
each other while the topic goes on. Where every key has to be there, that is not enough: what is
superseded after the noted end may be compacted away before it is read. Such a job reads on until it
has caught up. Transactions: only what is committed is read.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kept.client.bootstrap import Bootstrap
from kept.client.consume.positions import EARLIEST, LATEST
from kept.pipeline.connection import COMMAND_CONFIG, BadOption, open_client
from kept.pipeline.options import Subscribe
from kept.pipeline.read import offsets
from kept.storage.types import IsolationLevel, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kept.client.client import Client


_SETTINGS: Final = (
    "cleanup.",
    "delete.",
    "retention.",
    "min.compaction.",
    "max.compaction.",
    "min.cleanable.",
    "kept.",
    "max.message.bytes",
    "message.timestamp.after.",
    "message.timestamp.before.",
)
"""What says which records stay, how large they may be, and of when; a topic that is restored has
the same.
"""


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """A topic as it was at one moment: partition -> offset; the ends are exclusive."""

    topic: str
    topic_id: str | None
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    config: Mapping[str, str]

    @property
    def offsets(self) -> int:
        """How many offsets lie between: no fewer than there are records."""
        return sum(end - self.starts[p] for p, end in self.ends.items())


def connect(bootstrap: str | Bootstrap) -> Client:
    """A client for the driver; close it."""
    where = Bootstrap.of(bootstrap)
    return open_client(where.servers, "kept-spark", security=where.security)


def reach(bootstrap: str | Bootstrap) -> dict[str, str]:
    """The options of the data source that say how to reach a cluster. A Bootstrap that is secured
    must come from a file, which every executor reads.
    """
    where = Bootstrap.of(bootstrap)
    more = {COMMAND_CONFIG: where.command_config} if where.command_config else {}
    return {"bootstrap": where.servers, **more}


def bounds_of(client: Client, topic: str) -> TopicBounds:
    """Where the topic stands now. Raises UnknownTopicOrPartition, with the nearest name."""
    tps = offsets.find_partitions(client, Subscribe((topic,)))
    starts = offsets.all_at(client, tps, EARLIEST)
    ends = offsets.all_at(client, tps, LATEST, IsolationLevel.READ_COMMITTED)
    config = {
        entry.name: entry.value
        for entry in client.topic_configs([topic])[topic]
        if entry.value is not None
        and entry.name.startswith(_SETTINGS)
        # Apache Kafka, to which a topic may be restored, refuses ours, also what is their default.
        and not (entry.name.startswith("kept.") and entry.source == "default")
    }
    return TopicBounds(
        topic,
        offsets.topic_ids(client, tps)[topic],
        {tp.partition: starts[tp] for tp in tps},
        {tp.partition: ends[tp] for tp in tps},
        config,
    )


def session(
    master: str | None = None, settings: Mapping[str, str] | None = None, *, quiet: bool = False
) -> SparkSession:
    """The running session, or a new one, with the source ``kept`` known to it.

    ``master`` None leaves it to ``spark-submit`` or ``local[*]``. Spark's own progress bar is shown
    where standard error is a terminal. ``quiet``: of a new JVM's log only what is fatal.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.appName("kept")
    defaults = {
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.sql.session.timeZone": "UTC",
        # What a job caches has as many tasks as it is large, not always 200.
        "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
    }
    if quiet:
        defaults |= {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_log_setup()}"}
    for name, value in {**defaults, **(settings or {})}.items():
        builder = builder.config(name, value)
    if master is not None:
        builder = builder.master(master)
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def _log_setup() -> str:
    """A configuration of log4j for the life of this process."""
    with tempfile.NamedTemporaryFile("w", suffix=".properties", delete=False) as file:
        file.write("rootLogger.level = fatal\nrootLogger.appenderRef.o.ref = o\n")
        file.write("appender.o.type = Console\nappender.o.name = o\n")
        file.write("appender.o.target = SYSTEM_ERR\n")
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name


def register(spark: SparkSession) -> None:
    """Make ``format("kept")`` known, wherever kept is installed.

    Spark refuses a name that the *active* session has, where that is another one (``newSession``);
    a frame makes its own session the active one.
    """
    from kept.pipeline.source import KeptSource

    spark.createDataFrame([], "nothing int")
    spark.dataSource.register(KeptSource)


def records(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    bounds: TopicBounds,
    *,
    columns: str | None = None,
    replica: int | None = None,
    until_caught_up: bool = False,
) -> DataFrame:
    """The records within these bounds, with headers; ``columns`` as a schema leaves some out.

    ``until_caught_up`` goes on after their ends to where the log ends when it is read.
    """
    partitions = [p for p, end in bounds.ends.items() if end > bounds.starts[p]]
    if not partitions:  # nothing to read is read as nothing
        partitions = list(bounds.ends)[:1]
    named = {str(p): bounds.starts[p] for p in partitions}
    reader = (
        _reader(spark, bootstrap)
        .option("assign", json.dumps({bounds.topic: partitions}))
        .option("startingOffsets", json.dumps({bounds.topic: named}))
    )
    if until_caught_up:
        reader = reader.option("untilCaughtUp", "true")
    else:
        ends = {str(p): bounds.ends[p] for p in partitions}
        reader = reader.option("endingOffsets", json.dumps({bounds.topic: ends}))
    if replica is not None:
        reader = reader.option("replica", str(replica))
    if columns is not None:
        reader = reader.schema(columns)
    return reader.load()


def current_records(spark: SparkSession, bootstrap: str | Bootstrap, topic: str) -> DataFrame:
    """All records of a topic, with headers: those that are there whenever the frame is used."""
    reader = _reader(spark, bootstrap).option("subscribe", topic)
    return reader.option("untilCaughtUp", "true").load()


def _reader(spark: SparkSession, bootstrap: str | Bootstrap) -> Any:
    return (
        spark.read.format("kept")
        .options(**reach(bootstrap))
        .option("includeHeaders", "true")
        .option("kafka.isolation.level", "read_committed")
    )


def check_partitions(given: Mapping[int, int], bounds: TopicBounds, what: str) -> None:
    """Raises BadOption for offsets that name other partitions than there are, or lie outside of the
    log.
    """
    if set(given) != set(bounds.ends):
        raise BadOption(
            f"{what} names the partitions {sorted(given)}, {bounds.topic} has {sorted(bounds.ends)}"
        )
    for partition, offset in given.items():
        first, end = bounds.starts[partition], bounds.ends[partition]
        if not first <= offset <= end:
            place = TopicPartition(bounds.topic, partition).place
            raise BadOption(
                f"{what}: {place} has offsets {first} to {end}, {offset} is out of range"
            )
