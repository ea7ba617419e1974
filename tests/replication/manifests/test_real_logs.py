"""The same histories over real logs: what the cores say is done by the real code of compaction."""

from __future__ import annotations

import os
import random

import pytest

from tests.replication.manifests.checks import check, check_liveness
from tests.replication.manifests.history import History, prepare
from tests.replication.manifests.logs import Violation
from tests.replication.manifests.real import RealWorld

SEEDS = int(os.environ.get("SEEDS", "20"))
FIRST = int(os.environ.get("FIRST_SEED", "0"))


@pytest.mark.parametrize("unclean", [False, True])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_histories(seed: int, unclean: bool) -> None:
    rnd = random.Random(seed)
    weights = {"crash": 0.4, "wipe": 0.1} if unclean else {"elect_unclean": 0.0}
    world = RealWorld(seed, unclean=unclean)
    history = History(world, seed, {**weights, "work": 8.0})
    prepare(world, rnd.choice((0, 1, 1, 2)), rnd)
    try:
        check(world)
        history.run(200, in_the_end=False)
        check_liveness(world, rnd.choice(((), (0,), (1,), (2,))), copied=False)
    except Violation as violation:
        violation.add_note(f"seed {seed}, after {history.trace[-25:]}")
        raise
