"""Rules 1 to 3: what may be cleaned, what bounds it, which log comes next, back-off, free space."""

import uuid
from dataclasses import replace

import pytest

from kept.compaction.cleaner import planner
from kept.compaction.cleaner.log_snapshot import LogSnapshot, SegmentSnapshot, view
from kept.compaction.cleaner.planner import (
    Failures,
    Limits,
    PassSkipped,
    Plan,
    choose,
    cleanable_range,
    dirty_in_words,
    plan,
)
from kept.compaction.manifest.apply import CompactionState
from kept.storage import layout
from kept.storage.types import Generation, LogConfig, TopicPartition
from tests.support import logs
from tests.support.simulated_disk import SimulatedDisk

NOW = 1_000_000
TP = TopicPartition("t", 0)
COMPACT = LogConfig(cleanup_policy=frozenset({"compact"}))


def log(*bases, end=100, state=None, lso=None, start=0, config=COMPACT, stamps=None, size=10):
    """Segments of 10 bytes each; ``stamps`` are (first, largest) timestamps."""
    ends = [*bases[1:], end]
    stamps = stamps or [(1, 1)] * len(bases)
    segments = tuple(
        SegmentSnapshot(b, e, size, largest, first, 0)
        for b, e, (first, largest) in zip(bases, ends, stamps, strict=True)
    )
    return LogSnapshot(
        TP,
        uuid.UUID(int=1),
        "/t-0",
        segments,
        start,
        end,
        end if lso is None else lso,
        config,
        state or CompactionState(),
    )


def state(clean_to, end=None, **more):
    return CompactionState(Generation(0, 1), clean_to, clean_to if end is None else end, **more)


def test_the_range_ends_at_the_active_segment():
    found = cleanable_range(log(0, 20, 50), NOW)
    assert (found.first_dirty, found.end_offset, found.bound) == (0, 50, "the active segment")


@pytest.mark.parametrize(("lso", "end"), [(49, 20), (20, 20), (19, 0), (100, 50)])
def test_the_last_stable_offset_bounds_and_is_rounded_down_to_a_segment(lso, end):
    assert cleanable_range(log(0, 20, 50, lso=lso), NOW).end_offset == end


def test_min_compaction_lag_bounds_at_the_first_young_segment():
    config = replace(COMPACT, min_compaction_lag_ms=100)
    stamps = [(1, 1), (1, NOW - 99), (1, 1), (1, 1)]
    found = cleanable_range(log(0, 20, 50, 70, config=config, stamps=stamps), NOW)
    assert (found.end_offset, found.bound) == (20, "min.compaction.lag.ms=100")
    stamps[1] = (1, NOW - 100)
    assert cleanable_range(log(0, 20, 50, 70, config=config, stamps=stamps), NOW).end_offset == 70


def test_lag_looks_only_at_dirty_segments():
    config = replace(COMPACT, min_compaction_lag_ms=100)
    stamps = [(1, NOW), (1, 1), (1, 1)]
    view = log(0, 20, 50, config=config, stamps=stamps, state=state(20))
    assert cleanable_range(view, NOW).end_offset == 50


@pytest.mark.parametrize("clean_to", [5, 101])
def test_first_dirty_outside_the_log_is_reset_to_its_start(clean_to):
    view = log(0, 20, 50, start=10, state=state(clean_to, 20))
    assert cleanable_range(view, NOW).first_dirty == 10


def test_the_end_never_goes_back_below_the_applied_one():
    config = replace(COMPACT, min_compaction_lag_ms=100)
    stamps = [(1, NOW), (1, NOW), (1, NOW)]
    view = log(0, 20, 50, config=config, stamps=stamps, state=state(10, 20))
    waiting = plan(view, NOW, Limits(), on_demand=True)
    assert isinstance(waiting, PassSkipped)
    assert waiting.reason.endswith("from 10 on: min.compaction.lag.ms=100 begins below 20")
    made = plan(view, NOW + 100, Limits(), on_demand=True)
    assert (made.first_dirty, made.end_offset) == (10, 50)


