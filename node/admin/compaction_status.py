"""What compaction does, did and would do to one partition: for ``kept.node.admin.service``.

Status comes from the planner that the cleaner uses, so the two cannot disagree. A dry run reads the
log in a process of its own (``kept.node.compaction.dry_run``), niced like a pass. Why an offset is
missing is answered from the log, the applied manifest and the removal journal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner.cleaner_run import Result, read_manifest
from kept.compaction.cleaner.log_snapshot import job_for, sources_from, view
from kept.compaction.cleaner.planner import (
    Failure,
    NotNow,
    Plan,
    cleanable_range,
    next_identity,
    sizes,
)
from kept.compaction.manifest.apply import CompactionState
from kept.node.compaction.consistent_read import read_consistently
from kept.node.replicas.manifests.workers import pass_limits
from kept.storage.errors import KeptError, OffsetOutOfRange
from kept.storage.records import headers, records

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext
    from kept.node.replicas.local_replica import LocalReplica
    from kept.storage.disk import FileSlice

IDLE, WAITING, DUE, RUNNING, UNCLEANABLE = "idle", "waiting", "due", "running", "uncleanable"

MAX_PASSES: Final = 20
"""Of the removal journal, to be told at once."""
MAX_UNCLEANABLE: Final = 1000
"""Logs that failed, told at once."""
PEEK_BYTES: Final = 1
"""To look at one offset the one batch that holds it is read."""


@dataclass(frozen=True, slots=True)
class ReplicaGenerations:
    """What another replica holds and has applied; ``behind``: not what is published."""

    replica: int
    held: str | None
    applied: str | None
    behind: bool


@dataclass(frozen=True, slots=True)
class CompactionStatus:
    """Where one partition's compaction stands, as node ``node`` knows; with ``leads`` it counts.

    ``state`` is ``idle`` (nothing to clean), ``waiting`` (something to clean, not due), ``due``,
    ``running``, or ``uncleanable`` (it failed, and is tried again at ``retry_at_ms``; without that
    the check of a pass stopped it, and somebody is to say ``retry``). ``reason``
    is a sentence: what is due, why nothing is, or what failed. The cleanable range is
    ``first_dirty_offset..cleanable_end_offset``, held back by ``bound``. ``tombstones_pending`` are
    in the clean part and wait for their delete horizon, the first of which is ``next_horizon_ms``.

    While a pass runs, ``cleaning_to`` is the end of what it cleans, and ``progress`` is how much of
    its work is done: 0 to 1.

    ``held`` is the newest generation here, ``generation`` the one applied, ``published`` the one
    that all replicas in sync hold (as this leader knows). ``awaits`` are those it waits for, and
    ``replicas`` says of each other replica what it holds and has applied, as it last told.
    """

    state: str
    reason: str
    first_dirty_offset: int
    cleanable_end_offset: int
    bound: str
    clean_bytes: int
    dirty_bytes: int
    dirty_ratio: float
    generation: str | None
    last_compaction_ms: int | None
    retry_at_ms: int | None = None
    failures: int = 0
    progress: float | None = None
    tombstones_pending: int = 0
    next_horizon_ms: int | None = None
    cleaning_to: int | None = None
    node: int = -1
    leads: bool = False
    held: str | None = None
    published: str | None = None
    awaits: tuple[int, ...] = ()
    replicas: tuple[ReplicaGenerations, ...] = ()


def status(context: AdminContext, hosted: LocalReplica) -> CompactionStatus:
    """Where a compacted partition stands; no log is read."""
    cleaner = context.cleaner.started
    known = cleaner.state(hosted)
    seen = view(hosted.partition.log, known, hosted.partition.last_stable_offset)
    found = cleanable_range(seen, context.runtime.now_ms())
    clean, dirty = sizes(seen, found)
    tp = hosted.partition.topic_partition
    said = cleaner.status(tp)
    state, reason = _state(said.next, dirty)
    progress = None
    if not context.config.current.log_cleaner_enable and state in (DUE, WAITING):
        state, reason = WAITING, "the cleaner is off: log.cleaner.enable is false"
    if said.failure is not None:
        state, reason = UNCLEANABLE, said.failure.reason
    trouble = hosted.manifests.trouble
    if trouble.count:
        state, reason = UNCLEANABLE, trouble.reason
    if said.running is not None:
        computed = hosted.manifests.why_not if said.running.computed else None
        state, reason = RUNNING, computed or said.running.plan.why
        total = said.running.work.total_bytes
        progress = round(said.running.work.done_bytes / total, 3) if total else 0.0
    return CompactionStatus(
        state=state,
        reason=reason,
        first_dirty_offset=found.first_dirty,
        cleanable_end_offset=found.end_offset,
        bound=found.bound,
        clean_bytes=clean,
        dirty_bytes=dirty,
        dirty_ratio=_ratio(clean, dirty),
        generation=None if known.applied is None else str(known.applied),
        last_compaction_ms=known.last_ms if known.last_ms >= 0 else None,
        retry_at_ms=trouble.retry_at_ms if said.failure is None else _retry_at_ms(said.failure),
        failures=trouble.count if said.failure is None else said.failure.count,
        progress=progress,
        tombstones_pending=known.tombstones_from(seen.segments[0].base_offset),
        next_horizon_ms=min(known.horizons.values(), default=None),
        cleaning_to=None if said.running is None else said.running.plan.end_offset,
        node=context.identity.node_id,
        leads=hosted.partition.is_leader,
        **_generations(hosted),
    )


def dirty_ratio(hosted: LocalReplica, now_ms: int) -> float:
    """How much of what a pass could clean is dirty: 0 to 1."""
    known = hosted.compaction or CompactionState()
    seen = view(hosted.partition.log, known, hosted.partition.last_stable_offset)
    return _ratio(*sizes(seen, cleanable_range(seen, now_ms)))


def _ratio(clean_bytes: int, dirty_bytes: int) -> float:
    return round(dirty_bytes / (clean_bytes + dirty_bytes), 4) if dirty_bytes else 0.0


def _retry_at_ms(failure: Failure) -> int | None:
    return None if failure.stopped else failure.retry_at_ms


def _generations(hosted: LocalReplica) -> dict[str, Any]:
    """What is known of the manifests of all replicas."""
    core, leader = hosted.manifests.core, hosted.partition.core
    found: dict[str, Any] = {
        "held": _named(None if core.held is None else core.held.identity),
        "published": _named(None if core.published is None else core.published.identity),
    }
    if leader.leading and leader.followers:
        found["awaits"] = leader.lacking if leader.offered is not None else ()
        found["replicas"] = tuple(
            ReplicaGenerations(
                replica,
                _named(follower.held),
                _named(follower.applied),
                follower.applied != leader.published,
            )
            for replica, follower in leader.followers.items()
        )
    return found


def _named(identity: Any) -> str | None:
    """``<leader epoch>.<generation>``."""
    return None if identity is None else f"{identity[0]}.{identity[1]}"


def _state(following: Plan | NotNow, dirty_bytes: int) -> tuple[str, str]:
    if isinstance(following, Plan):
        return DUE, following.why
    return (WAITING if dirty_bytes else IDLE), following.reason


def outcome(finished: asyncio.Future[Result | NotNow]) -> dict[str, Any]:
    """What a pass that was asked for came to: ``done`` with its numbers, or ``error``."""
    error = finished.exception()
    if isinstance(error, KeptError):
        return {"done": False, "error": str(error)}
    found = finished.result()
    if isinstance(found, NotNow):
        return {"done": False, "reason": found.reason}
    return {"done": True, **asdict(found), "identity": str(found.identity)}


# Dry runs.


async def explain(context: AdminContext, hosted: LocalReplica, key: bytes | None) -> dict[str, Any]:
    """What a pass would do now, due or not, and the life of a key.

    Raises DryRunFailed, MovedMeanwhile (it is compacted again and again).
    """
    return await read_consistently(hosted, lambda: _explained(context, hosted, key))


async def _explained(
    context: AdminContext, hosted: LocalReplica, key: bytes | None
) -> dict[str, Any]:
    cleaner = context.cleaner.started
    due = cleaner.plan_for(hosted)
    found = due if isinstance(due, Plan) else cleaner.plan_for(hosted, asked=True)
    answer: dict[str, Any] = {
        "status": asdict(status(context, hosted)),
        "due": isinstance(due, Plan),
    }
    if isinstance(found, NotNow):
        answer |= {"reason": found.reason, "dry_run": None}
        answer["tombstones"] = await context.runtime.in_thread(_tombstones, context, hosted)
        if key is None:
            return answer
        return answer | {"key": await _records_of(context, hosted, key)}
    answer |= {
        "reason": due.why if isinstance(due, Plan) else due.reason,
        "bound": found.bound,
        "needs_bytes": found.needs_bytes,
        "horizons_only": found.horizons_only,
    }
    above = sources_from(
        hosted.partition.log, hosted.partition.last_stable_offset, found.end_offset
    )
    said = await context.dry_runs.run(_job(context, hosted, found), key, above)
    return {**answer, "tombstones": said["dry_run"].pop("tombstones"), **said}


def _tombstones(context: AdminContext, hosted: LocalReplica) -> list[dict[str, Any]]:
    """When the tombstones go that the last pass kept."""
    from kept.compaction.cleaner.explain import tombstones

    applied = context.cleaner.started.state(hosted).applied
    if applied is None:
        return []
    found = read_manifest(hosted.partition.log.directory, applied, context.runtime.disk)
    return [asdict(outlook) for outlook in tombstones(found)]


def _job(context: AdminContext, hosted: LocalReplica, found: Plan) -> jobs.Job:
    known = context.cleaner.started.state(hosted)
    return job_for(
        hosted.partition.log,
        found,
        next_identity(known.applied, hosted.partition.leader_epoch),
        now_ms=context.runtime.now_ms(),
        hash_key=os.urandom(jobs.HASH_KEY_BYTES),
        limits=pass_limits(context.config.current, context.runtime.disk, hosted),
    )


async def _records_of(
    context: AdminContext, hosted: LocalReplica, key: bytes
) -> list[Mapping[str, Any]]:
    """Every record of a key that is in the log."""
    log, known = hosted.partition.log, context.cleaner.started.state(hosted)
    return await context.dry_runs.find_key(
        log.directory,
        log.config,
        key=key,
        sources=sources_from(hosted.partition.log, hosted.partition.last_stable_offset, 0),
        clean_to=known.clean_to,
        applied=known.applied,
    )


# What passes did.


def cleaner(context: AdminContext) -> dict[str, Any]:
    """``running`` passes, logs that are ``uncleanable``, and totals since the node started.
    ``uncompiled_kernels``: those that the node or a worker of it runs as plain Python.

    ``retry_at_ms`` is -1 where nothing is tried before somebody says ``retry``.
    """
    now = context.cleaner.started
    running = []
    for tp, one in now.running.items():
        total = one.work.total_bytes
        running.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "reason": one.plan.why,
                "dirty_ratio": round(one.plan.dirty_ratio, 4),
                "progress": round(one.work.done_bytes / total, 3) if total else 0.0,
                "started_ms": one.started_ms,
            }
        )
    uncleanable = [
        {
            "topic": tp.topic,
            "partition": tp.partition,
            "reason": failure.reason,
            "failures": failure.count,
            "retry_at_ms": -1 if failure.stopped else failure.retry_at_ms,
        }
        for tp, failure in sorted(now.failures.all().items())
    ]
    totals = asdict(now.totals)
    return {
        "running": running,
        "uncleanable": uncleanable[:MAX_UNCLEANABLE],
        "uncompiled_kernels": list(context.kernels.uncompiled),
        **totals,
    }


async def passes(context: AdminContext, hosted: LocalReplica) -> dict[str, Any]:
    """``last``: numbers of the last pass that this process ran, or None; ``passes``: what the
    removal journal knows of the last ones, newest first. Raises DamagedData, MachineError.
    """
    from kept.compaction.cleaner import removal_log

    directory, disk = hosted.partition.log.directory, context.runtime.disk

    def read() -> list[dict[str, Any]]:
        found = []
        for identity, path in reversed(removal_log.files(directory, disk)[-MAX_PASSES:]):
            removed = removal_log.decode(path, disk.read(path))
            found.append(
                {
                    "generation": str(identity),
                    "at_ms": removed.now_ms,
                    "removed": removed.counts(),
                }
            )
        return found

    last = context.cleaner.started.status(hosted.partition.topic_partition).last
    return {
        "last": None if last is None else {**asdict(last), "identity": str(last.identity)},
        "passes": await context.runtime.in_thread(read),
    }


async def life_of_key(
    context: AdminContext, hosted: LocalReplica, key: bytes
) -> list[Mapping[str, Any]]:
    """Every record of a key in the log, with what a pass would do to it. Raises as
    :func:`explain`.
    """
    if hosted.partition.log.config.compact:
        answer = await explain(context, hosted, key)
        found: list[Mapping[str, Any]] = answer["key"]
        return found
    return await read_consistently(hosted, lambda: _records_of(context, hosted, key))


# Why an offset is missing.


async def why_missing(
    context: AdminContext, hosted: LocalReplica, offset: int, key: bytes | None
) -> dict[str, Any]:
    """``fate``, ``explanation``, and the generation and reason that removed it, where known.

    With ``key``: also ``winner``, the newest record of the key that is there. Raises as
    :func:`explain`.
    """
    return await read_consistently(hosted, lambda: _why_missing(context, hosted, offset, key))


async def _why_missing(
    context: AdminContext, hosted: LocalReplica, offset: int, key: bytes | None
) -> dict[str, Any]:
    from kept.compaction.cleaner import removal_log

    log, partition = hosted.partition.log, hosted.partition
    known = context.cleaner.started.state(hosted)
    slice_ = _batch_of(hosted, offset)
    bounds = {
        "log_start_offset": log.log_start_offset,
        "high_watermark": partition.high_watermark,
        "log_end_offset": log.log_end_offset,
    }

    def find() -> removal_log.Answer:
        applied = known.applied
        return removal_log.why(
            offset,
            directory=log.directory,
            disk=context.runtime.disk,
            manifest=None
            if applied is None
            else read_manifest(log.directory, applied, context.runtime.disk),
            is_there=lambda wanted: _holds(context, slice_, wanted),
            **bounds,
        )

    found = await context.runtime.in_thread(find)
    answer = {
        "fate": found.fate.value,
        "explanation": found.text,
        "reason": None if found.reason is None else found.reason.value,
        "generation": None if found.identity is None else str(found.identity),
    }
    if key is not None:
        history = await _records_of(context, hosted, key)
        answer["winner"] = history[-1] if history else None
    return answer


def _batch_of(hosted: LocalReplica, offset: int) -> FileSlice | None:
    """Where the batch is that would hold an offset."""
    log = hosted.partition.log
    if not log.log_start_offset <= offset < hosted.partition.high_watermark:
        return None
    try:
        return log.read(offset, PEEK_BYTES, hosted.partition.high_watermark)
    except OffsetOutOfRange:
        return None


def _holds(context: AdminContext, found: FileSlice | None, offset: int) -> bool:
    """Whether a batch has a record at ``offset``; a control batch's marker counts."""
    if found is None:
        return False
    data = context.runtime.disk.pread(*found)
    for position, header in headers(data):
        if header.base_offset > offset:
            return False
        if header.is_control:
            if header.record_count and header.last_offset == offset:
                return True
            continue
        batch = data[position : position + header.size_bytes]
        if any(record.offset == offset for record in records(batch)):
            return True
    return False
