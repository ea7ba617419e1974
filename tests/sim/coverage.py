"""What histories must contain: a fault that is never generated proves nothing.

Names are those of :attr:`tests.sim.world.World.counts`. ``make sim`` prints the counts of a run,
and fails when one of these is zero in a run that is long enough; so does ``test_histories.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENOUGH: Final = {
    "raft": 60, "cores": 150, "storage": 60, "scripted": 4,
    "directories": 24, "crashes": 24, "strangers": 12, "node": 40, "nodes": 40,
    "nodes-compaction": 40,
}  # fmt: skip
"""Histories after which nothing may be missing."""

_EVERYWHERE: Final = (
    "processes killed",
    "processes ended",
    "messages stopped by a partition",
    "messages cut one way",
    "messages delayed",
    "messages lost",
    "messages duplicated",
    "messages reordered",
    "stalls with events held",
    "clocks set",
    "clocks that drift",
    "slow disks",
    "controllers that handed over",
)
_DISKS: Final = (
    "power losses",
    "power losses with writes not synced",
    "writes torn by kill",
    "writes torn by power",
    "deaths within a disk call by kill",
    "deaths within a disk call by power",
    "disk errors",
)
_OPERATOR: Final = (
    "reassignments",
    "topics created",
    "topics deleted",
    "partitions added",
    "records deleted",
    "replicas removed",
    "unclean elections",
)

REQUIRED: Final = {
    "raft": (
        *_EVERYWHERE, *_DISKS, "voters changed", "leaderships handed over",
        "leaderships handed to two", "voters that died",
    ),
    "cores": (
        *_EVERYWHERE, *_OPERATOR, "followers that limp", "requests that came late",
        "leaders that slept",
    ),
    "scripted": (
        "an_isr_change_comes_late", "a_proposal_is_lost_in_a_stall",
        "a_follower_acknowledges_what_is_durable", "a_register_of_the_dead_comes_late",
    ),
    "directories": (
        "processes killed", "power losses", "devices that failed", "log directories offline",
        "leaders whose device failed",
    ),
    "strangers": (
        "processes killed", "messages of an unknown node", "messages of another disk",
        "messages of a voter that says what none does", "forged fetches",
    ),
    "crashes": (
        "processes killed", "power losses", "times all died", "times two went on",
        "batches that timed out", "batches sent again in another epoch",
        "batches written before, too",
    ),
    "node": (
        "starts", "slow disks", "topics created", "batches acknowledged",
        "batches without an answer",
        "checks of all records", "power losses", "power losses with writes not synced",
        "processes: dies within a disk call", "processes: is killed between two disk calls",
        "processes: stops", "processes: dies at its start, within a disk call",
    ),
    "nodes": (
        "slow disks", "topics created", "topics deleted", "reassignments", "records deleted",
        "batches acknowledged", "batches committed", "records consumed",
        "requests without an answer", "links cut", "nodes isolated", "processes stopped",
        "processes started again", "processes killed between two disk calls",
        "processes to die within a disk call", "times all died", "power losses",
        "power losses with writes not synced", "losses allowed", "checks of all records",
    ),
    "nodes-compaction": (
        "batches committed", "processes started again", "power losses", "generations applied",
        "base generations", "nodes forsaken", "reassignments", "records deleted",
        "unclean elections", "manifests damaged", "manifests: Damaged", "leaders left alone",
    ),
    "storage": (*_EVERYWHERE, *_DISKS, *_OPERATOR, "strays removed", "losses allowed"),
}  # fmt: skip


def missing(stage: str, counts: Mapping[str, int]) -> list[str]:
    """What never happened."""
    return [name for name in REQUIRED[stage] if not counts.get(name)]
