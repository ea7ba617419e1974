"""Consumers against a client that says what it is told to: no node is needed."""

from __future__ import annotations

from typing import Any

import pytest

from kept.client.admin.groups import NotAMember
from kept.client.consume import consumer as module
from kept.client.consume.consumer import Consumer, GroupConsumer
from kept.client.consume.fetch import Fetched, FetchLimits, fetch
from kept.client.consume.leader_offsets import OffsetAt
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import BrokerError, NoResponse
from kept.client.core.metadata import ClusterMetadata, Endpoint, PartitionMetadata, TopicMetadata
from kept.storage.errors import KeptError, OffsetOutOfRange
from kept.storage.records import build_batch
from kept.storage.types import IsolationLevel, TopicPartition
from tests.support.fake_client import FakeClient

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
HIGH_WATERMARK, LAST_STABLE = 10, 6


def batch(tp: TopicPartition, *offsets: int, error: KeptError | None = None) -> Fetched:
    """What a Fetch brings of a partition: a batch with a record for each offset."""
    records = b"".join(build_batch([(1, b"k", b"v", ())], base_offset=at) for at in offsets)
    return Fetched(tp, error, records, HIGH_WATERMARK, LAST_STABLE, 0, ())


class Answers(FakeClient):
    """Fetches are answered with these, one after the other; an exception is raised."""

    def __init__(self, *answers: list[Fetched] | BaseException) -> None:
        super().__init__()
        self.answers = list(answers)
        self.committed_offsets: list[dict[TopicPartition, int]] = []
        self.refuse: BaseException | None = None

    def fetch(self, positions, limits=None, silent_ms=0):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def list_offsets(self, asked, isolation=IsolationLevel.READ_UNCOMMITTED):
        committed = isolation is IsolationLevel.READ_COMMITTED
        end = LAST_STABLE if committed else HIGH_WATERMARK
        return {tp: OffsetAt(2 if at == EARLIEST else end, -1, -1) for tp, at in asked.items()}

    def commit(self, group, offsets, member_id="", generation=-1):
        if self.refuse is not None:
            raise self.refuse
        self.committed_offsets.append(dict(offsets))

    def call(self, call):
        raise KeptError("the group leaves unheard")


def offsets(records: list[Any]) -> list[tuple[int, int]]:
    return [(r.partition, r.offset) for r in records]


def member(client: Answers, **positions: int) -> GroupConsumer:
    """One that has joined, and was given the partitions at these positions."""
    joined = GroupConsumer(client, "g", ["t"])
    joined.member_id, joined.generation = "m", 1
    joined.consumer.positions = {A: positions["a"], B: positions["b"]}
    joined._committed = dict(joined.consumer.positions)
    joined._next_heartbeat = float("inf")
    return joined


def test_what_came_is_returned_before_the_error_of_another_partition():
    refused = batch(B, error=BrokerError("no"))
    consumer = Consumer(Answers([batch(A, 3, 4), refused], [batch(A, 5)]), {A: 3, B: 0})
    assert offsets(consumer.poll()) == [(0, 3), (0, 4)]
    assert consumer.positions == {A: 5, B: 0}
    with pytest.raises(BrokerError, match="no"):
        consumer.poll()
    assert offsets(consumer.poll()) == [(0, 5)]


@pytest.mark.parametrize("why", [KeyboardInterrupt(), KeptError("damaged")])
def test_what_a_poll_did_not_return_is_not_passed_over(monkeypatch, why):
    """Whoever is interrupted while it decodes has got nothing, and a group must not commit it."""
    client = Answers([batch(A, 3), batch(B, 0)], [batch(A, 3), batch(B, 0)])
    reader = member(client, a=3, b=0)
    real, count = module.records, iter(range(2))

    def interrupted(view):
        if next(count, 2) == 1:
            raise why
        return real(view)

    monkeypatch.setattr(module, "records", interrupted)
    with pytest.raises(type(why)):
        reader.poll()
    assert reader.consumer.positions == {A: 3, B: 0}
    assert offsets(reader.poll()) == [(0, 3), (1, 0)]


