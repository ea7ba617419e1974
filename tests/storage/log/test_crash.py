"""A crash at any call leaves a log that is a prefix of what was appended.

Process killed: everything written is there. Power lost: everything synced is there.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.errors import MachineError
from kept.storage.records import build_batch
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.slow import rest_slow

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100, file_delete_delay_ms=0)
OPERATIONS = ["append", "append", "append", "big", "flush", "roll", "epoch", "checkpoint"]


@dataclass
class History:
    """What a run may rely on, as it goes."""

    appended: list[tuple[int, int]] = field(default_factory=list)
    written: int = 0
    synced: int = 0
    checkpoint: int = 0
    epoch: int = 0


def run(kit, disk: SimulatedDisk, operations: list[str], history: History) -> None:
    """Run a script until it ends or the disk crashes."""
    log = kit.open_log(disk, config=CONFIG)
    sequence = 0
    for operation in operations:
        if operation in ("append", "big"):
            count = 3 if operation == "append" else 1
            data = kit.batch(
                count,
                mark=len(history.appended),
                size=5 if operation == "append" else 300,
                pid=9,
                epoch=0,
                sequence=sequence,
            )
            history.appended.append((log.log_end_offset, count))
            kit.append(log, data, leader_epoch=history.epoch)
            history.written = log.written_end_offset
            sequence += count
        elif operation == "flush":
            log.flush()
            history.synced = log.recovery_point
        elif operation == "roll":
            log.roll(kit.NOW)
        elif operation == "epoch":
            history.epoch += 1
        elif operation == "checkpoint":
            history.checkpoint = log.recovery_point
        elif operation == "close":
            log.close()
            history.synced = log.recovery_point
            return


def check_recovered(kit, disk: SimulatedDisk, history: History, at_least: int) -> None:
    log = kit.open_log(disk, config=CONFIG, recovery_point=history.checkpoint)
    log.check_invariants()
    found = kit.contents(log, 250)
    spans = [(base, last - base + 1) for base, last, _ in found]
    assert spans == history.appended[: len(spans)]
    marks = [value[:8] for _, _, _, value in kit.values(log)]
    expected = [b"%08d" % i for i, (_, n) in enumerate(history.appended) for _ in range(n)]
    assert marks == expected[: len(marks)]
    assert log.log_end_offset >= at_least, "something that had to be there is lost"
    assert log.log_end_offset == sum(n for _, n in spans)
    assert all(start < log.log_end_offset for _, start in log.leader_epochs.entries)
    state = log.producers.get(9)
    assert (state.last_offset if state else -1) == log.log_end_offset - 1
    usable(kit, disk, log, found)


def usable(kit, disk: SimulatedDisk, log, found) -> None:
    """It goes on: appends follow, a clean close opens clean with the same content."""
    end = log.log_end_offset
    info = kit.append(log, kit.batch(2, pid=9, epoch=0, sequence=end), leader_epoch=99)
    assert info.base_offset == end and not info.duplicate
    log.close()
    again = kit.open_log(disk, config=CONFIG, recovery_point=log.recovery_point, clean=True)
    assert kit.contents(again)[:-1] == found
    assert again.log_end_offset == end + 2
    again.check_invariants()
    assert kit.append(again, kit.batch(2, pid=9, epoch=0, sequence=end), leader_epoch=99).duplicate


def crash_everywhere(kit, operations: list[str], seeds: int) -> int:
    whole = SimulatedDisk()
    run(kit, whole, operations, History())
    for call in range(1, whole.calls + 1):
        disk, history = SimulatedDisk(seed=call), History()
        disk.crash_at(call)
        with pytest.raises(SimulatedCrash):
            run(kit, disk, operations, history)
        check_recovered(kit, disk.after_kill(), history, history.written)
        for seed in range(seeds):
            check_recovered(kit, disk.after_power_loss(seed), history, history.synced)
    return whole.calls


@pytest.mark.parametrize("seed", rest_slow(range(4), 2))
def test_every_call_of_a_script(kit, seed) -> None:
    random = Random(seed)
    operations = [random.choice(OPERATIONS) for _ in range(25)] + ["append", "close"]
    assert crash_everywhere(kit, operations, seeds=6) > 40


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    operations=st.lists(st.sampled_from([*OPERATIONS, "close"]), max_size=40),
    where=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_any_script_any_call(kit, operations, where, seed) -> None:
    whole = SimulatedDisk()
    run(kit, whole, operations, History())
    disk, history = SimulatedDisk(seed=seed), History()
    disk.crash_at(1 + int(where * (whole.calls - 1)))
    with pytest.raises(SimulatedCrash):
        run(kit, disk, operations, history)
    check_recovered(kit, disk.after_kill(), history, history.written)
    check_recovered(kit, disk.after_power_loss(seed), history, history.synced)


def test_a_crash_during_recovery_itself(kit) -> None:
    operations = ["append", "flush", "checkpoint"] + ["append", "big"] * 6
    disk, history = SimulatedDisk(), History()
    run(kit, disk, operations, history)
    torn = disk.after_power_loss(5)
    probe = torn.after_kill()
    kit.open_log(probe, config=CONFIG, recovery_point=history.checkpoint)
    for call in range(1, probe.calls + 1):
        again = torn.after_kill()
        again.crash_at(call)
        with pytest.raises(SimulatedCrash):
            kit.open_log(again, config=CONFIG, recovery_point=history.checkpoint)
        check_recovered(kit, again.after_kill(), history, history.synced)
        check_recovered(kit, again.after_power_loss(call), history, history.synced)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    operations=st.lists(
        st.sampled_from(["append", "big", "roll", "flush"]), min_size=3, max_size=25
    ),
    operation=st.sampled_from(["write", "truncate", "create", "fsync", "rename", "fsync_dir"]),
    skip=st.integers(0, 12),
    partial=st.booleans(),
)
def test_an_error_of_the_disk_loses_nothing_written(
    kit, operations, operation, skip, partial
) -> None:
    disk, history = SimulatedDisk(), History()
    kit.open_log(disk, config=CONFIG)
    disk.fail(operation, skip=skip, partial=partial)
    try:
        run(kit, disk, operations, history)
    except MachineError:
        disk.injections.clear()
        check_recovered(kit, disk.after_kill(), history, history.written)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(before=st.integers(1, 25), to=st.integers(0, 60), after=st.integers(0, 5), data=st.data())
def test_a_crash_during_truncation(kit, before, to, after, data) -> None:
    def script(disk: SimulatedDisk) -> tuple[list, list]:
        log = kit.open_log(disk, config=CONFIG)
        for n in range(before):
            kit.append(log, kit.batch(2, mark=n))
        log.flush()
        old.extend(kit.contents(log))
        log.truncate_to(to)
        for n in range(after):
            kit.append(log, kit.batch(1, mark=1000 + n), leader_epoch=1)
        new.extend(kit.contents(log))
        return old, new

    old: list = []
    new: list = []
    whole = SimulatedDisk()
    script(whole)
    goal = list(new)
    disk = SimulatedDisk(seed=1)
    disk.crash_at(data.draw(st.integers(1, whole.calls)))
    old, new = [], []
    with pytest.raises(SimulatedCrash):
        script(disk)
    for survivor in (disk.after_kill(), disk.after_power_loss(data.draw(st.integers(0, 99)))):
        log = kit.open_log(survivor, config=CONFIG)
        log.check_invariants()
        found = kit.contents(log)
        histories = (old, goal) if old else (goal, found)
        assert any(found == history[: len(found)] for history in histories)
        kept = sum(1 for batch in old if batch[1] < to)
        assert len(found) >= kept, "truncation took what it had to leave"


# Gaps between segments: compaction's, or a power cut's?

COMPACT = replace(CONFIG, cleanup_policy=frozenset({"compact"}))


def opened(disk: SimulatedDisk) -> LogDirectory:
    return LogDirectory.open(
        "/d", disk, cluster_id="c", node_id=1, new_directory_id=uuid.UUID(int=7), now_ms=0
    )


@pytest.mark.parametrize("flushed", [False, True])
def test_a_power_cut_leaves_no_gap_in_a_log_that_was_never_compacted_here(kit, flushed) -> None:
    """Though its topic is compacted: what is there is what was appended, up to somewhere."""
    disk = SimulatedDisk(seed=1)
    directory = opened(disk)
    log = kit.create_log(directory, kit.TP, kit.TOPIC_ID, COMPACT, now_ms=kit.NOW)
    durable = 0
    for n in range(40):
        kit.append(log, kit.batch(mark=n, timestamp=kit.NOW + n), now_ms=kit.NOW + n)
        if flushed and n == 19:
            log.flush()
            directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {kit.TP: log.recovery_point})
            durable = log.recovery_point
    whole = kit.contents(log)
    cuts = set()
    for seed in range(60):
        again = opened(disk.after_power_loss(seed))
        log = again.open_log(kit.TP, None, COMPACT, now_ms=kit.NOW)
        found = kit.contents(log)
        assert found == whole[: len(found)] and log.log_end_offset == len(found) >= durable
        cuts.add(len(found))
    assert len(cuts) > 5


def test_without_a_checkpoint_what_is_found_is_made_durable(kit) -> None:
    """So that the one which is written next has no gap of compaction above it."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=COMPACT)
    for n in range(40):
        kit.append(log, kit.batch(mark=n))
    second = log.segments[1]
    with_gap = disk.after_kill()
    path = second.path(".log")
    size = len(kit.contents(log)[0][2])
    with_gap.write_file(path, disk.read(path)[:-size])
    log = kit.open_log(with_gap, config=COMPACT)
    found = kit.contents(log)
    assert len(found) == 39 and log.recovery_point == log.active_segment.base_offset > 0
    for seed in range(20):
        survivor = with_gap.after_power_loss(seed)
        again = kit.open_log(survivor, config=COMPACT, recovery_point=log.recovery_point)
        below = [one for one in found if one[0] < log.recovery_point]
        assert kit.contents(again)[: len(below)] == below


@pytest.mark.parametrize("config", [CONFIG, COMPACT])
def test_a_batch_that_is_too_far_away_for_its_segment_leaves_a_gap(kit, config) -> None:
    """What a follower fetched from a leader that had compacted more than a segment can hold."""
    disk = SimulatedDisk()
    log = kit.open_log(disk, config=config)
    for base in (0, 1, 1 << 33):
        data = build_batch([(kit.NOW, b"k", b"v", ())], base_offset=base, leader_epoch=1)
        log.append_as_follower(data, kit.NOW)
        log.write()
    assert [segment.base_offset for segment in log.segments] == [0, 1 << 33]
    again = kit.open_log(disk.after_kill(), config=config, recovery_point=0)
    assert [first for first, _, _ in kit.contents(again)] == [0, 1, 1 << 33]
