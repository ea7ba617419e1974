"""A short run of the stage ``node``: the product's own process on a simulated loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.runner import report, run_one
from tests.support.slow import rest_slow

FINGERPRINT = """
from tests.sim.runner import run_one
print(run_one("node", {seed}, tracing=True)[0].fingerprint)
"""


@pytest.mark.parametrize("first", rest_slow([1, 6], 1))
def test_no_rule_is_broken(first: int) -> None:
    for seed in range(first, first + 5):
        result, _ = run_one("node", seed)
        assert not result.check, report(result)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5])
def test_a_seed_is_one_history_in_every_process(seed: int) -> None:
    fingerprints = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT.format(seed=seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert fingerprints == {run_one("node", seed)[0].fingerprint + "\n"}
