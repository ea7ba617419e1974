"""Transactional requests by hand, as an old client sends them."""

from __future__ import annotations

import time
from typing import Final

from kio.schema.errors import ErrorCode

from kept.storage.records import build_batch
from tests.support.kafka_connection import FIND, Connection
from tests.support.request_values import produce_values

PRODUCE: Final = 0
INIT: Final = 22
ADD: Final = 24


def begin(connection: Connection, name: str, topic: str, partition: int) -> int:
    """A transactional id with a partition in its transaction; its producer id, in epoch 0."""
    assert connection.ask(FIND, 2, key=name, key_type=1).error_code is ErrorCode.none
    begun = connection.ask(
        INIT,
        4,
        transactional_id=name,
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    added = connection.ask(
        ADD,
        3,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=begun.producer_id,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": topic, "partitions": [partition]}],
    )
    (one,) = added.results_by_topic_v3_and_below
    assert one.results_by_partition[0].partition_error_code is ErrorCode.none
    return int(begun.producer_id)


def send(
    connection: Connection,
    topic: str,
    producer_id: int,
    *,
    partition: int = 0,
    timestamp_ms: int | None = None,
) -> None:
    """A transactional batch, the first of its producer there."""
    now_ms = time.time_ns() // 1_000_000
    rows = [(now_ms if timestamp_ms is None else timestamp_ms, b"k", b"v", ())]
    data = build_batch(
        rows, producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    values = produce_values(topic, data, partition=partition, transactional_id="any", acks=-1)
    sent = connection.ask(PRODUCE, 9, **values)
    assert sent.responses[0].partition_responses[0].error_code is ErrorCode.none
