"""A short run of the simulator: ``make sim`` runs more; see docs/simulation.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.coverage import REQUIRED, missing
from tests.sim.runner import AHEAD, STAGES, repeat_command, report, run_many, run_one
from tests.sim.short_runs import printed_elsewhere
from tests.support.slow import rest_slow
from tests.tools.needs import cannot_run

SEEDS = range(1, 31)
AT_ONCE = 15
"""Histories in one test: few seconds of a processor."""
happened: Counter[str] = Counter()
"""What the histories of :func:`test_no_rule_is_broken` contained."""


@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
def test_no_rule_is_broken(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        result, _ = run_one("raft", seed)
        happened.update(result.counts)
        happened["histories"] += 1
        assert not result.check, report(result)


@pytest.mark.parametrize(
    "seed",
    [22, 5077, 508],
    ids=[
        "snapshot ahead of the log",
        "names that a kill left unsynced",
        "elected by those who were to vote it in again",
    ],
)
def test_what_once_broke_a_rule(seed: int) -> None:
    result, _ = run_one("raft", seed)
    assert not result.check, report(result)


def test_every_fault_was_generated() -> None:
    if happened["histories"] != len(SEEDS):
        cannot_run("histories", "they were not run in this process")
    assert not missing("raft", happened)


@pytest.mark.parametrize("stage", sorted(REQUIRED))
def test_a_fault_that_is_never_generated_is_named(stage: str) -> None:
    counts = dict.fromkeys(REQUIRED[stage], 1)
    assert not missing(stage, counts)
    name = REQUIRED[stage][-1]
    counts[name] = 0
    assert missing(stage, counts) == [name]


@pytest.mark.parametrize("stage", rest_slow(STAGES, 1))
def test_a_seed_is_one_history_in_every_process(stage: str) -> None:
    run = f"run_one({stage!r}, 3, tracing=True)"
    code = f"from tests.sim.runner import run_one; print({run}[0].fingerprint)"
    assert printed_elsewhere(code) == {run_one(stage, 3)[0].fingerprint + "\n"}


def test_seeds_that_end_by_the_clock_are_drawn_as_they_are_run() -> None:
    drawn: list[int] = []

    def seeds() -> Iterator[int]:
        for seed in range(1, 1001):
            drawn.append(seed)
            yield seed

    results = run_many("raft", seeds(), 2)
    assert [next(results).seed for _ in range(3)] == [1, 2, 3]
    results.close()
    assert len(drawn) <= 3 + AHEAD * 2


def test_a_failure_says_how_to_repeat_it() -> None:
    assert repeat_command("raft", 7).endswith("-m tests.sim --stage raft --seed 7")
    result, lines = run_one("raft", 3, planted="no-fsync", tracing=True)
    assert result.check and "no-fsync" in repeat_command("raft", 3, "no-fsync")
    assert any("dies" in line for line in lines)
