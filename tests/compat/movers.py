"""One story of transactions for every client: records are moved from a topic to another, each once,
while transactions are aborted, a node dies and returns, and the mover is replaced in the middle.

A client is a :class:`Mover`; :func:`move` tells the story and checks it. The programs in Java and
Go are movers of their own, which :func:`move_by` watches.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.kafka_connection import FIND, Connection

PARTITIONS = 4
RECORDS = 240
DEADLINE_S = 150.0
ABORTED = 3
"""Every third transaction is aborted at first."""


class Nodes(Protocol):
    """A cluster of kept or of Apache Kafka."""

    @property
    def bootstrap(self) -> str: ...
    def __len__(self) -> int: ...
    def kill(self, i: int = 0) -> None: ...
    def start(self, i: int = 0) -> None: ...


class Mover(Protocol):
    """A consumer of a group and a transactional producer."""

    def step(self, *, commit: bool) -> int | None:
        """Move what comes within a moment in one transaction and end it: how many it committed,
        None where nothing came.

        After an abort the same records come again. Raises one of ``errors`` when it cannot go on.
        """

    errors: tuple[type[BaseException], ...]

    def write(self, value: bytes) -> None:
        """Write a value in a transaction of its own."""

    def close(self) -> None: ...


def create(nodes: Nodes, topics: Sequence[str], partitions: int) -> None:
    """Topics with as many replicas as there are nodes, three at most."""
    admin = AdminClient({"bootstrap.servers": nodes.bootstrap})
    wanted = [NewTopic(topic, partitions, min(3, len(nodes))) for topic in topics]
    for made in admin.create_topics(wanted).values():
        made.result(timeout=60)


def leader(bootstrap: str, topic: str) -> int:
    """The node that leads the first partition of a topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    return int(admin.list_topics(topic, timeout=60).topics[topic].partitions[0].leader)


def read(bootstrap: str, topic: str, partitions: int, isolation: str) -> list[tuple[bytes, bytes]]:
    """(key, value) of all records up to the end that a consumer of this isolation sees."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-check",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    values, ended, deadline = [], set(), time.monotonic() + 60
    while len(ended) < partitions:
        assert time.monotonic() < deadline, f"{topic} has no end: {len(values)} so far"
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                values.append((message.key(), message.value()))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    return values


class Place:
    """Where a story happens: two topics, a group, a transactional id."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self.nodes, self.name = nodes, name
        self.bootstrap = nodes.bootstrap
        self.source, self.target = f"{name}-in", f"{name}-out"
        create(nodes, [self.source, self.target], PARTITIONS)
        self.values = [b"%d" % number for number in range(RECORDS)]
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "enable.idempotence": True, "log_level": 0}
        )
        for number, value in enumerate(self.values):
            producer.produce(self.source, value, partition=number % PARTITIONS)
        assert producer.flush(60) == 0

    def committed(self) -> int:
        """The sum of the group's stable offsets."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.name})
        places = [TopicPartition(self.source, number) for number in range(PARTITIONS)]
        found = consumer.committed(places, timeout=60)
        consumer.close()
        return sum(max(0, place.offset) for place in found)

    def coordinator(self) -> int:
        """The node that coordinates the transactional id."""
        for address in self.bootstrap.split(","):
            try:
                connection = Connection(address)
            except OSError:
                continue
            found = connection.ask(FIND, 2, key=self.name, key_type=1)
            connection.close()
            return int(found.node_id)
        raise AssertionError("no node answers")

    def leader(self) -> int:
        """The node that leads the first partition of the target."""
        return leader(self.bootstrap, self.target)

    def moved(self, isolation: str) -> Counter[bytes]:
        """The values of the target that a consumer of this isolation sees."""
        return Counter(
            value for _, value in read(self.bootstrap, self.target, PARTITIONS, isolation)
        )

    def check(self) -> None:
        """Everything was moved once, and the group has committed that."""
        assert self.moved("read_committed") == Counter(self.values)
        assert self.moved("read_uncommitted").total() > RECORDS, "nothing was aborted"
        assert self.committed() == RECORDS


class Killer:
    """Kills a node when it is asked to, and starts it again a moment later, beside the story."""

    DOWN_S = 2.0

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def kill(self, number: int) -> None:
        self._nodes.kill(number)
        self._thread = threading.Thread(target=self._restart, args=(number,))
        self._thread.start()

    def _restart(self, number: int) -> None:
        try:
            time.sleep(self.DOWN_S)
            self._nodes.start(number)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error


def move(
    place: Place, make: Callable[[Place], Mover], victim: Callable[[Place], int] | None
) -> None:
    """The story; ``victim`` says which node dies in the middle, None: none does."""
    killer = Killer(place.nodes)
    mover = make(place)
    moved, transactions, deadline = 0, 0, time.monotonic() + DEADLINE_S
    killed, replaced = victim is None, False
    try:
        while moved < RECORDS:
            assert time.monotonic() < deadline, f"{moved} of {RECORDS} moved"
            if moved >= RECORDS // 4 and not killed and victim is not None:
                killed = True
                killer.kill(victim(place))
            if moved >= RECORDS // 2 and not replaced:
                replaced = True
                mover.close()
                mover = make(place)
            try:
                committed = mover.step(commit=transactions % ABORTED != 1)
                if committed is not None:
                    transactions += 1
                    moved += committed
            except mover.errors:
                mover.close()
                mover = make(place)
                moved = place.committed()
    finally:
        mover.close()
        killer.wait()
    place.check()


def move_by(place: Place, command: Sequence[str], victim: Callable[[Place], int] | None) -> None:
    """The story of a program, which prints "quarter" when it has moved so much, and ends well when
    everything was moved.
    """
    killer = Killer(place.nodes)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watch = threading.Timer(DEADLINE_S, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "quarter\n" and victim is not None:
                    killer.kill(victim(place))
            _, errors = process.communicate()
        finally:
            watch.cancel()
            process.kill()
            killer.wait()
    assert process.returncode == 0, errors[-4000:]
    place.check()
