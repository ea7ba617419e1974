"""``kept transaction`` against a node: ids and their states, and transactions that hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.storage.records import build_batch
from kept.testing import Cluster
from tests.cli.conftest import Kept
from tests.node.coordinator.groups.wire import FIND, Connection

PRODUCE, FETCH, INIT, ADD, END = 0, 1, 22, 24, 26


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


def begin(connection: Connection, name: str, topic: str, partition: int) -> int:
    """A transactional id with a partition in its transaction; its producer id, in epoch 0."""
    assert connection.ask(FIND, 2, key=name, key_type=1).error_code is ErrorCode.none
    begun = connection.ask(
        INIT, 4, transactional_id=name, transaction_timeout=60_000, producer_id=-1,
        producer_epoch=-1,
    )  # fmt: skip
    added = connection.ask(
        ADD, 3, v3_and_below_transactional_id=name,
        v3_and_below_producer_id=begun.producer_id, v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": topic, "partitions": [partition]}],
    )  # fmt: skip
    (one,) = added.results_by_topic_v3_and_below
    assert one.results_by_partition[0].partition_error_code is ErrorCode.none
    return int(begun.producer_id)


def send(connection: Connection, topic: str, producer_id: int, *, partition: int = 0) -> None:
    """A transactional batch, the first of its producer there."""
    rows = [(time.time_ns() // 1_000_000, b"k", b"v", ())]
    data = build_batch(
        rows, producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    sent = connection.ask(
        PRODUCE, 9, transactional_id="any", acks=-1, timeout=30_000,
        topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": data}]}],
    )  # fmt: skip
    assert sent.responses[0].partition_responses[0].error_code is ErrorCode.none


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
        "transactional_id": "payments", "coordinator": 0, "producer_id": producer_id,
        "state": "Ongoing",
    }  # fmt: skip
    assert listed("--state", "Ongoing") and not listed("--state", "CompleteCommit")
    lines = [line.split() for line in kept("transaction", "list").lines]
    assert ["payments", "0", str(producer_id), "Ongoing"] in lines
    described = kept("transaction", "describe", "payments", "--json").json
    assert (described["state"], described["timeout_ms"]) == ("Ongoing", 60_000)
    assert described["partitions"] == [{"topic": topic, "partition": 1}]
    assert f"Partitions: {topic}-1\n" in kept("transaction", "describe", "payments").out

    fenced = kept("transaction", "fence", "payments").out
    assert fenced == f"fenced payments: producer {producer_id} epoch 2 is the newest\n"
    shown = kept("transaction", "describe", "payments").out
    assert "State: Empty" in shown and "Began: -\n" in shown
    refused = connection.ask(
        END, 3, transactional_id="payments", producer_id=producer_id, producer_epoch=0,
        committed=True,
    )  # fmt: skip
    assert refused.error_code is ErrorCode.producer_fenced


@pytest.mark.parametrize("command", ["describe", "fence"])
def test_an_id_that_does_not_exist_is_named(kept_trusting: Kept, command: str) -> None:
    ran = kept_trusting("transaction", command, "nobody", status=1)
    assert "nobody" in ran.err and "no such transactional id" in ran.err


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
    assert "open since: 0" in wrong.err
    done = kept("transaction", "abort", topic, 0, "--start-offset", 0).out
    assert done == f"aborted the transaction of producer 555555 in {topic}-0\n"
    assert hanging("--older-than", 0) == []
