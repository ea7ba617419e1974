"""Transactions of librdkafka: small ones in turn, over four partitions, of eight producers at once,
and the same requests without it; how soon a consumer of committed records has them; what a known id
costs in memory.

A transaction is one record of 100 bytes to each of its partitions; ``linger.ms`` is 0, everything
else as librdkafka, which speaks version 1 of transactions, has it by default. *Each* is the time
from one commit to the next. On three nodes a lone producer's coordinator is another node than the
leader of its first partition, as it is for two ids of three: they ask each other twice then.
*Requests alone* are librdkafka's, sent by one thread, each when the one before is answered.
The floor is librdkafka against its own mock cluster, which answers from memory in the same process:
1.5 ms a commit, more than the goal for one node. By a timer it sends AddPartitionsToTxn 1 ms after
the first record of a transaction, whatever the broker. That and its threads, which wake one
another, are what a commit takes beyond its requests; on three nodes the marker of the transaction
before is written meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from bare_producer import BareProducer
from baseline import FLOOR
from brokers import Broker
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from harness import Bench
from three_node_clusters import NODES, Trio

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import decode_response, encode_request
from kept.node.coordinator.common.partitioner import partition_for

SECONDS = 8.0
WARM_S = 2.0
PARTITIONS = 4
PRODUCERS = 8
SAMPLES = 100
READ_S = 30.0
WARM = 200
"""Transactions before one is measured."""
IDS = 20_000
IDS_AT_ONCE = 500
TIMEOUT_MS = 600_000
"""Open transactions stay so while there is a run."""
TOPIC = "transfers"
VALUE = b"v" * 100
_QUIET = {"log_level": 0}
SETTINGS = {
    "transaction_state_log_replication_factor": "1",
    "transaction_state_log_min_isr": "1",
}
"""Of a lone node of Apache Kafka, which wants three otherwise."""


class Writer:
    """A producer with a transactional id. With ``brokers_inside`` it speaks to those, which
    librdkafka has for tests, wherever ``bootstrap`` is.
    """

    def __init__(self, bootstrap: str, name: str, topic: str, brokers_inside: int = 0) -> None:
        self._topic = topic
        self._producer = Producer(
            {
                **_QUIET,
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "linger.ms": 0,
                "test.mock.num.brokers": brokers_inside,
            }
        )
        self._producer.init_transactions(60)

    def transaction(self, partitions: int) -> float:
        """One transaction; how many seconds its commit took."""
        self._producer.begin_transaction()
        for partition in range(partitions):
            self._producer.produce(self._topic, VALUE, partition=partition)
        started = time.perf_counter()
        self._producer.commit_transaction(60)
        return time.perf_counter() - started

    def run(self, partitions: int, seconds: float) -> list[float]:
        """Transactions one after the other for some time; the commits' seconds."""
        end, commits = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            commits.append(self.transaction(partitions))
        return commits


def _ids(broker: Broker | Trio, topic: str) -> Iterator[str]:
    """Transactional ids; see the module for which of them on three nodes."""
    names = (f"bench-{number}" for number in count())
    if not isinstance(broker, Trio):
        return names
    Writer(broker.bootstrap, "first", topic)  # with which there are coordinators
    coordinators = broker.partitions("__transaction_state")
    leader = broker.partitions(topic)[0].leader
    return (
        name
        for name in names
        if coordinators[partition_for(name, len(coordinators))].leader != leader
    )


def _cpu_seconds(broker: Broker | Trio) -> float:
    spent = broker.cpu_seconds()
    return sum(spent) if isinstance(spent, list) else spent


