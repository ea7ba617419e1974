"""Every planted bug is found from its seed on, by the right checker; without it that seed is
clean. All of stage ``raft`` and the cheapest of each other one are tried with ``make test``, the
rest with ``make sim`` and ``make test-slow``.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest

from tests.sim.planted import PLANTED
from tests.sim.runner import Result, run_one
from tests.support.slow import rest_slow

TRIED: Final = 24
"""What a change of ours does to a history may move the seed that shows a bug: one of so many
must. The rarest are shown by every fifth."""


@cache
def without_bugs(stage: str, seed: int, **options: float) -> Result:
    """A history that many bugs are planted in is run without them once."""
    return run_one(stage, seed, **options)[0]


QUICK: Final = (
    "groups-assigned-at-once",
    "node-ack-before-write",
    "nodes-ack-before-replicas",
    "transactions-ended-at-once",
)
NAMES: Final = sorted(
    PLANTED, key=lambda name: (PLANTED[name].stage != "raft" and name not in QUICK, name)
)
FAST: Final = sum(PLANTED[name].stage == "raft" or name in QUICK for name in PLANTED)


@pytest.mark.parametrize("name", rest_slow(NAMES, FAST))
def test_the_right_checker_fires(name: str) -> None:
    bug = PLANTED[name]
    found: dict[int, str] = {}
    for seed in range(bug.seed, bug.seed + TRIED):
        result, _ = run_one(bug.stage, seed, planted=name)
        found[seed] = result.check
        if result.check in bug.checks:
            break
    else:
        pytest.fail(f"{bug.rule}: {found}")
    without = without_bugs(bug.stage, seed, **bug.options)
    assert not without.check, without.message
