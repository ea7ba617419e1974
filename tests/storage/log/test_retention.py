"""Retention by time, size and DeleteRecords; never at or above the high watermark."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kept.storage import layout
from kept.storage.errors import DamagedData, OffsetOutOfRange, OutOfOrderSequenceNumber
from kept.storage.inspect.lost_files import Known, lost_segments, missing_records
from kept.storage.log.missing_files import find_traces, report_missing
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedCrash

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


@pytest.mark.parametrize("waited", [False, True])
def test_a_crash_after_retention_is_no_alarm(kit, disk, make_log, caplog, waited) -> None:
    """Not while the files wait for their delay, and not when they are gone."""
    log = fill(kit, make_log, retention_ms=5 * HOUR)
    log.flush()
    now = kit.NOW + 19 * HOUR
    assert log.delete_old_segments(now, 20)
    if waited:
        assert log.delete_expired(now + HOUR)
    disk = disk.after_kill()
    again = kit.open_log(disk, log_start_offset=0)
    assert again.log_start_offset == 14
    assert "records may be lost" not in caplog.text


def test_a_crash_after_delete_records_is_no_alarm(kit, disk, make_log, caplog) -> None:
    """The start was checkpointed, the leader epochs were not: no segment is missing."""
    log = fill(kit, make_log)
    log.flush()
    log.advance_log_start(5)
    disk = disk.after_kill()
    assert kit.open_log(disk, log_start_offset=5).log_start_offset == 5
    assert "records may be lost" not in caplog.text


def test_segments_that_vanished_are_an_alarm(kit, disk, make_log, caplog) -> None:
    log = fill(kit, make_log)
    log.flush()
    gone = log.segments[0].path(".log")
    disk = disk.after_kill()
    disk.unlink(gone)
    assert kit.open_log(disk, log_start_offset=0).log_start_offset == 2
    assert "begins at 2, its leader epochs at 0: records may be lost" in caplog.text


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
    log.advance_log_start(5)
    assert log.delete_old_segments(kit.NOW, 20) == [
        (0, "below log start offset"),
        (2, "below log start offset"),
    ]


def test_delete_records(kit, disk, make_log) -> None:
    log = fill(kit, make_log)
    log.advance_log_start(7)
    log.advance_log_start(3)
    assert log.log_start_offset == 7
    assert [o for o, *_ in kit.values(log)] == list(range(7, 20))
    with pytest.raises(OffsetOutOfRange):
        log.advance_log_start(21)
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


@pytest.mark.parametrize(("jitter", "least"), [(10, HOUR - 10), (HOUR // 2, HOUR // 2), (HOUR, 1)])
def test_jitter_makes_logs_roll_apart(make_log, jitter, least) -> None:
    """By as much as it says, and never at once."""
    log = make_log()
    config = LogConfig(segment_ms=HOUR, segment_jitter_ms=jitter)
    ages = []
    for number in range(100):
        for _ in range(2):
            log.tail.configure(config, TopicPartition("t", number))
            ages.append(log.tail.roll_age_ms)
    assert ages[::2] == ages[1::2], "the same after a restart"
    assert least <= min(ages) < max(ages) <= HOUR and len(set(ages)) >= min(jitter, 90)


def check_producer(log, sequence: int) -> None:
    """Producer 7 is known; the batch that comes next is the one with ``sequence``."""
    assert log.producers.check(7, 0, sequence, 1) is None
    with pytest.raises(OutOfOrderSequenceNumber):
        log.producers.check(7, 0, sequence + 5, 1)


@pytest.mark.parametrize("start_known", [0, 13])
def test_delete_records_makes_nothing_durable(kit, disk, make_log, start_known) -> None:
    """Power fails when the checkpoint of recovery points is durable, that of log starts or not."""
    log = fill(kit, make_log)
    written = kit.contents(log)
    log.advance_log_start(13)
    log.check_invariants()
    assert log.recovery_point == 0
    for seed in range(20):
        left = kit.open_log(
            disk.after_power_loss(seed),
            recovery_point=log.recovery_point,
            log_start_offset=start_known,
        )
        found = kit.contents(left)
        assert left.log_start_offset == start_known
        assert found == written[start_known : left.log_end_offset]
    log.flush()
    assert log.recovery_point == 20


def test_damage_below_the_log_start_costs_nothing_above_it(kit, disk, make_log) -> None:
    log = fill(kit, make_log)
    written = kit.contents(log)
    log.advance_log_start(13)
    left = disk.after_kill()
    left.flip_bit(layout.segment_file("/d/t-0", 4, layout.LOG), 100)
    again = kit.open_log(left, recovery_point=0, log_start_offset=13)
    assert kit.contents(again) == written[13:]


class Damage(NamedTuple):
    """One bit of a byte of a batch is another one; files of the kind ``lost`` are gone."""

    base: int
    batch: int
    byte: int
    lost: str
    clean: bool


def damaged(kit, disk, make_log, damage: Damage):
    """A log that starts at 13, closed or killed; the path of what is damaged, and what was in the
    log.
    """
    log = make_log(config=LogConfig(segment_bytes=1000, retention_ms=-1))
    for n in range(20):
        kit.append(log, kit.batch(1, size=400, pid=7, epoch=0, sequence=n), leader_epoch=n // 5)
    log.flush()
    written = kit.contents(log)
    log.advance_log_start(13)
    if damage.clean:
        log.close()
    left = disk.after_kill()
    path = layout.segment_file("/d/t-0", damage.base, layout.LOG)
    left.flip_bit(path, damage.batch * len(written[0][2]) + damage.byte, 1)
    for file, _ in list(left.files()):
        if file.endswith(damage.lost):
            left.unlink(file)
    return left, path, written


LENGTH, MAGIC = (0, 8), (1, 16)
READ_FOR = [
    (layout.SNAPSHOT, False),
    (layout.LEADER_EPOCHS, False),
    (layout.LEADER_EPOCHS, True),
    (layout.INDEX, False),
    (layout.INDEX, True),
]


@pytest.mark.parametrize(
    "damage",
    [
        Damage(base, *at, *read_for)
        for base in (0, 4, 10)
        for at in (LENGTH, MAGIC)
        for read_for in READ_FOR
    ],
    ids=str,
)
def test_a_log_opens_though_a_segment_below_its_start_is_no_log(
    kit, disk, make_log, caplog, damage
) -> None:
    """A start reads it for producers, leader epochs, or its indexes. Then it goes, with a word."""
    left, path, written = damaged(kit, disk, make_log, damage)
    again = kit.open_log(left, recovery_point=20, log_start_offset=13, clean=damage.clean)
    again.check_invariants()
    assert again.log_start_offset == 13 and kit.contents(again) == written[13:]
    check_producer(again, 20)
    assert again.segments.bases[0] == 12 and not left.exists(path)
    assert f"{path}: damaged" in caplog.text and "records may be lost" not in caplog.text
    again.close()
    caplog.clear()
    again = kit.open_log(left, recovery_point=20, log_start_offset=13, clean=True)
    assert kit.contents(again) == written[13:] and not caplog.records


@pytest.mark.parametrize("base", [0, 4, 10])
def test_a_crash_while_a_damaged_start_is_dropped_leaves_no_hole(
    kit, disk, make_log, caplog, base
) -> None:
    """Nothing is said to be lost that nobody could read."""
    left, _, written = damaged(kit, disk, make_log, Damage(base, *MAGIC, layout.SNAPSHOT, False))
    probe = left.after_kill()
    kit.open_log(probe, recovery_point=20, log_start_offset=13)
    assert probe.calls > 20
    for call in range(1, probe.calls + 1):
        again = left.after_kill()
        again.crash_at(call)
        with pytest.raises(SimulatedCrash):
            kit.open_log(again, recovery_point=20, log_start_offset=13)
        survivor = again.after_kill()
        names = map(layout.parse_segment_file, survivor.listdir("/d/t-0"))
        bases = sorted(one.base_offset for one in names if one and one.kind == layout.LOG)
        assert bases == list(range(bases[0], 20, 2)), call
        caplog.clear()
        log = kit.open_log(survivor, recovery_point=20, log_start_offset=13)
        assert log.log_start_offset == 13 and kit.contents(log) == written[13:]
        check_producer(log, 20)
        assert "lost" not in caplog.text, call


@pytest.mark.parametrize("base", [0, 4, 10])
def test_a_power_cut_while_a_damaged_start_is_dropped_loses_nothing(
    kit, disk, make_log, caplog, base
) -> None:
    left, _, written = damaged(kit, disk, make_log, Damage(base, *MAGIC, layout.SNAPSHOT, False))
    left = left.after_power_loss(0)  # all of it is durable
    assert kit.contents(kit.open_log(left.after_kill(), log_start_offset=13)) == written[13:]
    probe = left.after_kill()
    kit.open_log(probe, recovery_point=20, log_start_offset=13)
    for call in range(1, probe.calls + 1):
        again = left.after_kill()
        again.crash_at(call)
        with pytest.raises(SimulatedCrash):
            kit.open_log(again, recovery_point=20, log_start_offset=13)
        for seed in range(8):
            caplog.clear()
            log = kit.open_log(again.after_power_loss(seed), recovery_point=20, log_start_offset=13)
            assert log.log_start_offset == 13 and kit.contents(log) == written[13:], (call, seed)
            check_producer(log, 20)
            assert "lost" not in caplog.text, (call, seed)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kinds", [(layout.LOG,), layout.SEGMENT_SUFFIXES])
@pytest.mark.parametrize(("base", "is_lost"), [(2, False), (10, False), (14, True)])
def test_what_lies_below_the_log_start_is_lost_to_nobody(  # noqa: PLR0917
    kit, disk, make_log, caplog, base, is_lost, kinds, clean
) -> None:
    """A file system may bring back some of the names that were removed, in any order."""
    log = make_log(config=LogConfig(segment_bytes=1000, retention_ms=-1))
    for n in range(20):
        kit.append(log, kit.batch(1, size=400, pid=7, epoch=0, sequence=n), leader_epoch=n // 5)
    log.flush()
    log.advance_log_start(13)
    if clean:
        log.close()
    left = disk.after_kill()
    leaves_index = is_lost and kinds == (layout.LOG,)
    for kind in kinds:
        left.unlink(layout.segment_file("/d/t-0", base, kind))
    ends = {first: first + 2 for first in range(0, 20, 2) if first != base}
    known = Known(clean, True, recovery_point=20, high_watermark=20, log_start_offset=13)
    assert lost_segments(left, "/d/t-0", ends, known) == ({14} if leaves_index else set())
    found = missing_records(left, "/d/t-0", ends, known, frozenset())
    assert bool(found) is (is_lost and not leaves_index), found
    traces = find_traces(left, "/d/t-0")
    log = kit.open_log(left, recovery_point=20, log_start_offset=13, clean=clean)
    assert report_missing(log, traces, 20, 20) is leaves_index
    assert ("lost" in caplog.text) is is_lost


@pytest.mark.parametrize("at", [LENGTH, MAGIC])
def test_damage_above_the_log_start_takes_nothing_below_it(kit, disk, make_log, at) -> None:
    damage = Damage(14, *at, layout.SNAPSHOT, False)
    left, path, _ = damaged(kit, disk, make_log, damage)
    logs = [name for name in left.listdir("/d/t-0") if name.endswith(layout.LOG)]
    with pytest.raises(DamagedData, match=path):
        kit.open_log(left, recovery_point=20, log_start_offset=13)
    assert [name for name in left.listdir("/d/t-0") if name.endswith(layout.LOG)] == logs


def silent_producer(kit, log) -> None:
    """One record of producer 7, in a segment that others' records close."""
    kit.append(log, kit.batch(1, size=400, pid=7, epoch=0, sequence=0))
    for n in range(1, 6):
        kit.append(log, kit.batch(1, size=400, timestamp=kit.NOW + n * HOUR))


