"""A short run of the stage ``nodes``: several of the product's own processes on one loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.runner import run_one
from tests.sim.short_runs import no_rule_broken
from tests.support.slow import rest_slow

FINGERPRINT = """
from tests.sim.runner import run_one
print(run_one("nodes", 3, tracing=True)[0].fingerprint)
"""


@pytest.mark.parametrize("seeds", rest_slow([(3, 5, 7), (2, 4, 5, 6, 7)], 1))
def test_no_rule_is_broken(seeds: tuple[int, ...]) -> None:
    # 2: a keepalive span as a stopped process went on
    no_rule_broken(
        "nodes", seeds, "power losses", "nodes isolated", "processes stopped", "reassignments",
        "records deleted", "topics deleted",
    )  # fmt: skip


@pytest.mark.slow
def test_a_seed_is_one_history_in_every_process() -> None:
    fingerprints = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert fingerprints == {run_one("nodes", 3)[0].fingerprint + "\n"}
