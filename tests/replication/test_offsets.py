"""ListOffsets as Apache Kafka answers it, and what keeps a log: deletion and retention."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kept.replication.partition import Partition
from kept.storage.errors import OffsetNotAvailable, OffsetOutOfRange, PolicyViolation
from kept.storage.types import IsolationLevel, LogConfig
from tests.support import partitions as tools

LATEST, EARLIEST, MAX, EARLIEST_LOCAL, TIERED, PENDING = -1, -2, -3, -4, -5, -6
NOTHING = (-1, -1, -1)


@pytest.fixture
def filled(partition) -> Partition:
    """Offsets 0..9; the largest timestamp is at offset 4."""
    tools.produce(partition, 5, timestamp=tools.NOW)
    tools.produce(partition, 5, timestamp=tools.NOW - 1000)
    return partition


def test_latest(filled) -> None:
    assert filled.list_offset(LATEST) == (-1, 10, 0)
    assert filled.list_offset(LATEST, IsolationLevel.READ_COMMITTED) == (-1, 10, 0)


def test_latest_is_the_last_stable_offset_for_read_committed(filled) -> None:
    filled.log.producers.update(9, 0, 0, 0, 10, tools.NOW, True)
    tools.produce(filled)
    assert filled.list_offset(LATEST, IsolationLevel.READ_COMMITTED) == (-1, 10, 0)
    assert filled.list_offset(LATEST) == (-1, 11, 0)


def test_earliest(filled) -> None:
    assert filled.list_offset(EARLIEST) == filled.list_offset(EARLIEST_LOCAL) == (-1, 0, 0)
    filled.delete_records(7)
    assert filled.list_offset(EARLIEST) == filled.list_offset(EARLIEST_LOCAL) == (-1, 7, 0)


def test_earliest_names_an_epoch_only_if_it_covers_the_start(filled) -> None:
    filled.log.leader_epochs.clear()
    assert filled.list_offset(EARLIEST) == (-1, 0, -1)


def test_max_timestamp_is_the_record(filled) -> None:
    assert filled.list_offset(MAX) == (tools.NOW + 4, 4, 0)


def test_max_timestamp_below_the_log_start_is_no_offset(filled) -> None:
    """Ours: Apache Kafka 4.3 names the record while its segment is there, though nobody can read
    it."""
    filled.delete_records(4)
    assert filled.list_offset(MAX) == (tools.NOW + 4, 4, 0)
    filled.delete_records(5)
    assert filled.list_offset(MAX) == NOTHING
    tools.produce(filled, 1, timestamp=tools.NOW + 9)
    assert filled.list_offset(MAX) == (tools.NOW + 9, 10, 0)


def test_by_timestamp_is_the_first_record_not_older(filled) -> None:
    assert filled.list_offset(0) == (tools.NOW, 0, 0)
    assert filled.list_offset(tools.NOW + 3) == (tools.NOW + 3, 3, 0)
    assert filled.list_offset(tools.NOW + 5) == NOTHING
    filled.delete_records(5)
    assert filled.list_offset(tools.NOW - 999) == (tools.NOW - 999, 6, 0)


def test_there_is_no_tiered_storage(filled) -> None:
    assert filled.list_offset(TIERED) == filled.list_offset(PENDING) == NOTHING


def test_an_empty_log(partition) -> None:
    assert partition.list_offset(LATEST) == (-1, 0, 0)
    assert partition.list_offset(EARLIEST) == (-1, 0, 0)
    assert partition.list_offset(MAX) == partition.list_offset(0) == NOTHING


def test_what_is_not_committed_is_not_answered(replicated) -> None:
    tools.produce(replicated, 3)
    assert replicated.list_offset(0) == replicated.list_offset(MAX) == NOTHING
    assert replicated.list_offset(LATEST) == (-1, 0, 3)
    assert replicated.list_offset(0, None) == (tools.NOW, 0, 3), "a replica sees all"
    assert replicated.list_offset(LATEST, None) == (-1, 3, 3)


def test_not_available_until_the_epochs_start_is_committed(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    tools.lead(partition, 0)
    tools.produce(partition, 4, timestamp=tools.NOW)
    tools.produce(partition, 4, timestamp=tools.NOW + 100)
    partition.log.close()
    new = Partition(tools.open_log(disk, clean=True), 0, high_watermark=4)
    tools.lead(new, 1, (0, 1), (0, 1), 1)
    for timestamp in (LATEST, MAX, tools.NOW + 100, tools.NOW + 1000):
        with pytest.raises(OffsetNotAvailable, match="has not reached the start 8"):
            new.list_offset(timestamp)
    assert new.list_offset(EARLIEST) == (-1, 0, 0)
    assert new.list_offset(tools.NOW + 2) == (tools.NOW + 2, 2, 0), "it is below HW"
    assert new.list_offset(LATEST, None) == (-1, 8, 1)
    new.fetch(8, 1000, replica_id=1)
    assert new.list_offset(LATEST) == (-1, 8, 1)


# DeleteRecords.


def test_delete_records(filled) -> None:
    assert filled.delete_records(3) == 3
    assert filled.delete_records(1) == 3, "it never goes back"
    assert filled.delete_records(-1) == 10
    for offset in (-2, 11):
        with pytest.raises(OffsetOutOfRange):
            filled.delete_records(offset)
    assert filled.log_start_offset == 10


def test_not_above_the_high_watermark(replicated) -> None:
    tools.produce(replicated, 3)
    with pytest.raises(OffsetOutOfRange, match="high watermark is 0"):
        replicated.delete_records(1)
    assert replicated.delete_records(-1) == 0


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [({"compact"}, False), ({"compact", "delete"}, True), ({"delete"}, True), (set(), True)],
)
def test_a_topic_that_is_only_compacted_keeps_its_records(filled, policy, allowed) -> None:
    filled.update_config(LogConfig(cleanup_policy=frozenset(policy)))
    if allowed:
        assert filled.delete_records(3) == 3
    else:
        with pytest.raises(PolicyViolation):
            filled.delete_records(3)


# Upkeep.


def fill_segments(partition: Partition) -> None:
    for _ in range(60):
        tools.produce(partition, timestamp=tools.NOW)
    assert len(partition.segments()) > 2


def test_segments_are_shown(partition) -> None:
    fill_segments(partition)
    views = partition.segments()
    assert [view.active for view in views] == [False] * (len(views) - 1) + [True]
    assert views[0].base_offset == 0 and views[-1].next_offset == 60
    assert all(a.next_offset == b.base_offset for a, b in pairwise(views))
    assert sum(view.size_bytes for view in views) == partition.size_bytes


def test_retention_by_size_moves_the_start_and_wakes_readers(partition) -> None:
    fill_segments(partition)
    partition.update_config(LogConfig(retention_bytes=2500, retention_ms=-1))
    heard = []
    partition.add_waiter(lambda: heard.append(partition.log_start_offset))
    gone = partition.retention(tools.NOW)
    assert gone[0][0] == 0
    assert heard == [partition.log_start_offset] and partition.log_start_offset > 0
    assert partition.retention(tools.NOW) == [] and len(heard) == 1


def test_retention_never_passes_the_high_watermark(replicated) -> None:
    fill_segments(replicated)
    replicated.update_config(LogConfig(retention_bytes=0, retention_ms=1))
    assert replicated.retention(tools.NOW + 10**9) == []
    replicated.fetch(30, 1000, replica_id=1)
    replicated.retention(tools.NOW + 10**9)
    assert 0 < replicated.log_start_offset <= 30


def test_only_the_leader_applies_retention(partition) -> None:
    fill_segments(partition)
    partition.update_config(LogConfig(retention_bytes=0))
    partition.resign()
    assert partition.retention(tools.NOW) == [] and partition.log_start_offset == 0


def test_the_high_watermark_is_raised_before_a_swap(replicated) -> None:
    tools.produce(replicated, 4)
    heard = []
    replicated.add_waiter(lambda: heard.append(replicated.high_watermark))
    replicated.raise_high_watermark(3)
    replicated.raise_high_watermark(2)
    assert heard == [3] and replicated.high_watermark == 3
    with pytest.raises(OffsetOutOfRange):
        replicated.raise_high_watermark(5)
