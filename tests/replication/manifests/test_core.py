"""What one core must do that no scripted history tells from doing otherwise."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kept.replication import manifests_events as ev
from kept.replication.events import ManifestAcknowledged
from kept.replication.manifests import ManifestCore
from kept.storage.errors import InvariantViolation
from kept.storage.types import Generation

NOW = 0
OLD = ev.ManifestRef(Generation(1, 1), 50)
NEW = ev.ManifestRef(Generation(2, 2), 100)


def follower(held: ev.ManifestRef | None = None, **rest: object) -> ManifestCore:
    """One that follows epoch 2, and whose log agrees with the leader's."""
    core = ManifestCore(1, held=held, applied=held, **rest)  # type: ignore[arg-type]
    core.step(ev.StartedFollowing(2), NOW)
    core.step(ev.DivergenceChecked(2, agreed=True), NOW)
    return core


def told(core: ManifestCore, ref: ev.ManifestRef) -> ev.Effects:
    """The leader holds ``ref`` and calls it published; what that leads to once it is stored."""
    asked = core.start_pull(100)
    assert asked is not None
    (store,) = core.step(ev.PullResponseReceived(asked, ev.PullResponse(ref, ref, (ref,))), NOW)
    assert isinstance(store, ev.StoreManifest) and store.held == ref
    return core.step(ev.ManifestStored(ref), NOW)


def test_a_cut_voids_what_was_told_and_what_was_asked():
    """Below the end of what is published the log would be compacted with a hole (C6, C11)."""
    core = follower()
    assert ev.ApplyManifest(NEW) in told(core, NEW)
    core.step(ev.ApplyAborted(NEW), NOW)
    assert core.leader_published == NEW, "it failed, and is tried again"
    asked = core.start_pull(100)
    core.step(ev.TruncationCompleted(80), NOW)
    assert core.step(ev.RetryTriggered(), NOW) == ()
    assert core.step(ev.PullResponseReceived(asked, ev.PullResponse(NEW, NEW, ())), NOW) == ()
    assert core.leader_published is None and not core.synced
    assert not core.start_pull(80).synced, "nothing counts before a fetch has agreed again"
    core.check_invariants()


def lacking() -> ManifestCore:
    """It holds NEW, as its leader does, and lacks a record below its end."""
    core = follower(OLD)
    told(core, NEW)
    core.complete = True
    assert core.step(ev.ApplyAborted(NEW, missing=40), NOW) == (ev.ReportMissing(NEW, 40),)
    return core


def answered(core: ManifestCore, *, outside_isr: bool) -> ev.Effects:
    """Its leader holds NEW, and answers its next pull."""
    asked = core.start_pull(100)
    assert asked is not None
    answer = ev.PullResponse(NEW, NEW, (), outside_isr=outside_isr)
    return core.step(ev.PullResponseReceived(asked, answer), NOW)


def test_who_misses_a_survivor_acknowledges_nothing_until_it_is_cut() -> None:
    """Otherwise it would stay in the ISR, or enter it, with a hole in its log (rule 15)."""
    core = lacking()
    asked = core.start_pull(100)
    assert (asked.held, asked.applied, asked.complete) == (None, None, False)
    core.step(ev.PullFailed(asked), NOW)
    assert answered(core, outside_isr=True) == (ev.TruncateLog(40),)
    assert core.start_pull(100).held is None, "the cut may have to wait"
    core.step(ev.TruncationCompleted(40), NOW)
    assert core.start_pull(40).held == NEW
    assert not core.complete


def test_a_log_that_is_empty_at_its_start_lacks_nothing_below() -> None:
    """It was started anew there, above the record that its manifest lists: otherwise it would be
    emptied with every answer.
    """
    core = lacking()
    assert answered(core, outside_isr=True) == (ev.TruncateLog(40),)
    core.step(ev.TruncationCompleted(55, 45), NOW)
    assert core.missing == 40, "the records behind it are there"
    core.step(ev.TruncationCompleted(45, 45), NOW)
    assert core.missing is None
    assert core.start_pull(45).held == NEW


def test_who_misses_a_survivor_is_not_cut_while_its_leader_counts_it() -> None:
    """The image may not say yet that it is in the ISR (C17)."""
    core = lacking()
    assert answered(core, outside_isr=False) == ()
    core.step(ev.StartedFollowing(2), NOW)
    assert core.step(ev.RetryTriggered(), NOW) == ()
    assert answered(core, outside_isr=True) == (ev.TruncateLog(40),)


