"""Throughput, sizes and lag of the last hour: what is sampled, kept, and added up over nodes."""

from __future__ import annotations

import asyncio
import random
import uuid
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.client.admin.group_lag import group_lag, partition_lag
from kept.client.admin.groups import commit_offsets
from kept.client.client import Client, OutRecord
from kept.node.admin.history import activity_history, activity_view
from kept.node.admin.history.activity_history import INTERVAL_MS
from kept.node.admin.history.activity_view import ThroughputSample
from kept.node.admin.history.time_series import TimeSeries
from kept.node.admin.peer_http import PeerHttp
from kept.node.coordinator.groups import events as ev
from kept.node.metadata.node_identity import NodeIdentity
from kept.storage.errors import NetworkException
from kept.storage.types import TopicPartition
from tests.support.kafka_connection import Connection
from tests.support.quota_requests import fetch

START_MS = 1_700_000_010_000 // INTERVAL_MS * INTERVAL_MS


@pytest.fixture
def lone(lone_node, monkeypatch):
    """A node whose samples the test takes, at times of its own."""
    lone = lone_node(offsets_topic_num_partitions="1", log_cleaner_enable="false")
    lone.run(lone.node.warmed_up())
    lone.history = lone.node.parts.activity_history
    lone.run(lone.history.sampling.stop())
    lone.history._node_samples = None
    lone.now_ms, lone.clock_was_set_by_ms = START_MS, 0
    lone.history._ahead_ms = 0
    monkeypatch.setattr(activity_history, "elapsed_ms", lambda: lone.now_ms)
    monkeypatch.setattr(
        lone.node.parts.runtime, "now_ms", lambda: lone.now_ms + lone.clock_was_set_by_ms
    )
    return lone


def sample(lone, times=1):
    for _ in range(times):
        lone.run(lone.history.sample())
        lone.now_ms += INTERVAL_MS


def with_client(lone, use):
    def call():
        with Client(f"127.0.0.1:{lone.port}") as client:
            return use(client)

    return lone.run(asyncio.to_thread(call))


def produce(lone, count, topic="t", size=1000, partition=0):
    record = OutRecord(b"k", bytes(size), timestamp=START_MS, partition=partition)
    with_client(lone, lambda client: client.produce(topic, [record] * count))


def test_what_is_appended_is_a_rate(lone):
    lone.create("t", 2, segment_bytes="20000")
    lone.create("idle")
    sample(lone)
    produce(lone, 10)
    sample(lone)
    for _ in range(12):  # rolls segments
        produce(lone, 10, partition=1)
    sample(lone, 2)
    found = lone.get("/api/v1/history/throughput?topic=t")
    samples = found["samples"]
    assert [one["at_ms"] for one in samples] == [START_MS + n * INTERVAL_MS for n in range(4)]
    assert [one["records_in_per_second"] for one in samples] == [0, 0.67, 8, 0]
    log = lone.node.parts.table.replicas[TopicPartition("t", 1)].partition.log
    assert len(log.segments) > 2
    assert samples[2]["bytes_in_per_second"] == round(log.size_bytes / 15, 1)
    first = lone.node.parts.table.replicas[TopicPartition("t", 0)].partition.log
    sizes = [one["size_bytes"] for one in samples]
    assert sizes[1:] == [first.size_bytes, *[first.size_bytes + log.size_bytes] * 2]
    assert {one["bytes_out_per_second"] for one in samples} == {0}
    idle = lone.get("/api/v1/history/throughput?topic=idle")["samples"]
    assert len(idle) == 4 and {one["records_in_per_second"] for one in idle} == {0}
    assert "idle" not in lone.history._topic_samples

    found = lone.get("/api/v1/history/throughput")
    assert (found["topic"], found["nodes"], found["unanswered"]) == (None, [0], [])
    assert [one["records_in_per_second"] for one in found["samples"]] == [0, 0.67, 8, 0]
    lone.get("/api/v1/records?topic=t&partition=0")
    sample(lone)
    last = lone.get("/api/v1/history/throughput")["samples"][-1]
    assert last["bytes_out_per_second"] > 0


