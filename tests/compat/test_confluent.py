"""confluent-kafka (librdkafka): the client that most other languages wrap."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from kept.testing import Cluster

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DEADLINE_S = 60


def create(bootstrap: str, topic: str, partitions: int = 1, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    future = admin.create_topics(
        [NewTopic(topic, partitions, 1, config={k.replace("_", "."): v for k, v in config.items()})]
    )[topic]
    future.result(timeout=60)


def produce_all(bootstrap: str, topic: str, records: list[tuple[bytes, bytes]], **settings) -> None:
    errors: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, **settings})
    for key, value in records:
        while True:
            try:
                producer.produce(
                    topic, value, key, on_delivery=lambda e, _m: e is not None and errors.append(e)
                )
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(DEADLINE_S) == 0
    assert not errors


def read_all(bootstrap: str, topic: str, count: int, **settings) -> list[tuple[bytes, bytes]]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"read-{topic}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.subscribe([topic])
    got: list[tuple[bytes, bytes]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(got) < count and time.monotonic() < deadline:
        for message in consumer.consume(500, timeout=0.5):
            if message.error() is None:
                got.append((message.key(), message.value()))
            else:
                raise KafkaException(message.error())
    consumer.close()
    return got


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idempotent", [False, True], ids=["plain", "idempotent"])
def test_every_codec_round_trips(broker, codec, idempotent):
    topic = broker.name(f"codec-{codec}")
    create(broker.bootstrap, topic)
    records = [(b"k%d" % i, b"v%d-" % i + b"x" * (i % 300)) for i in range(2000)]
    produce_all(
        broker.bootstrap,
        topic,
        records,
        **{"compression.type": codec, "enable.idempotence": idempotent},
    )
    assert read_all(broker.bootstrap, topic, len(records)) == records


def test_headers_timestamps_nulls_and_big_values(broker):
    topic = broker.name("shapes")
    create(broker.bootstrap, topic, max_message_bytes="3000000")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "message.max.bytes": 3_000_000})
    big = bytes(range(256)) * 8000
    producer.produce(topic, None, b"tombstone", timestamp=1_700_000_000_000)
    producer.produce(topic, b"v", None, headers=[("a", b"1"), ("a", None), ("ü", b"\xff")])
    producer.produce(topic, big, b"big")
    assert producer.flush(DEADLINE_S) == 0
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = []
    deadline = time.monotonic() + DEADLINE_S
    while len(messages) < 3 and time.monotonic() < deadline:
        messages += consumer.consume(3, timeout=0.5)
    consumer.close()
    assert [m.error() for m in messages] == [None] * 3
    assert (messages[0].key(), messages[0].value()) == (b"tombstone", None)
    assert messages[0].timestamp() == (1, 1_700_000_000_000)
    assert messages[1].headers() == [("a", b"1"), ("a", None), ("ü", b"\xff")]
    assert messages[1].key() is None
    assert messages[2].value() == big


def test_admin_calls(broker):
    topic = broker.name("admin")
    create(broker.bootstrap, topic, 2, cleanup_policy="compact")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    assert len(admin.list_topics(timeout=60).topics[topic].partitions) == 2
    with pytest.raises(KafkaException) as again:
        create(broker.bootstrap, topic)
    assert again.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(timeout=60)
    assert len(admin.list_topics(timeout=60).topics[topic].partitions) == 4
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    before = admin.describe_configs([resource])[resource].result(timeout=60)
    assert before["cleanup.policy"].value == "compact"
    change = ConfigResource(
        ConfigResource.Type.TOPIC,
        topic,
        incremental_configs=[
            ConfigEntry("segment.ms", "12345", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    admin.incremental_alter_configs([change])[change].result(timeout=60)
    after = admin.describe_configs([resource])[resource].result(timeout=60)
    assert after["segment.ms"].value == "12345"
    produce_all(broker.bootstrap, topic, [(b"k%d" % i, b"v") for i in range(400)])
    partitions = [TopicPartition(topic, p) for p in range(4)]
    latest = {
        tp: f.result(timeout=60).offset
        for tp, f in admin.list_offsets({tp: OffsetSpec.latest() for tp in partitions}).items()
    }
    assert sum(latest.values()) == 400
    cluster = admin.describe_cluster().result(timeout=60)
    assert cluster.cluster_id and len(cluster.nodes) >= 1
    admin.delete_topics([topic])[topic].result(timeout=60)
    deadline = time.monotonic() + 60
    while topic in admin.list_topics(timeout=60).topics:
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_delete_records_moves_the_log_start(broker):
    topic = broker.name("delete-records")
    create(broker.bootstrap, topic)
    produce_all(broker.bootstrap, topic, [(b"k", b"%d" % i) for i in range(100)])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    target = TopicPartition(topic, 0, 60)
    assert admin.delete_records([target])[target].result(timeout=60).low_watermark == 60
    assert [v for _, v in read_all(broker.bootstrap, topic, 40)] == [
        b"%d" % i for i in range(60, 100)
    ]


@pytest.mark.parametrize(
    "strategy", ["range", pytest.param("cooperative-sticky", marks=pytest.mark.slow)]
)
def test_groups_rebalance_while_members_come_and_go(broker, strategy):
    topic = broker.name("group")
    create(broker.bootstrap, topic, 6)
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": topic,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "partition.assignment.strategy": strategy,
        "session.timeout.ms": 30_000,
        "heartbeat.interval.ms": 300,
    }
    seen: Counter[bytes] = Counter()
    sent = 0
    members: list[Consumer] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            producer.produce(topic, b"%d" % sent, b"k%d" % sent)
            sent += 1
        assert producer.flush(DEADLINE_S) == 0

    def drain(until: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(seen) < until:
            assert time.monotonic() < deadline, f"{len(seen)} of {until}"
            for member in members:
                got = [m for m in member.consume(200, timeout=0.05) if m.error() is None]
                seen.update(m.value() for m in got)
                if got:
                    try:
                        member.commit(asynchronous=False)
                    except KafkaException as error:  # a rebalance took the partition: read again
                        assert error.args[0].code() in (
                            KafkaError.REBALANCE_IN_PROGRESS,
                            KafkaError.ILLEGAL_GENERATION,
                            KafkaError.UNKNOWN_MEMBER_ID,
                            KafkaError._ASSIGNMENT_LOST,
                        )

    for count in (1, 2, 3):
        members.append(Consumer(settings))
        members[-1].subscribe([topic])
        send(300)
        drain(sent)
        assert len(members) == count
    members.pop(0).close()
    send(300)
    drain(sent)
    members.pop().close()
    send(300)
    drain(sent)
    last = members.pop()
    deadline = time.monotonic() + DEADLINE_S
    while len(last.assignment()) < 6:
        assert time.monotonic() < deadline
        last.poll(0.1)
    committed = sum(
        tp.offset for tp in last.committed([TopicPartition(topic, p) for p in range(6)])
    )
    last.close()
    assert committed == sent
    repeated = {value: n for value, n in seen.items() if n > 2}
    assert not repeated


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_over_kill_9():
    with Cluster(nodes=1) as cluster:
        topic = "survivor"
        create(cluster.bootstrap, topic, 3)
        delivered: list[bytes] = []

        def report(error, message):
            if error is None:
                delivered.append(message.value())

        producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "reconnect.backoff.max.ms": 200,
                "delivery.timeout.ms": 120_000,
            }
        )
        group = {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "survivors",
            "session.timeout.ms": 10_000,  # a leave that was not written yet: the member times out
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 200,
        }
        consumed: list[bytes] = []

        def consume(until: int) -> None:
            consumer = Consumer(group)
            consumer.subscribe([topic])
            deadline = time.monotonic() + DEADLINE_S
            while len(consumed) < until:
                assert time.monotonic() < deadline, (len(consumed), until)
                batch = [m for m in consumer.consume(500, timeout=0.2) if m.error() is None]
                consumed.extend(m.value() for m in batch)
            consumer.commit(asynchronous=False)
            consumer.close()

        total = 0
        for _ in range(3):
            for _ in range(2000):
                producer.produce(topic, b"%d" % total, b"k%d" % total, on_delivery=report)
                total += 1
                producer.poll(0)
            cluster.kill(0)
            cluster.start(0)
            assert producer.flush(DEADLINE_S) == 0
            consume(total)
        assert len(delivered) == total
        assert sorted(consumed, key=int) == [b"%d" % i for i in range(total)]
