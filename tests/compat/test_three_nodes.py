"""Three nodes that are killed or restarted while clients go on (:mod:`.scenario`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioTopic
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.admin import NewTopic as PythonTopic
from kafka.errors import KafkaError as PythonError

from kept.testing import Cluster
from tests.compat.scenario import DEADLINE_S, PARTITIONS, over_a_kill, over_restarts


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


class Librdkafka:
    """confluent-kafka."""

    COMMON = {"log_level": 0, "reconnect.backoff.max.ms": 500}  # noqa: RUF012

    def create(self, bootstrap: str, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(topic, PARTITIONS, 3)])[topic].result(timeout=60)

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _RdSender(bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _RdMember(bootstrap, topic, group)


class _RdSender:
    def __init__(self, bootstrap: str, topic: str, codec: str) -> None:
        self._topic = topic
        self._errors: list[Any] = []
        self._producer = Producer(
            {
                **Librdkafka.COMMON,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": codec,
                "linger.ms": 2,
            }
        )

    def send(self, values: Sequence[bytes]) -> None:
        for number, value in enumerate(values):
            self._producer.produce(
                self._topic, value, partition=number % PARTITIONS, on_delivery=self._delivered
            )
        assert self._producer.flush(DEADLINE_S) == 0
        assert not self._errors

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self._errors.append(error)

    def close(self) -> None:
        self._producer.flush(1)


class _RdMember:
    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        self._consumer = Consumer(
            {
                **Librdkafka.COMMON,
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        self._consumer.subscribe([topic])

    def poll(self) -> list[bytes]:
        return [m.value() for m in self._consumer.consume(200, 0.05) if m.error() is None]

    def commit(self) -> None:
        try:
            self._consumer.commit(asynchronous=False)
        except KafkaException as error:
            assert error.args[0].name() in {
                "REBALANCE_IN_PROGRESS", "ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "_NO_OFFSET",
                "NOT_COORDINATOR", "_ASSIGNMENT_LOST",
            }, error  # fmt: skip

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """kafka-python."""

    def create(self, bootstrap: str, topic: str) -> None:
        admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap)
        admin.create_topics([PythonTopic(topic, PARTITIONS, 3)])
        admin.close()

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _PythonSender(bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _PythonMember(bootstrap, topic, group)


class _PythonSender:
    def __init__(self, bootstrap: str, topic: str, codec: str) -> None:
        self._topic = topic
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap.split(","),
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=2,
        )

    def send(self, values: Sequence[bytes]) -> None:
        waiting = [
            self._producer.send(self._topic, value, partition=number % PARTITIONS)
            for number, value in enumerate(values)
        ]
        for one in waiting:
            one.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self._producer.close()


class _PythonMember:
    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        self._consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap.split(","),
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
        )

    def poll(self) -> list[bytes]:
        found = self._consumer.poll(timeout_ms=50)
        return [record.value for records in found.values() for record in records]

    def commit(self) -> None:
        try:
            self._consumer.commit()
        except PythonError as error:
            assert error.retriable or type(error).__name__ == "CommitFailedError", error

    def close(self) -> None:
        self._consumer.close()


class Aiokafka:
    """aiokafka, with its loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def create(self, bootstrap: str, topic: str) -> None:
        async def create() -> None:
            admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
            await admin.start()
            await admin.create_topics([AioTopic(topic, PARTITIONS, 3)])
            await admin.close()

        self.run(create())

    def sender(self, bootstrap: str, topic: str, codec: str) -> Any:
        return _AioSender(self, bootstrap, topic, codec)

    def member(self, bootstrap: str, topic: str, group: str) -> Any:
        return _AioMember(self, bootstrap, topic, group)


class _AioSender:
    def __init__(self, client: Aiokafka, bootstrap: str, topic: str, codec: str) -> None:
        self._client, self._topic = client, topic
        self._producer: AIOKafkaProducer = client.run(self._start(bootstrap, codec))

    @staticmethod
    async def _start(bootstrap: str, codec: str) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=2,
        )
        await producer.start()
        return producer

    def send(self, values: Sequence[bytes]) -> None:
        async def send() -> None:
            waiting = [
                await self._producer.send(self._topic, value, partition=number % PARTITIONS)
                for number, value in enumerate(values)
            ]
            await asyncio.gather(*waiting)

        self._client.run(send())

    def close(self) -> None:
        self._client.run(self._producer.stop())


class _AioMember:
    def __init__(self, client: Aiokafka, bootstrap: str, topic: str, group: str) -> None:
        self._client = client
        self._consumer: AIOKafkaConsumer = client.run(self._start(bootstrap, topic, group))

    @staticmethod
    async def _start(bootstrap: str, topic: str, group: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
        )
        await consumer.start()
        return consumer

    def poll(self) -> list[bytes]:
        found = self._client.run(self._consumer.getmany(timeout_ms=50))
        return [record.value for records in found.values() for record in records]

    def commit(self) -> None:
        try:
            self._client.run(self._consumer.commit())
        except AioError as error:
            assert error.retriable or type(error).__name__ == "CommitFailedError", error

    def close(self) -> None:
        self._client.run(self._consumer.stop())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("story", [over_a_kill, over_restarts])
@pytest.mark.parametrize("client", [Librdkafka, KafkaPython, Aiokafka])
def test_nothing_is_lost(three, client, story):
    made = client()
    try:
        story(three, made)
    finally:
        if isinstance(made, Aiokafka):
            made.end()
