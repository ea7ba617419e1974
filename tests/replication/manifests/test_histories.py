"""Random histories of the real cores, and the planted mistakes that they must find.

A failure names its seed: ``play(seed, replicas=..., unclean=...)`` repeats it. ``SEEDS`` in the
environment: how many histories of each kind; ``FIRST_SEED``: from where.
"""

from __future__ import annotations

import os

import pytest

from kept.storage.errors import InvariantViolation
from tests.replication.manifests.history import play
from tests.replication.manifests.logs import Violation
from tests.replication.manifests.planted import PLANTED
from tests.support.slow import rest_slow

SEEDS = int(os.environ.get("SEEDS", "80"))
FIRST = int(os.environ.get("FIRST_SEED", "0"))

KINDS = {
    "three replicas": {},
    "four replicas": {"replicas": 4},
    "unclean elections": {"unclean": True, "policies": True},
    "failing disks": {"failing": True},
    "damaged files": {"tearing": True},
    "damaged records": {"decaying": True},
}
COME_ACROSS = {
    "applied as leader",
    "applied as follower",
    "a new leader finishes",
    "joined",
    "left",
    "divergence",
    "fetched over a gap",
    "crashed in a swap",
    "cancelled",
    "discarded",
}
"""What must have happened in some history of each kind, or they show nothing."""
ALSO = {
    "unclean elections": {"cut below b", "missing survivor", "policy changed"},
    "damaged files": {"lost while it ran", "begun anew while it ran"},
    "damaged records": {
        "damaged as a member",
        "damaged outside the ISR",
        "cut where a record is damaged",
    },
}


@pytest.mark.parametrize("seeds", rest_slow([SEEDS // 4, SEEDS], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_histories(kind: str, seeds: int) -> None:
    seen: set[str] = set()
    for seed in range(FIRST, FIRST + seeds):
        seen |= play(seed, **KINDS[kind]).seen.keys()
    if seeds >= 80:
        assert COME_ACROSS | ALSO.get(kind, set()) <= seen


@pytest.mark.parametrize("name", [name for name, p in PLANTED.items() if p.seed is not None])
def test_a_mistake_is_found(name: str) -> None:
    planted = PLANTED[name]
    assert planted.seed is not None
    with pytest.raises((Violation, InvariantViolation), match=planted.breaks):
        play(planted.seed, **planted.options())
