"""Retention by time, size and DeleteRecords; never at or above the high watermark."""

from __future__ import annotations

import pytest

from kept.storage.errors import OffsetOutOfRange
from kept.storage.types import LogConfig

HOUR = 3_600_000


def fill(kit, make_log, **config):
    log = make_log(config=LogConfig(**{"segment_bytes": 1000, "retention_ms": -1, **config}))
    for n in range(20):
        kit.append(log, kit.batch(1, size=400, timestamp=kit.NOW + n * HOUR))
    return log


def test_by_time(kit, make_log) -> None:
    log = fill(kit, make_log, retention_ms=5 * HOUR)
    now = kit.NOW + 19 * HOUR
    assert log.delete_old_segments(now, 0) == [], "nothing is below the high watermark"
    gone = log.delete_old_segments(now, 7)
    assert gone == [(0, "retention.ms"), (2, "retention.ms"), (4, "retention.ms")]
    assert log.log_start_offset == 6
    assert log.delete_old_segments(now, 20)[-1][0] == 12
    assert [o for o, *_ in kit.values(log)] == list(range(14, 20))
    with pytest.raises(OffsetOutOfRange):
        log.read(13, 100, 20)
    assert log.leader_epochs.entries == [(0, 14)]
    log.check_invariants()


def test_an_idle_log_empties(kit, disk, make_log) -> None:
    log = fill(kit, make_log, retention_ms=5 * HOUR)
    log.delete_old_segments(kit.NOW + 100 * HOUR, 20)
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (20, 20, 0)
    assert log.delete_old_segments(kit.NOW + 200 * HOUR, 20) == []
    again = kit.open_log(disk, log_start_offset=20)
    assert (again.log_start_offset, again.log_end_offset) == (20, 20)
    assert kit.append(again, kit.batch()).base_offset == 20


def test_by_size(kit, make_log) -> None:
    log = fill(kit, make_log, retention_bytes=3000)
    log.delete_old_segments(kit.NOW, 20)
    assert 3000 <= log.size_bytes < 4000


def test_compacted_topics_keep_everything(kit, make_log) -> None:
    log = fill(kit, make_log, retention_ms=1, cleanup_policy=frozenset({"compact"}))
    assert log.delete_old_segments(kit.NOW + 100 * HOUR, 20) == []
    log.advance_log_start(5, kit.NOW)
    assert log.delete_old_segments(kit.NOW, 20) == [
        (0, "below log start offset"), (2, "below log start offset")
    ]  # fmt: skip


def test_delete_records(kit, disk, make_log) -> None:
    log = fill(kit, make_log)
    log.advance_log_start(7, kit.NOW)
    log.advance_log_start(3, kit.NOW)
    assert log.log_start_offset == 7
    assert [o for o, *_ in kit.values(log)] == list(range(7, 20))
    with pytest.raises(OffsetOutOfRange):
        log.advance_log_start(21, kit.NOW)
    log.delete_old_segments(kit.NOW, 20)
    assert log.segments[0].base_offset == 6
    again = kit.open_log(disk.after_kill(), log_start_offset=7)
    assert again.log_start_offset == 7
    assert log.offset_for_timestamp(0).offset == 7


def test_deleted_files_stay_for_the_delay_and_for_readers(kit, disk, make_log) -> None:
    log = fill(kit, make_log, retention_ms=HOUR)
    held = log.read(0, 100, 20)
    data = disk.pread(*held)
    log.delete_old_segments(kit.NOW + 50 * HOUR, 20)
    deleted = [n for n in disk.listdir(log.directory) if n.endswith(".deleted")]
    assert deleted and log.delete_expired(kit.NOW + 50 * HOUR) == 0
    assert log.delete_expired(kit.NOW + 50 * HOUR + 60_000) > 0
    assert not [n for n in disk.listdir(log.directory) if n.endswith(".deleted")]
    assert disk.pread(*held) == data


def test_files_marked_deleted_go_at_the_next_start(kit, disk, make_log) -> None:
    log = fill(kit, make_log, retention_ms=HOUR)
    log.delete_old_segments(kit.NOW + 50 * HOUR, 20)
    kit.open_log(disk, log_start_offset=20)
    assert not [n for n in disk.listdir(log.directory) if n.endswith(".deleted")]


def test_idle_compacted_logs_roll_by_lag(kit, make_log) -> None:
    config = LogConfig(cleanup_policy=frozenset({"compact"}), max_compaction_lag_ms=HOUR)
    log = make_log(config=config)
    kit.append(log, kit.batch())
    assert not log.maybe_roll(kit.NOW + HOUR)
    assert log.maybe_roll(kit.NOW + HOUR + 1)
    assert [s.base_offset for s in log.segments] == [0, 1]


def test_jitter_makes_logs_roll_apart(kit, disk) -> None:
    config = LogConfig(segment_ms=HOUR, segment_jitter_ms=HOUR // 2)
    log = kit.open_log(disk, config=config)
    assert HOUR // 2 <= log.roll_age_ms < HOUR
    assert log.roll_age_ms == kit.open_log(disk, config=config).roll_age_ms
