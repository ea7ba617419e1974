"""Replacing segments (rule 11): right reads at every moment, and after a crash at every step."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from kept.storage import layout
from kept.storage.errors import InvariantViolation
from kept.storage.segments.swap import SwapGroup, SwapPlan
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.support.swap_plans import CONFIG, bases_of, clean, fill, replace_segments


def test_a_swap_replaces_what_is_read(kit, disk) -> None:
    log = fill(kit, disk)
    before = bases_of(kit, log)
    held = log.read(0, 1 << 20, log.log_end_offset)
    held_bytes = disk.pread(*held)
    mtime = log.segments[1].mtime_ms
    plan, survivors = clean(disk, log)
    replace_segments(log, plan, kit.NOW)
    log.check_invariants()
    assert set(bases_of(kit, log)) == survivors < set(before)
    assert log.segments[0].mtime_ms == mtime
    assert disk.pread(*held) == held_bytes, "a reader keeps the old file"
    assert log.retired.paths and not log.delete_expired(kit.NOW)
    assert log.delete_expired(kit.NOW + 60_000)
    states = [layout.parse_segment_file(n) for n in disk.listdir(log.directory)]
    assert not [s for s in states if s is not None and s.state]
    for offset in range(60):
        found = log.read(offset, 1, log.log_end_offset)
        assert found is None or found.size_bytes
    again = kit.open_log(disk.after_kill(), config=CONFIG, recovery_point=log.recovery_point)
    assert set(bases_of(kit, again)) == survivors
    assert again.producers.get(3).last_offset == 59
    log.close()
    assert set(bases_of(kit, kit.open_log(disk, config=CONFIG, clean=True))) == survivors


def test_a_plan_that_does_not_fit_is_refused(kit, disk) -> None:
    log = fill(kit, disk)
    active = log.active_segment.base_offset
    for group in (SwapGroup((active,), (active,)), SwapGroup((0,), (7,)), SwapGroup((0,), ())):
        with pytest.raises(InvariantViolation):
            replace_segments(log, SwapPlan((group,)), kit.NOW)


def states_of_a_swap(plan: SwapPlan, before: set[int], survivors: set[int], ends) -> list[set[int]]:
    """What may be read when 0, 1, ... groups are swapped."""
    allowed = [before]
    for done in range(1, len(plan.groups) + 1):
        limit = ends[done - 1]
        allowed.append({b for b in before if b >= limit} | {b for b in survivors if b < limit})
    return allowed


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_crash_at_every_call_of_a_swap(kit, with_plan) -> None:
    """Without the plan (Kafka's way) only swaps whose tails survive are right: one to one."""
    disk = SimulatedDisk()
    log = fill(kit, disk)
    start = disk.calls
    plan, survivors = clean(disk, log)
    before, inputs = set(bases_of(kit, log)), [g.input_bases for g in plan.groups]
    bases = [s.base_offset for s in log.segments]
    ends = [bases[bases.index(i[-1]) + 1] for i in inputs]
    begin = disk.calls
    replace_segments(log, plan, kit.NOW)
    allowed = states_of_a_swap(plan, before, survivors, ends)
    outcomes = set()
    for call in range(start + 1, disk.calls + 1):
        crashed = SimulatedDisk(seed=call)
        log = fill(kit, crashed)
        crashed.crash_at(call)
        with pytest.raises(SimulatedCrash):
            replace_segments(log, clean(crashed, log)[0], kit.NOW)
        for survivor in (crashed.after_kill(), *(crashed.after_power_loss(s) for s in range(3))):
            again = kit.open_log(
                survivor,
                config=CONFIG,
                recovery_point=60,
                compacted_to=60,
                unfinished_swap=plan if with_plan else None,
            )
            again.check_invariants()
            found = set(bases_of(kit, again))
            if with_plan:
                assert found in (allowed[0], allowed[-1]), f"call {call}: {crashed.trace[-1]}"
            else:
                assert found >= survivors
            outcomes.add(len(found))
            names = [layout.parse_segment_file(n) for n in survivor.listdir("/d/t-0")]
            assert not [n for n in names if n is not None and n.state]
            kit.append(again, kit.batch(2, pid=3, epoch=0, sequence=60))
            again.close()
    assert begin > start and {len(before), len(survivors)} <= outcomes


def test_a_crash_while_a_swap_is_completed(kit) -> None:
    disk = SimulatedDisk()
    log = fill(kit, disk)
    begin = disk.calls
    plan, survivors = clean(disk, log)
    before = set(bases_of(kit, log))
    replace_segments(log, plan, kit.NOW)
    options = {"config": CONFIG, "recovery_point": 60, "unfinished_swap": plan}
    for call in range(begin + 1, disk.calls + 1, 3):
        crashed = SimulatedDisk(seed=call)
        log = fill(kit, crashed)
        crashed.crash_at(call)
        with pytest.raises(SimulatedCrash):
            replace_segments(log, clean(crashed, log)[0], kit.NOW)
        left = crashed.after_power_loss(call)
        probe = left.after_kill()
        goal = set(bases_of(kit, kit.open_log(probe, **options)))
        assert goal in (before, survivors)
        for inner in range(1, probe.calls + 1):
            again = left.after_kill()
            again.crash_at(inner)
            with pytest.raises(SimulatedCrash):
                kit.open_log(again, **options)
            for survivor in (again.after_kill(), again.after_power_loss(inner)):
                assert set(bases_of(kit, kit.open_log(survivor, **options))) == goal


def test_reads_during_a_swap_see_one_state_or_the_other(kit, disk) -> None:
    log = fill(kit, disk)
    plan, survivors = clean(disk, log)
    before = set(bases_of(kit, log))
    seen: list[set[int]] = []
    for name in ("cleaned", "renamed", "prepared", "deleted", "group", "done"):
        disk.fail_points[f"swap.{name}"] = lambda: seen.append(set(bases_of(kit, log)))
    replace_segments(log, plan, kit.NOW)
    assert len(seen) > 8 and seen[-1] == survivors
    for earlier, later in pairwise(seen):
        assert survivors <= later <= earlier <= before


def test_leftovers_are_removed(kit, disk) -> None:
    log = fill(kit, disk)
    before = kit.contents(log)
    random = Random(1)
    for state in (layout.DELETED, layout.CLEANED):
        path = layout.segment_file(log.directory, random.randint(0, 60), layout.LOG, state)
        disk.write_file(path, b"rest")
    disk.write_file(f"{log.directory}/00000000000000000050.index.swap", b"rest")
    disk.write_file(f"{log.directory}/leader-epoch-checkpoint.tmp", b"rest")
    again = kit.open_log(disk, config=CONFIG, recovery_point=60)
    assert kit.contents(again) == before
    assert not [n for n in disk.listdir(log.directory) if n.endswith(("ed", "swap", "tmp"))]
