"""A crash at every call of a pass and of all that puts it into place, killed or with the power cut,
recovers to a log that reads as before the pass or as after it, and the state on disk agrees with
it. Checkpoints and swap are the node's own (``tests/support/installing.py``)."""

import pytest

from kept.compaction.manifest import manifest
from kept.storage import layout
from kept.storage.directory import Checkpoint
from kept.storage.types import Generation
from tests.support.installing import install, log_directory
from tests.support.simulated_disk import SimulatedCrash
from tests.support.slow import rest_slow

OLD, NEW = 1, 2
"""The generation that the log has, and the one that the pass makes."""


def prepared(world):
    w = world(delete_retention_ms=1000, segment_bytes=400)
    for i in range(12):
        w.append((b"k%d" % (i % 5), None if i % 4 == 3 else b"v%d" % i * 30), pid=4, sequence=i)
        if i % 2:
            w.roll()
    w.append((b"n", b"bad"), pid=9, sequence=0, transactional=True)
    w.marker(9, commit=False)
    w.roll()
    w.clean()
    for i in range(12, 20):
        w.append((b"k%d" % (i % 5), b"w%d" % i * 30), pid=4, sequence=i)
        w.roll()
    w.log.flush()
    w.log.disk.fsync_dir("/t-0")
    return w


def everything(w):
    return [r[:5] for r in w.records()], [
        (h.base_offset, h.last_offset, h.producer_id, h.is_control) for h in w.headers()
    ]


def crashing_at(world, call):
    """A world whose pass crashes at a call; None when the pass ends before it."""
    w = prepared(world)
    w.disk.crash_at(w.disk.calls + call)
    try:
        w.clean()
    except SimulatedCrash:
        return w
    return None


def reopened(world, w, disk):
    again = world.__new__(world)
    again.disk, again.now, again.config, again.seed = disk, w.now + 1, w.config, w.seed
    return again.open()


def check_committed(w, disk):
    """Once a start would complete the pass, the checkpoints say of all of it that it is durable and
    committed: a gap that it left is not taken for a power cut's, and no replica takes part of it
    back.
    """
    path = layout.manifest_file("/t-0", 0, NEW)
    if not disk.exists(path):
        return
    end = manifest.decode(path, disk.read(path))[0].end_offset
    checkpoints = log_directory("/t-0", disk).checkpoints
    tp = w.log.topic_partition
    assert checkpoints[Checkpoint.RECOVERY_POINTS][tp] >= end
    assert checkpoints[Checkpoint.HIGH_WATERMARKS][tp] >= end


def check_recovered(again, expected):
    """``expected``: what the log is at each generation."""
    generation = again.state.applied.number
    assert everything(again) == expected[generation]
    names = again.disk.listdir("/t-0")
    assert not [n for n in names if n.endswith((".swap", ".cleaned", ".tmp"))]
    manifests = [n for n in names if n.startswith("manifest-") and n != "manifest-applied"]
    assert manifests == [f"manifest-0-{generation}"]
    again.log.check_invariants()
    again.clean()
    assert everything(again) == expected[NEW], "the next pass does what this one did, or nothing"
    offset = again.append((b"new", b"1"), pid=4, sequence=20)
    assert again.offsets()[-1] == offset
    return generation


def reference(world):
    """What the log is at each generation."""
    w = prepared(world)
    before = everything(w)
    w.clean()
    after = everything(w)
    assert before != after
    return {OLD: before, NEW: after}


@pytest.mark.parametrize("how", rest_slow(["power", "kill"], 1))
def test_a_crash_at_every_call_recovers(world, how):
    expected = reference(world)
    generations = []
    for call in range(1, 10_000):
        w = crashing_at(world, call)
        if w is None:
            break
        disk = w.disk.after_kill() if how == "kill" else w.disk.after_power_loss(call)
        check_committed(w, disk)
        generations.append(check_recovered(reopened(world, w, disk), expected))
    assert call > 50, "the pass makes more calls than that"
    assert set(generations) == {OLD, NEW}
    if how == "kill":
        assert generations == sorted(generations), "once it counts as applied it stays applied"


@pytest.mark.slow
def test_a_second_crash_during_recovery_recovers(world):
    expected = reference(world)
    for call in range(1, 10_000, 3):
        w = crashing_at(world, call)
        if w is None:
            break
        for second in range(1, 200, 4):
            disk = w.disk.after_kill()
            disk.crash_at(second)
            try:
                reopened(world, w, disk)
            except SimulatedCrash:
                check_recovered(reopened(world, w, disk.after_kill()), expected)
            else:
                break


@pytest.mark.parametrize("point", ["compaction.surveyed", "compaction.built", "compaction.written"])
def test_a_pass_that_stops_before_the_swap_leaves_the_log_alone(world, point):
    w = prepared(world)
    before = everything(w)

    def stop():
        raise SimulatedCrash(point)

    w.disk.fail_points[point] = stop
    with pytest.raises(SimulatedCrash):
        w.clean()
    w.disk.fail_points.clear()
    assert everything(w) == before
    assert w.clean() is not None, "leftovers are discarded before the next pass"
    assert w.state.applied == Generation(0, 2)


def test_full_disk_fails_the_pass_and_not_the_log(world):
    from kept.storage.errors import MachineError

    w = prepared(world)
    before = everything(w)
    w.disk.fail("write", ".log.cleaned", 28)
    with pytest.raises(MachineError):
        w.clean()
    assert everything(w) == before
    w.clean()
    assert w.state.applied.number == 2


def test_disk_that_is_nearly_full_stops_the_pass_by_itself(world, monkeypatch):
    from kept.compaction.cleaner.build import NoSpace

    w = prepared(world)
    monkeypatch.setattr(w.disk, "free_bytes", lambda path: 1000)
    with pytest.raises(NoSpace):
        w.clean()
    plan = w.plan(free_bytes=1000)
    assert plan.reason.startswith("needs ") and plan.reason.endswith("1000 are free")


def test_a_pass_based_on_what_is_not_applied_any_more_is_thrown_away(world):
    from kept.storage.errors import InvariantViolation

    w = prepared(world)
    before = everything(w)
    made = w.plan()
    from kept.compaction.cleaner.cleaner_run import run_pass

    result = run_pass(w.job(made), w.disk)
    with pytest.raises(InvariantViolation, match="another generation was applied meanwhile"):
        install(w.log, result, Generation(0, 77), w.now)
    assert everything(w) == before
    assert not [n for n in w.disk.listdir("/t-0") if layout.CLEANED in n or ".tmp" in n]
