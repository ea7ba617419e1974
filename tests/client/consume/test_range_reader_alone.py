"""A range of a partition, against a client that says what it is told to: no node is needed."""

from __future__ import annotations

import uuid

import pytest

from kept.client.consume import range_reader
from kept.client.consume.fetch import Fetched, FetchLimits
from kept.client.consume.leader_offsets import OffsetAt
from kept.client.consume.positions import EARLIEST
from kept.client.consume.range_reader import OffsetsLost, RangeReader
from kept.client.core.metadata import PartitionMetadata, TopicMetadata
from kept.storage.errors import RequestTimedOut
from kept.storage.records import build_batch, headers
from kept.storage.types import IsolationLevel, TopicPartition
from tests.support.fake_client import FakeClient

TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=1)


class OpenTransaction(FakeClient):
    """A log of ten batches; from offset 6 on a transaction is open. It grows with every fetch."""

    leader_epoch = 3

    def __init__(self) -> None:
        super().__init__()
        self.batches = [
            build_batch([(1, b"k", b"v", ())], base_offset=offset) for offset in range(10)
        ]
        self.fetches = 0

    def topic(self, name: str) -> TopicMetadata:
        partition = PartitionMetadata(0, 0, self.leader_epoch, (0,), (0,))
        return TopicMetadata(name, TOPIC_ID, False, {0: partition})

    def list_offsets(self, asked, isolation=IsolationLevel.READ_UNCOMMITTED):
        committed = isolation is IsolationLevel.READ_COMMITTED
        end = 6 if committed else 10
        return {tp: OffsetAt(0 if at == EARLIEST else end, -1, -1) for tp, at in asked.items()}

    def fetch_partition(self, tp, offset, limits, timeout_ms, *, node=None):
        self.fetches += 1
        end = 6 if limits.isolation is IsolationLevel.READ_COMMITTED else 10
        there = b"".join(self.batches[offset:end][:2])
        return Fetched(tp, None, there, 10, 6, 0, ())


def read(isolation: IsolationLevel) -> tuple[list[int], int]:
    client = OpenTransaction()
    limits = FetchLimits(isolation=isolation)
    one = RangeReader(
        client, TP, 0, 1, limits, timeout_ms=60_000, topic_id=TOPIC_ID, until_caught_up=True
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


class KnowsNothingYet(OpenTransaction):
    """A new leader whose high watermark is behind, and who says so at once (fetch.max.wait=1)."""

    def fetch_partition(self, tp, offset, limits, timeout_ms, *, node=None):
        self.fetches += 1
        return Fetched(tp, None, b"", 0, 0, 0, ())


class Clock:
    """Time passes where somebody sleeps, and a millisecond when somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_who_has_nothing_yet_is_not_asked_without_a_pause(monkeypatch):
    monkeypatch.setattr(range_reader, "time", Clock())
    client = KnowsNothingYet()
    one = RangeReader(client, TP, 0, 10, FetchLimits(), timeout_ms=300, topic_id=TOPIC_ID)
    with pytest.raises(RequestTimedOut, match="no batch within"):
        next(one.chunks())
    assert 3 < client.fetches < 10


class CutBack(OpenTransaction):
    """After the second fetch a leader is elected whose log was cut back to ``cut``, and has grown
    to its old length again.
    """

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = cut
        self.asked: list[int] = []

    def fetch_partition(self, tp, offset, limits, timeout_ms, *, node=None):
        if self.fetches == 2:
            self.leader_epoch = 5
            self.batches[self.cut :] = [
                build_batch([(1, b"k", b"new", ())], base_offset=offset)
                for offset in range(self.cut, 10)
            ]
        return super().fetch_partition(tp, offset, limits, timeout_ms, node=node)

    def epoch_ends(self, asked):
        self.asked += asked.values()
        return dict.fromkeys(asked, self.cut)


def follow(client: CutBack, start: int = 0, *, fails: bool = True) -> tuple[list[int], list[str]]:
    limits = FetchLimits()
    one = RangeReader(client, TP, start, 10, limits, timeout_ms=60_000, fail_on_data_loss=fails)
    found = []
    for chunk in one.chunks():
        for _, header in headers(chunk.records):
            found.append(header.base_offset)
            one.position = header.next_offset
    return found, one.lost


def test_a_log_that_was_cut_back_below_the_reader_is_a_loss_though_it_has_grown_again():
    why = "t:0: offsets 2 to 3 are lost: a leader without them was elected, and has others from off"
    with pytest.raises(OffsetsLost, match=why):
        follow(CutBack(2))
    found, lost = follow(CutBack(2), fails=False)
    assert found == [0, 1, 2, 3, *range(2, 10)] and [one[: len(why)] for one in lost] == [why]
    found, lost = follow(CutBack(2), start=3, fails=False)
    assert found == [3, 4, 5, 6, *range(3, 10)] and "offsets 3 to 6 are lost" in lost[0]


@pytest.mark.parametrize("cut", [4, 7])
def test_a_leader_that_has_what_was_read_is_asked_once_and_read_on(cut):
    client = CutBack(cut)
    assert follow(client) == ([*range(10)], [])
    assert client.asked == [3]
