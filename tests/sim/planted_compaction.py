"""Planted bugs of compaction that replicas follow (rules 11 to 19, 43).

Many more are planted over the cores alone, by history and by script:
``tests/replication/manifests`` has all counterexamples of ``docs/compaction-protocol.md``. What a
pass must keep is shown by ``tests/compaction/test_rules.py``, where it must end by
``tests/compaction/cleaner/test_planner.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyroaring import BitMap

from kept.storage.errors import MachineError
from tests.sim import batches
from tests.sim.planted import plant
from tests.sim.planted_replicas import returns

FOLLOW = "kept.compaction.manifest.follow"
STAGE = "nodes-compaction"


def rest_dropped(original: Any) -> Any:
    """What a split segment has beyond the manifest's end is not copied."""

    def copy_rest(self: Any, piece: Any) -> None:
        original(self, replace(piece, sources=(replace(piece.sources[0], size_bytes=0),)))

    return copy_rest


def own_horizon(original: Any) -> Any:
    """A follower drops tombstones by its own clock."""

    def job_for(log: Any, found: Any, previous: Any, now_ms: int) -> Any:
        segments = [
            replace(s, survivors=s.survivors - s.tombstones, digest=b"") for s in found.segments
        ]
        return original(log, found.with_segments(segments), previous, now_ms)

    return job_for


def starts_anew(original: Any) -> Any:
    """A follower that applies a manifest takes its first segment for its start."""

    def job_for(log: Any, *args: Any) -> Any:
        log.log_start_offset = log.segments[0].base_offset
        return original(log, *args)

    return job_for


def applied_twice(original: Any) -> Any:
    """Two tasks put one manifest into place."""

    async def apply(self: Any, ref: Any, work: Any) -> None:
        self._tasks.spawn(original(self, ref, self._begin_work()))
        await original(self, ref, work)

    return apply


def deletions_undone(original: Any) -> Any:
    """A pass removes each tombstone, and nothing that it deletes."""

    def decide(self: Any, facts: Any, *args: Any) -> None:
        original(self, facts, *args)
        alive = self.survivors[facts.source.base_offset]
        alive |= facts.present
        alive -= facts.tombstones

    return decide


