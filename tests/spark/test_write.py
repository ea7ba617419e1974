"""Batch and streaming writes through a real Spark session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kept.client.client import Client
from kept.client.partitioner import partition_for_key
from kept.testing import Cluster
from tests.spark.topics import fill

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture
def client(kept_broker: Cluster) -> Iterator[Client]:
    with kept_broker.client() as client:
        yield client


def save(df: Any, cluster: Cluster, mode: str = "append", **options: Any) -> None:
    (
        df.write.format("kept")
        .mode(mode)
        .option("kafka.bootstrap.servers", cluster.bootstrap)
        .options(**options)
        .save()
    )


def test_rows_become_records_where_java_would_put_them(spark, client, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    df = spark.range(1000).selectExpr(
        "concat('k', id) key", "if(id % 10 = 0, null, cast(string(id) as binary)) value"
    )
    save(df, kept_broker, topic=topic)
    found = list(client.read(topic))
    assert len(found) == 1000
    assert {r.key for r in found} == {b"k%d" % n for n in range(1000)}
    assert sum(r.value is None for r in found) == 100
    assert all(r.partition == partition_for_key(r.key, 3) for r in found)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_was_read_can_be_written(spark, client, kept_broker, codec):
    source = kept_broker.create_topic(partitions=2)
    target = kept_broker.create_topic(partitions=2)
    rows = [
        ("k", b"1", 0, [("h", b"x"), ("h", None)], 1_700_000_000_123),
        (None, b"2", 1, None, 1_700_000_000_124),
        ("k", None, 1, [], None),
    ]
    schema = (
        "key string, value binary, partition int,"
        " headers array<struct<key:string,value:binary>>, ms bigint"
    )
    df = spark.createDataFrame(rows, schema).selectExpr("*", "timestamp_millis(ms) timestamp")
    options = {"includeTimestamps": "true", "kafka.compression.type": codec}
    save(df.coalesce(1), kept_broker, topic=source, **options)
    again = (
        spark.read.format("kept")
        .option("bootstrap", kept_broker.bootstrap)
        .option("subscribe", source)
        .option("includeHeaders", "true")
        .load()
    )
    save(again, kept_broker, topic=target, **options)
    first, second = (
        [(r.partition, r.key, r.value, r.headers, r.timestamp) for r in client.read(topic)]
        for topic in (source, target)
    )
    assert [row[:4] for row in first] == [
        (0, b"k", b"1", (("h", b"x"), ("h", None))),
        (1, None, b"2", ()),
        (1, b"k", None, ()),
    ]
    assert [row[4] for row in first[:2]] == [1_700_000_000_123, 1_700_000_000_124]
    assert second == first


def test_batches_are_no_larger_than_the_topic_takes(spark, client, kept_broker):
    """Java's producer splits such batches. Each row alone would fit."""
    topic = kept_broker.create_topic(config={"max.message.bytes": "2000"})
    usual = kept_broker.create_topic()
    df = spark.range(400).selectExpr("repeat('x', if(id % 9 = 8, 1900, 90)) value")
    save(df.coalesce(1), kept_broker, topic=topic)
    large = spark.range(2000).selectExpr("repeat('x', if(id = 1999, 900000, 200)) value")
    save(large.coalesce(1), kept_broker, topic=usual)
    assert [len(list(client.read(one))) for one in (topic, usual)] == [400, 2000]


def test_topics_by_row(spark, client, kept_broker):
    one, two = kept_broker.create_topic(), kept_broker.create_topic()
    df = spark.range(20).selectExpr(
        f"if(id < 5, '{one}', '{two}') topic", "cast(id as string) value"
    )
    save(df, kept_broker)
    assert sorted(int(r.value) for r in client.read(one)) == list(range(5))
    assert sorted(int(r.value) for r in client.read(two)) == list(range(5, 20))


