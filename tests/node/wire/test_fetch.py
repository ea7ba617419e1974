"""Fetch: limits, waiting, sessions (KIP-227), offsets, epochs, topic ids."""

from __future__ import annotations

import time
import urllib.request
import uuid

import pytest

from kept.storage.records import records
from tests.support.request_values import fetch_values, now_ms, one_batch


def filled(broker, wire, count=10, **config):
    topic = broker.create_topic(config=config)
    for _ in range(count):
        wire.produce(topic, one_batch(1, 100))
    return topic


@pytest.mark.parametrize("version", range(4, 19))
def test_every_version(wire, kept_broker, version):
    topic = filled(kept_broker, wire, 3)
    topic_id = wire.ask(3, 12, topics=[{"name": topic, "topic_id": None}]).topics[0].topic_id
    found = wire.fetch(topic, 1, version=version, topic_id=topic_id)
    assert int(found.error_code) == 0
    assert [r.offset for r in records(bytes(found.records))] == [1, 2]
    assert found.high_watermark == 3


def test_records_that_a_consumer_took_are_counted_when_it_goes_on(wire, kept_broker):
    def taken():
        with urllib.request.urlopen(f"{kept_broker.url()}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(x.split()[1]) for x in lines if x.startswith("kept_records_out_total "))

    topic = filled(kept_broker, wire, 3)
    before = taken()
    for offset, counted in ((1, 0), (3, 2), (3, 2), (0, 2), (2, 4)):
        wire.fetch(topic, offset, max_wait_ms=0)
        assert taken() - before == counted, offset


def test_limits_cut_at_batches_and_the_first_always_comes(wire, kept_broker):
    topic = filled(kept_broker, wire)
    size = len(one_batch(1, 100))
    for limit, count in ((0, 1), (1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (10**6, 10)):
        found = wire.fetch(topic, 0, partition_max_bytes=limit)
        assert len(list(records(bytes(found.records)))) == count, limit
        found = wire.fetch(topic, 0, max_bytes=limit)
        assert len(list(records(bytes(found.records)))) == count, limit


def test_the_whole_response_keeps_to_max_bytes(wire, kept_broker):
    topic = kept_broker.create_topic(partitions=3)
    for partition in range(3):
        for _ in range(3):
            wire.produce(topic, one_batch(1, 100), partition=partition)
    size = len(one_batch(1, 100))
    values = fetch_values(topic, 0, max_bytes=4 * size + 10)
    one = values["topics"][0]["partitions"][0]
    values["topics"][0]["partitions"] = [{**one, "partition": i} for i in range(3)]
    response = wire.ask(1, 11, **values)
    counts = [len(bytes(p.records)) // size for p in response.responses[0].partitions]
    assert counts == [3, 1, 0]


def test_waiting(wire, kept_broker, connect):
    topic = kept_broker.create_topic()
    started = time.monotonic()
    found = wire.fetch(topic, 0, max_wait=300)
    assert time.monotonic() - started >= 0.29
    assert (int(found.error_code), bytes(found.records)) == (0, b"")
    size = len(one_batch(1, 100))
    sent = wire.send(1, 11, **fetch_values(topic, 0, max_wait=200_000, min_bytes=3 * size))
    other = connect(kept_broker.port())
    for _ in range(3):
        other.produce(topic, one_batch(1, 100))
    correlation_id, response = wire.response(1, 11)
    assert correlation_id == sent
    assert len(bytes(response.responses[0].partitions[0].records)) == 3 * size


def test_an_error_does_not_wait(wire, kept_broker):
    topic = kept_broker.create_topic()
    assert int(wire.fetch("nobody-made-it", 0, max_wait=200_000).error_code) == 3
    assert int(wire.fetch(topic, 0, partition=4, max_wait=200_000).error_code) == 3
    assert int(wire.fetch(topic, 1, max_wait=200_000).error_code) == 1
    assert int(wire.fetch(topic, -1, max_wait=200_000).error_code) == 1
    found = wire.fetch("", 0, version=13, topic_id=uuid.uuid4(), max_wait=200_000)
    assert int(found.error_code) == 100


def test_a_parked_fetch_hears_of_deletion(wire, kept_broker, connect):
    topic = kept_broker.create_topic()
    wire.send(1, 11, **fetch_values(topic, 0, max_wait=200_000))
    other = connect(kept_broker.port())
    other.ask(20, 3, topic_names=(topic,), timeout=5000)
    _, response = wire.response(1, 11)
    assert int(response.responses[0].partitions[0].error_code) in (3, 6)


def test_leader_epochs(wire, kept_broker):
    topic = filled(kept_broker, wire, 1)
    assert int(wire.fetch(topic, 0, current_leader_epoch=0).error_code) == 0
    assert int(wire.fetch(topic, 0, current_leader_epoch=7).error_code) == 75
    values = {"replica_id": -1}
    partition = {"partition": 0, "current_leader_epoch": 0, "leader_epoch": 0}
    topics = [{"topic": topic, "partitions": [partition]}]
    response = wire.ask(23, 4, topics=topics, **values)
    (found,) = response.topics[0].partitions
    assert (int(found.error_code), found.leader_epoch, found.end_offset) == (0, 0, 1)
    partition["current_leader_epoch"] = 9
    (found,) = wire.ask(23, 4, topics=topics, **values).topics[0].partitions
    assert int(found.error_code) == 75


# Sessions.


def session_values(offsets, session_id, epoch, forgotten=()):
    values = fetch_values("", 0)
    one = values["topics"][0]["partitions"][0]
    values["topics"] = [
        {"topic": topic, "topic_id": None, "partitions": [{**one, "fetch_offset": offset}]}
        for topic, offset in offsets.items()
    ]
    values["forgotten_topics_data"] = [
        {"topic": topic, "topic_id": None, "partitions": (0,)} for topic in forgotten
    ]
    return {**values, "session_id": session_id, "session_epoch": epoch}


def names(response):
    return [topic.topic for topic in response.responses]


def test_a_session_sends_only_news(wire, kept_broker):
    a, b, c = (filled(kept_broker, wire, 1) for _ in range(3))
    first = wire.ask(1, 11, **session_values({a: 1, b: 1, c: 0}, 0, 0))
    assert (int(first.error_code), names(first)) == (0, [a, b, c])
    assert first.session_id > 0
    session = first.session_id

    quiet = wire.ask(1, 11, **session_values({c: 1}, session, 1))
    assert (int(quiet.error_code), names(quiet), quiet.session_id) == (0, [], session)

    wire.produce(b, one_batch(1))
    news = wire.ask(1, 11, **session_values({}, session, 2))
    assert names(news) == [b]

    wire.produce(a, one_batch(1))
    news = wire.ask(1, 11, **session_values({b: 2}, session, 3, forgotten=[a]))
    assert names(news) == []

    wrong = wire.ask(1, 11, **session_values({}, session, 9))
    assert (int(wrong.error_code), wrong.responses) == (71, ())
    unknown = wire.ask(1, 11, **session_values({}, session + 1, 4))
    assert int(unknown.error_code) == 70
    closed = wire.ask(1, 11, **session_values({b: 0}, session, -1))
    assert (int(closed.error_code), closed.session_id, names(closed)) == (0, 0, [b])
    assert int(wire.ask(1, 11, **session_values({}, session, 4)).error_code) == 70


def test_a_session_of_names_does_not_go_on_with_ids(wire, kept_broker):
    topic = filled(kept_broker, wire, 1)
    first = wire.ask(1, 12, **session_values({topic: 0}, 0, 0))
    wrong = wire.ask(1, 13, **session_values({}, first.session_id, 1))
    assert int(wrong.error_code) == 106


def test_a_deleted_topic_in_a_session(wire, kept_broker):
    topic = filled(kept_broker, wire, 1)
    topic_id = wire.ask(3, 12, topics=[{"name": topic, "topic_id": None}]).topics[0].topic_id
    values = fetch_values(topic, 1, topic_id=topic_id, session_id=0, session_epoch=0)
    first = wire.ask(1, 15, **values)
    assert int(first.responses[0].partitions[0].error_code) == 0
    wire.ask(20, 3, topic_names=(topic,), timeout=5000)
    values.update(session_id=first.session_id, session_epoch=1, topics=())
    again = wire.ask(1, 15, **values)
    assert int(again.responses[0].partitions[0].error_code) == 100


# ListOffsets.


@pytest.mark.parametrize("version", range(1, 12))
def test_list_offsets(wire, kept_broker, version):
    topic = kept_broker.create_topic()
    start = now_ms() - 10_000
    for step in range(3):
        wire.produce(topic, one_batch(1, timestamp=start + 1000 * step))

    def ask(timestamp):
        partition = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
        topics = [{"name": topic, "partitions": [partition]}]
        response = wire.ask(
            2, version, replica_id=-1, isolation_level=0, topics=topics, timeout=1000
        )
        (found,) = response.topics[0].partitions
        assert int(found.error_code) == 0
        return found.offset

    assert (ask(-2), ask(-1)) == (0, 3)
    assert (ask(start), ask(start + 1), ask(start + 2000), ask(start + 2001)) == (0, 1, 2, -1)
    if version >= 7:
        assert ask(-3) == 2


def test_nobody_waits_for_more_than_may_be_answered(wire, kept_broker):
    topic = kept_broker.create_topic(config={"segment.bytes": "5000"})
    for _ in range(8):
        wire.produce(topic, one_batch(1, 2000))
    for limits in (
        {"min_bytes": 12_000},  # more is readable, but in the segments behind
        {"min_bytes": 9000, "max_bytes": 3000},
    ):
        found = wire.fetch(topic, 0, max_wait=200_000, **limits)
        assert len(bytes(found.records)) > 2000
    # In the last segment there is nothing behind: this one waits.
    started = time.monotonic()
    wire.fetch(topic, 7, max_wait=300, min_bytes=10_000)
    assert time.monotonic() - started >= 0.29


@pytest.mark.parametrize("key", [1, 2])
def test_an_isolation_level_that_does_not_exist_is_no_bug_of_ours(kept_broker, connect, key):
    topic = kept_broker.create_topic()
    before = len(kept_broker.log())
    odd = connect(kept_broker.port())
    if key == 1:
        odd.send(1, 11, **fetch_values(topic, 0, isolation_level=7))
    else:
        partition = {"partition_index": 0, "timestamp": -1}
        topics = [{"name": topic, "partitions": [partition]}]
        odd.send(2, 5, replica_id=-1, isolation_level=7, topics=topics, timeout=1000)
    assert odd.is_closed()
    said = kept_broker.log()[before:]
    assert "isolation_level is 0 or 1, not 7" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("version", [4, 11, 12])
def test_aborted_transactions_are_none_or_null_as_in_kafka(wire, kept_broker, version):
    topic = kept_broker.create_topic()
    assert wire.produce(topic, one_batch()).error_code == 0

    def aborted(**more):
        return wire.fetch(version=version, **{"topic": topic, "offset": 0} | more)

    assert aborted().aborted_transactions is None
    assert aborted(isolation_level=1).aborted_transactions == ()
    for wrong in ({"partition": 7}, {"topic": "nobody-made-this"}):
        answer = aborted(**wrong)
        assert (answer.error_code, answer.aborted_transactions) == (3, ())
    beyond = aborted(offset=99, isolation_level=1)
    assert (beyond.error_code, beyond.aborted_transactions) == (1, None)
