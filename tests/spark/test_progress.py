"""What a stream takes from trigger to trigger, against a real node, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kept.client.client import Client
from kept.client.consume.range_reader import OffsetsLost
from kept.pipeline.options import parse_read
from kept.pipeline.read.admission import from_json, leader_epochs_in, to_json, topic_ids_in
from kept.pipeline.read.batch import plan_batch
from kept.pipeline.read.offsets import find_partitions
from kept.pipeline.read.plan import Range, ReadBounds
from kept.pipeline.read.progress import StreamProgress
from kept.storage.errors import UnknownTopicOrPartition
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from kept.testing import Cluster
from tests.spark.topics import delete_before, eventually, fill, recreate


@pytest.fixture
def client(kept_broker: Cluster) -> Iterator[Client]:
    with kept_broker.client() as client:
        yield client


def following(client: Client, topic: str, **options: str) -> StreamProgress:
    given = {"bootstrap": client.bootstrap, "subscribe": topic, **options}
    return StreamProgress(client, parse_read(given, streaming=True))


def test_a_query_starts_at_the_end_or_where_it_is_told(client, kept_broker):
    topic = kept_broker.create_topic(partitions=2)
    fill(client, topic, range(10))
    ends = {TopicPartition(topic, p): end for p, (_, end) in client.bounds(topic).items()}
    assert following(client, topic).begin() == ends
    assert set(following(client, topic, startingOffsets="earliest").begin().values()) == {0}


@pytest.mark.parametrize("options", [{}, {"startingTimestamp": "9000000000000000"}])
def test_a_first_batch_that_is_repeated_begins_where_the_other_did(client, kept_broker, options):
    """Spark asks for the beginning when it plans the first batch, again when it reads it, and when
    it repeats it after a crash; what it notes is where the batch ends.
    """
    options = options and {**options, "startingOffsetsByTimestampStrategy": "latest"}
    topic = kept_broker.create_topic(partitions=2)
    tp, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    fill(client, topic, range(3), partition=0)
    one = following(client, topic, **options)
    begun = one.begin()
    fill(client, topic, range(4), partition=0)
    assert one.begin() == begun == {tp: 3, other: 0}
    noted = one.next_end(begun, None, None)
    fill(client, topic, range(5), partition=0)
    assert one.ranges(one.begin(), noted) == []
    again = following(client, topic, **options)
    assert again.begin() == {tp: 12, other: 0}
    assert again.ranges(again.begin(), noted) == []
    for follower in (one, again):
        end = follower.next_end(noted, None, None)
        assert [(r.partition, r.start, r.end) for r in follower.ranges(noted, end)] == [(0, 3, 12)]


def test_spark_4_1_asks_for_the_end_before_the_beginning(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    one = following(client, topic)
    fill(client, topic, range(3))
    end = one.newest()
    fill(client, topic, range(4))
    assert one.begin() == end == {tp: 3}
    assert one.ranges(one.begin(), end) == []


def test_limits_and_delays(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    one = following(client, topic, minOffsetsPerTrigger="8", maxTriggerDelay="1h")
    fill(client, topic, range(5))
    assert one.next_end({tp: 0}, None, 8) == {tp: 0}
    assert one.next_end({tp: 0}, None, None) == {tp: 5}
    fill(client, topic, range(5))
    assert one.next_end({tp: 0}, None, 8) == {tp: 10}
    assert one.next_end({tp: 0}, 3, None) == {tp: 3}
    late = following(client, topic, minOffsetsPerTrigger="100", maxTriggerDelay="1ms")
    assert eventually(lambda: late.next_end({tp: 0}, None, 100)[tp]) == 10


def test_a_delay_counts_from_the_trigger_before(client, kept_broker, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kept.pipeline.read.progress.monotonic", lambda: now[0])
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    one = following(client, topic, minOffsetsPerTrigger="100", maxTriggerDelay="10s")
    fill(client, topic, range(5))
    assert one.next_end({tp: 0}, None, 100) == {tp: 0}
    now[0] = 11.0
    assert one.next_end({tp: 0}, None, 100) == {tp: 5}
    fill(client, topic, range(5))
    assert one.next_end({tp: 5}, None, 100) == {tp: 5}, "ten seconds have not passed again"
    now[0] = 22.0
    assert one.next_end({tp: 5}, None, 100) == {tp: 10}


def test_available_now_ends_at_what_there_was(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(5))
    one = following(client, topic, minOffsetsPerTrigger="100")
    one.stop_at_newest()
    fill(client, topic, range(5))
    assert one.next_end({tp: 0}, None, 100) == {tp: 5}
    assert one.next_end({tp: 5}, None, 100) == {tp: 5}


def test_new_partitions_are_read_from_their_beginning(client, kept_broker):
    topic = kept_broker.create_topic()
    one = following(client, topic)
    fill(client, topic, range(3), partition=0)
    start = one.newest()
    client.create_partitions(topic, 2)
    fill(client, topic, range(4), partition=1)
    end = eventually(lambda: found if len(found := one.next_end(start, None, None)) == 2 else None)
    assert [(r.partition, r.start, r.end) for r in one.ranges(start, end)] == [(1, 0, 4)]


def test_retention_past_the_position_is_a_loss(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(10))
    delete_before(client, tp, 6)
    with pytest.raises(OffsetsLost, match=f"{tp.place}: offsets 2 to 5 lost: its log starts at 6"):
        following(client, topic).ranges({tp: 2}, {tp: 10})
    tolerant = following(client, topic, failOnDataLoss="false")
    assert [(r.start, r.end) for r in tolerant.ranges({tp: 2}, {tp: 10})] == [(6, 10)]
    assert following(client, topic).ranges({tp: 10}, {tp: 10}) == []


def test_a_log_that_went_back_is_a_loss(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(3))
    with pytest.raises(OffsetsLost, match="everything up to offset 9 lost: the log ends at 3"):
        following(client, topic).next_end({tp: 9}, None, None)
    tolerant = following(client, topic, failOnDataLoss="false")
    assert tolerant.next_end({tp: 9}, 1, None) == {tp: 3}
    assert tolerant.ranges({tp: 9}, {tp: 3}) == []


@pytest.mark.slow
def test_a_log_that_was_cut_back_and_has_grown_again_is_a_loss(kept_cluster):
    """Offsets alone cannot tell: only the epochs of the leaders do (KIP-320)."""
    cluster = kept_cluster(3, unclean_leader_election_enable="true", min_insync_replicas="1")
    topic = cluster.create_topic(replication_factor=2)
    tp = TopicPartition(topic, 0)

    def led_by(node: int) -> bool:
        return client.metadata([topic]).topics[topic].partitions[0].leader == node

    with cluster.client() as client:
        fill(client, topic, range(4))
        eventually(lambda: len(client.metadata([topic]).topics[topic].partitions[0].isr) == 2)
        first = client.topic(topic).partitions[0].leader
        (second,) = set(client.topic(topic).partitions[0].replicas) - {first}
        strict, tolerant = (
            following(client, topic, failOnDataLoss=fails, startingOffsets="earliest")
            for fails in ("true", "false")
        )
        cluster.kill(second)
        fill(client, topic, range(6))
        start = strict.newest()
        assert start == {tp: 10}
        checkpoint = to_json(start, strict.topic_ids(start), strict.leader_epochs)
        cluster.kill(first)
        cluster.start(second)
        eventually(lambda: led_by(second))
        fill(client, topic, range(20))
        assert client.bounds(topic)[0] == (0, 24)
        for one in (strict, tolerant, following(client, topic)):
            one.remember(topic_ids_in(checkpoint), leader_epochs_in(checkpoint))
            if one is tolerant:
                end = one.next_end(start, None, None)
                assert [(r.start, r.end) for r in one.ranges(start, end)] == [(4, 24)]
                continue
            for ask in (lambda f: f.next_end(start, None, None), lambda f: f.ranges(start, start)):
                with pytest.raises(OffsetsLost, match=f"{tp.place}: offsets 4 to 9 lost: a leader"):
                    ask(one)


@pytest.mark.slow
def test_a_new_leader_with_everything_is_no_loss(kept_cluster):
    cluster = kept_cluster(3)
    topic = cluster.create_topic()
    with cluster.client() as client:
        fill(client, topic, range(4))
        one = following(client, topic, startingOffsets="earliest")
        start = one.newest()
        epochs = dict(one.leader_epochs)
        cluster.kill(client.topic(topic).partitions[0].leader)
        fill(client, topic, range(3))
        for _ in range(2):
            one.remember({}, epochs)
            assert set(one.next_end(start, None, None).values()) == {7}
        assert one.leader_epochs != epochs
        assert [(r.start, r.end) for r in one.ranges(start, one.newest())] == [(4, 7)]


def test_a_topic_that_is_gone_and_one_that_came_back(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(3))
    strict, tolerant = following(client, topic), following(client, topic, failOnDataLoss="false")
    for one in (strict, tolerant):
        assert len(one.ranges({tp: 0}, {tp: 3})) == 1
    recreate(client, topic)
    fill(client, topic, range(20))
    with pytest.raises(OffsetsLost, match=f"{topic}: everything not read yet lost"):
        strict.ranges({tp: 3}, {tp: 20})
    assert [(r.start, r.end) for r in tolerant.ranges({tp: 3}, {tp: 20})] == [(0, 20)]
    assert [(r.start, r.end) for r in tolerant.ranges({tp: 3}, {tp: 20})] == [(3, 20)], (
        "of this one"
    )
    client.delete_topics([topic])
    eventually(lambda: topic not in client.metadata().topics)
    with pytest.raises(UnknownTopicOrPartition, match=topic):
        strict.next_end({tp: 3}, None, None)
    assert tolerant.next_end({tp: 3}, None, None) == {}


def test_a_checkpoint_knows_a_topic_that_was_replaced_while_nobody_followed(client, kept_broker):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(3))
    one = following(client, topic)
    end = one.next_end({tp: 0}, None, None)
    checkpoint = to_json(end, one.topic_ids(end))
    recreate(client, topic)
    fill(client, topic, range(20))

    def again(**options: str) -> StreamProgress:
        found = following(client, topic, **options)
        found.remember(topic_ids_in(checkpoint))
        return found

    for ask in (lambda f: f.next_end(end, None, None), lambda f: f.ranges(end, {tp: 20})):
        with pytest.raises(OffsetsLost, match=f"{topic}: .* it was deleted and created again"):
            ask(again())
    assert again(failOnDataLoss="false").next_end(end, 5, 1000) == {tp: 5}, "no waiting for more"
    ranges = again(failOnDataLoss="false").ranges(end, {tp: 5})
    assert [(r.start, r.end) for r in ranges] == [(0, 5)]
    # A checkpoint of the connector has no ids, and is taken as it is.
    assert following(client, topic).next_end(from_json({topic: {"0": 3}}), None, None) == {tp: 20}


def test_a_batch_since_before_1970_has_the_records_without_a_timestamp(client, kept_broker):
    topic = kept_broker.create_topic()
    for when in (-1, 5000):
        client.append(topic, {0: build_batch([(when, b"k", b"v", ())])})
    options = parse_read({"bootstrap": client.bootstrap, "subscribe": topic}, streaming=False)
    for since, first in ((-9000, 0), (0, 0), (1, 1)):
        (one,) = plan_batch(client, options, ReadBounds(min_timestamp=since))
        assert one == Range(topic, 0, first, 2, one.topic_id)


def test_a_topic_deleted_after_its_batch_was_planned(client, kept_broker):
    topic, other = kept_broker.create_topic(), kept_broker.create_topic()
    fill(client, topic, range(3))
    fill(client, other, range(4))
    subscribe, begin = f"{topic},{other}", {TopicPartition(t, 0): 0 for t in (topic, other)}
    strict = following(client, topic, subscribe=subscribe)
    tolerant = following(client, topic, subscribe=subscribe, failOnDataLoss="false")
    end = strict.next_end(begin, None, None)
    tolerant.stop_at_newest()
    client.delete_topics([topic])
    eventually(lambda: topic not in client.metadata().topics)
    with pytest.raises(OffsetsLost, match=f"{topic}:0: everything up to offset 3 lost"):
        strict.ranges(begin, end)
    assert [(r.topic, r.start, r.end) for r in tolerant.ranges(begin, end)] == [(other, 0, 4)]
    assert tolerant.next_end(begin, None, None) == {TopicPartition(other, 0): 4}


def test_a_planned_batch_of_a_topic_that_was_replaced_reads_nothing_of_the_new_one(
    client, kept_broker
):
    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    fill(client, topic, range(9))
    first = following(client, topic)
    planned = to_json({tp: 9}, first.topic_ids([tp]))
    recreate(client, topic)
    fill(client, topic, range(3))
    after = following(client, topic, failOnDataLoss="false")
    after.remember(topic_ids_in(planned))
    assert after.ranges({tp: 0}, from_json(planned), topic_ids_in(planned)) == []
    after.remember(topic_ids_in(planned))
    end = after.next_end({tp: 9}, None, None)
    ids = {topic: number for topic, number in after.topic_ids(end).items() if number}
    after.remember(topic_ids_in(planned))
    assert [(r.start, r.end) for r in after.ranges({tp: 9}, end, ids)] == [(0, 3)], "each row once"
    strict = following(client, topic)
    with pytest.raises(OffsetsLost, match="it was deleted and created again"):
        strict.ranges({tp: 0}, from_json(planned), topic_ids_in(planned))


def test_a_pattern_matches_no_internal_topic(client, kept_broker):
    topic = kept_broker.create_topic()
    client.commit("a-group", {TopicPartition(topic, 0): 0})
    assert any(one.internal for one in client.metadata(None).topics.values())
    given = {"bootstrap": client.bootstrap, "subscribePattern": ".*"}
    found = find_partitions(client, parse_read(given, streaming=False).topics)
    assert TopicPartition(topic, 0) in found
    assert not {tp.topic for tp in found} & {"__consumer_offsets"}
