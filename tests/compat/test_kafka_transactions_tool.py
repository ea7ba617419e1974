"""Apache Kafka's ``kafka-transactions.sh`` against a node: what it lists, and what it ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from kept.testing import Cluster
from tests.support.kafka_connection import Connection
from tests.support.transactional_requests import begin, send

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def trusting() -> Iterator[Cluster]:
    """A node on which a transaction may hang."""
    with Cluster(transaction_partition_verification_enable="false") as cluster:
        yield cluster


def test_it_finds_and_ends_transactions(kafka_dist: ModuleType, trusting: Cluster) -> None:
    def rows(*arguments: str) -> list[list[str]]:
        out = kafka_dist.run(
            "org.apache.kafka.tools.TransactionsCommand",
            "--bootstrap-server",
            trusting.bootstrap,
            *arguments,
        )
        return [line.split() for line in out.splitlines()[1:] if line.strip()]

    topic, connection = trusting.create_topic(partitions=2), Connection(trusting.bootstrap)
    producer_id = begin(connection, "payments", topic, 1)
    send(connection, topic, producer_id, partition=1)
    send(connection, topic, 555_555, timestamp_ms=1000)
    connection.close()

    assert rows("list") == [["payments", "0", str(producer_id), "Ongoing"]]
    (described,) = rows("describe", "--transactional-id", "payments")
    assert described[:6] == ["0", "payments", str(producer_id), "0", "Ongoing", "60000"]
    assert described[-1] == f"{topic}-1"
    producers = ("describe-producers", "--topic", topic, "--partition")
    (opened,) = rows(*producers, "1")
    assert (opened[:4], opened[5]) == ([str(producer_id), "0", "0", "0"], "0")  # Kafka: epoch -1
    (late,) = rows(*producers, "0")
    assert (late[:2], late[3:]) == (["555555", "0"], ["0", "1000", "0"])
    hanging = ("find-hanging", "--topic", topic, "--max-transaction-timeout", "1")
    assert [row[:4] for row in rows(*hanging)] == [[topic, "0", "555555", "0"]]
    assert rows("abort", "--topic", topic, "--partition", "0", "--start-offset", "0") == []
    assert rows(*hanging) == []
    (ended,) = rows(*producers, "0")
    assert (ended[:2], ended[3], ended[5]) == (["555555", "0"], "0", "None")
    rows("forceTerminateTransaction", "--transactionalId", "payments")
    assert rows("list")[0][3] in ("Empty", "CompleteAbort", "PrepareAbort")