def test_what_consumers_are_sent_of_a_topic_is_a_rate(lone):
    """By name and by id, of this topic alone, also where nothing is appended."""
    for name in ("t", "other"):
        lone.create(name)
        produce(lone, 10, topic=name)

    def read_by_name():
        connection = Connection(f"127.0.0.1:{lone.port}")
        try:
            return fetch(connection, "t")
        finally:
            connection.close()

    lone.run(asyncio.to_thread(read_by_name))
    sample(lone)
    lone.run(asyncio.to_thread(read_by_name))
    sample(lone)
    read_by_id = with_client(lone, lambda client: client.fetch({TopicPartition("t", 0): 0}))
    assert [one.error for one in read_by_id] == [None]
    with_client(lone, lambda client: client.fetch({TopicPartition("other", 0): 0}))
    with_client(lone, lambda client: client.fetch({TopicPartition("t", 0): 0}))
    sample(lone, 2)
    log = lone.node.parts.table.replicas[TopicPartition("t", 0)].partition.log
    once = round(log.size_bytes / 15, 1)
    samples = lone.get("/api/v1/history/throughput?topic=t")["samples"]
    assert [one["bytes_out_per_second"] for one in samples] == [
        0,  # what was before the first sample has no interval
        once,
        pytest.approx(2 * once, abs=0.2),
        0,
    ]
    assert {one["bytes_in_per_second"] for one in samples} == {0}
    everything = lone.get("/api/v1/history/throughput")["samples"]
    assert everything[2]["bytes_out_per_second"] == pytest.approx(3 * once, abs=0.3)


def test_a_replica_that_is_read_in_its_rack_counts_without_leading(lone, monkeypatch):
    """What it sends is counted, the size of its log is the leader's to tell."""
    monkeypatch.setattr(activity_history, "SAMPLES", 5)
    lone.create("t")
    produce(lone, 10)
    sample(lone)
    topic = lone.node.parts.table.by_name[b"t"]
    hosted = lone.node.parts.table.replicas
    following = hosted.pop(TopicPartition("t", 0))
    topic.bytes_out += 1500
    sample(lone, 2)
    hosted[TopicPartition("t", 0)] = following
    sample(lone)
    size = following.partition.log.size_bytes
    found = [(one.bytes_out, one.size_bytes) for one in lone.history.of_topic("t")]
    assert found == [(0, 0), (1500, 0), (0, 0), (0, size)]
    sample(lone, 6)
    assert not lone.history._topic_samples, "at rest for as long as samples are kept"


def test_the_size_of_a_topic_is_none_where_another_node_led_at_the_oldest_sample(lone, monkeypatch):
    monkeypatch.setattr(activity_history, "SAMPLES", 5)
    lone.create("t")
    sample(lone)
    produce(lone, 10)
    sample(lone)
    hosted, tp = lone.node.parts.table.replicas, TopicPartition("t", 0)
    led = hosted.pop(tp)
    sample(lone, 3)
    hosted[tp] = led
    produce(lone, 1)
    sample(lone, 2)
    size = led.partition.log.size_bytes
    assert [one.size_bytes for one in lone.history.of_topic("t")] == [0, 0, 0, size, size]


def test_a_log_that_was_cut_or_made_anew_counts_nothing_twice(lone):
    lone.create("t")
    produce(lone, 10)
    sample(lone)
    gone = {"name": "t", "topic_id": None}
    lone.ask(20, 6, topics=[gone], timeout=1000)
    lone.create("t")
    produce(lone, 1)
    sample(lone)
    assert [one.records_in for one in lone.history.of_topic("t")] == [0, 0]
    lone.create("new")  # between two samples
    produce(lone, 3, topic="new")
    sample(lone)
    assert [one.records_in for one in lone.history.of_topic("new")] == [0, 0, 3]
    assert lone.history.of_topic("new")[-1].bytes_in > 3000


def test_what_a_log_had_before_it_was_here_is_no_traffic(lone):
    """As after a reassignment: a log is here that was not at the last sample."""
    lone.create("t")
    sample(lone)
    produce(lone, 10)
    hosted, tp = lone.node.parts.table.replicas, TopicPartition("t", 0)
    elsewhere = hosted.pop(tp)
    sample(lone)
    hosted[tp] = elsewhere
    sample(lone)
    produce(lone, 2)
    sample(lone)
    assert [one.records_in for one in lone.history.of_topic("t")] == [0, 0, 0, 2]
    partitions = [{"name": "t", "count": 2, "assignments": None}]
    lone.ask(37, 3, topics=partitions, timeout=1000, validate_only=False)
    produce(lone, 3, partition=1)
    sample(lone)
    assert lone.history.of_topic("t")[-1].records_in == 3, "that log is new everywhere"


def test_a_clock_that_is_set_neither_ends_samples_nor_leaves_their_times_wrong(lone):
    lone.create("t")
    sample(lone)
    lone.clock_was_set_by_ms = -3_600_000
    produce(lone, 1)
    sample(lone, 2)
    samples = lone.history.of_topic("t")
    assert [one.records_in for one in samples] == [0, 1, 0]
    begin = START_MS - 3_600_000
    assert [one.at_ms for one in samples] == [begin + n * INTERVAL_MS for n in range(3)]
    lone.clock_was_set_by_ms = 2_000
    assert lone.history.of_node()[0].at_ms == START_MS, "samples of several nodes meet"


