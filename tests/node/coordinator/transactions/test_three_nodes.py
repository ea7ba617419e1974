"""Transactions while their coordinators move, and at the last epoch, on several nodes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from kio.schema.errors import ErrorCode

from kept.client.admin import cluster as cluster_operations
from kept.client.admin import transactions
from kept.client.client import Client, OutRecord
from kept.client.consume.consumer import Consumer
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.positions import EARLIEST
from kept.client.transactional_producer import TransactionalProducer
from kept.storage.errors import KeptError
from kept.storage.records import build_batch
from kept.storage.types import IsolationLevel, TopicPartition
from kept.testing import Cluster
from tests.support.kafka_connection import FIND, Connection
from tests.support.request_values import produce_values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STATE = "__transaction_state"
PRODUCE, INIT, ADD, END = 0, 22, 24, 26
LAST_EPOCH = 32766
PIPELINED = 50
MOVES = 8
PARTITIONS = 2


def committed_values(client: Client, topic: str, partitions: int) -> Counter[bytes]:
    """The values that a read_committed consumer sees up to the end."""
    positions = {TopicPartition(topic, number): EARLIEST for number in range(partitions)}
    limits = FetchLimits(isolation=IsolationLevel.READ_COMMITTED)
    consumer = Consumer(client, positions, limits)
    return Counter(record.value for record in consumer.until_end())


class Writer:
    """Transactions of one id, one after the other, each with a record in each partition."""

    errors: tuple[type[BaseException], ...] = (KeptError,)

    def __init__(self, cluster: Cluster, topic: str, name: str) -> None:
        self.cluster, self.topic, self.name = cluster, topic, name
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.unknown: set[int] = set()
        self.error: BaseException | None = None
        self._numbers = itertools.count()
        self._random = Random(name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def values(self, number: int) -> list[bytes]:
        """The records of a transaction, one for each partition."""
        return [f"{self.name} {number} {p}".encode() for p in range(PARTITIONS)]

    def stop(self) -> None:
        """Stop after the transaction under way; raises what ended the thread otherwise."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self.go_on()
                except self.errors:
                    continue
        except BaseException as error:  # noqa: BLE001 - stop() raises it
            self.error = error

    def go_on(self) -> None:
        """A new producer writes until it cannot, or is to stop."""
        with self.cluster.client() as client:
            producer = TransactionalProducer(client, self.name)

            def write(values: list[bytes]) -> None:
                records = [OutRecord(None, v, partition=p) for p, v in enumerate(values)]
                producer.produce(self.topic, records)

            self.write(write, producer.commit, producer.abort)

    def write(
        self,
        send: Callable[[list[bytes]], None],
        commit: Callable[[], object],
        abort: Callable[[], object],
    ) -> None:
        """Transactions with these calls of a client. What raised has an end that nobody knows,
        unless no commit was sent: then it is an abort.
        """
        while not self._stop.is_set():
            number = next(self._numbers)
            commits = self._random.random() < 0.7
            self.aborted.add(number)
            send(self.values(number))
            if not commits:
                abort()
                continue
            self.aborted.remove(number)
            self.unknown.add(number)
            commit()
            self.unknown.remove(number)
            self.committed.add(number)


class Librdkafka(Writer):
    """The same of confluent-kafka."""

    errors = (KafkaException,)

    def go_on(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.cluster.bootstrap,
                "transactional.id": self.name,
                "log_level": 0,
                "linger.ms": 0,
            }
        )
        producer.init_transactions(60)

        def send(values: list[bytes]) -> None:
            producer.begin_transaction()
            for partition, value in enumerate(values):
                producer.produce(self.topic, value, partition=partition)
            producer.flush(60)

        def commit() -> None:
            producer.commit_transaction(60)

        def abort() -> None:
            producer.abort_transaction(60)

        self.write(send, commit, abort)


def states(client: Client) -> list[str]:
    """Those of all transactional ids."""
    silent: list[int] = []
    listed = client.run(transactions.list_transactions(silent, 5_000))
    return [] if silent else [one.state for one in listed]


