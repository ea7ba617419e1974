"""``kept transaction`` against a node: ids and their states, and transactions that hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.testing import Cluster
from tests.cli.conftest import Kept
from tests.support.kafka_connection import Connection
from tests.support.transactional_requests import begin, send

END = 26


@pytest.fixture(scope="module")
def trusting() -> Iterator[Cluster]:
    """A node that takes a late batch for a transaction, as Kafka before KIP-890 did."""
    with Cluster(transaction_partition_verification_enable="false") as cluster:
        yield cluster


@pytest.fixture
def connection(trusting: Cluster) -> Iterator[Connection]:
    opened = Connection(trusting.bootstrap)
    yield opened
    opened.close()


@pytest.fixture
def kept_trusting(trusting: Cluster) -> Kept:
    return Kept(trusting.bootstrap)


def test_an_id_from_its_transaction_to_the_fence(
    trusting: Cluster, connection: Connection, kept_trusting: Kept
) -> None:
    kept, topic = kept_trusting, trusting.create_topic(partitions=2)
    producer_id = begin(connection, "payments", topic, 1)

    def listed(*more: str) -> Any:
        found = {
            t["transactional_id"]: t for t in kept("transaction", "list", "--json", *more).json
        }
        return found.get("payments")

    assert listed() == {
        "transactional_id": "payments",
        "coordinator": 0,
        "producer_id": producer_id,
        "state": "Ongoing",
    }
    assert listed("--state", "Ongoing") and not listed("--state", "CompleteCommit")
    lines = [line.split() for line in kept("transaction", "list").lines]
    assert ["payments", "0", str(producer_id), "Ongoing"] in lines
    described = kept("transaction", "describe", "payments", "--json").json
    assert (described["state"], described["timeout_ms"]) == ("Ongoing", 60_000)
    assert described["partitions"] == [{"topic": topic, "partition": 1}]
    assert f"Partitions: {topic}:1\n" in kept("transaction", "describe", "payments").out

    fenced = kept("transaction", "fence", "payments").out
    assert fenced == f"fenced payments: producer {producer_id} epoch 2 is the newest\n"
    shown = kept("transaction", "describe", "payments").out
    assert "State: Empty" in shown and "Began: -\n" in shown
    refused = connection.ask(
        END,
        3,
        transactional_id="payments",
        producer_id=producer_id,
        producer_epoch=0,
        committed=True,
    )
    assert refused.error_code is ErrorCode.producer_fenced


@pytest.mark.parametrize("command", ["describe", "fence"])
def test_an_id_that_does_not_exist_is_named(kept_trusting: Kept, command: str) -> None:
    ran = kept_trusting("transaction", command, "nobody", status=1)
    told = "kept: no transactional id nobody; kept transaction list shows those that exist\n"
    assert ran.err == told


def test_an_id_that_is_near_is_named(
    trusting: Cluster, connection: Connection, kept_trusting: Kept
) -> None:
    begin(connection, "orders-out", trusting.create_topic(), 0)
    ran = kept_trusting("transaction", "describe", "orders-aut", status=1)
    assert ran.err == "kept: no transactional id orders-aut; did you mean orders-out?\n"


def test_a_transaction_that_hangs_is_found_and_aborted(
    trusting: Cluster, connection: Connection, kept_trusting: Kept
) -> None:
    kept, topic = kept_trusting, trusting.create_topic(partitions=2)
    known = begin(connection, "known", topic, 1)
    send(connection, topic, known, partition=1)
    send(connection, topic, 555_555)

    def hanging(*more: object) -> Any:
        return kept("transaction", "hanging", "--topic", topic, "--json", *more).json

    assert hanging() == [], "it may be a transaction that has just begun"
    (found,) = hanging("--older-than", 0)
    assert (found["partition"], found["producer_id"], found["start_offset"]) == (0, 555_555, 0)
    table = kept("transaction", "hanging", "--topic", topic, "--older-than", 0).out
    assert "START OFFSET" in table and "555555" in table
    wrong = kept("transaction", "abort", topic, 0, "--start-offset", 7, status=1)
    where = f"no transaction is open in {topic}"
    assert f"{where}:0 since offset 7; open since: 0" in wrong.err
    nowhere = kept("transaction", "abort", f"{topic}:1", "--start-offset", 9, status=1)
    assert f"{where}:1 since offset 9; open since: 0" in nowhere.err
    done = kept("transaction", "abort", f"{topic}:0", "--start-offset", 0).out
    assert done == f"aborted the transaction of producer 555555 in {topic}:0\n"
    assert hanging("--older-than", 0) == []
