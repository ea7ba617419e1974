"""Planted bugs of compaction that replicas follow (rules 11 to 19, 30).

The letters are the counterexamples of the rules' model; ``tests/replication/manifests`` has all of
them, over the cores alone.

Not here: *bytes instead of records* (rule 17) shows in
``tests/compaction/manifest/test_verify.py``: every record of these histories is uncompressed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kept.compaction.manifest.follow import LogsDiffer
from tests.sim.planted import plant

CORE = "kept.replication.manifests.ManifestCore"
LEADER = "kept.replication.partition_core.PartitionCore"
FOLLOW = "kept.compaction.manifest.follow"
HELD = "kept.compaction.manifest.manifest_store"
STAGE = "compaction"


def published_by(counts: Any) -> Any:
    """Publication asks only those whom ``counts`` counts."""

    def make(_: Any) -> Any:
        def publish(self: Any) -> Any:
            if self.offered is None:
                return ()
            for replica, follower in self.followers.items():
                if follower.held != self.offered and counts(self, replica):
                    return ()
            return self._publish_held(self.offered)

        return publish

    return make


def always(value: Any) -> Any:
    return lambda _: lambda *args, **kwargs: value


def held_forgotten(_: Any) -> Any:
    """What is held is acknowledged before it is on disk: never, here."""

    def store(directory: str, disk: Any, held: Any, told: Any) -> None:
        return None

    return store


def denied(original: Any) -> Any:
    """A replica takes the newest record of a base generation for missing."""

    def run_here(job: Any, previous: Any, disk: Any) -> Any:
        found = job.manifest
        newest = next((one for one in reversed(found.segments) if one.survivors), None)
        if found.clean_to == found.log_start_offset and newest is not None:
            offset = newest.base_offset + newest.survivors.max()
            raise LogsDiffer(job.directory, -1, offset, "planted")
        return original(job, previous, disk)

    return run_here


def denied_once(original: Any) -> Any:
    """The first replica that builds from the pass after a base generation denies its newest record,
    once: a cut and a fetch later nothing is to be seen of it. At seed 27 nothing was, while any
    lone leader that had begun anew excused all that was missing (``test_excuses.py``).
    """
    said: set[Any] = set()

    def run_here(job: Any, previous: Any, disk: Any) -> Any:
        found = job.manifest
        newest = next((one for one in reversed(found.segments) if one.survivors), None)
        after_base = found.generation.leader_epoch > 0 and found.generation.number == 1
        name = job.directory, found.generation
        if after_base and newest is not None and name not in said:
            said.add(name)
            offset = newest.base_offset + newest.survivors.max()
            raise LogsDiffer(job.directory, -1, offset, "planted")
        return original(job, previous, disk)

    return run_here


def on_persist(original: Any) -> Any:
    """A follower applies what its leader holds."""

    def pulled(self: Any, event: Any) -> Any:
        answer = replace(event.response, published=event.response.held)
        return original(self, replace(event, response=answer))

    return pulled


def by_eligibility(_: Any) -> Any:
    """Whoever is alive joins, whatever it has applied."""

    def may_join(self: Any, replica: int) -> bool:
        return replica in self.eligible

    return may_join


def rest_dropped(original: Any) -> Any:
    """What a split segment has beyond the manifest's end is not copied."""

    def copy_rest(self: Any, piece: Any) -> None:
        original(self, replace(piece, sources=(replace(piece.sources[0], size_bytes=0),)))

    return copy_rest


def cleared_not(original: Any) -> Any:
    """The applied mark outlives a cut below it."""

    def cut(self: Any, log_end_offset: int) -> Any:
        applied = self.applied
        effects = original(self, log_end_offset)
        self.applied = applied
        return tuple(e for e in effects if type(e).__name__ != "ClearApplied")

    return cut


def cleans_first(_: Any) -> Any:
    """A leader computes before what it holds is published and applied."""

    def may_compute(self: Any) -> bool:
        return self.has_offered and self.storing is None and self.applying is None

    return property(may_compute)


def below_log_end(original: Any) -> Any:
    """A replica asks as if its log went as far as any manifest."""

    def pull(self: Any, log_end_offset: int, broker_epoch: int = -1) -> Any:
        return original(self, 1 << 60, broker_epoch)

    return pull


def own_horizon(original: Any) -> Any:
    """A follower drops tombstones by its own clock."""

    def job_for(log: Any, found: Any, previous: Any, now_ms: int) -> Any:
        segments = [
            replace(s, survivors=s.survivors - s.tombstones, digest=b"") for s in found.segments
        ]
        return original(log, found.with_segments(segments), previous, now_ms)

    return job_for


plant(
    "published-by-all", STAGE, 1, "tombstones liveness",
    "removal never waits for an absent replica (16)",
    (f"{LEADER}._publish", published_by(lambda self, replica: True)),
    forsakes=True,
)  # fmt: skip
plant(
    "held-forgotten", STAGE, 1, "crash liveness value-lost resurrection older-needed",
    "a manifest is durable before it is acknowledged (14)",
    (f"{HELD}.store", held_forgotten),
)  # fmt: skip
plant(
    "applies-what-is-held", STAGE, 5, "resurrection generation-differs survivor-missing "
    "value-lost liveness invariants crash",
    "a replica applies what was published (14, C14)",
    (f"{CORE}._pulled", on_persist),
    (f"{CORE}._accepts_published", always(True)),
)  # fmt: skip
plant(
    "joins-at-any-generation", STAGE, 8, "resurrection generation-differs value-lost",
    "who joins has applied what was published last (15)",
    (f"{LEADER}._may_join", by_eligibility),
    forsakes=True,
)  # fmt: skip
plant(
    "rest-dropped", STAGE, 2, "survivor-missing value-lost isr-holds kill-lost committed-lost "
    "crash liveness invariants",
    "a segment that is split keeps what is beyond the manifest's end (18)",
    (f"{FOLLOW}._Follower._copy_rest", rest_dropped),
)  # fmt: skip
plant(
    "mark-outlives-cut", STAGE, 7, "resurrection generation-differs value-lost survivor-missing "
    "liveness invariants crash",
    "a cut below the applied end clears the mark (19)",
    (f"{CORE}._cut", cleared_not),
    unclean=True,
)  # fmt: skip
plant(
    "survivor-denied", STAGE, 19, "survivor-missing",
    "what a lone leader begins anew with is there, unless a generation had dropped it (15, 19)",
    ("kept.compaction.manifest.follow_worker.run_here", denied),
    rots=True, unclean=False,
)  # fmt: skip
plant(
    "survivor-denied-once", STAGE, 27, "survivor-missing",
    "what a pass has left is there, however anew its leader had begun (15)",
    ("kept.compaction.manifest.follow_worker.run_here", denied_once),
    rots=True, unclean=False,
)  # fmt: skip
plant(
    "own-horizon", STAGE, 1, "generation-differs liveness",
    "followers decide nothing (13, 16)",
    ("tests.sim.manifests.follow.job_for", own_horizon),
)  # fmt: skip
plant(
    "cleans-first", STAGE, 2, "generation-differs value-lost resurrection",
    "no pass before what is held is published and applied (14, C5)",
    (f"{CORE}.may_compute", cleans_first),
)  # fmt: skip
plant(
    "below-log-end", STAGE, 17, "crash survivor-missing value-lost resurrection",
    "a manifest is applied once the log reaches its end (14, 15, C6)",
    (f"{CORE}.pull", below_log_end),
)  # fmt: skip
