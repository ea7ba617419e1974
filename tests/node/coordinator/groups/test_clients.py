"""Real clients in groups: mixed ones, static members, and members that live through kill -9 of the
node.

Rebalancing as members come and go, for each client on its own, is in ``tests/compat``.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaConsumer

from kept.testing import Cluster
from tests.support.joining import knows

DEADLINE_S = 60
QUICK = {
    "session.timeout.ms": 60_000,
    "heartbeat.interval.ms": 200,
    "reconnect.backoff.max.ms": 200,
}


@pytest.fixture(autouse=True)
def _clients_may_leak_sockets() -> Iterator[None]:
    """kafka-python leaves sockets to the garbage collector; our own code may not."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Member:
    """A confluent-kafka consumer that notes what is assigned to it."""

    def __init__(self, bootstrap: str, group: str, topic: str, **settings: object) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **QUICK,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        self.assignments: list[set[int]] = []
        self.lost = 0
        self.values: list[bytes] = []
        self.consumer.subscribe([topic], on_assign=self._assigned, on_lost=self._lost)

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assignments.append({tp.partition for tp in partitions})

    def _lost(self, *_: object) -> None:
        self.lost += 1

    @property
    def partitions(self) -> set[int]:
        return {tp.partition for tp in self.consumer.assignment()}

    def poll(self) -> None:
        for message in self.consumer.consume(100, timeout=0.05):
            if message.error() is None:
                self.values.append(message.value())