def test_coordinators_move_under_running_producers(kept_cluster: Callable[..., Cluster]) -> None:
    """Each of the two partitions of ``__transaction_state`` visits all replica sets of four nodes;
    every second move takes its leader away from it.
    """
    cluster = kept_cluster(nodes=4, transaction_state_log_num_partitions=2)
    topic = cluster.create_topic(partitions=PARTITIONS)
    writers = [
        kind(cluster, topic, f"{kind.__name__}-{n}")
        for kind in (Writer, Librdkafka)
        for n in (1, 2)
    ]
    with cluster.client() as client:
        try:
            cluster.wait_until(lambda: all(w.committed for w in writers), "all have committed")
            for move in range(MOVES):
                before = {id(w): len(w.committed) for w in writers}
                ring = [(move + step) % 4 for step in range(4)]
                plan = {
                    TopicPartition(STATE, 0): tuple(ring[:3]),
                    TopicPartition(STATE, 1): tuple(reversed(ring[1:])),
                }
                outcomes = client.run(cluster_operations.reassign(plan, 60_000))
                assert not [one for one in outcomes if one.error is not None]
                cluster.wait_until(
                    lambda: not client.run(cluster_operations.list_reassignments(10_000)),
                    "the replicas have moved",
                )
                cluster.wait_until(
                    lambda before=before: all(len(w.committed) > before[id(w)] for w in writers),
                    "all commit at the new coordinators",
                )
        finally:
            for writer in writers:
                writer.stop()
        view = client.metadata([STATE]).topics[STATE]
        last = [(MOVES - 1 + step) % 4 for step in range(4)]
        assert {p: set(view.partitions[p].replicas) for p in (0, 1)} == {
            0: set(last[:3]),
            1: set(last[1:]),
        }
        for writer in writers:  # what is still open ends with its successor
            TransactionalProducer(client, writer.name)
        ended = {"Empty", "CompleteCommit", "CompleteAbort"}
        cluster.wait_until(lambda: set(states(client)) <= ended, "every transaction has ended")
        seen = committed_values(client, topic, PARTITIONS)
        partitions = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        assert client.run(transactions.open_transactions(partitions)) == []
    assert max(seen.values()) == 1
    for writer in writers:
        for number in writer.committed:
            assert all(value in seen for value in writer.values(number)), (writer.name, number)
        for number in writer.aborted:
            assert not any(value in seen for value in writer.values(number))
        for number in writer.unknown:
            found = {value in seen for value in writer.values(number)}
            assert len(found) == 1, f"torn: {writer.name} {number}"
        assert len(writer.committed) > MOVES and writer.aborted