def test_the_end_is_that_of_the_isolation_level():
    committed = FetchLimits(isolation=IsolationLevel.READ_COMMITTED)
    consumer = Consumer(Answers([]), {A: LATEST}, committed)
    consumer.poll()
    assert consumer.positions == {A: LAST_STABLE}


@pytest.mark.parametrize(
    ("reset", "position", "goes_on"), [(EARLIEST, 1, 2), (EARLIEST, 99, 10), (LATEST, 1, 10)]
)
def test_an_offset_that_is_not_there_goes_on_where_it_was_asked_to(reset, position, goes_on):
    missing = batch(A, error=OffsetOutOfRange("gone"))
    consumer = Consumer(Answers([missing]), {A: position}, reset=reset)
    assert consumer.poll() == []
    assert consumer.positions == {A: goes_on}


class Led(Answers):
    """Its leaders are asked for anew whenever a topic was forgotten. ``asked``: of each Fetch."""

    def __init__(self, *answers: list[Fetched]) -> None:
        super().__init__(*answers)
        self.led = {n: PartitionMetadata(n, 0, 1, (0, 1), (0, 1)) for n in (0, 1)}
        self.asked: list[list[TopicPartition]] = []
        self.view.nodes = {n: Endpoint("node", n) for n in (0, 1)}

    def metadata(self, topics=None, *, auto_create=False):
        self.view.topics["t"] = TopicMetadata("t", None, False, dict(self.led))
        return self.view

    def fetch(self, positions, limits=None, silent_ms=0):
        self.metadata()
        self.asked.append(sorted(positions))
        return super().fetch(positions, limits, silent_ms)