def _writing(bench: Bench, broker: Broker | Trio, group: str, topic: str) -> None:
    """One producer, then eight at once."""
    name = "transaction of three nodes" if isinstance(broker, Trio) else "transaction"
    if broker.name == "kept":
        with bench.attempt("the floor of transactions"):
            floor(bench, group, name)
    ids = _ids(broker, topic)
    alone = Writer(broker.bootstrap, next(ids), topic)
    alone.run(PARTITIONS, WARM_S)
    for partitions in (1, PARTITIONS):
        what = _what(name, partitions)
        before = _cpu_seconds(broker)
        count = _in_turn(bench, group, what, broker.name, alone, partitions)
        spent = _cpu_seconds(broker) - before
        bench.add(group, what, broker.name, "CPU-ms", 1000 * spent / count)
    _bare(bench, broker, group, topic, next(ids))
    for partitions in (1, PARTITIONS):
        _at_once(bench, broker, group, topic, partitions)


def floor(bench: Bench, group: str, name: str) -> None:
    """What one producer takes whose broker takes next to nothing."""
    alone = Writer("", "floor", TOPIC, brokers_inside=1)
    alone.run(PARTITIONS, WARM_S * bench.scale)
    for partitions in (1, PARTITIONS):
        _in_turn(bench, group, _what(name, partitions), FLOOR, alone, partitions)


def _what(name: str, partitions: int) -> str:
    return f"{name}, {partitions} partition{'s' * (partitions > 1)}"


def _in_turn(  # noqa: PLR0917
    bench: Bench, group: str, what: str, who: str, writer: Writer, partitions: int
) -> int:
    """One producer's transactions one after the other; how many there were."""
    seconds = SECONDS * bench.scale
    commits = writer.run(partitions, seconds)
    bench.add(group, f"{what}, each", who, "ms", 1000 * seconds / len(commits))
    bench.add(group, f"{what}, commit p50", who, "ms", 1000 * statistics.median(commits))
    return len(commits)


def _bare(
    bench: Bench, broker: Broker | Trio, group: str, topic: str, transactional_id: str
) -> None:
    """One producer without librdkafka's threads."""
    what = "transaction of three nodes" if isinstance(broker, Trio) else "transaction"
    what += ", requests alone"
    with contextlib.closing(BareProducer(broker.bootstrap, transactional_id, topic)) as producer:
        for _ in range(WARM):
            producer.transaction()
        end = time.perf_counter() + SECONDS * bench.scale
        before = _cpu_seconds(broker)
        took = []
        while time.perf_counter() < end:
            took.append(producer.transaction())
        spent = _cpu_seconds(broker) - before
    whole, ends = zip(*took, strict=True)
    bench.add(group, f"{what}, p50", broker.name, "ms", 1000 * statistics.median(whole))
    bench.add(group, f"{what}, EndTxn p50", broker.name, "ms", 1000 * statistics.median(ends))
    bench.add(group, what, broker.name, "CPU-ms", 1000 * spent / len(took))


def _at_once(bench: Bench, broker: Broker | Trio, group: str, topic: str, partitions: int) -> None:
    """Many producers."""
    name = "transaction of three nodes" if isinstance(broker, Trio) else "transaction"
    seconds = SECONDS * bench.scale
    names = [f"one of {n} over {partitions}" for n in range(PRODUCERS)]
    writers = [Writer(broker.bootstrap, each, topic) for each in names]
    done: list[float] = []
    threads = [
        threading.Thread(target=lambda writer=writer: done.extend(writer.run(partitions, seconds)))
        for writer in writers
    ]
    before = _cpu_seconds(broker)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = _cpu_seconds(broker) - before
    what = f"{name}, {PRODUCERS} producers"
    if partitions > 1:
        what += f", {partitions} partitions"
    bench.add(group, f"{what}, each", broker.name, "ms", 1000 * seconds / len(done))
    bench.add(group, f"{what}, commit p50", broker.name, "ms", 1000 * statistics.median(done))
    bench.add(group, what, broker.name, "CPU-ms", 1000 * spent / len(done))


