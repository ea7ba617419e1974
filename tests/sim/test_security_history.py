"""A short run of the stage ``security``."""

from __future__ import annotations

import pytest

from tests.sim.short_runs import no_rule_broken
from tests.support.slow import rest_slow


@pytest.mark.parametrize("seeds", rest_slow([(7,), (1, 2, 3, 4, 5, 6, 8)], 1))
def test_no_rule_is_broken(seeds: tuple[int, ...]) -> None:
    no_rule_broken(
        "security",
        seeds,
        "changes acknowledged: acl",
        "changes acknowledged: scram",
        "images compared",
        "decisions compared",
        "petitions told 0, allowed: True",
    )
