"""Transactions of real clients: what is moved from topic to topic arrives once, and a producer that
was replaced hears of it.

The fixtures of the nodes say how to run these tests against Apache Kafka.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiokafka
import kafka
import pytest
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as RdPartition
from kafka.errors import KafkaError as PythonError

from tests.compat.movers import RECORDS, Mover, Nodes, Place, move, move_by
from tests.support.joining import knows
from tests.support.kafka_connection import Connection
from tests.tools import go_tools, kafka_dist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JAVA = Path(__file__).parents[1] / "tools" / "transactions"
TRANSACTION_MS = 20_000
AT_ONCE = 10
DESCRIBE_TRANSACTIONS = 65


class Librdkafka:
    """confluent-kafka."""

    errors = (KafkaException,)

    def __init__(self, place: Place) -> None:
        common = {
            "bootstrap.servers": place.bootstrap,
            "log_level": 0,
            "reconnect.backoff.max.ms": 500,
        }
        if len(place.nodes) == 1:
            # Or send_offsets_to_transaction may not return once no node was there
            # (docs/transactions.md).
            common["metadata.recovery.strategy"] = "none"
        self._target = place.target
        self.producer = Producer(
            {**common, "transactional.id": place.name, "transaction.timeout.ms": TRANSACTION_MS}
        )
        self.producer.init_transactions(60)
        self._consumer = Consumer(
            {
                **common,
                "group.id": place.name,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
            }
        )
        self._consumer.subscribe([place.source])

    def step(self, *, commit: bool) -> int | None:
        messages = [m for m in self._consumer.consume(AT_ONCE, 0.2) if m.error() is None]
        if not messages:
            return None
        self.producer.begin_transaction()
        try:
            for message in messages:
                self.producer.produce(self._target, message.value(), partition=message.partition())
            self.producer.send_offsets_to_transaction(
                self._consumer.position(self._consumer.assignment()),
                self._consumer.consumer_group_metadata(),
                60,
            )
            self.producer.flush(60)
            if commit:
                self.producer.commit_transaction(60)
                return len(messages)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
        self.producer.abort_transaction(60)
        for place in self._consumer.committed(self._consumer.assignment(), 60):
            self._consumer.seek(RdPartition(place.topic, place.partition, max(0, place.offset)))
        return 0

    def write(self, value: bytes) -> None:
        self.producer.begin_transaction()
        self.producer.produce(self._target, value)
        self.producer.commit_transaction(60)

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """kafka-python, which waits without a limit where its coordinator has died."""

    errors = (PythonError, TimeoutError)
    PATIENCE_S = 30
    CLOSE_S = 5
    """Without a limit a producer waits for batches until ``delivery.timeout.ms``, 120 s."""

    def __init__(self, place: Place) -> None:
        servers = place.bootstrap.split(",")
        self._target = place.target
        self.producer = kafka.KafkaProducer(
            bootstrap_servers=servers,
            transactional_id=place.name,
            transaction_timeout_ms=TRANSACTION_MS,
        )
        self.producer.init_transactions()
        self._consumer = kafka.KafkaConsumer(
            place.source,
            bootstrap_servers=servers,
            group_id=place.name,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
            max_poll_records=AT_ONCE,
        )
        knows(self._consumer, place.source)

    def step(self, *, commit: bool) -> int | None:
        found = self._consumer.poll(timeout_ms=200)
        if not found:
            return None
        return self._in_time(lambda: self._move(found, commit))

    def _in_time(self, work: Callable[[], int]) -> int:
        """The result of some work, which is left to itself when it takes too long."""
        result: Future[int] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 - who waits has it
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result.result(self.PATIENCE_S)

    def _move(self, found: dict[Any, Any], commit: bool) -> int:
        records = [record for some in found.values() for record in some]
        self.producer.begin_transaction()
        for record in records:
            self.producer.send(self._target, record.value, partition=record.partition)
        self.producer.send_offsets_to_transaction(
            {
                place: kafka.OffsetAndMetadata(some[-1].offset + 1, "", -1)
                for place, some in found.items()
            },
            self._consumer.group_metadata(),
        )
        self.producer.flush()
        if commit:
            self.producer.commit_transaction()
            return len(records)
        self.producer.abort_transaction()
        for place, some in found.items():
            self._consumer.seek(place, some[0].offset)
        return 0

    def write(self, value: bytes) -> None:
        self.producer.begin_transaction()
        self.producer.send(self._target, value)
        self.producer.commit_transaction()

    def close(self) -> None:
        with contextlib.suppress(PythonError):  # a node that was killed does not answer
            self._consumer.close()
        with contextlib.suppress(PythonError):
            self.producer.close(timeout=self.CLOSE_S)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Aiokafka:
    """aiokafka."""

    errors = (AioError,)

    def __init__(self, place: Place) -> None:
        self._loop = Loop()
        self._place = place
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.end()
            raise

    async def _start(self) -> None:
        place = self._place
        self.producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=place.bootstrap,
            transactional_id=place.name,
            transaction_timeout_ms=TRANSACTION_MS,
        )
        await self.producer.start()
        self._consumer = aiokafka.AIOKafkaConsumer(
            place.source,
            bootstrap_servers=place.bootstrap,
            group_id=place.name,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
            max_poll_records=AT_ONCE,
        )
        await self._consumer.start()

    def step(self, *, commit: bool) -> int | None:
        found = self._loop.run(self._consumer.getmany(timeout_ms=200))
        return int(self._loop.run(self._step(found, commit))) if found else None

    async def _step(self, found: dict[Any, Any], commit: bool) -> int:
        records = [record for some in found.values() for record in some]
        await self.producer.begin_transaction()
        for record in records:
            await self.producer.send(self._place.target, record.value, partition=record.partition)
        await self.producer.send_offsets_to_transaction(
            {place: some[-1].offset + 1 for place, some in found.items()}, self._place.name
        )
        await self.producer.flush()
        if commit:
            await self.producer.commit_transaction()
            return len(records)
        await self.producer.abort_transaction()
        for place, some in found.items():
            self._consumer.seek(place, some[0].offset)
        return 0

    def write(self, value: bytes) -> None:
        async def write() -> None:
            await self.producer.begin_transaction()
            await self.producer.send(self._place.target, value)
            await self.producer.commit_transaction()

        self._loop.run(write())

    def close(self) -> None:
        async def stop() -> None:
            await self._consumer.stop()
            await self.producer.stop()

        try:
            self._loop.run(stop())
        finally:
            self._loop.end()


PYTHON = [Librdkafka, KafkaPython, Aiokafka]


@pytest.mark.parametrize("client", PYTHON)
def test_everything_is_moved_once(one_node: Nodes, client: Callable[[Place], Mover]) -> None:
    move(Place(one_node, f"alone-{client.__name__}"), client, None)


@pytest.mark.parametrize("victim", ["coordinator", "leader"])
@pytest.mark.parametrize("client", PYTHON)
def test_everything_is_moved_once_over_kill_9(
    three_nodes: Nodes, client: Callable[[Place], Mover], victim: str
) -> None:
    place = Place(three_nodes, f"{victim}-{client.__name__}")
    move(place, client, getattr(Place, victim))


@pytest.mark.parametrize("client", PYTHON)
def test_everything_is_moved_once_over_kill_9_of_a_lone_node(
    one_node: Nodes, client: Callable[[Place], Mover]
) -> None:
    """Nobody takes over meanwhile: no client reaches any node for a while."""
    move(Place(one_node, f"lone-{client.__name__}"), client, Place.leader)


@pytest.mark.parametrize("client", PYTHON)
def test_an_instance_that_was_replaced_hears_of_it(
    one_node: Nodes, client: Callable[[Place], Mover]
) -> None:
    place = Place(one_node, f"zombie-{client.__name__}")
    old = client(place)
    old.write(b"old")
    new = client(place)
    try:
        with pytest.raises(old.errors) as fenced:
            old.write(b"too late")
        assert re.search("fenced|newer instance|old epoch", f"{fenced.value!r}", re.IGNORECASE)
        new.write(b"new")
    finally:
        new.close()
        old.close()
    assert sorted(place.moved("read_committed")) == [b"new", b"old"]


def java(place: Place) -> list[str]:
    return _mover(kafka_dist.install() / "libs", place)


def java_3(place: Place) -> list[str]:
    """The last of Kafka's clients that knows version 1 of transactions alone."""
    return _mover(kafka_dist.libraries("org.apache.kafka:kafka-clients:3.9.1"), place)


