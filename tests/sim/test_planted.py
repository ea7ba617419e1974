"""Every planted bug is found from its seed on, by the right checker; without it that seed is
clean.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.planted import PLANTED
from tests.sim.runner import run_one

TRIED: Final = 24
"""What a change of ours does to a history may move the seed that shows a bug: one of so many
must. The rarest are shown by every fifth. A script is always the same."""
SLOW = {"compaction": pytest.mark.slow}
NAMES = [pytest.param(name, marks=SLOW.get(PLANTED[name].stage, ())) for name in sorted(PLANTED)]


@pytest.mark.parametrize("name", NAMES)
def test_the_right_checker_fires(name: str) -> None:
    bug = PLANTED[name]
    found: dict[int, str] = {}
    tried = 1 if bug.stage.endswith("scripted") else TRIED
    for seed in range(bug.seed, bug.seed + tried):
        result, _ = run_one(bug.stage, seed, planted=name)
        found[seed] = result.check
        if result.check in bug.checks:
            break
    else:
        pytest.fail(f"{bug.rule}: {found}")
    without, _ = run_one(bug.stage, seed)
    assert not without.check, without.message