@pytest.mark.parametrize("lso", [0, 19, 20, 49])
def test_what_a_base_generation_covers_of_an_open_transaction_is_not_mapped(lso):
    """It covers all there is (rule 19), and a pass may not end below it."""
    base = state(0, 50, horizons={0: 5})
    view = log(0, 20, 50, lso=lso, state=base)
    found = cleanable_range(view, NOW)
    assert (found.end_offset, found.bound) == (0, "the last stable offset")
    made = plan(view, NOW, Limits(), on_demand=True)
    assert made.horizons_only and made.end_offset == 50, "what is expired goes, nothing is mapped"
    view = log(0, 20, 50, lso=lso, state=replace(base, horizons={}))
    waiting = plan(view, NOW, Limits(), on_demand=True, renew=True)
    assert isinstance(waiting, PassSkipped)
    assert waiting.reason.endswith("from 0 on: the last stable offset begins below 50")
    ended = plan(log(0, 20, 50, lso=50, state=base), NOW, Limits())
    assert (ended.first_dirty, ended.end_offset, ended.horizons_only) == (0, 50, False)


def test_dirty_ratio_must_be_above_the_target():
    half = log(0, 20, 50, state=state(20))
    assert isinstance(plan(half, NOW, Limits()), PassSkipped)
    reason = plan(half, NOW, Limits()).reason
    assert reason == "50 % dirty, limit 50 % (min.cleanable.dirty.ratio)"
    lower = replace(half, config=replace(COMPACT, min_cleanable_dirty_ratio=0.49))
    made = plan(lower, NOW, Limits())
    assert isinstance(made, Plan) and made.dirty_ratio == 0.5
    assert made.why == "50 % dirty, limit 49 %"
    assert dirty_in_words(0.5001, 0.5) == "50.01 % dirty, limit 50.00 %"
    assert (made.clean_bytes, made.cleanable_bytes) == (10, 10)


def test_a_partly_cleaned_segment_counts_as_dirty_once():
    made = plan(log(0, 20, 50, state=state(30, 50)), NOW, Limits())
    assert isinstance(made, PassSkipped) and made.dirty_ratio == 0.5


def test_overdue_by_max_lag_with_something_to_clean():
    config = replace(COMPACT, max_compaction_lag_ms=1000, min_cleanable_dirty_ratio=1.0)
    stamps = [(1, 1), (NOW - 1001, NOW), (1, 1)]
    made = plan(log(0, 20, 50, config=config, state=state(20), stamps=stamps), NOW, Limits())
    assert isinstance(made, Plan) and made.overdue
    stamps[1] = (NOW - 1000, NOW)
    view = log(0, 20, 50, config=config, state=state(20), stamps=stamps)
    assert isinstance(plan(view, NOW, Limits()), PassSkipped)


def test_passed_horizons_make_a_clean_log_due():
    clean = log(0, 20, 50, end=50, state=state(50, 50, horizons={20: NOW}))
    assert isinstance(plan(clean, NOW - 1, Limits()), PassSkipped)
    made = plan(clean, NOW, Limits())
    assert isinstance(made, Plan) and made.horizons_only and made.rewrite == {20}
    assert made.needs_bytes == 10


def test_no_pass_for_horizons_over_segments_that_the_manifest_does_not_describe():
    """One reaches beyond its end: such a pass would take over what it says of another segment."""
    other = log(0, 20, 60, end=60, state=state(60, 50, horizons={20: NOW}))
    assert isinstance(plan(other, NOW, Limits()), PassSkipped)
    assert isinstance(plan(other, NOW, Limits(), on_demand=True, renew=True), PassSkipped)


def test_a_log_that_is_not_compacted_or_has_nothing_dirty():
    assert "compact" in plan(log(0, 20, config=LogConfig()), NOW, Limits()).reason
    assert plan(log(0, end=0), NOW, Limits()).reason == "everything is clean"
    assert "the active segment" in plan(log(0), NOW, Limits(), on_demand=True).reason


def test_asked_for_ignores_the_ratio():
    made = plan(log(0, 20, 50, state=state(20)), NOW, Limits(), on_demand=True)
    assert isinstance(made, Plan) and made.on_demand


def test_free_space_is_checked_before():
    reserve = planner.RESERVE_BYTES
    made = plan(log(0, 20, 50), NOW, Limits(free_bytes=19 + reserve))
    assert isinstance(made, PassSkipped)
    assert made.reason == f"needs {20 + reserve} bytes, {19 + reserve} are free"
    assert isinstance(plan(log(0, 20, 50), NOW, Limits(free_bytes=20 + reserve)), Plan)


