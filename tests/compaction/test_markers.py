"""Which transaction markers may go, decided from facts alone (rules 8 and 9)."""

from __future__ import annotations

from uuid import UUID

from kept.compaction.cleaner.job import Job, Source
from kept.compaction.cleaner.scan_stats import Control, ScanStats
from kept.compaction.cleaner.transactions import Markers, decide
from kept.storage.records.control import COMMIT
from kept.storage.types import Generation, LogConfig

NOW, PASSED = 10_000, 9_000
DATA = 7
"""Data of producer 7."""


def marker(at: int, horizon_ms: int = PASSED) -> Control:
    return Control(at, at, 7, 0, COMMIT, horizon_ms)


def decided(*events: int | Control, end: int = 20, clean_to: int = 20, **rest: bool) -> Markers:
    """Of one segment 0..20."""
    source = Source(0, 20, 1000, 0)
    facts = ScanStats(source, events=list(events))
    job = Job(
        "d",
        "t",
        0,
        str(UUID(int=1)),
        Generation(1, 1),
        0,
        0,
        end,
        (source,),
        NOW,
        b"",
        LogConfig(delete_retention_ms=500),
        **rest,
    )
    return decide(job, [facts], clean_to)[0]


def test_a_marker_goes_when_its_data_is_gone_and_its_horizon_has_passed():
    found = decided(marker(9))
    assert (list(found.removed), found.empties, found.horizons) == ([9], [], [])
    assert list(decided(marker(9, NOW + 1)).kept) == [9]
    found = decided(DATA, marker(9))
    assert (list(found.kept), list(found.removed)) == ([9], [])


def test_data_of_one_transaction_holds_no_marker_of_the_next():
    found = decided(DATA, marker(5), marker(9))
    assert (list(found.kept), list(found.removed)) == ([5], [9])


def test_the_first_pass_that_finds_the_data_gone_sets_the_horizon():
    assert decided(marker(9, -1)).horizons == [(9, NOW + 500)]
    assert decided(DATA, marker(9, -1)).horizons == []


def test_the_last_batch_below_the_end_stays_without_its_marker():
    """Offsets would otherwise begin anew below it (rule 8)."""
    found = decided(marker(19))
    assert (list(found.removed), found.empties) == ([19], [19])


def test_nothing_above_what_was_mapped_is_touched():
    found = decided(marker(9), marker(15), clean_to=12)
    assert (list(found.removed), list(found.kept)) == ([9], [15])


def test_a_pass_for_horizons_does_not_know_of_data_in_segments_that_it_does_not_read():
    """Only a pass that saw the whole log can have set a horizon: without one the marker stays."""
    found = decided(marker(9, -1), marker(12), horizons_only=True)
    assert (list(found.kept), found.horizons, list(found.removed)) == ([9], [], [12])
