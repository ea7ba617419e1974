"""A crash at every call of all that a replica does with a manifest: store it, write checkpoints,
commit the files of the pass, swap, mark.

As leader of its own pass, as follower of another's manifest, and as a leader that begins anew. A
start, by the node's own code, finds what was acknowledged, and the log is at the generation that
it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kept.compaction.cleaner import job_builder, planner, removal_log
from kept.compaction.cleaner.cleaner_run import discard, run_pass
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import follow, manifest, manifest_store
from kept.node.replicas.manifests import recover
from kept.storage import layout
from kept.storage.directory import Checkpoint
from kept.storage.log.log import Log
from kept.storage.types import Generation
from tests.support.installing import install
from tests.support.simulated_disk import SimulatedCrash
from tests.support.slow import rest_slow

OLD, NEW, BASE = Generation(0, 1), Generation(0, 2), Generation(3, 0)


@pytest.fixture
def prepared(world, kit):
    """A replica at one generation, with more to clean; made anew each time, always the same."""

    def make():
        w = world(segment_bytes=400)
        for row in range(6):
            w.append((b"k%d" % (row % 3), None if row == 4 else b"v%d" % row * 20))
        w.roll()
        w.clean()
        for row in range(6, 10):
            w.append((b"k%d" % (row % 3), b"w%d" % row * 20))
        w.roll()
        w.log.flush()
        w.disk.fsync_dir(kit.DIRECTORY)
        w.path = kit.DIRECTORY
        return w

    return make


def as_leader(w, said) -> None:
    """Its own pass."""
    discard(w.path, w.disk)
    result = run_pass(w.job(w.plan()), w.disk)
    path = layout.manifest_file(w.path, *result.generation) + layout.TEMPORARY
    manifest_store.store(w.path, w.disk, manifest.decode(path, w.disk.read(path))[0], None)
    said.held = True
    w.state = install(w.log, result, w.state.applied, w.now)


def as_follower(w, said) -> None:
    """The manifest that ``said.body`` is, unless a start found that it is held."""
    if manifest_store.load(w.path, w.disk).generation != NEW:
        manifest_store.store(w.path, w.disk, said.body, None)
    said.held = True
    body = manifest_store.read_manifest(w.path, w.disk, NEW)
    discard(w.path, w.disk)
    result = follow.follow(follow.job_for(w.log, body, None, w.now), w.disk)
    w.state = install(w.log, result, w.state.applied, w.now)


def anew(w, said) -> None:
    """It lost what it held, and is alone."""
    manifest_store.mark_lost(w.path, w.disk)
    said.held = True
    discard(w.path, w.disk)
    job = job_builder.base_job(w.log, BASE, now_ms=w.now, limits=planner.Limits())
    w.state = install(w.log, run_pass(job, w.disk), None, w.now)
    manifest_store.store_base(w.path, w.disk, BASE)


def start(w, disk):
    """A process after the crash; what it finds."""
    w.disk = disk
    state, known = recover.before_opening(w.path, disk, False)
    w.log = Log.open(
        w.path,
        w.log.topic_partition,
        w.log.topic_id,
        w.config,
        disk,
        now_ms=w.now,
        recovery_point=w.checkpointed(Checkpoint.RECOVERY_POINTS),
        unfinished_swap=None if state is None else state.unfinished,
        compacted_to=None if state is None or state.applied is None else state.end_offset,
    )
    if state is not None:
        state, known = recover.after_opening(w.path, disk, state, False, w.log)
    w.state = state or applying.CompactionState()
    return known


@dataclass(slots=True)
class Leadership:
    """What a leader said before a crash: whether its manifest is held; ``body`` is a follower's."""

    held: bool
    body: Any