def test_a_stream_into_a_topic(spark, client, kept_broker, tmp_path: Path):
    source, target = kept_broker.create_topic(), kept_broker.create_topic(partitions=2)
    for n in (0, 100):
        fill(client, source, range(n, n + 100))
        query = (
            spark.readStream.format("kept")
            .option("bootstrap", kept_broker.bootstrap)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .load()
            .selectExpr("key", "concat('seen ', string(value)) value")
            .writeStream.format("kept")
            .option("bootstrap", kept_broker.bootstrap)
            .option("topic", target)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(180)
    found = sorted(int(r.value.removeprefix(b"seen v")) for r in client.read(target))
    assert found == list(range(200))


def test_refusals_name_what_is_wrong(spark, client, kept_broker):
    topic = kept_broker.create_topic(config={"max.message.bytes": "2000"})
    df = spark.range(3).selectExpr("string(id) key", "string(id) value", f"'{topic}' topic")
    for rows, options, why in (
        (df.drop("topic"), {}, "give the option topic or a column topic"),
        (df.drop("value"), {"topic": topic}, "a write needs a column value"),
        (
            spark.range(1).selectExpr("id value"),
            {"topic": topic},
            "column value is bigint, it must be binary or string",
        ),
        (df, {"topic": topic + "x"}, f"has no topic {topic}x; did you mean {topic}?"),
        (df, {"topic": topic, "kafka.acks": "1"}, "acks=all"),
        (df, {"topics": topic}, "did you mean topic?"),
        (df.selectExpr("value", "-1 partition"), {"topic": topic}, "partition -1: it must be at"),
        (df.selectExpr("value", "9 partition"), {"topic": topic}, "partition 9: the topic has 1"),
        (df.selectExpr("value", "string(null) topic"), {}, "a row whose topic is null"),
        (df.selectExpr("repeat(value, 5000) value"), {"topic": topic}, "MESSAGE_TOO_LARGE"),
    ):
        with pytest.raises(Exception, match=why):
            save(rows, kept_broker, **options)
    with pytest.raises(Exception, match="a topic is only appended to; use mode append"):
        save(df, kept_broker, mode="overwrite", topic=topic)
    assert list(client.read(topic)) == []


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_micro_batch_that_spark_repeats(spark, client, kept_broker, tmp_path, exactly_once):
    source, target = kept_broker.create_topic(partitions=2), kept_broker.create_topic(partitions=2)
    ledger = kept_broker.topic("ledger")
    fill(client, source, range(100))

    def run() -> None:
        query = (
            spark.readStream.format("kept")
            .option("bootstrap", kept_broker.bootstrap)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .load()
            .writeStream.format("kept")
            .option("bootstrap", kept_broker.bootstrap)
            .option("topic", target)
            .option("exactlyOnce", str(exactly_once).lower())
            .option("ledgerTopic", ledger)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(180)

    run()
    if exactly_once:
        entries = [json.loads(r.value) for r in client.read(ledger)]
        assert entries and all(entry["run"] for entry in entries), "Spark names the run of a query"
    last = tmp_path / "checkpoint" / "commits" / "0"
    assert last.exists()
    for file in (last, last.with_name(".0.crc")):  # as if the driver had died before its commit
        file.unlink()
    fill(client, source, range(100, 120))
    run()
    run()  # on Spark 4.1 a run is one batch: the one before took the repeated one only
    found = sorted(int(r.value.removeprefix(b"v")) for r in client.read(target))
    once = list(range(120))
    assert found == (once if exactly_once else sorted([*range(100), *once]))


def test_a_batch_write_is_in_the_topic_once(spark, client, kept_broker, tmp_path):
    topic, ledger = kept_broker.create_topic(partitions=2), "batches"
    rows = spark.range(100).selectExpr("if(id % 3 = 0, null, string(id)) key", "string(id) value")
    rows.repartition(3).write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    named = {"topic": topic, "exactlyOnce": "true", "ledgerTopic": ledger, "txnAppId": "nightly"}
    for version in (1, 1, 2, 2):  # each is repeated, as by a job that died before it knew
        save(rows, kept_broker, **named, txnVersion=version)
    assert sorted(int(r.value) for r in client.read(topic)) == sorted([*range(100)] * 2)
    for wrong, version, why in (
        (rows, 1, "its txnVersion is too low"),
        (rows.selectExpr("key", "reverse(value) value"), 2, "not those that its first attempt"),
    ):
        with pytest.raises(Exception, match=why):
            save(wrong, kept_broker, **named, txnVersion=version)
    del named["txnAppId"]
    before = {r.key for r in client.read(ledger)}
    save(rows, kept_broker, **named)
    entries = [r.value for r in client.read(ledger) if r.key not in before]
    assert entries and entries.count(None) == len(entries) // 2, "each begun, then ended"
    assert len(list(client.read(topic))) == 300