def of(topic, cleanable, **more):
    tp = TopicPartition(topic, 0)
    return Plan(tp, 0, 1, "", (), 100, cleanable, "", **more)


def test_choice_overdue_first_then_the_highest_ratio():
    low, high, late = of("low", 10), of("high", 90), of("late", 1, overdue=True)
    assert choose([low, high, late]) is late
    assert choose([low, high]) is high
    assert choose([low, high], in_progress=[high.topic_partition]) is low
    assert choose([of("asked", 0, on_demand=True), late]).topic_partition.topic == "asked"
    assert choose([]) is None


def test_a_failing_log_backs_off_and_stops_nobody():
    failures = Failures()
    bad, good = of("bad", 90), of("good", 10)
    first = failures.note(bad.topic_partition, "damaged", 1000)
    assert first.retry_at_ms == 1000 + 15_000
    assert choose([bad, good], failures=failures, now_ms=1001) is good
    assert choose([bad, good], failures=failures, now_ms=first.retry_at_ms) is bad
    second = failures.note(bad.topic_partition, "damaged again", 20_000)
    assert (second.retry_at_ms - 20_000, second.count) == (30_000, 2)
    for _ in range(30):
        last = failures.note(bad.topic_partition, "damaged", 0)
    assert last.retry_at_ms == 600_000
    assert failures.retry(bad.topic_partition)
    assert choose([bad, good], failures=failures, now_ms=1) is bad
    assert failures.all()[bad.topic_partition].reason == "damaged"
    failures.succeeded(bad.topic_partition)
    assert not failures.all() and not failures.retry(bad.topic_partition)


def test_a_back_off_does_not_outlast_a_clock_that_is_set_back():
    failures, tp = Failures(), of("bad", 90).topic_partition
    failed = failures.note(tp, "damaged", 10 * 365 * 86_400_000)
    assert not failures.may_try(tp, failed.retry_at_ms - 1)
    assert failures.may_try(tp, 1000)
    failures.note(tp, "wrong", 1000, stopped=True)
    assert not failures.may_try(tp, 1000)


def test_identities_of_one_log_go_up():
    assert planner.next_generation(None, 4) == Generation(4, 1)
    assert planner.next_generation(Generation(2, 7), 4) == Generation(4, 8)


def test_a_manifest_that_cannot_be_read_is_made_anew_by_a_pass_over_all_that_is_clean():
    clean = log(0, 20, 50, end=50, start=3, state=state(50))
    assert isinstance(plan(clean, NOW, Limits(), on_demand=True), PassSkipped)
    made = plan(clean, NOW, Limits(), on_demand=True, renew=True)
    assert (made.first_dirty, made.end_offset, made.previous) == (3, 50, None)
    assert [segment.base_offset for segment in made.segments] == [0, 20]
    assert not made.horizons_only


def test_what_is_expired_is_no_reason_to_build_on_a_manifest_that_cannot_be_read():
    """A pass for horizons alone would fail for ever, and nobody could join the leader."""
    clean = log(0, 20, 50, end=50, start=3, state=state(50, horizons={0: 5}))
    assert plan(clean, NOW, Limits(), on_demand=True).horizons_only
    made = plan(clean, NOW, Limits(), on_demand=True, renew=True)
    assert (made.first_dirty, made.end_offset, made.previous) == (3, 50, None)
    assert not made.horizons_only


def test_a_damaged_first_batch_does_not_keep_a_log_from_being_looked_at():
    """What compaction has come to is sampled on a clock; a pass says what is damaged."""
    disk = SimulatedDisk()
    written = logs.open_log(disk)
    while len(written.segments) < 3:
        logs.append(written, logs.batch(2))
    bases = list(written.segments.bases)
    written.close()
    first = layout.segment_file("/d/t-0", 0, layout.LOG)
    disk.flip_bit(first, 16, 3)
    opened = logs.open_log(disk, clean=True, recovery_point=written.log_end_offset)
    stamps = [s.first_timestamp for s in view(opened, CompactionState(), 0).segments]
    assert len(stamps) == len(bases) and stamps[:2] == [-1, logs.NOW + 1]
