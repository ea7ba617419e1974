"""Every planted bug is found at its pinned seed, by the right checker; without it the seed is
clean.
"""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED
from tests.sim.runner import run_one

SLOW = {"compaction": pytest.mark.slow}
NAMES = [pytest.param(name, marks=SLOW.get(PLANTED[name].stage, ())) for name in sorted(PLANTED)]
CLEAN = [
    pytest.param(pair, marks=SLOW.get(pair[0], ()))
    for pair in sorted({(bug.stage, bug.seed) for bug in PLANTED.values()})
]


@pytest.mark.parametrize("name", NAMES)
def test_the_right_checker_fires(name: str) -> None:
    bug = PLANTED[name]
    result, _ = run_one(bug.stage, bug.seed, planted=name)
    assert result.check in bug.checks, f"{bug.rule}: {result.check or 'nothing'}: {result.message}"


@pytest.mark.parametrize("stage_seed", CLEAN)
def test_the_seed_is_clean_without_it(stage_seed: tuple[str, int]) -> None:
    result, _ = run_one(*stage_seed)
    assert not result.check, result.message
