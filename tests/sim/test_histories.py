"""A short run of the simulator: ``make sim`` runs more; see docs/simulation.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.coverage import REQUIRED, missing
from tests.sim.runner import AHEAD, repeat_command, report, run_many, run_one
from tests.tools.needs import cannot_run

SEEDS = {
    "raft": range(1, 61), "cores": range(1, 13), "storage": range(1, 25),
    "directories": range(1, 7), "crashes": range(1, 5),
    "strangers": range(1, 7),
}  # fmt: skip
AT_ONCE = {"raft": 15, "cores": 3, "storage": 3, "directories": 3, "crashes": 2, "strangers": 3}
"""Histories in one test: few seconds of a processor."""
REGRESSIONS = {
    "raft": (22, 5077),  # a snapshot ahead of the log; names that a killed process left unsynced
    # an ISR proposed while suspended; a producer whose records were deleted where it is not known
    "cores": (234, 220),
}
HISTORIES = [(stage, first) for stage, seeds in SEEDS.items() for first in seeds[:: AT_ONCE[stage]]]
happened: dict[str, Counter[str]] = {}
"""What the histories of :func:`test_no_rule_is_broken` contained, by stage."""


@pytest.mark.parametrize(("stage", "first"), HISTORIES)
def test_no_rule_is_broken(stage: str, first: int) -> None:
    counts = happened.setdefault(stage, Counter())
    for seed in range(first, first + AT_ONCE[stage]):
        result, _ = run_one(stage, seed)
        counts.update(result.counts)
        counts["histories"] += 1
        assert not result.check, report(result)


@pytest.mark.parametrize("stage", sorted(REGRESSIONS))
def test_what_once_broke_a_rule(stage: str) -> None:
    for seed in REGRESSIONS[stage]:
        result, _ = run_one(stage, seed)
        assert not result.check, report(result)


def test_every_fault_was_generated() -> None:
    ran = {stage: counts["histories"] for stage, counts in happened.items()}
    if ran != {stage: len(seeds) for stage, seeds in SEEDS.items()}:
        cannot_run("histories", "they were not run in this process")
    assert not missing("raft", happened["raft"])
    assert not missing("storage", happened["storage"] + happened["cores"])
    assert not missing("directories", happened["directories"] + happened["storage"])
    assert (
        happened["strangers"]["forged fetches"]
        and happened["strangers"]["messages of another disk"]
    )
    assert happened["crashes"]["times two went on"], "two of three were never enough"


@pytest.mark.parametrize("stage", sorted(REQUIRED))
def test_a_fault_that_is_never_generated_is_named(stage: str) -> None:
    counts = dict.fromkeys(REQUIRED[stage], 1)
    assert not missing(stage, counts)
    name = REQUIRED[stage][-1]
    counts[name] = 0
    assert missing(stage, counts) == [name]


@pytest.mark.parametrize("stage", ["raft", "storage"])
def test_a_seed_is_one_history_in_every_process(stage: str) -> None:
    code = (
        "from tests.sim.runner import run_one; "
        f"print(run_one({stage!r}, 3, tracing=True)[0].fingerprint)"
    )
    fingerprints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert fingerprints == {run_one(stage, 3)[0].fingerprint + "\n"}


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
