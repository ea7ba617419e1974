"""Directories that the real Apache Kafka 4.3.0 made are adopted and served.

What a client could see in Kafka is there afterwards: topics, settings, records, committed offsets;
compacted topics stay compacted; Kafka's files of metadata are not touched. Then kept goes on: new
records, a restart.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kept.node.coordinator.transactions.records import (
    TransactionRecord,
    TransactionState,
    decode_record,
)
from kept.storage.records import build_batch, headers, records
from kept.testing.ports import free_port
from tests.node.kafka_import import fixtures
from tests.node.kafka_import.fixtures import READY_S, serving

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(300)]

PLAIN, TABLE = 600, 2000
State = dict[str, Any]


def fill(bootstrap: str, replicas: int) -> None:
    """Topics of both kinds, a deleted one, a transaction of each outcome, a group half way."""
    from confluent_kafka import Consumer, Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    compacted = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.bytes": "1048576",
        "segment.ms": "300",
    }
    topics = [
        NewTopic("plain", 3, replicas, config={"retention.ms": "777600000"}),
        NewTopic("table", 2, replicas, config=compacted),
        NewTopic("gone", 1, replicas),
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for made in admin.create_topics(topics).values():
        made.result(30)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for n in range(PLAIN):
        producer.produce("plain", f"v{n}", f"k{n % 97}", headers={"n": str(n)})
    for n in range(TABLE):
        producer.produce("table", f"v{n}" if n % 7 else None, f"k{n % 50}")
        if n % 400 == 0:
            producer.flush(30)
            time.sleep(0.35)  # segments are closed by age
    assert producer.flush(30) == 0
    for removed in admin.delete_topics(["gone"]).values():
        removed.result(30)
    transactional = Producer({"bootstrap.servers": bootstrap, "transactional.id": "tx"})
    transactional.init_transactions(60)
    for end in (transactional.commit_transaction, transactional.abort_transaction):
        transactional.begin_transaction()
        transactional.produce("plain", end.__name__, "tx")
        end(60)
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "half", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["plain"])
    taken = 0
    while taken < PLAIN // 2:
        taken += len(consumer.consume(50, 5))
    consumer.commit(asynchronous=False)
    consumer.close()


def state(bootstrap: str) -> State:
    """Everything a client sees of it."""
    from confluent_kafka import Consumer, TopicPartition
    from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource

    admin = AdminClient({"bootstrap.servers": bootstrap})
    listed = admin.list_topics(timeout=30)
    found: State = {"cluster": listed.cluster_id}
    for name, topic in listed.topics.items():
        asked = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, name)])
        entries = next(iter(asked.values())).result(30)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        settings = {e.name: e.value for e in entries.values() if e.source == own}
        replicas = {p.id: sorted(p.replicas) for p in topic.partitions.values()}
        found[name] = (replicas, settings)
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "half",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    plain = [TopicPartition("plain", n) for n in range(3)]
    found["committed"] = {p.partition: p.offset for p in reader.committed(plain, 30)}
    wanted = [TopicPartition("table", n, 0) for n in range(2)]
    wanted += [TopicPartition("plain", n, 0) for n in range(3)]
    for one, row in read(reader, wanted):
        found.setdefault(one, []).append(row)
    reader.close()
    return found


def read(reader: Any, wanted: list[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every record of some partitions, up to their ends as they are now."""
    from confluent_kafka import KafkaError

    reader.assign(wanted)
    ended = 0
    while ended < len(wanted):
        message = reader.poll(30)
        assert message is not None, f"nothing came of {wanted}"
        if message.error() is None:
            name = f"{message.topic()}-{message.partition()}"
            yield name, (message.offset(), message.key(), message.value(), message.headers())
        elif message.error().code() == KafkaError._PARTITION_EOF:
            ended += 1
        else:
            raise AssertionError(message.error())


