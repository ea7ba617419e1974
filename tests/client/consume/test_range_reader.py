from __future__ import annotations

from collections.abc import Iterator

import pytest

from kept.client.client import Client
from kept.client.consume.aborted_filter import aborted_batches
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.range_reader import OffsetsLost, RangeReader
from kept.storage.errors import OffsetOutOfRange
from kept.storage.records import Field, build_batch, read_block
from kept.storage.types import TopicPartition
from kept.testing import Cluster
from tests.spark.topics import COMPACTED, compact, delete_before, eventually, fill, recreate

LIMITS = FetchLimits(max_wait_ms=20, partition_max_bytes=300)


@pytest.fixture
def client(kept_broker: Cluster) -> Iterator[Client]:
    with kept_broker.client() as client:
        yield client


@pytest.fixture
def tp(kept_broker: Cluster) -> TopicPartition:
    return TopicPartition(kept_broker.create_topic(), 0)


def reader(client: Client, tp: TopicPartition, start: int, end: int, **rest: object) -> RangeReader:
    options = {"timeout_ms": 60_000, **rest}
    return RangeReader(client, tp, start, end, LIMITS, **options)  # type: ignore[arg-type]


def offsets(one: RangeReader) -> list[int]:
    """Read to the end, as a task does."""
    found: list[int] = []
    for records, hidden in one.chunks():
        at = 0
        while at < len(records) and one.position < one.end:
            block = read_block(records, at, one.position, one.end, Field.OFFSET, hidden=hidden)
            if block.position == at:
                break
            at, one.position = block.position, block.next_offset
            assert block.offsets is not None
            found += memoryview(block.offsets).cast("q").tolist()
    return found


def test_a_range_comes_whole_over_many_fetches(client, tp):
    for n in range(40):
        fill(client, tp.topic, range(n * 5, n * 5 + 5))
    assert offsets(reader(client, tp, 3, 197)) == list(range(3, 197))


def test_gaps_of_compaction_are_no_loss(client, kept_broker):
    topic = kept_broker.create_topic(config=COMPACTED)
    for n in range(60):
        fill(client, topic, range(n % 3, n % 3 + 3))
    compact(kept_broker, topic)
    tp = TopicPartition(topic, 0)
    found = offsets(reader(client, tp, 0, 180))
    assert found == [r.offset for r in client.read(topic)]
    assert len(found) < 100
    gap = next(n for n in range(180) if n not in found)
    assert offsets(reader(client, tp, gap, gap + 1)) == []


def test_what_left_the_log_is_lost_and_named(client, tp):
    fill(client, tp.topic, range(10))
    delete_before(client, tp, 6)
    with pytest.raises(OffsetsLost, match=rf"{tp.place}: offsets 2 to 5 are lost: the log starts"):
        offsets(reader(client, tp, 2, 8))
    with pytest.raises(OffsetsLost, match="offsets 0 to 3 are lost"):
        offsets(reader(client, tp, 0, 4))
    tolerant = reader(client, tp, 2, 8, fail_on_data_loss=False)
    assert offsets(tolerant) == [6, 7]
    assert len(tolerant.lost) == 1


def test_a_log_that_ends_too_early_is_a_loss(client, tp):
    fill(client, tp.topic, range(5))
    with pytest.raises(OffsetsLost, match="offsets 5 to 8 are lost: the log has ended at 5 for"):
        offsets(reader(client, tp, 0, 9, timeout_ms=2000))
    with pytest.raises(OffsetsLost, match="offsets 7 to 8 are lost: the log ends at 5"):
        offsets(reader(client, tp, 7, 9))
    assert offsets(reader(client, tp, 0, 9, timeout_ms=2000, fail_on_data_loss=False)) == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_another_topic_of_the_name_is_not_taken_for_it(client, tp):
    fill(client, tp.topic, range(5))
    before = client.topic(tp.topic).topic_id
    recreate(client, tp.topic)
    fill(client, tp.topic, range(50, 60))
    with pytest.raises(OffsetsLost, match="deleted and created again"):
        offsets(reader(client, tp, 0, 5, topic_id=before))
    begun = reader(client, tp, 0, 10)
    chunks = begun.chunks()
    next(chunks)
    begun.position = 5
    recreate(client, tp.topic)
    fill(client, tp.topic, range(20))
    with pytest.raises(OffsetsLost, match="deleted and created again"):
        next(chunks)


