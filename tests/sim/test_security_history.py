"""A short run of the stage ``security``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.runner import report, run_one
from tests.support.slow import rest_slow


@pytest.mark.parametrize("seeds", rest_slow([(7,), (1, 2, 3, 4, 5, 6, 8)], 1))
def test_no_rule_is_broken(seeds: tuple[int, ...]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        result, _ = run_one("security", seed)
        assert not result.check, report(result)
        counts.update(result.counts)
    for what in (
        "changes acknowledged: acl", "changes acknowledged: scram", "images compared",
        "decisions compared", "checks of all records", "petitions told 0, allowed: True",
    ):  # fmt: skip
        assert counts[what], what
