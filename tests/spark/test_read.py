"""Batch reads through a real Spark session."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kept.client.client import Client, OutRecord
from kept.storage.types import Codec, TopicPartition
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.spark.topics import COMPACTED, compact, delete_before, eventually, fill

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(300)]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def client(kept_broker: Cluster) -> Iterator[Client]:
    with kept_broker.client() as client:
        yield client


@pytest.fixture
def read(spark: Any, kept_broker: Cluster) -> Callable[..., Any]:
    def load(schema: str | None = None, **options: Any) -> Any:
        reader = spark.read.format("kept").option("kafka.bootstrap.servers", kept_broker.bootstrap)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**options).load()

    return load


def offsets(df: Any) -> list[int]:
    return sorted(row.offset for row in df.select("offset").collect())


def test_columns_are_those_of_the_kafka_connector(read, client, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    sent = [
        OutRecord(b"a", b"1", (("h", b"x"), ("h", None), ("ü", b"")), 1_700_000_000_123, 0),
        OutRecord(None, None, (), 1_700_000_000_124, 0),
        OutRecord(b"", b"", (), 0, 2),
    ]
    client.produce(topic, sent)
    plain = read(subscribe=topic)
    assert plain.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    rows = read(subscribe=topic, includeHeaders=True).orderBy("partition", "offset").collect()
    assert [(r.partition, r.offset, r.topic, r.timestampType) for r in rows] == [
        (0, 0, topic, 0),
        (0, 1, topic, 0),
        (2, 0, topic, 0),
    ]
    assert [(r.key, r.value) for r in rows] == [(b"a", b"1"), (None, None), (b"", b"")]
    assert [tuple(h) for h in rows[0].headers] == [("h", b"x"), ("h", None), ("ü", b"")]
    assert [r.headers for r in rows[1:]] == [None, None]
    assert plain.selectExpr("unix_millis(timestamp) t").orderBy("t").collect() == [
        (0,),
        (1_700_000_000_123,),
        (1_700_000_000_124,),
    ]


def test_log_append_time_is_said(read, client, kept_broker):
    topic = kept_broker.create_topic(config={"message.timestamp.type": "LogAppendTime"})
    client.produce(topic, [OutRecord(b"k", b"v", (), 5)])
    (row,) = read(subscribe=topic).collect()
    assert row.timestampType == 1
    assert row.timestamp > datetime.datetime(2026, 1, 1)


def test_which_topics(read, client, kept_broker):
    one, two = kept_broker.create_topic("alpha"), kept_broker.create_topic("alphb", partitions=2)
    fill(client, one, range(3))
    fill(client, two, range(4), partition=0)
    fill(client, two, range(5), partition=1)
    assert read(subscribe=f"{one},{two}").count() == 12
    assert read(subscribePattern=f"({one}|{two[:-1]}.)").count() == 12
    assert read(subscribePattern="nothing-has-this-name").count() == 0
    assert read(assign=json.dumps({two: [1]})).count() == 5


def test_from_where_to_where(read, client, kept_broker):
    topic = kept_broker.create_topic()
    for n in range(10):
        client.produce(topic, [OutRecord(b"k", b"v", (), 1000 + n)])

    def at(n: int) -> str:
        return json.dumps({topic: {"0": n}})

    assert offsets(read(subscribe=topic, startingOffsets=at(3), endingOffsets=at(6))) == [3, 4, 5]
    assert offsets(read(subscribe=topic, startingOffsets=at(8), endingOffsets="latest")) == [8, 9]
    assert offsets(read(subscribe=topic, startingTimestamp=1004, endingTimestamp=1006)) == [4, 5]
    assert offsets(read(subscribe=topic, startingOffsetsByTimestamp=at(1008))) == [8, 9]
    assert offsets(read(subscribe=topic, endingOffsetsByTimestamp=at(2000)))[-1] == 9
    late = {"startingTimestamp": 2000, "startingOffsetsByTimestampStrategy": "latest"}
    assert offsets(read(subscribe=topic, **late)) == []


def test_tasks(read, client, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    fill(client, topic, range(90), partition=0)
    fill(client, topic, range(10), partition=1)
    for options, tasks in (({}, 2), ({"minPartitions": 5}, 5), ({"maxRecordsPerPartition": 30}, 4)):
        df = read(subscribe=topic, **options)
        assert df.rdd.getNumPartitions() == tasks
        assert len(set(df.select("partition", "offset").collect())) == 100


def test_filters_reach_the_plan_and_change_no_result(spark, read, client, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    for n in range(20):
        rows = [OutRecord(b"k", b"v", (), 1000 * n, p) for p in (0, 1)]
        client.produce(topic, rows)
    filters = (
        ("partition = 1 and offset >= 5 and offset < 9", 4),
        ("partition in (0, 7) and offset = 3", 1),
        ("timestamp >= timestamp_millis(15000)", 10),
        ("timestamp > timestamp_millis(99000)", 0),
        (f"topic = '{topic}' and offset <= 2 and value is not null", 6),
        ("partition = 5", 0),
    )
    try:
        for enabled in ("false", "true"):
            spark.conf.set(PUSHDOWN, enabled)
            for text, count in filters:
                assert read(subscribe=topic).filter(text).count() == count, (enabled, text)
        narrow = read(subscribe=topic, minPartitions=4).filter("partition = 1 and offset >= 19")
        assert narrow.rdd.getNumPartitions() == 1
    finally:
        spark.conf.unset(PUSHDOWN)


def test_a_schema_of_fewer_columns(read, client, kept_broker):
    topic = kept_broker.create_topic()
    fill(client, topic, range(5))
    two = read("offset bigint, key binary", subscribe=topic)
    assert two.columns == ["offset", "key"]
    assert sorted(two.collect())[0] == (0, b"k0")
    assert read("partition int", subscribe=topic).count() == 5
    for schema, why in (
        ("value string", "value is binary, it cannot be read as string"),
        ("payload binary", "no column payload"),
        ("offset bigint, offset bigint", "the column offset is named more than once"),
        ("headers array<struct<key:string,value:binary>>", "needs includeHeaders=true"),
    ):
        with pytest.raises(Exception, match=why):
            read(schema, subscribe=topic).count()


def test_gaps_empty_partitions_and_what_is_left_after_compaction(read, client, kept_broker):
    topic = kept_broker.create_topic(partitions=2, config=COMPACTED)
    for n in range(60):
        fill(client, topic, range(n % 3, n % 3 + 3), partition=0)
    compact(kept_broker, topic)
    wanted = [r.offset for r in client.read(topic, [0])]
    assert len(wanted) < 100
    assert offsets(read(subscribe=topic)) == wanted
    assert offsets(read(subscribe=topic, minPartitions=12)) == wanted
    assert read("partition int", subscribe=topic, minPartitions=7).count() == len(wanted)


def test_every_codec(read, client, kept_broker):
    topic = kept_broker.create_topic()
    for codec in Codec:
        rows = [OutRecord(b"k%d" % n, b"%d" % n * 500) for n in range(100)]
        client.produce(topic, rows, codec=codec)
    found = read(subscribe=topic).selectExpr("count(*)", "sum(length(value))", "max(value)")
    size = len(Codec) * sum(len(str(n)) * 500 for n in range(100))
    assert found.collect() == [(500, size, b"99" * 500)]


def test_refusals_name_what_is_wrong(spark, read, client, kept_broker):
    from pyspark.errors import AnalysisException

    topic = kept_broker.create_topic()
    fill(client, topic, range(10))
    delete_before(client, TopicPartition(topic, 0), 4)
    closed = f"localhost:{free_port()}"
    for options, why in (
        ({"subscribe": topic + "x"}, f"has no topic {topic}x; did you mean {topic}?"),
        ({"assign": json.dumps({topic: [7]})}, f"{topic} has 1 partitions, there is no partition"),
        ({"subscribe": topic, "bootstrap": closed, "kafka.bootstrap.servers": ""}, "only one of"),
        ({"subscribe": topic, "kafka.bootstrap.servers": closed}, f"{closed}: .*refused"),
        ({"subscribe": topic, "startingoffset": "earliest"}, "did you mean startingOffsets?"),
        (
            {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 2}})},
            "startingOffsets: .* has offsets 4 to 10, 2 is out of range",
        ),
        (
            {"subscribe": topic, "endingOffsets": json.dumps({topic: {"0": 12}})},
            "endingOffsets: .* has offsets 4 to 10, 12 is out of range",
        ),
        (
            {"subscribe": topic, "endingOffsets": json.dumps({"other": {"0": 1}})},
            f"endingOffsets does not name {topic}:0",
        ),
    ):
        with pytest.raises(AnalysisException, match=why):
            read(**options).count()
    nearest = {"startingOffsets": json.dumps({topic: {"0": 2}}), "failOnDataLoss": "false"}
    assert offsets(read(subscribe=topic, **nearest)) == [4, 5, 6, 7, 8, 9]


def test_a_leader_that_dies_while_a_task_reads(spark, kept_cluster, tmp_path):
    cluster = kept_cluster(3)
    topic = cluster.create_topic()
    with cluster.client() as client:
        for n in range(50):
            fill(client, topic, range(n * 100, n * 100 + 100))
        leader = client.topic(topic).partitions[0].leader
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"

    def pause(batches: Any) -> Any:
        for batch in batches:
            if not begun.exists():
                begun.touch()
            deadline = time.monotonic() + 60
            while not go_on.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            yield batch

    df = (
        spark.read.format("kept")
        .option("kafka.bootstrap.servers", cluster.bootstrap)
        .option("subscribe", topic)
        .option("kafka.max.partition.fetch.bytes", 8000)
        .load()
        .select("offset")
        .mapInArrow(pause, "offset bigint")
    )
    found = _while_running(df, lambda: _kill(cluster, leader, begun, go_on))
    assert found == list(range(5000))


def _while_running(df: Any, act: Callable[[], None]) -> list[int]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: sorted(row.offset for row in df.collect()))
        act()
        return running.result()


def _kill(cluster: Cluster, leader: int, begun: Path, go_on: Path) -> None:
    eventually(begun.exists)
    cluster.kill(leader)
    go_on.touch()