def test_of_another_topic_nothing_is_taken_either_way(client, tp):
    fill(client, tp.topic, range(5))
    before = client.topic(tp.topic).topic_id
    recreate(client, tp.topic)
    for rest in ({}, {"until_caught_up": True}):
        for _ in range(2):  # it is shorter than the range, then longer
            fill(client, tp.topic, range(4))
            one = reader(client, tp, 0, 6, topic_id=before, fail_on_data_loss=False, **rest)
            assert offsets(one) == []
            assert len(one.lost) == 1 and "offsets 0 to 5 are lost" in one.lost[0]


def test_a_client_that_remembers_the_former_topic_reads_the_one_that_was_planned(
    client, tp, kept_broker
):
    fill(client, tp.topic, range(5))
    assert offsets(reader(client, tp, 0, 5)) == [0, 1, 2, 3, 4]
    with kept_broker.client() as planner:
        recreate(planner, tp.topic)
        fill(planner, tp.topic, range(3))
        planned = planner.topic(tp.topic).topic_id
    assert client.topic(tp.topic).topic_id != planned, "not heard of yet"
    assert offsets(reader(client, tp, 0, 3, topic_id=planned)) == [0, 1, 2]


def test_aborted_transactions_end_at_their_marker():
    def batch(pid: int, offset: int, *, control: bool = False, transactional: bool = True) -> bytes:
        return build_batch(
            [(1, b"k", b"v", ())],
            base_offset=offset,
            producer_id=pid,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=transactional,
            is_control=control,
        )

    parts = [
        batch(1, 0),  # aborted
        batch(2, 1),  # committed
        batch(1, 2, transactional=False),
        batch(1, 3, control=True),
        batch(1, 4),  # the producer's next transaction, committed
        batch(2, 5),  # aborted
    ]
    at = [sum(map(len, parts[:i])) for i in range(len(parts))]
    found = aborted_batches(b"".join(parts), [(2, 5), (1, 0)])
    assert sorted(found) == [at[0], at[5]]
    assert aborted_batches(b"".join(parts), []) == ()


def test_a_new_leader_is_found(kept_broker, client, tp):
    fill(client, tp.topic, range(5))
    client.topic(tp.topic)
    known = client.view.topics[tp.topic]
    stale = known.partitions[0].__class__(0, 99, 0, (99,), (99,))
    client.view.topics[tp.topic] = known.__class__(
        known.name, known.topic_id, known.internal, {0: stale}
    )
    assert offsets(reader(client, tp, 0, 5)) == [0, 1, 2, 3, 4]


def test_a_wrong_epoch_is_refused_and_asked_for_again(client, tp):
    fill(client, tp.topic, range(5))
    known = client.topic(tp.topic)
    part = known.partitions[0]
    newer = part.__class__(0, part.leader, part.leader_epoch + 7, part.replicas, part.isr)
    client.view.topics[tp.topic] = known.__class__(
        known.name, known.topic_id, known.internal, {0: newer}
    )
    assert offsets(reader(client, tp, 0, 5)) == [0, 1, 2, 3, 4]


def test_a_topic_that_is_deleted_before_it_was_read(client, tp):
    fill(client, tp.topic, range(5))
    readers = [reader(client, tp, 0, 5), reader(client, tp, 0, 5, fail_on_data_loss=False)]
    assert client.fetch_partition(tp, 0, LIMITS, 10_000).records, "it is known where it was"
    client.delete_topics([tp.topic])
    eventually(lambda: tp.topic not in client.metadata().topics)
    lost = f"^{tp.place}: offsets 0 to 4 are lost: the topic was deleted "
    with pytest.raises(OffsetsLost, match=lost):
        offsets(readers[0])
    assert offsets(readers[1]) == []
    assert readers[1].lost


def test_a_replica_that_never_knows_of_an_offset_is_not_asked_for_ever(client, tp, monkeypatch):
    fill(client, tp.topic, range(5))

    def behind(*args: object, **rest: object) -> None:
        raise OffsetOutOfRange(f"Fetch of {tp.place} at offset 3: it is out of range")

    monkeypatch.setattr(client, "fetch_partition", behind)
    with pytest.raises(OffsetOutOfRange, match="offset 3"):
        offsets(reader(client, tp, 3, 5, node=0, timeout_ms=120))
