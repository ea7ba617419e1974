"""A short run of the stage ``nodes``: several of the product's own processes on one loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.sim.runner import report, run_one
from tests.support.slow import rest_slow

FINGERPRINT = """
from tests.sim.runner import run_one
print(run_one("nodes", 3, tracing=True)[0].fingerprint)
"""


@pytest.mark.parametrize("seeds", rest_slow([(3, 5, 7), (2, 4, 5, 6, 7)], 1))
def test_no_rule_is_broken(seeds: tuple[int, ...]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:  # 2: a keepalive span as a stopped process went on
        result, _ = run_one("nodes", seed)
        assert not result.check, report(result)
        counts.update(result.counts)
    assert counts["checks of all records"] == len(seeds)
    for fault in ("power losses", "nodes isolated", "processes stopped", "reassignments"):
        assert counts[fault], fault
    assert counts["records deleted"] and counts["topics deleted"]


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
