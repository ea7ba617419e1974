"""What histories must contain: a fault that is never generated proves nothing.

Names are those of :attr:`tests.sim.world.World.counts`. ``make sim`` prints the counts of a run,
and fails when one of these is zero in a run that is long enough; so does ``test_histories.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENOUGH: Final = {
    "raft": 60, "node": 40, "nodes": 100, "groups": 40, "nodes-compaction": 40,
    "transactions": 20, "security": 30, "kills": 10,
}  # fmt: skip
"""Histories after which nothing may be missing."""

REQUIRED: Final = {
    "raft": (
        "processes killed", "processes ended", "messages stopped by a partition",
        "messages cut one way", "messages delayed", "messages lost", "messages duplicated",
        "messages reordered", "stalls with events held", "clocks set", "clocks that drift",
        "slow disks", "controllers that handed over", "power losses",
        "power losses with writes not synced", "writes torn by kill", "writes torn by power",
        "deaths within a disk call by kill", "deaths within a disk call by power", "disk errors",
        "voters changed", "leaderships handed over",
        "leaderships handed to two", "voters that died",
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
        "links cut one way", "slow links", "clocks set", "devices that failed", "full disks",
        "devices put in order", "processes told to end", "processes that ended cleanly",
        "unclean elections", "followers that limp", "leaders whose device failed",
        "times two went on", "histories with early jobs", "voters changed",
        "producer epochs raised", "cuts that waited for their producers",
    ),
    "groups": (
        "commits acknowledged", "offsets read", "groups described", "members that left",
        "members that died", "members that slept", "coordinators deposed",
        "coordinators struck at commits", "coordinators struck at leaves",
        "coordinators struck at generations", "losses allowed", "reassignments",
        "members told illegal_generation", "members told unknown_member_id",
        "members told fenced_instance_id", "times two went on",
    ),
    "transactions": (
        "commits", "aborts", "records read committed", "stable offsets read",
        "requests held in an old connection", "instances with a successor",
        "producers told concurrent_transactions", "producers told not_coordinator",
        "offsets: unstable_offset_commit", "reassignments", "processes started again",
        "nodes isolated", "links cut", "coordinators struck at ends", "power losses",
        "producers fenced", "transactions described", "hanging transactions ended",
        "producer states compared", "records moved", "movers of an old generation",
        "producer states of offsets compared", "histories with passes", "views compared",
        "connections of markers held",
    ),
    "security": (
        "changes acknowledged: acl", "changes acknowledged: scram", "changes without an answer",
        "petitions told 0, allowed: True", "petitions told 31, allowed: False",
        "images compared", "decisions compared", "starts from a snapshot",
        "snapshots of a leader", "processes started again", "nodes isolated",
        "checks of all records",
    ),
    "nodes-compaction": (
        "batches committed", "processes started again", "power losses", "generations applied",
        "base generations", "nodes forsaken", "reassignments", "records deleted",
        "unclean elections", "manifests damaged", "manifests: ManifestDamaged",
        "leaders left alone", "slow builds", "devices that failed in a pass",
        "devices put in order", "leaders that died while a follower applied",
        "histories with early jobs", "passes that ended with their device",
        "directories that stayed offline", "cuts that waited for their producers",
    ),
    "kills": (
        "times all died", "times two went on", "generations applied", "batches given up",
        "producer epochs raised", "batches committed", "checks of all records",
    ),
}  # fmt: skip


def missing(stage: str, counts: Mapping[str, int]) -> list[str]:
    """What never happened."""
    return [name for name in REQUIRED[stage] if not counts.get(name)]
