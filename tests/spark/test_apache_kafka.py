"""The same source against Apache Kafka: read, committed records only, stream and write."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

from kept.client.client import Client
from tests.spark.topics import fill

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(400)]


def transact(bootstrap: str, topic: str, values: list[str], *, commit: bool) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "t"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value.encode())
    producer.flush(30)
    if commit:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def values(df: Any) -> list[str]:
    return [row.value.decode() for row in df.orderBy("offset").collect()]


def test_apache_kafka_is_read_followed_and_written(spark, apache_kafka, tmp_path):
    with Client(apache_kafka) as client:
        client.create_topic("source", partitions=1)
        client.create_topic("target", partitions=2)
        transact(apache_kafka, "source", ["a", "b"], commit=True)
        transact(apache_kafka, "source", ["lost", "too"], commit=False)
        fill(client, "source", range(3))
    source = spark.read.format("kept").option("kafka.bootstrap.servers", apache_kafka)
    df = source.option("subscribe", "source").load()
    assert values(df) == ["a", "b", "lost", "too", "v0", "v1", "v2"]
    committed = source.option("subscribe", "source").option(
        "kafka.isolation.level", "read_committed"
    )
    assert values(committed.load()) == ["a", "b", "v0", "v1", "v2"]
    assert values(committed.option("minPartitions", 4).load()) == ["a", "b", "v0", "v1", "v2"]
    query = (
        spark.readStream.format("kept")
        .option("kafka.bootstrap.servers", apache_kafka)
        .option("subscribe", "source")
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", "read_committed")
        .load()
        .writeStream.format("kept")
        .option("kafka.bootstrap.servers", apache_kafka)
        .option("topic", "target")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(180)
    with Client(apache_kafka) as client:
        assert sorted(r.value for r in client.read("target")) == [b"a", b"b", b"v0", b"v1", b"v2"]
