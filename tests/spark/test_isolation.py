"""Reads at both isolation levels around open transactions, from Apache Kafka, without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from kept.client.client import Client
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.range_reader import OffsetsLost, RangeReader
from kept.pipeline.connection import BadOption
from kept.pipeline.options import parse_read
from kept.pipeline.read.batch import plan_batch
from kept.pipeline.read.plan import ReadBounds
from kept.pipeline.read.progress import StreamProgress
from kept.storage.errors import RequestTimedOut
from kept.storage.types import IsolationLevel, TopicPartition
from tests.spark.topics import eventually

pytestmark = [pytest.mark.slow, pytest.mark.java, pytest.mark.timeout(400)]

COMMITTED = {"kafka.isolation.level": "read_committed"}


@pytest.fixture
def client(apache_kafka: str) -> Iterator[Client]:
    with Client(apache_kafka) as client:
        yield client


@pytest.fixture
def half_open(client: Client) -> Iterator[tuple[TopicPartition, Producer]]:
    """A log of ten records; the transaction of the last four, with their producer, is open."""
    tp = TopicPartition(f"half-open-{uuid.uuid4().hex[:8]}", 0)
    client.create_topic(tp.topic, partitions=1)
    plain = Producer({"bootstrap.servers": client.bootstrap})
    for n in range(6):
        plain.produce(tp.topic, b"v%d" % n)
    plain.flush(30)
    producer = Producer({"bootstrap.servers": client.bootstrap, "transactional.id": tp.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    for n in range(6, 10):
        producer.produce(tp.topic, b"v%d" % n)
    producer.flush(30)
    yield tp, producer
    producer.abort_transaction(30)


def following(client: Client, topic: str, **options: str) -> StreamProgress:
    given = {"bootstrap": client.bootstrap, "subscribe": topic, **options}
    return StreamProgress(client, parse_read(given, streaming=True))


def test_a_stream_that_had_read_what_is_open_goes_on_with_what_is_committed(client, half_open):
    tp, producer = half_open
    start = following(client, tp.topic).newest()
    assert start == {tp: 10} == client.epoch_ends({tp: 0})
    one = following(client, tp.topic, **COMMITTED)
    assert one.next_end(start, None, None) == one.next_end(start, 3, None) == start
    assert one.ranges(start, start) == []
    one.stop_at_newest()
    assert one.next_end(start, None, None) == start
    producer.commit_transaction(30)
    producer.begin_transaction()
    after = following(client, tp.topic, **COMMITTED)
    eventually(lambda: after.next_end(start, None, None) == {tp: 11})  # the marker
    with pytest.raises(OffsetsLost, match="everything up to offset 99 lost: the log ends at 11"):
        after.next_end({tp: 99}, None, None)


def test_a_stream_of_what_is_committed_goes_on_with_everything(client, half_open):
    tp, _ = half_open
    start = following(client, tp.topic, **COMMITTED).newest()
    assert start == {tp: 6}
    assert following(client, tp.topic).next_end(start, None, None) == {tp: 10}


def test_a_read_may_begin_where_nothing_is_committed_yet(client, half_open):
    tp, _ = half_open
    at = {"startingOffsets": f'{{"{tp.topic}": {{"0": 8}}}}'}
    one = following(client, tp.topic, **at, **COMMITTED)
    assert one.begin() == one.next_end(one.begin(), None, None) == {tp: 8}
    assert one.ranges(one.begin(), {tp: 8}) == []
    given = {"bootstrap": client.bootstrap, "subscribe": tp.topic, **COMMITTED}
    ending = parse_read({**given, "endingOffsets": at["startingOffsets"]}, streaming=False)
    with pytest.raises(BadOption, match="has offsets 0 to 6, 8 is out of range"):
        plan_batch(client, ending, ReadBounds())


def test_a_range_that_a_transaction_holds_up_is_not_lost(client, half_open):
    tp, producer = half_open
    limits = FetchLimits(max_wait_ms=50, isolation=IsolationLevel.READ_COMMITTED)
    held = RangeReader(client, tp, 6, 10, limits, timeout_ms=300, fail_on_data_loss=False)
    with pytest.raises(RequestTimedOut, match="from offset 6 on a transaction is still open"):
        list(held.chunks())
    assert not held.lost
    producer.commit_transaction(30)
    producer.begin_transaction()
    reader = RangeReader(client, tp, 6, 10, limits, timeout_ms=30_000)
    (chunk,) = (_taken(reader, one) for one in reader.chunks())
    assert chunk.records


def _taken(reader: RangeReader, chunk: object) -> object:
    reader.position = reader.end
    return chunk