def test_an_answer_that_was_asked_for_before_it_missed_anything_lets_nobody_cut() -> None:
    """What that pull said made the replica eligible (C17)."""
    core = follower()
    told(core, NEW)
    asked = core.start_pull(100)
    core.step(ev.ApplyAborted(NEW, missing=40), NOW)
    answer = ev.PullResponse(NEW, NEW, (), outside_isr=True)
    assert core.step(ev.PullResponseReceived(asked, answer), NOW) == ()
    assert core.start_pull(100).held is None


def test_another_epoch_takes_the_leave_to_cut_away() -> None:
    """Its new leader has not heard yet that it lacks anything (C17)."""
    core = lacking()
    assert answered(core, outside_isr=True) == (ev.TruncateLog(40),)
    core.step(ev.StartedFollowing(3), NOW)
    assert core.missing is None


def test_one_that_lost_what_it_held_stores_even_that_nothing_is_held():
    """Only then does it know, durably, what it holds."""
    core = follower(lost=True)
    asked = core.start_pull(100)
    (store,) = core.step(ev.PullResponseReceived(asked, ev.PullResponse(None, None, ())), NOW)
    assert store == ev.StoreManifest(None, None)
    core.step(ev.ManifestStored(None), NOW)
    assert not core.lost


def test_what_was_cut_while_it_was_applied_does_not_count_as_applied():
    core = follower()
    assert ev.ApplyManifest(NEW) in told(core, NEW)
    assert core.step(ev.TruncationCompleted(90), NOW) == (ev.CancelApply(NEW),)
    core.step(ev.TruncationCompleted(95), NOW)
    assert ev.ClearApplied(NEW) in core.step(ev.ApplyCompleted(NEW), NOW)
    assert core.applied is None


def test_a_pass_ends_no_lower_than_the_one_before():
    core = ManifestCore(1, held=OLD, applied=OLD)
    core.step(ev.StartedLeading(2), NOW)
    with pytest.raises(InvariantViolation, match="ends below"):
        core.step(ev.PassCompleted(ev.ManifestRef(Generation(2, 2), 49), 2, OLD), NOW)
    assert core.step(ev.PassCompleted(NEW, 2, OLD), NOW) == (
        ev.StoreManifest(NEW, None, complete=True),
    )


def test_a_cut_below_the_end_of_what_is_applied_clears_the_mark():
    """What comes there next is not clean (rule 19)."""
    core = ManifestCore(1, held=OLD, applied=OLD)
    assert core.step(ev.TruncationCompleted(OLD.end_offset), NOW) == ()
    assert core.applied == OLD
    assert core.step(ev.TruncationCompleted(OLD.end_offset - 1), NOW) == (ev.ClearApplied(OLD),)
    assert core.applied is None


# Complete: who had everything below the end of what it holds before anybody acted on it (C16).


def leader(published: ev.ManifestRef = OLD) -> ManifestCore:
    """It has applied OLD, and made NEW in its epoch 2."""
    core = ManifestCore(0, held=OLD, applied=OLD)
    core.step(ev.StartedLeading(2), NOW)
    core.step(ev.PassCompleted(NEW, 2, OLD), NOW)
    core.step(ev.ManifestStored(NEW), NOW)
    core.published = published
    return core


def pull(**changes: object) -> ev.PullRequest:
    asked = ev.PullRequest(1, -1, 2, 1, OLD, OLD, True, NEW.end_offset, ())
    return replace(asked, **changes)


@pytest.mark.parametrize(
    ("asked", "complete"),
    [
        (pull(), True),
        (pull(synced=False), False),
        (pull(log_end_offset=NEW.end_offset - 1), False),
        (pull(applied=None), False),
        (pull(applied=None, complete=True), True),
        (pull(applied=None, held=None, complete=True), False),
    ],
)
def test_a_leader_says_who_is_complete(asked: ev.PullRequest, complete: bool) -> None:
    assert leader().pull_response(asked).complete is complete


def test_nobody_is_complete_for_what_may_have_been_acted_on() -> None:
    assert not leader(NEW).pull_response(pull()).complete
    after = ManifestCore(0, held=NEW, applied=OLD)
    after.step(ev.StartedLeading(3), NOW)
    assert not after.pull_response(pull(leader_epoch=3)).complete, "its leader may have"
    empty = ManifestCore(0)
    empty.step(ev.StartedLeading(2), NOW)
    assert not empty.pull_response(pull(applied=None)).complete


