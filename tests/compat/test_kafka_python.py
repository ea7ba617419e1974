"""kafka-python: pure Python, the oldest client in the field."""

from __future__ import annotations

import time

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from tests.support.joining import knows

pytestmark = pytest.mark.slow

DEADLINE_S = 60


def consumer_for(broker, *topics: str, **settings) -> KafkaConsumer:
    consumer = KafkaConsumer(
        *topics,
        bootstrap_servers=broker.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=500,
        **settings,
    )
    return knows(consumer, *topics)


def read(consumer: KafkaConsumer, count: int) -> list:
    got: list = []
    deadline = time.monotonic() + DEADLINE_S
    while len(got) < count and time.monotonic() < deadline:
        got.extend(consumer)
    return got


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("idempotent", [False, True], ids=["plain", "idempotent"])
def test_every_codec_round_trips(broker, codec, idempotent):
    topic = broker.name("kp")
    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap,
        compression_type=codec,
        enable_idempotence=idempotent,
        acks="all",
        linger_ms=5,
    )
    sent = [(b"k%d" % i, b"v%d" % i + b"y" * (i % 200)) for i in range(1000)]
    futures = [
        producer.send(
            topic, v, k, partition=0, headers=[("h", b"1")], timestamp_ms=1_700_000_000_000
        )
        for k, v in sent
    ]
    offsets = [f.get(timeout=DEADLINE_S).offset for f in futures]
    producer.close()
    assert offsets == list(range(1000))
    consumer = consumer_for(broker, topic)
    got = read(consumer, 1000)
    consumer.close()
    assert [(m.key, m.value) for m in got] == sent
    assert {tuple(m.headers) for m in got} == {(("h", b"1"),)}
    assert {m.timestamp for m in got} == {1_700_000_000_000}


def test_group_commits_and_resumes(broker):
    topic = broker.name("kp-group")
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.create_topics([NewTopic(topic, 2, 1)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    for i in range(200):
        producer.send(topic, b"%d" % i, partition=i % 2)
    producer.flush()
    first = consumer_for(broker, topic, group_id=topic, enable_auto_commit=False)
    assert len(read(first, 200)) == 200
    first.commit()
    first.close()
    for i in range(200, 300):
        producer.send(topic, b"%d" % i, partition=i % 2)
    producer.close()
    second = consumer_for(broker, topic, group_id=topic, enable_auto_commit=False)
    got = read(second, 100)
    assert sorted(int(m.value) for m in got) == list(range(200, 300))
    second.close()
    admin.delete_topics([topic])
    admin.close()


def test_offsets_by_time(broker):
    topic = broker.name("kp-times")
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    for i in range(10):
        future = producer.send(topic, b"x", partition=0, timestamp_ms=1_000_000 + i * 1000)
        future.get(timeout=DEADLINE_S)
    producer.close()
    tp = TopicPartition(topic, 0)
    consumer = consumer_for(broker)
    consumer.assign([tp])
    found = consumer.offsets_for_times({tp: 1_004_500})[tp]
    assert (found.offset, found.timestamp) == (5, 1_005_000)
    assert consumer.offsets_for_times({tp: 9_999_999})[tp] is None
    assert consumer.beginning_offsets([tp])[tp] == 0
    assert consumer.end_offsets([tp])[tp] == 10
    consumer.close()