def test_a_silent_leader_is_left_out_until_its_time_comes_or_another_leads(monkeypatch):
    """So its silence costs one poll, and not each."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    silent = batch(B, error=NoResponse("silent"))
    client = Led(
        [batch(A, 0), silent],
        [batch(A, 1)],
        [batch(A, 2), silent],
        [batch(A, 3), batch(B, 0)],
        [batch(A, 4), batch(B, 1)],
    )
    consumer = Consumer(client, {A: 0, B: 0})
    assert offsets(consumer.poll()) == [(0, 0)]
    assert offsets(consumer.poll()) == [(0, 1)]
    clock[0] = module.LEFT_OUT_S
    assert offsets(consumer.poll()) == [(0, 2)]
    client.led[1] = PartitionMetadata(1, 1, 2, (0, 1), (0, 1))
    assert offsets(consumer.poll()) == [(0, 3), (1, 0)]
    assert offsets(consumer.poll()) == [(0, 4), (1, 1)]
    assert client.asked == [[A, B], [A], [A, B], [A, B], [A, B]]


def test_what_is_passed_over_stays_so_though_another_partition_is_refused():
    """Markers and aborted batches bring no records, and must not be fetched for ever."""
    marker = build_batch([(1, b"k", b"v", ())], base_offset=3, is_control=True)
    only = Fetched(A, None, marker, HIGH_WATERMARK, LAST_STABLE, 0, ())
    consumer = Consumer(Answers([only, batch(B, error=BrokerError("no"))]), {A: LATEST, B: 0})
    consumer.positions[A] = 3
    with pytest.raises(BrokerError, match="no"):
        consumer.poll()
    assert consumer.positions == {A: 4, B: 0}


def test_a_position_that_is_in_the_log_again_is_kept():
    consumer = Consumer(Answers([batch(A, error=OffsetOutOfRange("was cut"))]), {A: 7})
    assert consumer.poll() == []
    assert consumer.positions == {A: 7}


def test_what_was_read_is_given_before_waiting_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "LEADERLESS_DEADLINE_S", -1.0)
    given = Consumer(Answers([batch(A, 0)]), {A: 0, B: 0}).batches_until({A: 2, B: 2})
    assert offsets(next(given)) == [(0, 0)]
    with pytest.raises(KeptError, match="t:1"):
        next(given)


def test_each_leader_is_asked_for_itself():
    """One that is not there costs the answers of no other one."""
    led = {n: PartitionMetadata(n, n, 1, (0, 1), (0, 1)) for n in (0, 1)}
    view = ClusterMetadata(
        {n: Endpoint("node", n) for n in (0, 1)}, topics={"t": TopicMetadata("t", None, False, led)}
    )
    operation = fetch(view, {A: 0, B: 0}, FetchLimits(max_wait_ms=100), 3_000)
    calls = next(operation)
    assert [(c.optional, c.patient, c.timeout_ms) for c in calls] == [(True, False, 3_100)] * 2
    gone = NoResponse("gone")
    with pytest.raises(StopIteration) as end:
        operation.send([gone, gone])
    assert [(one.topic_partition, one.error) for one in end.value.value] == [(A, gone), (B, gone)]


def test_nothing_to_read_takes_the_time_that_was_given(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    consumer = Consumer(Answers(), {})
    for max_wait_ms in (0, 20, None):
        assert consumer.poll(max_wait_ms) == []
    assert slept == [0, 0.02, 0.5]


def test_a_commit_that_is_refused_for_another_reason_is_raised_and_the_member_stays():
    client = Answers([batch(A, 3)], [batch(A, 4)])
    reader = member(client, a=3, b=0)
    reader.poll()
    client.refuse = BrokerError("INVALID_COMMIT_OFFSET_SIZE")
    with pytest.raises(BrokerError, match="SIZE"):
        reader.poll()
    assert reader.generation == 1
    client.refuse = None
    reader.poll()
    assert client.committed_offsets == [{A: 4}]


def test_a_member_that_was_removed_before_its_last_poll_says_so_at_the_end():
    client = Answers([batch(A, 3)])
    reader = member(client, a=3, b=0)
    reader.poll()
    client.refuse = NotAMember("rebalance")
    assert reader.poll() == []
    assert reader.generation == -1
    with pytest.raises(NotAMember, match="rebalance"):
        reader.close()


def _left(reader: GroupConsumer) -> bool:
    return (reader.member_id, reader.generation) == ("", -1)


def test_a_block_commits_at_its_end_and_not_where_an_error_leaves_it():
    client = Answers([batch(A, 3)], [batch(A, 3)])
    with member(client, a=3, b=0) as reader:
        reader.poll()
    assert client.committed_offsets == [{A: 4}]
    assert _left(reader)
    with pytest.raises(ZeroDivisionError), member(client, a=3, b=0) as reader:
        reader.poll()
        raise ZeroDivisionError
    assert len(client.committed_offsets) == 1
    assert _left(reader)


def test_whoever_cannot_commit_leaves_the_group_all_the_same():
    client = Answers([batch(A, 3)])
    reader = member(client, a=3, b=0)
    reader.poll()
    client.refuse = NoResponse("the coordinator is away")
    with pytest.raises(NoResponse):
        reader.close()
    assert _left(reader)


class Grows(Answers):
    """A topic that has more partitions each time."""

    def __init__(self) -> None:
        super().__init__([], [], [])
        self.count = 2

    def metadata(self, topics=None, *, auto_create=False):
        partitions = {n: PartitionMetadata(n, 0, 1, (0,), (0,)) for n in range(self.count)}
        return ClusterMetadata(topics={"t": TopicMetadata("t", None, False, partitions)})


def test_the_leader_of_a_group_shares_anew_when_a_topic_has_grown():
    client = Grows()
    reader = member(client, a=0, b=0)
    reader._shared = {"t": 2}
    reader.poll()
    assert reader.generation == 1
    client.count, reader._next_count = 3, 0.0
    reader.poll()
    assert reader.generation == -1


def test_who_may_not_join_a_group_is_told_which():
    reader = member(Answers(), a=0, b=0)
    reader.group = "app: eu"
    with pytest.raises(NotAuthorized, match=r" read group:app: eu\)$"):
        reader._judge(30, "JoinGroup")