@pytest.mark.parametrize("adopted", [True, False])
def test_nobody_is_complete_by_what_kafka_compacted_on_each_replica_alone(*, adopted: bool) -> None:
    first = ManifestCore(0, adopted=adopted)
    first.step(ev.StartedLeading(2), NOW)
    first.step(ev.PassCompleted(NEW, 2, None), NOW)
    first.step(ev.ManifestStored(NEW), NOW)
    asked = pull(held=None, applied=None)
    assert first.pull_response(asked).complete is not adopted
    core = follower(adopted=adopted)
    taken(core)
    core.step(ev.ManifestStored(NEW), NOW)
    assert core.complete is not adopted
    core = follower(OLD, adopted=adopted)
    taken(core)
    core.step(ev.ManifestStored(NEW), NOW)
    assert core.complete, "what was applied had made them equal"


def taken(core: ManifestCore, *, complete: bool = True) -> ev.StoreManifest:
    """The leader offers NEW; what is to be stored."""
    asked = core.start_pull(100)
    answer = ev.PullResponse(NEW, None, (NEW,), complete)
    (store,) = core.step(ev.PullResponseReceived(asked, answer), NOW)
    assert isinstance(store, ev.StoreManifest)
    return store


def test_it_is_stored_with_what_is_held_and_said_with_every_pull() -> None:
    core = follower(OLD)
    assert not core.start_pull(100).complete
    core.step(ev.PullFailed(core.in_flight), NOW)
    assert taken(core) == ev.StoreManifest(NEW, None, complete=True)
    assert not core.complete, "it is not durable yet"
    core.step(ev.ManifestStored(NEW), NOW)
    assert core.start_pull(100).complete
    core.check_invariants()


def test_who_takes_it_otherwise_is_not() -> None:
    core = follower(OLD)
    assert taken(core, complete=False) == ev.StoreManifest(NEW, None)
    core.step(ev.ManifestStored(NEW), NOW)
    assert not core.start_pull(100).complete
    assert taken(follower(lost=True)) == ev.StoreManifest(NEW, None), "what it had is not known"


def test_what_is_told_beside_it_changes_nothing() -> None:
    core = ManifestCore(1, held=NEW, applied=None, complete=True)
    core.step(ev.StartedFollowing(2), NOW)
    core.step(ev.DivergenceChecked(2, agreed=True), NOW)
    asked = core.start_pull(100)
    (store,) = core.step(ev.PullResponseReceived(asked, ev.PullResponse(NEW, OLD, (OLD,))), NOW)
    assert store == ev.StoreManifest(NEW, OLD, complete=True)


@pytest.mark.parametrize(("end", "complete"), [(NEW.end_offset, True), (NEW.end_offset - 1, False)])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "while it is stored"])
def test_a_cut_below_its_end_takes_that_away(end: int, *, complete: bool, stored: bool) -> None:
    """What comes there next may be compacted by then."""
    core = follower(OLD)
    taken(core)
    effects: tuple[object, ...] = ()
    for event in (
        (ev.ManifestStored(NEW), ev.TruncationCompleted(end))
        if stored
        else (ev.TruncationCompleted(end), ev.ManifestStored(NEW))
    ):
        effects += core.step(event, NOW)
    assert (ev.ClearComplete(NEW) in effects) is not complete
    assert core.complete is complete
    core.check_invariants()


def test_what_is_applied_needs_it_no_more() -> None:
    core = follower(OLD)
    taken(core)
    core.step(ev.ManifestStored(NEW), NOW)
    asked = core.start_pull(100)
    assert ev.ApplyManifest(NEW) in core.step(
        ev.PullResponseReceived(asked, ev.PullResponse(NEW, NEW, ())), NOW
    )
    core.step(ev.ApplyCompleted(NEW), NOW)
    assert not core.complete
    core.check_invariants()


@pytest.mark.parametrize("synced", [True, False])
def test_it_counts_for_a_log_that_agrees_with_the_leaders(*, synced: bool) -> None:
    said = leader().receive_pull(pull(held=NEW, complete=True, synced=synced))
    (held,) = (e.event for e in said if isinstance(e.event, ManifestAcknowledged))
    assert held == ManifestAcknowledged(1, NEW.generation, complete=synced, number=1)