def produce(bootstrap: str, topic: str, values: list[bytes], partitions: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for i, value in enumerate(values):
        producer.produce(topic, value, partition=i % partitions)
    assert producer.flush(DEADLINE_S) == 0


def until(condition: Callable[[], bool], *members: Member) -> None:
    """Poll the members until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, [(m.partitions, len(m.values)) for m in members]
        for member in members:
            member.poll()


def test_three_kinds_of_clients_share_a_topic(kept_broker: Cluster) -> None:
    """Their range assignors agree, whoever leads: each partition has one reader."""
    topic, bootstrap = kept_broker.create_topic(partitions=6), kept_broker.bootstrap
    stop = threading.Event()
    owned: dict[str, set[int]] = {}
    values: dict[str, list[bytes]] = {"kafka-python": [], "aiokafka": []}

    def with_kafka_python() -> None:
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=topic,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=200,
            session_timeout_ms=60_000,
        )
        knows(consumer, topic)
        while not stop.is_set():
            for records in consumer.poll(timeout_ms=50).values():
                values["kafka-python"] += [r.value for r in records]
            owned["kafka-python"] = {tp.partition for tp in consumer.assignment()}
        consumer.close()

    async def with_aiokafka() -> None:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=topic,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=200,
            session_timeout_ms=60_000,
        )
        await consumer.start()
        while not stop.is_set():
            for records in (await consumer.getmany(timeout_ms=50)).values():
                values["aiokafka"] += [r.value for r in records]
            owned["aiokafka"] = {tp.partition for tp in consumer.assignment()}
        await consumer.stop()

    member = Member(bootstrap, topic, topic)
    until(lambda: len(member.partitions) == 6, member)
    threads = [
        threading.Thread(target=with_kafka_python),
        threading.Thread(target=lambda: asyncio.run(with_aiokafka())),
    ]
    try:
        for thread in threads:
            thread.start()

        def shared() -> bool:
            parts = [member.partitions, *list(owned.values())]
            return sorted(p for part in parts for p in part) == list(range(6)) and all(
                len(part) == 2 for part in parts
            )

        until(shared, member)
        sent = [b"%d" % i for i in range(600)]
        produce(bootstrap, topic, sent, 6)
        until(lambda: len(member.values) + sum(map(len, values.values())) >= 600, member)
        read = [*member.values, *values["kafka-python"], *values["aiokafka"]]
        assert sorted(read) == sorted(sent)
        member.consumer.close()
        deadline = time.monotonic() + DEADLINE_S
        while sorted(p for part in owned.values() for p in part) != list(range(6)):
            assert time.monotonic() < deadline, owned
            time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_static_member_restarts_without_a_rebalance(kept_broker: Cluster, strategy: str) -> None:
    topic, bootstrap = kept_broker.create_topic(partitions=4), kept_broker.bootstrap
    settings = {"partition_assignment_strategy": strategy}

    def member(instance: str) -> Member:
        return Member(bootstrap, topic, topic, group_instance_id=instance, **settings)

    one, two = member("one"), member("two")
    until(lambda: len(one.partitions) == len(two.partitions) == 2, one, two)
    produce(bootstrap, topic, [b"%d" % i for i in range(40)], 4)
    until(lambda: len(one.values) + len(two.values) == 40, one, two)
    one.consumer.commit(asynchronous=False)
    before, calls = two.partitions, len(two.assignments)
    ones = one.partitions
    one.consumer.close()
    again = member("one")
    until(lambda: again.partitions == ones, again, two)
    produce(bootstrap, topic, [b"more"] * 4, 4)
    until(lambda: len(again.values) == 2, again, two)
    assert (two.partitions, len(two.assignments), two.lost) == (before, calls, 0)
    # A second consumer of the same instance id fences the first.
    usurper = member("one")

    def is_fenced() -> bool:
        usurper.poll()
        try:
            again.consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        except KafkaException as error:
            return error.args[0].name() in ("FENCED_INSTANCE_ID", "_FENCED", "_FATAL")
        return False

    until(is_fenced, two)
    for each in (again, usurper, two):
        each.consumer.close()


@pytest.mark.slow
def test_members_live_through_kill_9_of_the_node() -> None:
    """Nobody rejoins, nothing is read twice: generation, assignments and offsets are in the log."""
    with Cluster() as cluster:
        topic = cluster.create_topic(partitions=4)
        one = Member(cluster.bootstrap, "survivors", topic, client_id="one")
        two = Member(cluster.bootstrap, "survivors", topic, group_instance_id="two")
        until(lambda: len(one.partitions) == len(two.partitions) == 2, one, two)
        parts, calls = (one.partitions, two.partitions), len(one.assignments + two.assignments)
        for round_ in range(1, 4):
            produce(cluster.bootstrap, topic, [b"%d" % i for i in range(100)], 4)
            until(lambda n=round_: len(one.values) + len(two.values) >= 100 * n, one, two)
            for member in (one, two):
                member.consumer.commit(asynchronous=False)
            cluster.kill()
            cluster.start()
        assert len(one.values) + len(two.values) == 300
        committed = one.consumer.committed(
            [TopicPartition(topic, p) for p in range(4)], timeout=DEADLINE_S
        )
        assert [tp.offset for tp in committed] == [75, 75, 75, 75]
        assert (one.partitions, two.partitions) == parts
        assert len(one.assignments + two.assignments) == calls
        described = AdminClient({"bootstrap.servers": cluster.bootstrap})
        group = described.describe_consumer_groups(["survivors"])["survivors"].result()
        assert {m.group_instance_id for m in group.members} == {None, "two"}
        one.consumer.close()
        two.consumer.close()


def test_offsets_of_a_deleted_topic_are_gone(kept_broker: Cluster) -> None:
    topic = kept_broker.create_topic(partitions=1)
    settings = {"bootstrap.servers": kept_broker.bootstrap, "group.id": topic}
    consumer = Consumer(settings)
    where = [TopicPartition(topic, 0, 5)]
    consumer.commit(offsets=where, asynchronous=False)
    assert consumer.committed(where, timeout=DEADLINE_S)[0].offset == 5
    with kept_broker.client() as client:
        client.delete_topics([topic])
        client.create_topic(topic, partitions=1)
        assert consumer.committed(where, timeout=DEADLINE_S)[0].offset < 0
    consumer.close()