def test_an_hour_is_kept_and_a_pause_is_a_gap(lone, monkeypatch):
    monkeypatch.setattr(activity_history, "SAMPLES", 5)
    lone.create("t")
    sample(lone)
    produce(lone, 1)
    sample(lone, 2)
    lone.now_ms += 2 * INTERVAL_MS  # it stood still
    sample(lone)
    times = [one.at_ms for one in lone.history.of_node()]
    assert times == [START_MS + n * INTERVAL_MS for n in (1, 2, 5)]
    sample(lone, 6)
    assert len(lone.history.of_node()) == 5 and not lone.history._topic_samples
    lone.now_ms -= INTERVAL_MS  # twice in one interval
    sample(lone)
    assert len(lone.history.of_node()) == 5


def test_it_has_room_for_so_many_topics(lone, monkeypatch):
    monkeypatch.setattr(activity_history, "TOPICS", 2)
    names = ["a", "b", "c"]
    for name in names:
        lone.create(name)
    sample(lone)
    for name in names:
        produce(lone, 1, topic=name)
    sample(lone)
    assert len(lone.history._topic_samples) == 2
    assert len(lone.history.of_node()) == 2


def test_lag_of_groups(lone, monkeypatch):
    monkeypatch.setattr(activity_history, "SAMPLES", 4)
    lone.create("t", 2)
    produce(lone, 10)
    sample(lone)
    tps = {TopicPartition("t", 0): 4, TopicPartition("t", 1): 0}
    with_client(lone, lambda client: client.run(commit_offsets("g", tps)))
    sample(lone)
    produce(lone, 5, partition=1)
    sample(lone)
    found = lone.get("/api/v1/history/lag?group=g")
    at = [START_MS + n * INTERVAL_MS for n in (1, 2)]
    assert found["samples"] == [
        {"at_ms": at[0], "lag": 6, "partitions_unknown": 0},
        {"at_ms": at[1], "lag": 11, "partitions_unknown": 0},
    ]
    (listed,) = lone.get("/api/v1/groups")["groups"]
    (of_topic,) = lone.get("/api/v1/topics/t/groups")["groups"]
    one = lone.get("/api/v1/groups/g")
    status, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200 and b'kept_group_lag{group="g",topic="t"} 11.0' in body
    assert listed["lag"] == of_topic["lag"] == one["lag"] == 11, "one number everywhere"
    # The topic goes: nobody knows its ends.
    lone.ask(20, 6, topics=[{"name": "t", "topic_id": None}], timeout=1000)
    sample(lone, 5)
    assert lone.history.of_group("g") == []
    assert lone.get("/api/v1/history/lag?group=none")["samples"] == []


def test_offsets_of_a_topic_that_had_the_name_before_tell_no_lag(lone):
    lone.create("t")
    produce(lone, 10)
    with_client(lone, lambda client: client.run(commit_offsets("g", {TopicPartition("t", 0): 4})))
    before = ev.CommitTopic("t", uuid.UUID(int=99), (ev.CommitPartition(0, 1),))

    async def commit() -> None:
        shards = lone.node.parts.groups.shards
        await shards.submit("old", lambda n: ev.CommitOffsets(n, "old", (before,)))

    lone.run(commit())
    sample(lone)
    assert [one.lag for one in lone.history.of_group("g")] == [6]
    assert lone.history.of_group("old") == []
    _, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b'kept_group_lag{group="g"' in body and b'kept_group_lag{group="old"' not in body


def test_groups_are_sampled_whole_or_not_at_all(lone, monkeypatch):
    lone.create("t", 3)
    produce(lone, 10)
    every = {TopicPartition("t", n): 0 for n in range(3)}
    for group in ("a", "b"):
        with_client(lone, lambda client, group=group: client.run(commit_offsets(group, every)))
    one = {TopicPartition("t", 0): 8}
    with_client(lone, lambda client: client.run(commit_offsets("c", one)))
    monkeypatch.setattr(activity_history, "COMMITS", 5)
    sample(lone)
    lags = [[one.lag for one in lone.history.of_group(group)] for group in ("a", "b", "c")]
    assert lags == [[10], [], [2]]
    assert lone.get("/api/v1/history/lag?group=a")["groups_left_out"] == 1
    monkeypatch.setattr(activity_history, "COMMITS", 7)
    monkeypatch.setattr(activity_history, "GROUPS", 2)
    sample(lone)
    assert lone.history.groups_left_out == 1 and not lone.history.of_group("b")
    monkeypatch.setattr(activity_history, "GROUPS", 3)
    sample(lone)
    assert [one.lag for one in lone.history.of_group("b")] == [10]
    assert lone.history.groups_left_out == 0