def crashes(prepared, act, body, how):
    """(replica, what it had said, what its start found) for a crash at each call of ``act``."""
    for call in range(1, 10_000):
        w, said = prepared(), Leadership(held=False, body=body)
        w.disk.crash_at(w.disk.calls + call)
        try:
            act(w, said)
        except SimulatedCrash:
            disk = w.disk.after_kill() if how == "kill" else w.disk.after_power_loss(call)
            yield w, said, start(w, disk)
        else:
            assert call > 20, "it makes more calls than that"
            return


def body_of(prepared):
    w = prepared()
    w.clean()
    return w.pairs(), manifest_store.load(w.path, w.disk)


@pytest.mark.parametrize("how", rest_slow(["power", "kill"], 1))
@pytest.mark.parametrize("act", [as_leader, as_follower])
def test_what_was_acknowledged_is_held_and_applied_in_the_end(prepared, act, how) -> None:
    after, body = body_of(prepared)
    before = prepared().pairs()
    assert before != after and body.generation == NEW
    steps = set()
    for w, said, known in crashes(prepared, act, body, how):
        at, mine = w.state.applied, tuple(known.held.generation)
        steps.add((mine, at))
        assert not known.lost and at in (OLD, NEW) and mine in (OLD, NEW)
        assert mine == NEW or not (said.held or at == NEW)
        assert w.pairs() == (after if at == NEW else before)
        if at == OLD:
            as_follower(w, said)  # a leader, too: it finishes what it holds
        assert (w.pairs(), w.state.applied) == (after, NEW)
        again = start(w, w.disk.after_power_loss(0))
        assert again.held == again.applied and w.pairs() == after
    assert steps == {(OLD, OLD), (NEW, OLD), (NEW, NEW)}


@pytest.mark.parametrize("point", ["compaction.manifest", "swap.cleaned", "swap.deleted"])
def test_a_leader_that_dies_before_its_swap_still_knows_why_records_went(prepared, point) -> None:
    """It applies its own manifest as a follower does, and that does not say."""
    w, said = prepared(), Leadership(held=False, body=None)

    def dies():
        raise SimulatedCrash(point)

    w.disk.fail_points[point] = dies
    with pytest.raises(SimulatedCrash):
        as_leader(w, said)
    start(w, w.disk.after_kill())
    if w.state.applied == OLD:
        as_follower(w, said)
    assert w.state.applied == NEW
    path = removal_log.find(w.path, w.disk, NEW)
    found = removal_log.decode(path, w.disk.read(path)).counts()
    assert set(found) == {"superseded"} and sum(found.values()) > 0
    assert not [name for name in w.disk.listdir(w.path) if name.endswith(".tmp")]


@pytest.mark.parametrize("how", rest_slow(["power", "kill"], 1))
def test_who_begins_anew_is_never_taken_for_one_that_had_nothing(prepared, how) -> None:
    before = prepared().pairs()
    steps = set()
    for w, said, known in crashes(prepared, anew, None, how):
        at = w.state.applied
        steps.add((known.lost, at))
        assert w.pairs() == before, "a base drops nothing"
        assert known.lost or (at == OLD and not said.held) or at == BASE
        assert known.lost == (known.held is None) and (at is None) == known.lost
        if known.lost:
            anew(w, said)
        assert start(w, w.disk.after_power_loss(0)).held is not None
    assert {(False, OLD), (True, None), (False, BASE)} >= steps > {(True, None)}


@pytest.mark.parametrize("seed", range(20))
def test_what_a_pass_leaves_as_it_is_survives_a_power_cut(world, seed):
    """It lies between what the pass wrote: a start takes a gap there for compaction's work."""
    w = world(segment_bytes=400)
    for keys in ((b"a", b"b"), (b"c", b"d"), (b"a", b"e")):
        for key in keys:
            w.append((key, b"x" * 100))
        w.roll()
    w.clean()
    assert w.offsets() == [1, 2, 3, 4, 5]
    w.disk = w.disk.after_power_loss(seed)
    assert w.open().offsets() == [1, 2, 3, 4, 5]
