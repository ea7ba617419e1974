"""What one core must do that no scripted history tells from doing otherwise."""

from __future__ import annotations

import pytest

from kept.replication import manifests_events as ev
from kept.replication.manifests import ManifestCore
from kept.storage.errors import InvariantViolation
from kept.storage.types import Generation

NOW = 0
OLD = ev.ManifestRef(Generation(1, 1), 50)
NEW = ev.ManifestRef(Generation(2, 2), 100)


def follower(held: ev.ManifestRef | None = None, **rest: object) -> ManifestCore:
    """One that follows epoch 2, and whose log agrees with the leader's."""
    core = ManifestCore(1, held=held, applied=held, **rest)  # type: ignore[arg-type]
    core.step(ev.Follows(2, in_isr=False), NOW)
    core.step(ev.Synced(2, agreed=True), NOW)
    return core


def told(core: ManifestCore, ref: ev.ManifestRef) -> ev.Effects:
    """The leader holds ``ref`` and calls it published; what that leads to once it is stored."""
    asked = core.pull(100)
    assert asked is not None
    (store,) = core.step(ev.Pulled(asked, ev.PullResponse(ref, ref, (ref,))), NOW)
    assert isinstance(store, ev.Store) and store.held == ref
    return core.step(ev.Stored(ref), NOW)


def test_a_cut_voids_what_was_told_and_what_was_asked():
    """Below the end of what is published the log would be compacted with a hole (C6, C11)."""
    core = follower()
    assert ev.Apply(NEW) in told(core, NEW)
    core.step(ev.ApplyEnded(NEW), NOW)
    assert core.leader_published == NEW, "it failed, and is tried again"
    asked = core.pull(100)
    core.step(ev.Cut(80), NOW)
    assert core.step(ev.Retried(), NOW) == ()
    assert core.step(ev.Pulled(asked, ev.PullResponse(NEW, NEW, ())), NOW) == ()
    assert core.leader_published is None and not core.synced
    assert not core.pull(80).synced, "nothing counts before a fetch has agreed again"
    core.check_invariants()


def test_a_member_that_misses_a_survivor_acknowledges_nothing_until_it_is_cut():
    """Otherwise it would stay in the ISR with a hole in its log (rule 15)."""
    core = follower()
    core.step(ev.Follows(2, in_isr=True), NOW)
    told(core, NEW)
    assert core.step(ev.ApplyEnded(NEW, missing=40), NOW) == (ev.ReportMissing(NEW, 40),)
    asked = core.pull(100)
    assert asked.held is None
    assert core.step(ev.Follows(2, in_isr=False), NOW) == (ev.CutLog(40),)
    core.step(ev.PullFailed(asked), NOW)
    core.step(ev.Cut(40), NOW)
    assert core.pull(40).held == NEW


def test_one_that_lost_what_it_held_stores_even_that_nothing_is_held():
    """Only then does it know, durably, what it holds."""
    core = follower(lost=True)
    asked = core.pull(100)
    (store,) = core.step(ev.Pulled(asked, ev.PullResponse(None, None, ())), NOW)
    assert store == ev.Store(None, None)
    core.step(ev.Stored(None), NOW)
    assert not core.lost


def test_what_was_cut_while_it_was_applied_does_not_count_as_applied():
    core = follower()
    assert ev.Apply(NEW) in told(core, NEW)
    assert core.step(ev.Cut(90), NOW) == (ev.CancelApply(NEW),)
    core.step(ev.Cut(95), NOW)
    assert ev.ClearApplied(NEW) in core.step(ev.Applied(NEW), NOW)
    assert core.applied is None


def test_a_pass_ends_no_lower_than_the_one_before():
    core = ManifestCore(1, held=OLD, applied=OLD)
    core.step(ev.Leads(2), NOW)
    with pytest.raises(InvariantViolation, match="ends below"):
        core.step(ev.PassDone(ev.ManifestRef(Generation(2, 2), 49), 2, OLD), NOW)
    assert core.step(ev.PassDone(NEW, 2, OLD), NOW) == (ev.Store(NEW, None),)


def test_a_cut_below_the_end_of_what_is_applied_clears_the_mark():
    """What comes there next is not clean (rule 19)."""
    core = ManifestCore(1, held=OLD, applied=OLD)
    assert core.step(ev.Cut(OLD.end_offset), NOW) == ()
    assert core.applied == OLD
    assert core.step(ev.Cut(OLD.end_offset - 1), NOW) == (ev.ClearApplied(OLD),)
    assert core.applied is None
