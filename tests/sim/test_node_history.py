"""A short run of the stage ``node``: the product's own process on a simulated loop."""

from __future__ import annotations

import pytest

from tests.sim.runner import report, run_one
from tests.support.slow import rest_slow


@pytest.mark.parametrize("first", rest_slow([1, 6], 1))
def test_no_rule_is_broken(first: int) -> None:
    for seed in range(first, first + 5):
        result, _ = run_one("node", seed)
        assert not result.check, report(result)
