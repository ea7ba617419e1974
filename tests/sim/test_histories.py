"""A short run of the simulator: ``make sim`` runs more; see docs/simulation.md."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.runner import repeat_command, report, run_one

SEEDS = {"raft": range(1, 61), "cores": range(1, 13), "storage": range(1, 5)}
REGRESSIONS = {
    "raft": (22, 5077),  # a snapshot ahead of the log; names that a killed process left unsynced
}


@pytest.mark.parametrize("stage", ["raft", "cores", "storage"])
def test_no_rule_is_broken(stage: str) -> None:
    for seed in (*SEEDS[stage], *REGRESSIONS.get(stage, ())):
        result, _ = run_one(stage, seed)
        assert not result.check, report(result)


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


def test_a_failure_says_how_to_repeat_it() -> None:
    assert repeat_command("raft", 7).endswith("-m tests.sim --stage raft --seed 7")
    result, lines = run_one("raft", 3, planted="no-fsync", tracing=True)
    assert result.check and "no-fsync" in repeat_command("raft", 3, "no-fsync")
    assert any("dies" in line for line in lines)
