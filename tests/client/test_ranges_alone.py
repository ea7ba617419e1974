"""A range of a partition, against a client that says what it is told to: no node is needed."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

from kept.client.ranges import RangeReader
from kept.client.records import EARLIEST, FetchLimits
from kept.storage.records import build_batch, headers
from kept.storage.types import IsolationLevel, TopicPartition

TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=1)


class OpenTransaction:
    """A log of ten batches; from offset 6 on a transaction is open. It grows with every fetch."""

    def __init__(self) -> None:
        self.batches = [
            build_batch([(1, b"k", b"v", ())], base_offset=offset) for offset in range(10)
        ]
        self.fetches = 0
        self.view = SimpleNamespace(forget=lambda tp: None)

    def topic(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(topic_id=TOPIC_ID)

    def list_offsets(self, asked, isolation=IsolationLevel.READ_UNCOMMITTED):
        committed = isolation is IsolationLevel.READ_COMMITTED
        end = 6 if committed else 10
        return {
            tp: SimpleNamespace(offset=0 if at == EARLIEST else end) for tp, at in asked.items()
        }

    def fetch_partition(self, tp, offset, limits, timeout_ms, *, node=None):
        self.fetches += 1
        end = 6 if limits.isolation is IsolationLevel.READ_COMMITTED else 10
        there = b"".join(self.batches[offset:end][:2])
        return SimpleNamespace(records=there, aborted=(), high_watermark=10, last_stable_offset=6)


def read(isolation: IsolationLevel) -> tuple[list[int], int]:
    client = OpenTransaction()
    limits = FetchLimits(isolation=isolation)
    one = RangeReader(
        client, TP, 0, 1, limits, timeout_ms=200, topic_id=TOPIC_ID, until_caught_up=True
    )
    found = []
    for chunk in one.chunks():
        for _, header in headers(chunk.records):
            found.append(header.base_offset)
            one.position = header.next_offset
    return found, client.fetches


def test_who_reads_what_is_committed_has_caught_up_where_a_transaction_is_open():
    """Beyond it nothing comes until the transaction ends, which may take its timeout."""
    assert read(IsolationLevel.READ_COMMITTED) == ([0, 1, 2, 3, 4, 5], 3)
    assert read(IsolationLevel.READ_UNCOMMITTED) == ([*range(10)], 5)