@pytest.mark.parametrize("start_known", [False, True])
def test_a_power_cut_does_not_forget_a_producer_whose_records_are_gone(
    kit, disk, make_log, start_known
) -> None:
    """Where a segment begins its snapshot is as durable as what was before it."""
    log = make_log(config=LogConfig(segment_bytes=1000))
    silent_producer(kit, log)
    log.flush()
    log.advance_log_start(3)
    assert log.delete_old_segments(kit.NOW, 6) == [(0, "below log start offset")]
    log.delete_expired(2 * kit.NOW)
    recovery_point = 6 if start_known else 0
    for seed in range(20):
        left = kit.open_log(disk.after_power_loss(seed), recovery_point=recovery_point)
        assert left.segments.bases[0] == 2
        check_producer(left, 1)


@pytest.mark.parametrize("became", ["unsynced", "gone", "torn"])
def test_a_start_makes_snapshots_durable(kit, disk, make_log, became) -> None:
    """Those that a kill left in the page cache, and anew those that a power cut took or tore."""
    log = make_log(config=LogConfig(segment_bytes=1000))
    silent_producer(kit, log)
    left = disk.after_kill()
    for base in (2, 4):
        path = layout.segment_file("/d/t-0", base, layout.SNAPSHOT)
        if became == "gone":
            left.unlink(path)
        elif became == "torn":
            left.write_file(path, left.read(path)[:-7])
    again = kit.open_log(left)
    assert left.exists(layout.segment_file("/d/t-0", 2, layout.SNAPSHOT))
    again.flush()
    again.advance_log_start(3)
    again.delete_old_segments(kit.NOW, 6)
    again.delete_expired(2 * kit.NOW)
    for seed in range(20):
        check_producer(kit.open_log(left.after_power_loss(seed)), 1)


def test_a_start_makes_the_snapshot_durable_where_the_log_begins(kit, disk, make_log) -> None:
    """Retention took the segment below it, and a kill came before the next flush."""
    log = make_log(config=LogConfig(segment_bytes=1000))
    silent_producer(kit, log)
    log.advance_log_start(3)
    log.delete_old_segments(kit.NOW, 6)
    log.delete_expired(2 * kit.NOW)
    left = disk.after_kill()
    again = kit.open_log(left)
    assert again.segments.bases[0] == 2
    again.flush()
    for seed in range(20):
        check_producer(kit.open_log(left.after_power_loss(seed)), 1)


def test_deleted_files_go_though_the_clock_is_set_back(kit, make_log, disk) -> None:
    """They would stay, and hold the disk, until the clock is where it was."""
    log = fill(kit, make_log, retention_ms=5 * HOUR, file_delete_delay_ms=60_000)
    assert log.delete_old_segments(kit.NOW + 10 * 365 * 24 * HOUR, 7)
    paths = log.retired.paths
    assert paths and log.delete_expired(kit.NOW) == 0
    assert log.delete_expired(kit.NOW + 60_000) == len(paths)
    assert not any(disk.exists(path) for path in paths)
