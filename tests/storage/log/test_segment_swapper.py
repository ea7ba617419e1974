"""A swap in steps: what may happen between them, and how it is taken back."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import InvariantViolation
from kept.storage.segments.segment import Segment
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.swap_plans import CONFIG, bases_of, clean, copy, fill, replace_segments


def states(disk, directory="/d/t-0"):
    """The states of the segment files that are there."""
    found = map(layout.parse_segment_file, disk.listdir(directory))
    return {parsed.state for parsed in found if parsed is not None and parsed.state}


def test_the_log_goes_on_between_the_steps(kit, disk) -> None:
    log = fill(kit, disk)
    plan, survivors = clean(disk, log)
    swap = log.begin_replacement(plan)
    kit.append(log, kit.batch(2, pid=3, epoch=0, sequence=60))
    swap.prepare()
    log.roll(kit.NOW)
    more, seen = True, [set(bases_of(kit, log))]
    while more:
        more = swap.place_next(kit.NOW)
        log.check_invariants()
        kit.append(log, kit.batch(2, size=60))
        seen.append(set(bases_of(kit, log)) & set(range(60)))
    assert seen[-1] == survivors and len(seen) == 4
    assert all(survivors < later < earlier for earlier, later in pairwise(seen[:-1]))
    swap.finish()
    swap.end()
    assert states(disk) == {layout.DELETED} and log.replacement is None
    assert {60, 62, 64, 66} <= set(bases_of(kit, log))
    again = kit.open_log(disk.after_kill(), config=CONFIG, recovery_point=log.recovery_point)
    assert bases_of(kit, again) == bases_of(kit, log)


def test_retention_waits_for_the_end(kit, disk) -> None:
    log = fill(kit, disk)
    plan, _ = clean(disk, log)
    swap = log.begin_replacement(plan)
    log.advance_log_start(50)
    assert log.delete_old_segments(kit.NOW, 60) == []
    swap.prepare()
    while swap.place_next(kit.NOW):
        assert log.delete_old_segments(kit.NOW, 60) == []
    swap.finish()
    swap.end()
    assert log.delete_old_segments(kit.NOW, 60)
    assert log.log_start_offset == 50 and log.segments[0].base_offset > 0
    log.check_invariants()


def test_one_at_a_time(kit, disk) -> None:
    log = fill(kit, disk)
    plan, _ = clean(disk, log)
    swap = log.begin_replacement(plan)
    with pytest.raises(InvariantViolation):
        log.begin_replacement(plan)
    with pytest.raises(InvariantViolation):
        swap.place_next(kit.NOW)
    assert log.replacement is swap
    swap.prepare()
    swap.place_next(kit.NOW)
    with pytest.raises(InvariantViolation):
        swap.withdraw()


def test_a_truncation_withdraws_what_was_not_begun(kit, disk) -> None:
    for prepared in (False, True):
        disk = SimulatedDisk()
        log = fill(kit, disk)
        plan, _ = clean(disk, log)
        swap = log.begin_replacement(plan)
        if prepared:
            swap.prepare()
        log.truncate_to(20)
        assert states(disk) == {layout.CLEANED}
        with pytest.raises(InvariantViolation):
            swap.place_next(kit.NOW) if prepared else swap.prepare()
        swap.end()
        assert bases_of(kit, log) == list(range(0, 20, 2))
        log.check_invariants()
        again = kit.open_log(disk.after_power_loss(1), config=CONFIG, unfinished_swap=plan)
        assert bases_of(kit, again) == list(range(0, 20, 2)) and not states(again.disk)


def test_a_truncation_completes_what_was_begun(kit, disk) -> None:
    log = fill(kit, disk)
    plan, survivors = clean(disk, log)
    swap = log.begin_replacement(plan)
    swap.prepare()
    assert swap.place_next(kit.NOW)
    log.truncate_to(20)
    assert not swap.place_next(kit.NOW)
    swap.finish()
    swap.end()
    assert set(bases_of(kit, log)) == {base for base in survivors if base < 20}
    log.check_invariants()


def test_a_crash_while_it_is_withdrawn(kit) -> None:
    """All of it is undone, or all of it is completed: then the withdrawal had not begun."""
    disk = SimulatedDisk()
    log = fill(kit, disk)
    before = set(bases_of(kit, log))
    plan, survivors = clean(disk, log)
    begin = disk.calls
    swap = log.begin_replacement(plan)
    swap.prepare()
    prepared = disk.calls
    swap.withdraw()
    assert states(disk) == {layout.CLEANED} and set(bases_of(kit, log)) == before
    outcomes = []
    for call in range(begin + 1, disk.calls + 1):
        crashed = SimulatedDisk(seed=call)
        log = fill(kit, crashed)
        found, _ = clean(crashed, log)
        crashed.crash_at(call)
        with pytest.raises(SimulatedCrash):
            swap = log.begin_replacement(found)
            swap.prepare()
            swap.withdraw()
        for left in (crashed.after_kill(), *(crashed.after_power_loss(s) for s in range(3))):
            again = kit.open_log(left, config=CONFIG, recovery_point=60, unfinished_swap=plan)
            read = set(bases_of(kit, again))
            assert read in (before, survivors) and not states(left)
            if call > prepared + 2 and read == before:
                outcomes.append(call)
    assert outcomes


def test_the_indexes_of_the_cleaner_are_taken(kit, disk, monkeypatch) -> None:
    """And made again when they do not fit the output (rule 23)."""
    reference = fill(kit, SimulatedDisk())
    plan, survivors = clean(reference.disk, reference)
    reference.begin_replacement(plan).prepare()
    written = {
        name: reference.disk.read(f"/d/t-0/{name}")
        for name in reference.disk.listdir("/d/t-0")
        if name.endswith(layout.SWAP) and ".log" not in name
    }
    assert len(written) == 8
    walks: list[int] = []
    walk = Segment.walk
    monkeypatch.setattr(
        Segment, "walk", lambda self, *args: walks.append(self.base_offset) or walk(self, *args)
    )
    for damage in (b"", b"x"):
        disk = SimulatedDisk()
        log = fill(kit, disk)
        clean(disk, log)
        for name, content in written.items():
            path = f"/d/t-0/{name.replace(layout.SWAP, layout.CLEANED)}"
            disk.write_file(path, content + (damage if ".index" in name else b""))
        walks.clear()
        swap = log.begin_replacement(plan)
        swap.prepare()
        assert len(walks) == (4 if damage else 0)
        for name, content in written.items():
            assert disk.read(f"/d/t-0/{name}") == content
        while swap.place_next(kit.NOW):
            pass
        swap.finish()
        assert set(bases_of(kit, log)) == survivors
        assert log.segments[0].max_timestamp >= 0


def test_passes_leave_no_file_open(kit, tmp_path) -> None:
    """Each cleaned segment would keep a descriptor for as long as it is part of the log."""
    disk = Disk({})
    disk.max_reopenable = 0
    log = fill(kit, disk, f"{tmp_path}/t-0")
    before, contents = len(os.listdir("/proc/self/fd")), kit.contents(log)
    for _ in range(5):
        replace_segments(log, copy(disk, log), kit.NOW)
        log.delete_expired(kit.NOW + 60_000)
        assert len(os.listdir("/proc/self/fd")) == before
    assert kit.contents(log) == contents
    for segment in log.segments:
        assert segment.file.path == segment.path(layout.LOG), "errors name a file that is there"