def of_its_own(original: Any) -> Any:
    """A pass publishes digests that no other replica comes to."""

    def build(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        segments = [
            replace(segment, digest=bytes(byte ^ 1 for byte in segment.digest))
            for segment in built.manifest.segments
        ]
        return replace(built, manifest=built.manifest.with_segments(segments))

    return build


def not_missed(original: Any) -> Any:
    """A replica that lacks a survivor puts a manifest into place as if it were not one."""

    def job_for(log: Any, found: Any, *args: Any) -> Any:
        offsets = [rec.offset for rec in batches.records(log)]
        bases = [batch.base for batch in batches.read(log, log.log_start_offset)]
        segments = []
        for segment in found.segments:
            base, end = segment.base_offset, segment.end_offset
            there = BitMap(offset - base for offset in offsets if base <= offset < end)
            whole = BitMap(offset - base for offset in bases if base <= offset < end)
            segments.append(
                replace(
                    segment,
                    survivors=segment.survivors & there,
                    empties=segment.empties & whole,
                    horizons={ms: first & whole for ms, first in segment.horizons.items()},
                    tombstones=segment.tombstones & there,
                    digest=b"",
                )
            )
        return original(log, found.with_segments(segments), *args)

    return job_for


def unheard(original: Any) -> Any:
    """A pass is not told that its directory is offline, and waits for its manifest."""

    def _reject(self: Any, error: BaseException) -> bool:
        told = not (self._closed or isinstance(error, MachineError))
        return bool(told and original(self, error))

    return _reject


def joins_as(complete: bool) -> Callable[[Any], Any]:
    """Whose log is complete is forgotten, or taken for granted of who holds a manifest."""

    def make(original: Any) -> Any:
        def may_join(self: Any, replica: int) -> Any:
            self.followers[replica].complete = complete
            return original(self, replica)

        return may_join

    return make


plant(
    "digest-of-its-own",
    STAGE,
    1,
    "survivor-missing",
    "a replica that holds all survivors comes to the manifest's digests (17)",
    ("kept.compaction.cleaner.cleaner_run.build", of_its_own),
)
plant(
    "rest-dropped",
    STAGE,
    3,
    "survivor-missing value-lost isr-holds kill-lost committed-lost "
    "crash liveness invariants escaped",
    "a segment that is split keeps what is beyond the manifest's end (18)",
    (f"{FOLLOW}._Follower._copy_rest", rest_dropped),
)
plant(
    "own-horizon",
    STAGE,
    1,
    "generation-differs liveness",
    "followers decide nothing (13, 16)",
    (f"{FOLLOW}.job_for", own_horizon),
)
plant(
    "start-goes-back",
    STAGE,
    1,
    "log-start-back",
    "a replica's log start does not go back (43)",
    (f"{FOLLOW}.job_for", starts_anew),
    moves=True,
)
plant(
    "nodes-applied-twice",
    STAGE,
    1,
    "escaped",
    "one task at a time works on a manifest's files",
    ("kept.node.replicas.manifests.replica.ReplicaManifests._apply", applied_twice),
)
plant(
    "deletions-undone",
    STAGE,
    1,
    "resurrection",
    "a tombstone goes after all that it deletes (5)",
    ("kept.compaction.cleaner.survey._Surveyor._decide", deletions_undone),
    ("kept.compaction.cleaner.self_check.check", returns(0)),
)
plant(
    "empties-dropped",
    STAGE,
    7,
    "producer-state",
    "the last batch of a producer stays, though it is empty (8)",
    ("kept.compaction.cleaner.survey.producers_by_last_offset", returns(array("q"))),
)
plant(
    "tombstones-stay",
    STAGE,
    8,
    "tombstones",
    "a tombstone goes when its horizon has passed (6)",
    ("kept.compaction.cleaner.job.Job.horizon_ms", lambda _: property(lambda _job: 1 << 62)),
)
plant(
    "cut-while-applying",
    STAGE,
    1,
    "cut-in-use",
    "a log is not cut while a manifest is put into place",
    ("kept.node.replicas.manifests.replica.ReplicaManifests.check_cut", returns(None)),
    large=True,
    devices=False,
    rots=False,
    unclean=False,
    forsakes=False,
    suffer_s=1.0,
)
plant(
    "survivor-not-missed",
    STAGE,
    1,
    "generation-differs",
    "a replica that lacks a survivor does not apply the manifest (15, 17)",
    (f"{FOLLOW}.job_for", not_missed),
    unclean=True,
    moves=False,
    rots=False,
    forsakes=False,
    devices=False,
)
plant(
    "pass-outlives-its-device",
    STAGE,
    4,
    "device-in-pass",
    "a pass ends with the device that it works on",
    ("kept.node.replicas.manifests.replica.ReplicaManifests._reject", unheard),
    devices=True,
    rots=False,
    unclean=False,
    forsakes=False,
)
plant(
    "pass-goes-on-offline",
    STAGE,
    6,
    "offline-written device-in-pass",
    "nothing is put into place in a directory that is offline, though its device is back",
    ("kept.node.replicas.manifests.replica.ReplicaManifests.abandon", returns(None)),
    ("kept.node.replicas.manifests.store.ManifestFiles.check", returns(None)),
    ("kept.node.compaction.cleaner.Cleaner.forget", returns(None)),
    devices=True,
    loose=True,
    large=True,
    rots=False,
    unclean=False,
    forsakes=False,
    suffer_s=4.0,
)
plant(
    "held-enters",
    STAGE,
    3,
    "resurrection value-lost prefix",
    "a replica that comes over a gap enters the ISR when it has applied what is published (15)",
    ("kept.replication.partition_core.PartitionCore._may_join", joins_as(complete=True)),
)
plant(
    "only-applied-enters",
    "kills",
    1,
    "slow-return",
    "a replica that had everything before it was published enters at once (15)",
    ("kept.replication.partition_core.PartitionCore._may_join", joins_as(complete=False)),
    large=True,
)
