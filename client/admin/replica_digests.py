"""Comparing what the replicas of a partition have on disk (semantics.md, rule 16).

Every replica recomputes digests from its files (``kept.node.compaction.replica_digests``) at one
generation, up to the lowest high watermark; they are equal, or the first differing segment and
offset are found by asking two replicas for ever smaller parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from kept.client.json_api import HttpFailed, JsonApi

PARTS: Final = 256
RETRY_S: Final = 0.2
UNAVAILABLE: Final = 503
"""Status of an answer that another moment may change."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Offsets ``base_offset..end_offset`` are not the same everywhere, or damaged on one replica.

    ``offset`` is of the first record that differs; None where records are equal or cannot be read.
    ``replicas`` says what each one has: a digest, or what is wrong.
    """

    base_offset: int
    end_offset: int
    offset: int | None
    replicas: Mapping[int, str]


@dataclass(slots=True)
class Verdict:
    """What became of one partition: ``equal`` up to ``end_offset`` at ``generation``, or not.

    ``covered_end`` is where the part ends that compaction covers. ``why`` says why there is no
    verdict (``equal`` None). ``absent`` replicas were not asked.
    """

    topic: str
    partition: int
    replicas: tuple[int, ...]
    absent: tuple[int, ...]
    equal: bool | None = None
    generation: str | None = None
    start_offset: int = -1
    covered_end: int = -1
    end_offset: int = -1
    segments: int = 0
    differences: list[Difference] = field(default_factory=list)
    why: str | None = None


class _Moved(Exception):
    """Replicas are not at one generation now."""


def verify(
    topic: str,
    partition: int,
    replicas: Mapping[int, JsonApi],
    absent: tuple[int, ...],
    patience_s: float,
) -> Verdict:
    """Compare the replicas; as long as compaction is at work there, again and again until
    ``patience_s`` is over.
    """
    end = time.monotonic() + patience_s
    with ThreadPoolExecutor(max(len(replicas), 1)) as pool:
        while True:
            verdict = Verdict(topic, partition, tuple(sorted(replicas)), absent)
            try:
                _compare(verdict, replicas, pool)
            except _Moved as error:
                verdict.why = str(error)
            if verdict.why is None or time.monotonic() >= end:
                return verdict
            time.sleep(RETRY_S)


def _compare(verdict: Verdict, replicas: Mapping[int, JsonApi], pool: ThreadPoolExecutor) -> None:
    named = {"topic": verdict.topic, "partition": verdict.partition}

    def request(what: str, **more: object) -> dict[int, Any]:
        def one(api: JsonApi) -> Any:
            try:
                return api.get(f"compaction/{what}", **named, **more)
            except HttpFailed as error:
                if error.status == UNAVAILABLE:
                    raise _Moved(str(error)) from error
                raise

        return dict(zip(replicas, pool.map(one, replicas.values()), strict=True))

    states = request("replica")
    generations = {state["generation"] for state in states.values()}
    if len(generations) > 1:
        at = ", ".join(f"node {n} at {s['generation'] or 'none'}" for n, s in states.items())
        raise _Moved(f"the replicas are not at one generation: {at}")
    verdict.generation = generations.pop()
    verdict.start_offset = max(state["log_start_offset"] for state in states.values())
    verdict.end_offset = min(state["high_watermark"] for state in states.values())
    verdict.end_offset = max(verdict.start_offset, verdict.end_offset)
    answers = request(
        "digests", generation=verdict.generation, start=verdict.start_offset, end=verdict.end_offset
    )
    verdict.covered_end = next(iter(answers.values()))["covered_end"]
    for part in ("covered", "tail"):
        _compare_ranges(verdict, {n: answer[part] for n, answer in answers.items()}, request)
    verdict.equal = not verdict.differences


def _compare_ranges(
    verdict: Verdict,
    ranges: Mapping[int, list[dict[str, Any]]],
    request: Callable[..., dict[int, Any]],
) -> None:
    """Note every range that is not the same everywhere; of the first one the first record."""
    places = sorted({(r["base_offset"], r["end_offset"]) for rs in ranges.values() for r in rs})
    verdict.segments += len(places)
    by_base = {n: {r["base_offset"]: r for r in several} for n, several in ranges.items()}
    for base, end in places:
        there = {node: digests.get(base) for node, digests in by_base.items()}
        if len({None if r is None else (r["end_offset"], r["digest"]) for r in there.values()}) > 1:
            offset = None if verdict.differences else _first(verdict, base, end, request)
        elif any(r is not None and r["wrong"] for r in there.values()):
            offset = None
        else:
            continue
        said = {node: _said(digest) for node, digest in there.items()}
        verdict.differences.append(Difference(base, end, offset, said))


def _said(found: dict[str, Any] | None) -> str:
    if found is None:
        return "nothing"
    return str(found["wrong"] or f"{found['count']} with digest {found['digest']}")


def _first(
    verdict: Verdict, base: int, end: int, request: Callable[..., dict[int, Any]]
) -> int | None:
    """The first offset of ``base..end`` at which somebody has another record than the others."""
    base, end = max(base, verdict.start_offset), min(end, verdict.end_offset)
    while end > base:
        try:
            answers = request(
                "digests", generation=verdict.generation, start=base, end=end, parts=PARTS
            )
        except HttpFailed:
            return None  # it cannot be read: what is wrong is said with the range
        width = -(-(end - base) // PARTS)
        parts = {
            node: {b["number"]: (b["digest"], b["count"]) for b in answer["buckets"]}
            for node, answer in answers.items()
        }
        numbers = sorted(set().union(*parts.values()))
        first = next((n for n in numbers if len({p.get(n) for p in parts.values()}) > 1), None)
        if first is None:
            return None
        base = base + first * width
        if width == 1:
            return base
        end = min(base + width, end)
    return None
