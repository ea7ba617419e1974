"""ListOffsets and Metadata: what the versions of a request mean, as Kafka 4.3 has it."""

from __future__ import annotations

import uuid

import pytest

from kept.storage.records import EndTxnMarker
from kept.storage.types import TopicPartition
from tests.support.partitions import NOW, checked

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
        "none", "unknown_topic_or_partition", "unknown_topic_or_partition",
    ]  # fmt: skip
    assert (here.error_message, absent.error_message) == (None, "t has no partition 5")
    found = [
        (p.producer_id, p.producer_epoch, p.last_sequence, p.last_timestamp, p.coordinator_epoch,
         p.current_txn_start_offset)
        for p in here.active_producers
    ]  # fmt: skip
    assert found == [(7, 2, 2, NOW + 2, -1, -1), (9, 1, -1, NOW, 4, -1)]
