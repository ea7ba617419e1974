"""ListOffsets and Metadata: what the versions of a request mean, as Kafka 4.3 has it."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

import pytest

from kept.node.kafka.handlers.records import list_offsets as handler
from kept.node.runtime.time_slices import LOOP_BYTES
from kept.storage.errors import MachineError
from kept.storage.log.log_reader import find_record
from kept.storage.records import EndTxnMarker, build_batch, check
from kept.storage.types import Codec, TopicPartition
from tests.support.partitions import NOW, RULES, checked

NOWHERE = -(2**31)


def listed(lone, version, timestamp):
    topics = [
        {
            "name": "t",
            "partitions": [
                {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
            ],
        }
    ]
    more = {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout": 1000}
    answer = lone.ask(2, version, **more)
    return answer.topics[0].partitions[0].error_code.name


@pytest.mark.parametrize(
    ("timestamp", "since"), [(-1, 1), (-2, 1), (-3, 7), (-4, 8), (-5, 9), (-6, 11), (-7, 99)]
)
def test_special_timestamps_are_as_old_as_in_kafka(lone, timestamp, since):
    lone.create("t")
    for version in range(1, 12):
        expected = "none" if version >= since else "unsupported_version"
        assert listed(lone, version, timestamp) == expected, version


@pytest.mark.parametrize("version", range(8, 14))
def test_metadata_tells_operations_when_asked(lone, version):
    lone.create("t")
    names = [{"name": name, "topic_id": None} for name in ("t", "absent")]
    for asked in (False, True):
        answer = lone.ask(
            3,
            version,
            topics=names,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=asked,
            include_topic_authorized_operations=asked,
        )
        assert {t.topic_authorized_operations for t in answer.topics} == {
            3576 if asked else NOWHERE
        }
        if version <= 10:
            assert answer.cluster_authorized_operations == (8096 if asked else NOWHERE)


def test_metadata_of_topics_that_are_not_there(lone):
    """Of an id that nobody knows nothing is told, of an internal topic that it is one."""
    unknown = uuid.UUID(int=77)
    wanted = [{"name": None, "topic_id": unknown}, {"name": "__consumer_offsets", "topic_id": None}]
    answer = lone.ask(
        3,
        13,
        topics=wanted,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    found = {t.error_code.name: t for t in answer.topics}
    assert found["unknown_topic_id"].topic_authorized_operations == NOWHERE
    assert found["unknown_topic_or_partition"].is_internal
    assert found["unknown_topic_or_partition"].topic_authorized_operations == 3576


def test_producers_are_described_by_the_leader(lone):
    lone.create("t")
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    partition.append(checked(3, pid=7, sequence=0, epoch=2), NOW)
    partition.append_marker(EndTxnMarker(True, 4), 9, 1, NOW)
    partition.write()
    wanted = [{"name": "t", "partition_indexes": (0, 5)}, {"name": "x", "partition_indexes": (0,)}]
    t, x = lone.ask(61, 0, topics=wanted).topics
    here, absent = t.partitions
    assert [p.error_code.name for p in (here, absent, *x.partitions)] == [
        "none",
        "unknown_topic_or_partition",
        "unknown_topic_or_partition",
    ]
    assert (here.error_message, absent.error_message) == (None, "t has no partition 5")
    found = [
        (
            p.producer_id,
            p.producer_epoch,
            p.last_sequence,
            p.last_timestamp,
            p.coordinator_epoch,
            p.current_txn_start_offset,
        )
        for p in here.active_producers
    ]
    assert found == [(7, 2, 2, NOW + 2, -1, -1), (9, 1, -1, NOW, 4, -1)]


def test_a_partition_that_is_named_twice_has_its_producers_described_once(lone):
    lone.create("t")
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    partition.append(checked(1, pid=7, sequence=0), NOW)
    partition.write()
    wanted = [{"name": "t", "partition_indexes": (0,) * 100}] * 10
    (t,) = lone.ask(61, 0, topics=wanted).topics
    (described,) = t.partitions
    assert [p.producer_id for p in described.active_producers] == [7]


COUNT = 40_000
LARGE = {
    "gzip": (Codec.GZIP, b"v" * 60, 2_000_000),
    "zstd": (Codec.ZSTD, b"v" * 60, 2_000_000),
    "plain": (Codec.NONE, b"v" * 20, 2_000_000),
}


@pytest.fixture(params=LARGE)
def large(request, lone):
    """A partition with one batch of so many records that it is not for the loop."""
    codec, value, most = LARGE[request.param]
    lone.create("t", max_message_bytes=str(most))
    rows = [(NOW + number, b"k", value, ()) for number in range(COUNT)]
    batch = memoryview(bytearray(build_batch(rows, codec=codec)))
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    partition.append(check(batch, replace(RULES, max_batch_bytes=most), NOW), NOW)
    partition.write()
    return lone


def located(lone, *timestamps):
    parts = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": t} for t in timestamps]
    topics = [{"name": "t", "partitions": parts}]
    answer = lone.ask(2, 9, replica_id=-1, isolation_level=0, topics=topics, timeout=1000)
    return [(p.error_code.name, p.offset, p.timestamp) for p in answer.topics[0].partitions]


@pytest.mark.parametrize(("timestamp", "expected"), [(NOW + 777, 777), (-3, COUNT - 1)])
def test_a_large_batch_is_looked_into_in_a_thread(large, monkeypatch, timestamp, expected):
    looks = []

    def noted(*given):
        looks.append((threading.current_thread() is threading.main_thread(), given[4]))
        return find_record(*given)

    monkeypatch.setattr(handler, "find_record", noted)
    assert located(large, timestamp) == [("none", expected, NOW + expected)]
    on_loop = [limit for is_main, limit in looks if is_main]
    assert on_loop in ([], [LOOP_BYTES]) and len(looks) == len(on_loop) + 1
    assert large.node.parts.memory.inflating.used_bytes == 0
    twice = located(large, timestamp, timestamp)
    assert twice == [("none", expected, NOW + expected), ("invalid_request", -1, -1)]


def test_a_thread_that_cannot_read_a_batch_says_so(large, monkeypatch):
    def fails(*given):
        if threading.current_thread() is not threading.main_thread():
            raise MachineError("/data", "read", OSError(5, "EIO"))
        return find_record(*given)

    monkeypatch.setattr(handler, "find_record", fails)
    assert located(large, NOW) == [("kafka_storage_error", -1, -1)]
    assert located(large, -1)[0][0] == "kafka_storage_error", "its log directory has failed"
