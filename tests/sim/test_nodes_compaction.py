"""A short run of the stage ``nodes-compaction``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.runner import report, run_one


@pytest.mark.slow
def test_no_rule_is_broken() -> None:
    counts: Counter[str] = Counter()
    for seed in (3,):  # followers left a segment in which nothing changed but a delete horizon
        result, _ = run_one("nodes-compaction", seed)
        assert not result.check, report(result)
        counts.update(result.counts)
    assert counts["checks of all records"] == 1
    assert counts["generations applied"] and counts["power losses"]