def go_on(bootstrap: str) -> None:
    """New records are taken and the group goes on from what it had committed."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "acks": "all"})
    for n in range(100):
        producer.produce("plain", f"new{n}", f"k{n % 97}")
        producer.produce("table", f"new{n}", f"k{n % 50}")
    assert producer.flush(60) == 0


def check(before: State, after: State) -> None:
    assert after.keys() == before.keys()
    for name in before:
        assert after[name] == before[name], name


def latest(found: State) -> dict[bytes, bytes]:
    rows = [row for n in range(2) for row in found[f"table-{n}"]]
    values = {key: value for _, key, value, _ in rows}
    return {key: value for key, value in values.items() if value is not None}


def compacted(found: State) -> bool:
    """Less is left than was written, and there are gaps."""
    return sum(len(found[f"table-{n}"]) for n in range(2)) < TABLE // 2


def wait_compacted(bootstrap: str) -> State:
    deadline = time.monotonic() + READY_S
    while not compacted(found := state(bootstrap)):
        assert time.monotonic() < deadline, "Apache Kafka did not compact"
        time.sleep(0.5)
    return found


def test_one_node(kafka_dist: Any, tmp_path: Path) -> None:
    """Snapshots of its metadata log, an unclean stop (refused), a clean one (taken over)."""
    broker = kafka_dist.Broker(
        tmp_path,
        free_port(above=[1]),
        log_cleaner_backoff_ms=200,
        metadata_log_max_record_bytes_between_snapshots=3000,
    )
    with broker:
        fill(broker.bootstrap, 1)
        wait_compacted(broker.bootstrap)
        before = state(broker.bootstrap)
    assert list((broker.data / "__cluster_metadata-0").glob("*.checkpoint"))
    hashes = fixtures.hashes(broker.data)
    port = free_port()
    with serving([broker.data], [{}], [port]) as (node,):
        after = state(node.bootstrap)
        assert compacted(after)
        # kept may have compacted on; of each key the last value is what counts
        assert latest(after) == latest(before)
        for one in (before, after):
            one.pop("table-0"), one.pop("table-1")
        check(before, after)
        go_on(node.bootstrap)
    assert fixtures.hashes(broker.data) == hashes
    with serving([broker.data], [{}], [port], readies=2) as (node,):
        again = state(node.bootstrap)
        assert again["committed"] == before["committed"]
        assert sum(len(again[f"plain-{n}"]) for n in range(3)) == PLAIN + 1 + 100
        assert "nothing to adopt" in node.said


def three_brokers(kafka_dist: Any, tmp_path: Path) -> list[Any]:
    """Three nodes of Kafka, each broker and controller, to be started."""
    ports = [free_port(above=[1]) for _ in range(3)]
    voters = ",".join(f"{n}@127.0.0.1:{port + 1}" for n, port in enumerate(ports))
    cluster_id = kafka_dist.new_id()
    return [
        kafka_dist.Broker(
            tmp_path / f"n{n}",
            port,
            cluster_id,
            node_id=n,
            controller_quorum_voters=voters,
            offsets_topic_replication_factor=3,
            transaction_state_log_replication_factor=3,
            transaction_state_log_min_isr=2,
            min_insync_replicas=2,
            log_cleaner_backoff_ms=200,
        )
        for n, port in enumerate(ports)
    ]


@contextmanager
def started(brokers: list[Any]) -> Iterator[str]:
    """All of them together, and stopped together; their bootstrap."""
    with ThreadPoolExecutor(3) as several:
        try:
            list(several.map(lambda broker: broker.start(), brokers))
            yield ",".join(broker.bootstrap for broker in brokers)
        finally:
            list(several.map(lambda broker: broker.stop(), brokers))


def three_settings() -> tuple[list[dict[str, str]], list[int]]:
    """Settings and ports of three nodes of kept."""
    ports = [free_port(above=[1]) for _ in range(3)]
    ours = ",".join(f"{n}@127.0.0.1:{port + 1}" for n, port in enumerate(ports))
    settings = [
        {
            "controller.quorum.voters": ours,
            "listeners": f"PLAINTEXT://127.0.0.1:{port},NODE://127.0.0.1:{port + 1}",
            "min.insync.replicas": "2",
        }
        for port in ports
    ]
    return settings, ports


def test_three_nodes_that_were_stopped_cleanly(kafka_dist: Any, tmp_path: Path) -> None:
    """The same command on each; whose metadata log is longest decides, as in Raft."""
    brokers = three_brokers(kafka_dist, tmp_path)
    with started(brokers) as bootstrap:
        fill(bootstrap, 3)
        before = wait_compacted(bootstrap)
    directories = [broker.data for broker in brokers]
    assert all((path / ".kafka_cleanshutdown").exists() for path in directories)
    hashes = [fixtures.hashes(path) for path in directories]
    settings, ports = three_settings()
    with serving(directories, settings, ports) as nodes:
        after = state(nodes[0].bootstrap)
        assert latest(after) == latest(before)
        for one in (before, after):
            one.pop("table-0"), one.pop("table-1")
        check(before, after)
        go_on(nodes[1].bootstrap)
        verify = [sys.executable, "-m", "kept", "compact", "verify", "table"]
        done = subprocess.run(
            [*verify, "--bootstrap", nodes[2].bootstrap], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "level=error" not in "".join(node.said for node in nodes)
    assert [fixtures.hashes(path) for path in directories] == hashes


# Transactions.

LEFT_OPEN_MS = 15_000
"""The timeout of transactions that nobody ends."""


def transact(bootstrap: str, replicas: int) -> list[Any]:
    """A transaction in each state that Kafka keeps when it stops; the producers, which must not
    end theirs. ``going-on`` is open and long, ``left`` open and short.
    """
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    for made in admin.create_topics([NewTopic("orders", 1, replicas)]).values():
        made.result(30)
    producers = []
    names = ("empty", "committed", "aborted", "left", "going-on", "to-commit", "to-abort")
    for name in names:
        timeout_ms = LEFT_OPEN_MS if name == "left" else 600_000
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "transaction.timeout.ms": timeout_ms,
            }
        )
        producer.init_transactions(60)
        producers.append(producer)
        if name == "empty":
            continue
        producer.begin_transaction()
        producer.produce("orders", name, name)
        assert producer.flush(30) == 0
        if name == "committed":
            producer.commit_transaction(30)
        if name == "aborted":
            producer.abort_transaction(30)
    return producers


def _decided(one: TransactionRecord, state: TransactionState) -> tuple[bytes, bytes | None]:
    assert one.metadata is not None
    return replace(one, metadata=replace(one.metadata, state=state)).encode()


def decide(directories: list[Path]) -> None:
    """What Kafka's coordinator writes before it sends markers: the transactions ``to-commit`` and
    ``to-abort`` are decided, and no marker is there. In the log of every replica.
    """
    ends = {
        "to-commit": TransactionState.PREPARE_COMMIT,
        "to-abort": TransactionState.PREPARE_ABORT,
    }
    for directory in directories:
        (path,) = (directory / "__transaction_state-0").glob("*.log")
        data = path.read_bytes()
        held = {}
        for record in records(data):
            assert record.key is not None
            one = decode_record(record.key, record.value)
            assert one is not None
            held[one.transactional_id] = one
        newest = list(headers(data))[-1][1]
        rows = [
            (newest.max_timestamp, *_decided(held[name], end), ()) for name, end in ends.items()
        ]
        path.write_bytes(
            data
            + build_batch(
                rows, base_offset=newest.next_offset, leader_epoch=newest.partition_leader_epoch
            )
        )


def transact_on(bootstrap: str) -> list[bytes]:
    """Every id goes on, and what was open is ended; what was committed in all."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    names = ("empty", "committed", "aborted", "going-on", "to-commit", "to-abort")
    for name in names:
        producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce("orders", f"{name} again", name)
        producer.commit_transaction(60)
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "orders",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    deadline = time.monotonic() + READY_S
    place = TopicPartition("orders", 0, 0)
    try:
        while True:
            found = [row[2] for _, row in read(reader, [place])]
            if len(found) >= 2 + len(names):
                return found
            assert time.monotonic() < deadline, f"a transaction stays open behind {found}"
            time.sleep(0.5)
    finally:
        reader.close()