def test_ends_of_other_leaders_are_asked_for(lone):
    """And are unknown where these do not answer."""
    lone.create("t")
    produce(lone, 10)
    tp = TopicPartition("t", 0)
    with_client(lone, lambda client: client.run(commit_offsets("g", {tp: 4})))
    lone.history._identity = NodeIdentity(9)  # no replica of the partition is its own
    sample(lone)

    async def refuse(_):
        raise NetworkException("a test")

    lone.history._ends = refuse
    sample(lone)
    lags = [(one.lag, one.partitions_unknown) for one in lone.history.of_group("g")]
    assert lags == [(6, 0), (None, 1)]


def test_who_leads_what_is_not_open_does_not_ask_itself(lone):
    lone.create("t")
    produce(lone, 10)
    tp = TopicPartition("t", 0)
    with_client(lone, lambda client: client.run(commit_offsets("g", {tp: 4})))
    asked = []

    async def ask(tps):
        asked.append(tps)
        return {}

    lone.history._ends = ask
    hosted = lone.history._table.partitions
    gone = hosted.pop(tp)
    sample(lone)
    hosted[tp] = gone
    assert [one.partitions_unknown for one in lone.history.of_group("g")] == [1]
    assert asked == []


def test_samples_of_other_nodes_are_added_up(lone, monkeypatch):
    sample(lone, 3)
    view = lone.node.parts.admin.activity
    brokers = dict(lone.node.parts.metadata.image.brokers)
    template = next(iter(brokers.values()))
    elsewhere = [
        {
            "at_ms": START_MS + n * INTERVAL_MS,
            "bytes_in_per_second": 2.0,
            "records_in_per_second": 1.0,
            "bytes_out_per_second": 0.5,
            "size_bytes": 10,
        }
        for n in (1, 2)
    ]

    async def get(_self, node, path, query, _timeout_s):
        assert (path, query) == ("/api/v1/history/throughput", {})
        if node == 8:
            raise NetworkException("it is away")
        return {"samples": elsewhere}

    monkeypatch.setattr(PeerHttp, "get", get)
    image = lone.node.parts.metadata.image
    monkeypatch.setattr(type(image), "brokers", {**brokers, 7: template, 8: template})
    found = lone.run(view.throughput(None, here=False))
    own = found.samples[0].size_bytes
    assert [one.bytes_in_per_second for one in found.samples] == [0, 2.0, 2.0]
    assert [one.size_bytes for one in found.samples] == [own, own + 10, own + 10]
    assert found.nodes == [0, 7] and [one.node for one in found.unanswered] == [8]
    assert lone.run(view.throughput(None, here=True)).nodes == [0]


@pytest.mark.slow
def test_a_rest_costs_little(lone):
    """A thousand partitions at rest: far below 0.1 % of a core, which is 15 ms a sample."""
    for n in range(10):
        lone.create(f"t{n}", 100)
    sample(lone, 3)
    began = process_time()
    sample(lone, 20)
    assert (process_time() - began) / 20 < 0.008


# The definition of lag, and time series.


@given(st.lists(st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 50))))
def test_lag_is_defined_once(partitions):
    lags = [partition_lag(*one) for one in partitions]
    found = group_lag(lags)
    known = [max(0, end - at) for at, end in partitions if at is not None and end is not None]
    assert found.lag == (sum(known) if known else None)
    assert found.partitions_unknown == len(partitions) - len(known)


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 8))
def test_a_time_series_is_the_last_samples(steps, most):
    rng, model, number = random.Random(1), {}, 5
    series = TimeSeries(number, "dq", -1)
    for step in steps:
        values = (rng.randrange(100), rng.randrange(100))
        series.add(number, values, most)
        model[number] = values
        model = {n: v for n, v in model.items() if n > number - most}
        number += step
        assert dict(series.items()) == model and len(series) <= most


def sampled(*size_bytes: int, first: int = 0) -> list[ThroughputSample]:
    """Samples of one node from the interval ``first`` on."""
    return [
        ThroughputSample((first + number) * INTERVAL_MS, 0, 0, 0, size)
        for number, size in enumerate(size_bytes)
    ]


def test_a_sample_that_a_node_has_still_to_take_is_not_added_up():
    late, ahead = sampled(1, 1), sampled(10, 10, 10)
    assert activity_view._added_up([late, ahead]) == sampled(11, 11)
    assert activity_view._added_up([late + sampled(1, first=2), ahead]) == sampled(11, 11, 11)
    # Who led until an hour ago, or never, has none to come.
    assert activity_view._added_up([sampled(1), ahead, []]) == sampled(11, 10, 10)
    assert activity_view._added_up([[], []]) == []