def _reading(bench: Bench, broker: Broker | Trio, group: str, topic: str) -> None:
    """From the call of commit until a consumer of committed records has the record."""
    consumer = Consumer({**_QUIET, "bootstrap.servers": broker.bootstrap, "group.id": "bench"})
    place = TopicPartition(topic, 0)
    place.offset = consumer.get_watermark_offsets(place, timeout=30)[1]
    consumer.assign([place])
    writer = Writer(broker.bootstrap, "seen", topic)
    writer.transaction(1)
    _read_one(consumer)
    took = []
    for _ in range(max(10, int(SAMPLES * bench.scale))):
        started = time.perf_counter()
        writer.transaction(1)
        _read_one(consumer)
        took.append(time.perf_counter() - started)
    consumer.close()
    name = "transaction of three nodes" if isinstance(broker, Trio) else "transaction"
    what = f"{name}, seen by a read_committed consumer, p50"
    bench.add(group, what, broker.name, "ms", 1000 * statistics.median(took))


def _read_one(consumer: Consumer) -> None:
    """Wait for a record; what else the client has to say is passed over."""
    end = time.monotonic() + READ_S
    while time.monotonic() < end:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            return
    raise RuntimeError(f"a committed record did not come within {READ_S:.0f} s")


def _topic(broker: Broker | Trio, copies: int) -> str:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, copies)])[TOPIC].result(60)
    return TOPIC


def transactions(bench: Bench, broker: Broker) -> None:
    """On one node, with the memory of known ids."""
    group = "transactions, one node"
    topic = _topic(broker, 1)
    _writing(bench, broker, group, topic)
    _reading(bench, broker, group, topic)
    _knowing(bench, broker, group)


def transactions_of_three(bench: Bench, broker: Trio) -> None:
    """On three nodes, three replicas."""
    group = "transactions, three nodes"
    topic = _topic(broker, NODES)
    _writing(bench, broker, group, topic)
    _reading(bench, broker, group, topic)


def _knowing(bench: Bench, broker: Broker, group: str) -> None:
    """Memory of a transactional id that has no transaction. Kafka's is in its heap: not asked."""
    if broker.name == "kafka":
        return
    count = max(2000, int(IDS * bench.scale))
    before = broker.resident_bytes()
    with socket.create_connection((broker.host, broker.port), 60) as connection:
        initialize(connection, range(count))
    grown = broker.resident_bytes() - before
    bench.add(group, "memory of a known transactional id", broker.name, "B", grown / count)


def initialize(connection: socket.socket, numbers: range) -> list[tuple[int, int]]:
    """An InitProducerId for each number's transactional id: producer ids and epochs. Raises
    RuntimeError at an error.
    """
    given = []
    requests = map(_initialized, numbers)
    for answer in asked(connection, ApiKey.INIT_PRODUCER_ID, 4, requests):
        if answer.error_code:
            raise RuntimeError(f"InitProducerId: {answer.error_code}")
        given.append((answer.producer_id, answer.producer_epoch))
    return given


def asked(
    connection: socket.socket, api: ApiKey, version: int, requests: Iterable[dict[str, Any]]
) -> Iterator[Any]:
    """The answers to requests with these values, many of which are under way at once."""
    waiting = iter(requests)
    with connection.makefile("rb") as incoming:
        while part := list(islice(waiting, IDS_AT_ONCE)):
            frames = (encode_request(api, version, 1, "bench", values) for values in part)
            connection.sendall(b"".join(frames))
            for _ in part:
                (size,) = struct.unpack(">i", incoming.read(4))
                yield decode_response(api, version, incoming.read(size))[1]


def transactional_id(number: int) -> str:
    """The transactional id of a number."""
    return f"application-{number}"


def _initialized(number: int) -> dict[str, Any]:
    """Of an InitProducerId for a new id."""
    return {
        "transactional_id": transactional_id(number),
        "transaction_timeout": TIMEOUT_MS,
        "producer_id": -1,
        "producer_epoch": -1,
    }