def check_transactions(found: list[bytes]) -> None:
    """Those that Kafka or its decision committed, and nothing of the others."""
    again = ["empty", "committed", "aborted", "going-on", "to-commit", "to-abort"]
    expected = ["committed", "to-commit", *(f"{name} again" for name in again)]
    assert sorted(found) == sorted(value.encode() for value in expected)


def test_transactions_of_one_node_go_on(kafka_dist: Any, tmp_path: Path) -> None:
    broker = kafka_dist.Broker(tmp_path, free_port(above=[1]))
    with broker:
        producers = transact(broker.bootstrap, 1)
    producers.clear()
    decide([broker.data])
    with serving([broker.data], [{}], [free_port()]) as (node,):
        check_transactions(transact_on(node.bootstrap))
        assert "level=error" not in node.said


def test_transactions_of_three_nodes_go_on(kafka_dist: Any, tmp_path: Path) -> None:
    brokers = three_brokers(kafka_dist, tmp_path)
    with started(brokers) as bootstrap:
        producers = transact(bootstrap, 3)
    producers.clear()
    directories = [broker.data for broker in brokers]
    decide(directories)
    settings, ports = three_settings()
    with serving(directories, settings, ports) as nodes:
        check_transactions(transact_on(nodes[0].bootstrap))
        assert "level=error" not in "".join(node.said for node in nodes)