def _mover(jars: Path, place: Place) -> list[str]:
    return [
        "java",
        kafka_dist.HEAP,
        *kafka_dist.QUICK_START,
        "-cp",
        f"{jars}/*",
        str(JAVA / "Mover.java"),
        *arguments(place),
    ]


def franz(place: Place) -> list[str]:
    return [str(go_tools.kafka_clients()), "mover", *arguments(place)]


def arguments(place: Place) -> tuple[str, ...]:
    """Of a program that moves."""
    return place.bootstrap, place.source, place.target, place.name, str(RECORDS)


PROGRAMS = [
    pytest.param(java, marks=pytest.mark.java),
    pytest.param(java_3, marks=pytest.mark.java),
    pytest.param(franz, marks=pytest.mark.go),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_moves_everything_once(
    brokers: str, one_node: Nodes, program: Callable[[Place], list[str]]
) -> None:
    place = Place(one_node, f"alone-{program.__name__}")
    move_by(place, program(place), None)
    by_version_1 = program is java_3 or brokers == "kafka-0"
    assert (epoch(place) < RECORDS // AT_ONCE) is by_version_1, "in version 2 each end has its own"


def epoch(place: Place) -> int:
    """That of the producer, on a lone node."""
    connection = Connection(place.bootstrap)
    answer = connection.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=[place.name])
    connection.close()
    return int(answer.transaction_states[0].producer_epoch)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_moves_everything_once_over_kill_9_of_a_lone_node(
    one_node: Nodes, program: Callable[[Place], list[str]]
) -> None:
    place = Place(one_node, f"lone-{program.__name__}")
    move_by(place, program(place), Place.leader)


@pytest.mark.parametrize("victim", ["coordinator", "leader"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_moves_everything_once_over_kill_9(
    three_nodes: Nodes, program: Callable[[Place], list[str]], victim: str
) -> None:
    place = Place(three_nodes, f"{victim}-{program.__name__}")
    move_by(place, program(place), getattr(Place, victim))