class ById:
    """Requests of one transactional id to its coordinator, found anew where it is not there."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.node = -1
        self.connection: Connection | None = None

    def find(self) -> Connection:
        """A connection to the coordinator."""
        running = [i for i in range(len(self.cluster)) if self.cluster.running(i)]

        def found() -> bool:
            connection = Connection(f"localhost:{self.cluster.port(running[0])}")
            try:
                answer = connection.ask(FIND, 2, key=self.name, key_type=1)
            except OSError:
                return False
            finally:
                connection.close()
            self.node = answer.node_id
            return answer.error_code is ErrorCode.none and self.node in running

        self.cluster.wait_until(found, "a coordinator")
        self.connection = Connection(f"localhost:{self.cluster.port(self.node)}")
        return self.connection

    def ask(self, api: int, version: int, **values: Any) -> Any:
        """The answer, asked again until it has no error."""
        answers: list[Any] = []

        def answered() -> bool:
            connection = self.connection or self.find()
            try:
                answer = connection.ask(api, version, transactional_id=self.name, **values)
            except OSError:
                self.leave()
                return False
            answers.append(answer)
            if answer.error_code is ErrorCode.none:
                return True
            assert answer.error_code.retriable, answer
            if answer.error_code is not ErrorCode.concurrent_transactions:
                self.leave()
            return False

        self.cluster.wait_until(answered, f"API {api} of {self.name}")
        return answers[-1]

    def init(self, producer: tuple[int, int] = (-1, -1)) -> Any:
        return self.ask(
            INIT, 4, transaction_timeout=60_000, producer_id=producer[0], producer_epoch=producer[1]
        )

    def leave(self) -> None:
        """The coordinator is looked for anew."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def exhaust(self) -> tuple[int, int]:
        """InitProducerId until the epoch is the last one that is given."""
        answer = self.init()
        while answer.producer_epoch < LAST_EPOCH:
            count = min(PIPELINED, LAST_EPOCH - answer.producer_epoch)
            answer = self.pipelined(count) or self.init()
        return answer.producer_id, LAST_EPOCH

    def pipelined(self, count: int) -> Any:
        """The newest of so many epochs; None: the coordinator is elsewhere, or gave none."""
        connection = self.connection or self.find()
        try:
            for _ in range(count):
                connection.send(
                    INIT,
                    4,
                    transactional_id=self.name,
                    transaction_timeout=60_000,
                    producer_id=-1,
                    producer_epoch=-1,
                )
            answers = [connection.receive() for _ in range(count)]
        except OSError:
            self.leave()
            return None
        refused = {one.error_code for one in answers} - {ErrorCode.none}
        assert all(code.retriable for code in refused), refused
        if refused - {ErrorCode.concurrent_transactions}:
            self.leave()
            return None
        given = [one for one in answers if one.error_code is ErrorCode.none]
        return max(given, key=lambda one: one.producer_epoch, default=None)

    def end(self, producer: tuple[int, int]) -> tuple[int, int]:
        """EndTxn of version 2; the producer that goes on."""
        answer = self.ask(
            END, 5, producer_id=producer[0], producer_epoch=producer[1], committed=True
        )
        return answer.producer_id, answer.producer_epoch


def produce(cluster: Cluster, name: str, topic: str, producer: tuple[int, int]) -> ErrorCode:
    """A transactional batch of version 2, the first of its producer, to partition 0; sent again
    until it is taken or refused for good, as clients do.
    """
    data = build_batch(
        [(1, b"k", b"v", ())],
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=0,
        is_transactional=True,
    )
    codes: list[ErrorCode] = []

    def answered() -> bool:
        with cluster.client() as client:
            leader = client.metadata([topic]).topics[topic].partitions[0].leader
        if leader < 0 or not cluster.running(leader):
            return False
        connection = Connection(f"localhost:{cluster.port(leader)}")
        values = produce_values(topic, data, transactional_id=name, acks=-1)
        answer = connection.ask(PRODUCE, 12, **values)
        connection.close()
        code = answer.responses[0].partition_responses[0].error_code
        assert isinstance(code, ErrorCode)
        codes.append(code)
        return not code.retriable

    cluster.wait_until(answered, f"a batch of {producer} is answered")
    return codes[-1]


def test_the_last_epoch_outlives_its_coordinator(kept_cluster: Callable[..., Cluster]) -> None:
    """The id that follows an exhausted one is that of the answer at each successor, too."""
    cluster = kept_cluster(nodes=3, transaction_state_log_num_partitions=1)
    topic = cluster.create_topic()
    bank = ById(cluster, "bank")
    old = bank.exhaust()
    assert produce(cluster, "bank", topic, old) is ErrorCode.none
    new = bank.end(old)
    assert new[0] != old[0] and new[1] == 0
    for _ in range(2):
        victim = bank.node
        cluster.kill(victim)
        bank.leave()
        assert bank.end(old) == new, "the answer to a retry"
        assert bank.node != victim
        cluster.start(victim)
    assert produce(cluster, "bank", topic, old) is ErrorCode.invalid_producer_epoch
    again = bank.init(old)
    assert (again.producer_id, again.producer_epoch) == new, "the answer to a retry"
    assert produce(cluster, "bank", topic, new) is ErrorCode.none
    assert bank.end(new) == (new[0], 1)
    with cluster.client() as client:  # an end is answered when it is decided, before its marker
        cluster.wait_until(lambda: set(states(client)) == {"CompleteCommit"}, "the end")
        assert committed_values(client, topic, 1) == {b"v": 2}
    bank.leave()
