"""Planted bugs of compaction that replicas follow (rules 11 to 19, 30).

The letters are the counterexamples of the rules' model; ``tests/replication/manifests`` has more of
them, over the cores alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.planted import plant

CORE = "kept.replication.manifests.ManifestCore"
HELD = "kept.compaction.held"
STAGE = "compaction"


def always(value: Any) -> Any:
    return lambda _: lambda *args, **kwargs: value


def held_forgotten(_: Any) -> Any:
    """What is held is acknowledged before it is on disk: never, here."""

    def store(directory: str, disk: Any, held: Any, told: Any) -> None:
        return None

    return store


def on_persist(original: Any) -> Any:
    """A follower applies what its leader holds."""

    def pulled(self: Any, event: Any) -> Any:
        answer = replace(event.answer, published=event.answer.held)
        return original(self, replace(event, answer=answer))

    return pulled


def own_horizon(original: Any) -> Any:
    """A follower drops tombstones by its own clock."""

    def job_for(log: Any, found: Any, previous: Any, now_ms: int) -> Any:
        segments = [
            replace(s, survivors=s.survivors - s.tombstones, digest=b"") for s in found.segments
        ]
        return original(log, found.with_segments(segments), previous, now_ms)

    return job_for


plant(
    "held-forgotten", STAGE, 1, "crash liveness value-lost resurrection older-needed",
    "a manifest is durable before it is acknowledged (14)",
    (f"{HELD}.store", held_forgotten),
)  # fmt: skip
plant(
    "applies-what-is-held", STAGE, 1, "resurrection generation-differs survivor-missing "
    "value-lost liveness invariants crash",
    "a replica applies what was published (14, C14)",
    (f"{CORE}._pulled", on_persist),
    (f"{CORE}._counts", always(True)),
)  # fmt: skip
plant(
    "own-horizon", STAGE, 1, "generation-differs liveness",
    "followers decide nothing (13, 16)",
    ("tests.sim.manifests.follow.job_for", own_horizon),
)  # fmt: skip
