"""A leader's answers in the log: the pass over its batches, epochs on disk, what a crash leaves."""

from __future__ import annotations

import uuid

import pytest

from kept.storage import records
from kept.storage.checkpoints import read_epochs
from kept.storage.errors import CorruptMessage, OffsetOutOfRange
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.log.log import Log
from kept.storage.records import build_batch, python
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedDisk

DIRECTORY = "/d/t-0"
EPOCHS = f"{DIRECTORY}/leader-epoch-checkpoint"
NOW = 1_700_000_000_000


def batch(base: int, count: int = 1, epoch: int = 1, size: int = 20, pid: int = -1) -> bytes:
    rows = [(NOW, b"k", b"v" * size, ())] * count
    sequence = base if pid >= 0 else -1
    return build_batch(
        rows,
        base_offset=base,
        leader_epoch=epoch,
        producer_id=pid,
        producer_epoch=0 if pid >= 0 else -1,
        base_sequence=sequence,
    )


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.mkdir("/d")
    made.fsync_dir("/")
    return made


def open_log(disk: SimulatedDisk, **options) -> Log:
    config = options.pop("config", LogConfig(segment_bytes=2000))
    return Log.open(
        DIRECTORY, TopicPartition("t", 0), uuid.UUID(int=5), config, disk, now_ms=NOW, **options
    )


@pytest.mark.parametrize("check", [records.check_replicas, python.check_replicas])
@pytest.mark.parametrize("size", [20, 40_000])
def test_one_pass_over_all_batches(check, size) -> None:
    parts = [batch(0, 3, 1, size), batch(9, 1, 2, size, pid=7), batch(10, 2, 2, size)]
    data = b"".join(parts)
    first, second = len(parts[0]), len(parts[0]) + len(parts[1])
    expected = [
        (0, first, 0, 2, NOW, 1, -1),
        (first, len(parts[1]), 9, 9, NOW, 2, 7),
        (second, len(parts[2]), 10, 11, NOW, 2, -1),
    ]
    assert check(data) == check(memoryview(bytearray(data))) == expected
    assert check(b"") == []
    for cut in (1, 11, 12, 60, 61, len(parts[2]) - 1):
        assert check(data[: second + cut]) == expected[:2], "cut off"
    for cut in (1, 60, first - 1):
        with pytest.raises(CorruptMessage):
            check(data[:cut])
    for damaged in (16, 20, first - 1, first + 16, first + 30, len(data) - 1):
        wrong = bytearray(data)
        wrong[damaged] ^= 1
        with pytest.raises(CorruptMessage):
            check(wrong)
    short = bytearray(data)
    short[first + 8 : first + 12] = (20).to_bytes(4, "big")
    with pytest.raises(CorruptMessage):
        check(short)


def test_an_answer_over_several_segments(disk) -> None:
    log = open_log(disk)
    sent = {base: batch(base, 5) for base in range(0, 100, 5)}
    data = b"".join(sent.values())
    info = log.append_as_follower(data, NOW)
    assert (info.base_offset, info.last_offset) == (0, 99)
    log.write()
    assert len(log.segments) > 1
    found = b"".join(segment.read(0, segment.size_bytes) for segment in log.segments)
    assert found == data
    assert sum(segment.size_bytes for segment in log.segments) == len(data)
    for base, content in sent.items():
        assert log.read_batches(base, 1000, base + 5) == content
    log.check_invariants()
    again = open_log(disk.after_kill())
    assert again.log_end_offset == 100
    for offset in (0, 37, 99):
        assert again.read(offset, 10, 100) is not None


@pytest.mark.parametrize(
    ("start", "parts", "outcome"),
    [
        (0, [(0, 3), (3, 2)], (0, 5)),
        (0, [(0, 3), (2, 2)], None),
        (5, [(3, 4)], (3, 7)),
        (6, [(3, 4), (9, 1)], (3, 10)),
        (7, [(3, 4)], None),
        (5, [(3, 4), (4, 8)], None),
    ],
)
def test_only_the_first_batch_of_an_empty_log_may_begin_before_its_end(
    disk, start, parts, outcome
) -> None:
    """Rule 31; nothing is appended of an answer whose batches overlap."""
    log = open_log(disk, log_start_offset=start)
    data = b"".join(batch(base, count) for base, count in parts)
    if outcome is None:
        with pytest.raises(OffsetOutOfRange, match="overlaps"):
            log.append_as_follower(data, NOW)
        outcome = (start, start)
    else:
        log.append_as_follower(data, NOW)
    assert (log.log_start_offset, log.log_end_offset) == outcome


@pytest.mark.parametrize(("newest", "end"), [(None, 9), (3, 9), (2, 4), (1, 2), (0, 0)])
def test_batches_of_later_epochs_than_the_leaders_are_left_out(disk, newest, end) -> None:
    log = open_log(disk)
    data = batch(0, 2, 1) + batch(2, 2, 2) + batch(4, 1, 3) + batch(5, 4, 3)
    log.append_as_follower(data, NOW, max_leader_epoch=newest)
    assert log.log_end_offset == end


def test_sequences_follow(disk) -> None:
    log = open_log(disk)
    log.append_as_follower(batch(0, 3, pid=7) + batch(3, 2, pid=7), NOW)
    assert log.producers.get(7).last_sequence == 4


def test_epochs_of_lost_records_do_not_come_back_from_their_file(disk) -> None:
    log = open_log(disk)
    log.append_as_follower(batch(0, 2, 2), NOW)
    log.flush()
    log.append_as_follower(batch(2, 2, 3), NOW)
    log.leader_epochs.save()
    left = disk.after_power_loss(0)
    left.truncate(left.open_append(f"{DIRECTORY}/{0:020d}.log"), len(batch(0, 2, 2)))
    log = open_log(left, recovery_point=2)
    assert read_epochs(left, EPOCHS) == [(2, 0)]
    log.append_as_follower(batch(2, 2, 2), NOW)
    log.write()
    assert open_log(left.after_kill(), recovery_point=2).leader_epochs.entries == [(2, 0)]


def test_a_log_start_that_goes_back_gets_its_epochs_again(disk) -> None:
    log = open_log(disk)
    log.append_as_follower(batch(0, 3, 1) + batch(3, 3, 2) + batch(6, 3, 4), NOW)
    log.write()
    log.advance_log_start(7)
    log.flush()
    assert read_epochs(disk, EPOCHS) == [(4, 7)]
    again = open_log(disk.after_kill(), log_start_offset=1, recovery_point=9)
    assert again.leader_epochs.entries == [(1, 1), (2, 3), (4, 6)]


def test_a_cut_at_the_log_end_drops_an_epoch_without_records(disk) -> None:
    log = open_log(disk)
    log.append_as_follower(batch(0, 3, 1), NOW)
    log.write()
    log.leader_epochs.assign(2, 3)
    log.leader_epochs.save()
    log.truncate_to(3)
    assert read_epochs(disk, EPOCHS) == [(1, 0)]
    assert log.log_end_offset == 3


def test_a_change_during_a_save_is_saved_by_the_next(disk) -> None:
    cache = LeaderEpochCache(disk, "/d/epochs", [])
    cache.assign(1, 0)
    disk.fail_points["checkpoint.written"] = lambda: cache.assign(2, 5)
    cache.save()
    disk.fail_points.clear()
    assert cache.dirty and read_epochs(disk, "/d/epochs") == [(1, 0)]
    cache.save()
    assert not cache.dirty and read_epochs(disk, "/d/epochs") == [(1, 0), (2, 5)]
