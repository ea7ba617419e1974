"""A topic in Spark, in one file: write rows, read them, follow them, keep the latest of every key.

    pip install '.[spark]'
    python examples/spark_topic.py [--bootstrap localhost:9092]

Without ``--bootstrap`` it starts a node of its own. Prints the latest value of every key, computed
from the batch and from the stream, and ends with `equal`, or with the status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator

from pyspark.sql import DataFrame, SparkSession, functions

from kept.client.client import Client
from kept.testing import Cluster

ROWS = [("ada", "engineer"), ("bob", "clerk"), ("ada", "countess"), ("bob", None), ("eve", "spy")]


@contextlib.contextmanager
def broker(bootstrap: str | None) -> Iterator[str]:
    """The cluster that is given, or one node for this run."""
    if bootstrap is not None:
        yield bootstrap
        return
    with Cluster() as cluster:
        yield cluster.bootstrap


def latest(records: DataFrame) -> dict[str, str]:
    """Key -> its newest value; keys whose newest record is a tombstone are gone."""
    newest = records.groupBy("key").agg(
        functions.max_by("value", functions.struct("partition", "offset")).alias("value")
    )
    found = newest.filter("value is not null").selectExpr("string(key)", "string(value)").collect()
    return {row.key: row.value for row in found}


def run(spark: SparkSession, bootstrap: str, topic: str, directory: str) -> bool:
    """Write, read and follow; whether both ways of reading give one table."""
    where = {"kafka.bootstrap.servers": bootstrap}
    rows = spark.createDataFrame(ROWS, "key string, value string").coalesce(1)
    rows.write.format("kept").mode("append").options(**where).option("topic", topic).save()

    batch = spark.read.format("kept").options(**where).option("subscribe", topic).load()
    stream = spark.readStream.format("kept").options(**where).option("subscribe", topic)
    query = (
        stream.option("startingOffsets", "earliest")
        .load()
        .writeStream.format("parquet")
        .option("path", f"{directory}/rows")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    table = latest(batch)
    for key, value in sorted(table.items()):
        print(f"{key:8} {value}")
    return table == latest(spark.read.parquet(f"{directory}/rows"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bootstrap", help="a cluster that runs already")
    parser.add_argument("--topic", default="people")
    given = parser.parse_args()
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with broker(given.bootstrap) as bootstrap, tempfile.TemporaryDirectory() as directory:
            with Client(bootstrap) as client:
                client.create_topic(given.topic, partitions=2, config={"cleanup.policy": "compact"})
            equal = run(spark, bootstrap, given.topic, directory)
    finally:
        spark.stop()
    print("equal" if equal else "different")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
