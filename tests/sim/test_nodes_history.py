"""A short run of the stage ``nodes``: several of the product's own processes on one loop."""

from __future__ import annotations

import pytest

from tests.sim.short_runs import no_rule_broken
from tests.support.slow import rest_slow


@pytest.mark.parametrize("seeds", rest_slow([(3, 5, 7), (2, 4, 5, 6, 7)], 1))
def test_no_rule_is_broken(seeds: tuple[int, ...]) -> None:
    # 2: a keepalive span as a stopped process went on
    no_rule_broken(
        "nodes",
        seeds,
        "power losses",
        "nodes isolated",
        "processes stopped",
        "reassignments",
        "records deleted",
        "topics deleted",
    )
