"""Runs of a few seeds, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from tests.sim.runner import report, run_one

MORE = 5
"""Few, so that a fault that has become rare is told, and does not end in a timeout."""


def no_rule_broken(stage: str, seeds: Iterable[int], *what: str, more: int = MORE) -> Counter[str]:
    """Run these seeds, and then up to ``more`` others until everything in ``what`` happened: which
    seed has which fault changes with anything that the product does. How often all of it happened.
    """
    counts: Counter[str] = Counter()
    first, others = list(seeds), range(101, 101 + more)
    for number, seed in enumerate(chain(first, others), 1):
        result, _ = run_one(stage, seed)
        assert not result.check, report(result)
        counts.update(result.counts)
        assert counts["checks of all records"] == number
        if number >= len(first) and all(counts[kind] for kind in what):
            return counts
    missing = [kind for kind in what if not counts[kind]]
    raise AssertionError(f"{stage}, seeds {[*first, *others]}: never happened: {missing}")


def printed_elsewhere(code: str) -> set[str]:
    """What ``code`` prints in two other processes, whose hashes of strings differ."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
