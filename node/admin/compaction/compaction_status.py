"""What compaction does, did and would do to one partition of this node.

Status comes from the planner that the cleaner uses, so the two cannot disagree. A dry run reads the
log in a process of its own (``kept.node.compaction.dry_run``), niced like a pass. Why an offset is
missing is answered from the log, the applied manifest and the removal journal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner import removal_log
from kept.compaction.cleaner.cleaner_run import Result, read_manifest
from kept.compaction.cleaner.explain import TombstoneOutlook, tombstones
from kept.compaction.cleaner.job_builder import job_for, sources_from
from kept.compaction.cleaner.log_snapshot import view
from kept.compaction.cleaner.planner import (
    Failure,
    PassSkipped,
    Plan,
    cleanable_range,
    next_generation,
    sizes,
)
from kept.compaction.manifest.apply import CompactionState
from kept.node.admin.results import OMITTED, Omitted, PartitionResult
from kept.node.compaction.consistent_read import read_consistently
from kept.node.replicas.manifests.workers import pass_limits
from kept.storage.errors import KeptError, OffsetOutOfRange
from kept.storage.records import headers, records

if TYPE_CHECKING:
    from kept.node.compaction.dry_run import DryRuns
    from kept.node.compaction.lazy_cleaner import LazyCleaner
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.uncompiled_kernels import Kernels
    from kept.storage.disk import Disk, FileSlice
    from kept.storage.types import TopicPartition

IDLE, WAITING, DUE, RUNNING, UNCLEANABLE = "idle", "waiting", "due", "running", "uncleanable"

MAX_PASSES: Final = 20
"""Passes of the removal journal in one answer."""
MAX_UNCLEANABLE: Final = 1000
"""Logs that failed, in one answer."""
PEEK_BYTES: Final = 1
"""Bytes to read for one offset: the one batch that holds it."""


class ReplicaGenerations(Struct, frozen=True):
    """What another replica holds and has applied; ``behind``: not what is published."""

    replica: int
    held: str | None
    applied: str | None
    behind: bool


class CompactionStatus(Struct, frozen=True):
    """Where one partition's compaction stands, as node ``node`` knows; with ``leads`` it counts.

    ``summary`` says it in words, as the console and the command line show it: ``due: 100 % dirty,
    limit 90 %``. ``state`` is ``idle`` (nothing to clean), ``waiting`` (something to clean, not
    due), ``due``, ``running``, or ``uncleanable`` (it failed, and is tried again at
    ``retry_at_ms``; without that the check of a pass stopped it, and somebody is to say ``retry``).
    ``reason`` is a sentence: what is due, why nothing is, or what failed. The cleanable range is
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
    summary: str
    first_dirty_offset: int
    cleanable_end_offset: int
    bound: str
    clean_bytes: int
    dirty_bytes: int
    dirty_ratio: float
    dirty_ratio_limit: float
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


class PartitionStatus(PartitionResult, frozen=True):
    """The status of a named partition."""

    INLINED: ClassVar = frozenset({"status"})

    status: CompactionStatus


class PassOutcome(PartitionResult, frozen=True):
    """What a requested pass came to: numbers, an ``error``, or why there was nothing to do."""

    INLINED: ClassVar = frozenset({"result"})

    done: bool
    result: Result | Omitted = OMITTED
    reason: str | Omitted = OMITTED
    error: str | Omitted = OMITTED


class NothingCleanable(PartitionResult, frozen=True):
    """Why a pass would do nothing now. ``key`` are the records of a key, where one was named."""

    status: CompactionStatus
    due: bool
    reason: str
    dry_run: None
    tombstones: list[TombstoneOutlook]
    key: Sequence[Mapping[str, Any]] | Omitted = OMITTED


class Explanation(PartitionResult, frozen=True):
    """What a pass would do now; ``tombstones``, ``dry_run`` and ``key`` are the dry run's."""

    status: CompactionStatus
    due: bool
    reason: str
    bound: str
    needs_bytes: int
    horizons_only: bool
    tombstones: Sequence[Mapping[str, Any]]
    dry_run: Mapping[str, Any]
    key: Sequence[Mapping[str, Any]] | Omitted = OMITTED


class RunningPass(PartitionResult, frozen=True):
    """A pass that runs; ``progress`` is 0 to 1."""

    reason: str
    dirty_ratio: float
    progress: float
    started_ms: int


class UncleanableLog(PartitionResult, frozen=True):
    """A log whose pass failed. ``retry_at_ms`` is -1 where it waits for ``retry``."""

    reason: str
    failures: int
    retry_at_ms: int


class CleanerSummary(Struct, frozen=True):
    """This node's cleaner: passes that run, logs that failed, and totals since it started.
    ``uncompiled_kernels``: those that the node or a worker of it runs as plain Python.
    """

    node: int
    running: list[RunningPass]
    uncleanable: list[UncleanableLog]
    uncompiled_kernels: list[str]
    passes: int
    failures: int
    cleaned_bytes: int
    removed_records: int
    seconds: float


class JournalledPass(Struct, frozen=True):
    """A pass as the removal journal knows it; ``removed`` counts records by reason."""

    generation: str
    at_ms: int
    removed: Mapping[str, int]


class PassHistory(PartitionResult, frozen=True):
    """``last``: numbers of the last pass that this process ran, or None; ``passes``: what the
    removal journal knows of the last ones, newest first.
    """

    last: Result | None
    passes: list[JournalledPass]


class MissingRecord(PartitionResult, frozen=True):
    """What became of an offset. ``winner`` is the newest record of a key, where one was named."""

    offset: int
    fate: str
    explanation: str
    reason: str | None
    generation: str | None
    winner: Mapping[str, Any] | Omitted | None = OMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionView:
    """Compaction of the partitions of one node."""

    runtime: Runtime
    config: LiveConfig
    identity: NodeIdentity
    table: ReplicaTable
    cleaner: LazyCleaner
    dry_runs: DryRuns

    def status_of(self, tp: TopicPartition) -> CompactionStatus | None:
        """Where a partition stands; None when it is not here or not compacted."""
        hosted = self.table.replicas.get(tp)
        if hosted is None or not hosted.partition.log.config.compact:
            return None
        return self.status(hosted)

    def status(self, hosted: LocalReplica) -> CompactionStatus:
        """Where a compacted partition stands; no log is read."""
        cleaner = self.cleaner.started
        known = cleaner.state(hosted)
        snapshot = view(hosted.partition.log, known, hosted.partition.last_stable_offset)
        cleanable = cleanable_range(snapshot, self.runtime.now_ms())
        clean, dirty = sizes(snapshot, cleanable)
        tp = hosted.partition.topic_partition
        cleaning = cleaner.status(tp)
        state, reason = _state(cleaning.next, dirty)
        progress = None
        if not self.config.current.log_cleaner_enable and state in (DUE, WAITING):
            state, reason = WAITING, "the cleaner is off: log.cleaner.enable is false"
        if cleaning.failure is not None:
            state, reason = UNCLEANABLE, cleaning.failure.reason
        trouble = hosted.manifests.retry_schedule
        if trouble.count:
            state, reason = UNCLEANABLE, trouble.reason
        if cleaning.running is not None:
            computed = hosted.manifests.pass_blocked_by if cleaning.running.computed else None
            state, reason = RUNNING, computed or cleaning.running.plan.why
            progress = cleaning.running.progress
        return CompactionStatus(
            state=state,
            reason=reason,
            summary=in_words(state, reason, progress),
            first_dirty_offset=cleanable.first_dirty,
            cleanable_end_offset=cleanable.end_offset,
            bound=cleanable.bound,
            clean_bytes=clean,
            dirty_bytes=dirty,
            dirty_ratio=_ratio(clean, dirty),
            dirty_ratio_limit=hosted.partition.log.config.min_cleanable_dirty_ratio,
            generation=None if known.applied is None else str(known.applied),
            last_compaction_ms=known.last_ms if known.last_ms >= 0 else None,
            retry_at_ms=trouble.retry_at_ms
            if cleaning.failure is None
            else _retry_at_ms(cleaning.failure),
            failures=trouble.count if cleaning.failure is None else cleaning.failure.count,
            progress=progress,
            tombstones_pending=known.tombstones_from(snapshot.segments[0].base_offset),
            next_horizon_ms=min(known.horizons.values(), default=None),
            cleaning_to=None if cleaning.running is None else cleaning.running.plan.end_offset,
            node=self.identity.node_id,
            leads=hosted.partition.is_leader,
            **_generations(hosted),
        )

    def retry(self, tp: TopicPartition) -> bool:
        """Try an uncleanable log again at once; whether it was uncleanable."""
        return self.cleaner.started.retry(tp)

    def start_pass(self, tp: TopicPartition) -> asyncio.Future[Result | PassSkipped]:
        """Compact a log that this node leads, whatever its dirty ratio. Raises KeptError."""
        return self.cleaner.started.request(tp)

    # Dry runs.

    async def explain(
        self, hosted: LocalReplica, key: bytes | None
    ) -> NothingCleanable | Explanation:
        """What a pass would do now, due or not, and the life of a key.

        Raises DryRunFailed, ConcurrentlyModified (it is compacted again and again).
        """
        return await read_consistently(hosted, lambda: self._explain(hosted, key))

    async def _explain(
        self, hosted: LocalReplica, key: bytes | None
    ) -> NothingCleanable | Explanation:
        cleaner, tp = self.cleaner.started, hosted.partition.topic_partition
        due = cleaner.plan_for(hosted)
        plan = due if isinstance(due, Plan) else cleaner.plan_for(hosted, on_demand=True)
        status = self.status(hosted)
        if isinstance(plan, PassSkipped):
            return NothingCleanable(
                *tp,
                status=status,
                due=isinstance(due, Plan),
                reason=plan.reason,
                dry_run=None,
                tombstones=await self.runtime.in_thread(self._tombstones, hosted),
                key=OMITTED if key is None else await self.records_of(hosted, key),
            )
        above = sources_from(
            hosted.partition.log, hosted.partition.last_stable_offset, plan.end_offset
        )
        outlook = await self.dry_runs.run(self._job(hosted, plan), key, above)
        return Explanation(
            *tp,
            status=status,
            due=isinstance(due, Plan),
            reason=due.why if isinstance(due, Plan) else due.reason,
            bound=plan.bound,
            needs_bytes=plan.needs_bytes,
            horizons_only=plan.horizons_only,
            tombstones=outlook["dry_run"].pop("tombstones"),
            dry_run=outlook["dry_run"],
            key=outlook.get("key", OMITTED),
        )

    def _tombstones(self, hosted: LocalReplica) -> list[TombstoneOutlook]:
        """When the tombstones go that the last pass kept."""
        applied = self.cleaner.started.state(hosted).applied
        if applied is None:
            return []
        disk = self.runtime.disk
        return list(tombstones(read_manifest(hosted.partition.log.directory, applied, disk)))

    def _job(self, hosted: LocalReplica, plan: Plan) -> jobs.Job:
        known = self.cleaner.started.state(hosted)
        return job_for(
            hosted.partition.log,
            plan,
            next_generation(known.applied, hosted.partition.leader_epoch),
            now_ms=self.runtime.now_ms(),
            hash_key=os.urandom(jobs.HASH_KEY_BYTES),
            limits=pass_limits(self.config.current, self.runtime.disk, hosted.directory.name),
        )

    async def records_of(self, hosted: LocalReplica, key: bytes) -> list[Mapping[str, Any]]:
        """Every record of a key that is in the log. Raises DryRunFailed."""
        log, known = hosted.partition.log, self.cleaner.started.state(hosted)
        return await self.dry_runs.find_key(
            log.directory,
            log.config,
            key=key,
            sources=sources_from(log, hosted.partition.last_stable_offset, 0),
            clean_to=known.clean_to,
            applied=known.applied,
        )

    async def life_of_key(self, hosted: LocalReplica, key: bytes) -> Sequence[Mapping[str, Any]]:
        """Every record of a key, with what a pass would do to it. Raises as :meth:`explain`."""
        if not hosted.partition.log.config.compact:
            return await read_consistently(hosted, lambda: self.records_of(hosted, key))
        life = (await self.explain(hosted, key)).key
        assert not isinstance(life, Omitted)
        return life

    # What passes did.

    async def passes(self, hosted: LocalReplica) -> PassHistory:
        """What the last passes did here. Raises DamagedData, MachineError."""
        directory, disk = hosted.partition.log.directory, self.runtime.disk
        tp = hosted.partition.topic_partition

        def read() -> list[JournalledPass]:
            journalled = []
            for identity, path in reversed(removal_log.files(directory, disk)[-MAX_PASSES:]):
                removed = removal_log.decode(path, disk.read(path))
                journalled.append(JournalledPass(str(identity), removed.now_ms, removed.counts()))
            return journalled

        last = self.cleaner.started.status(tp).last
        return PassHistory(*tp, last=last, passes=await self.runtime.in_thread(read))

    async def why_missing(
        self, hosted: LocalReplica, offset: int, key: bytes | None
    ) -> MissingRecord:
        """What became of an offset, by the log, the applied manifest and the removal journal. With
        ``key`` its newest record, too. Raises as :meth:`explain`.
        """
        return await read_consistently(hosted, lambda: self._why_missing(hosted, offset, key))

    async def _why_missing(
        self, hosted: LocalReplica, offset: int, key: bytes | None
    ) -> MissingRecord:
        log, partition, disk = hosted.partition.log, hosted.partition, self.runtime.disk
        applied = self.cleaner.started.state(hosted).applied
        batch = _batch_of(hosted, offset)
        bounds = {
            "log_start_offset": log.log_start_offset,
            "high_watermark": partition.high_watermark,
            "log_end_offset": log.log_end_offset,
        }

        def find() -> removal_log.OffsetFate:
            return removal_log.explain_offset(
                offset,
                directory=log.directory,
                disk=disk,
                manifest=None if applied is None else read_manifest(log.directory, applied, disk),
                is_there=lambda wanted: _holds(disk, batch, wanted),
                **bounds,
            )

        answer = await self.runtime.in_thread(find)
        winner: Mapping[str, Any] | Omitted | None = OMITTED
        if key is not None:
            history = await self.records_of(hosted, key)
            winner = history[-1] if history else None
        return MissingRecord(
            *partition.topic_partition,
            offset=offset,
            fate=answer.fate.value,
            explanation=answer.text,
            reason=None if answer.reason is None else answer.reason.value,
            generation=None if answer.generation is None else str(answer.generation),
            winner=winner,
        )


@dataclass(frozen=True, slots=True)
class CleanerView:
    """What the cleaner of one node does and did."""

    identity: NodeIdentity
    cleaner: LazyCleaner
    kernels: Kernels
    counters: Counters

    def describe(self) -> CleanerSummary:
        """Passes that run, logs that failed, what it did since start."""
        cleaner, counters = self.cleaner.started, self.counters
        running = [
            RunningPass(
                *tp,
                running_pass.plan.why,
                round(running_pass.plan.dirty_ratio, 4),
                running_pass.progress,
                running_pass.started_ms,
            )
            for tp, running_pass in cleaner.running.items()
        ]
        uncleanable = [
            UncleanableLog(
                *tp, failure.reason, failure.count, -1 if failure.stopped else failure.retry_at_ms
            )
            for tp, failure in sorted(cleaner.failures.all().items())[:MAX_UNCLEANABLE]
        ]
        return CleanerSummary(
            node=self.identity.node_id,
            running=running,
            uncleanable=uncleanable,
            uncompiled_kernels=list(self.kernels.uncompiled),
            passes=counters.compactions,
            failures=counters.failed_compactions,
            cleaned_bytes=counters.cleaned_bytes,
            removed_records=counters.records_removed,
            seconds=counters.cleaner_seconds.total,
        )


def dirty_ratio(hosted: LocalReplica, now_ms: int) -> float:
    """How much of what a pass could clean is dirty: 0 to 1."""
    known = hosted.compaction or CompactionState()
    snapshot = view(hosted.partition.log, known, hosted.partition.last_stable_offset)
    return _ratio(*sizes(snapshot, cleanable_range(snapshot, now_ms)))


def _ratio(clean_bytes: int, dirty_bytes: int) -> float:
    return round(dirty_bytes / (clean_bytes + dirty_bytes), 4) if dirty_bytes else 0.0


def _retry_at_ms(failure: Failure) -> int | None:
    return None if failure.stopped else failure.retry_at_ms


def _generations(hosted: LocalReplica) -> dict[str, Any]:
    """What is known of the manifests of all replicas."""
    leader = hosted.partition.core
    core = leader.manifests
    generations: dict[str, Any] = {
        "held": _named(None if core.held is None else core.held.generation),
        "published": _named(None if core.published is None else core.published.generation),
    }
    if leader.leading and leader.followers:
        generations["awaits"] = leader.unacknowledged_replicas if leader.offered is not None else ()
        generations["replicas"] = tuple(
            ReplicaGenerations(
                replica,
                _named(follower.held),
                _named(follower.applied),
                follower.applied != leader.published,
            )
            for replica, follower in leader.followers.items()
        )
    return generations


def _named(identity: Any) -> str | None:
    """``<leader epoch>.<generation>``."""
    return None if identity is None else f"{identity[0]}.{identity[1]}"


def in_words(state: str, reason: str, progress: float | None) -> str:
    """``due: 100 % dirty, limit 90 %``, ``running, 45 % done: 100 % dirty, limit 90 %``."""
    if progress is not None:
        state = f"{state}, {progress:.0%} done".replace("%", " %")
    return f"{state}: {reason}"


def _state(following: Plan | PassSkipped, dirty_bytes: int) -> tuple[str, str]:
    if isinstance(following, Plan):
        return DUE, following.why
    return (WAITING if dirty_bytes else IDLE), following.reason


def outcome(tp: TopicPartition, finished: asyncio.Future[Result | PassSkipped]) -> PassOutcome:
    """What a pass that was requested came to. Raises what is no error of kept."""
    error = finished.exception()
    if isinstance(error, KeptError):
        return PassOutcome(*tp, done=False, error=error.client_message)
    result = finished.result()
    if isinstance(result, PassSkipped):
        return PassOutcome(*tp, done=False, reason=result.reason)
    return PassOutcome(*tp, done=True, result=result)


def _batch_of(hosted: LocalReplica, offset: int) -> FileSlice | None:
    """Where the batch is that would hold an offset."""
    log = hosted.partition.log
    if not log.log_start_offset <= offset < hosted.partition.high_watermark:
        return None
    try:
        return log.read(offset, PEEK_BYTES, hosted.partition.high_watermark)
    except OffsetOutOfRange:
        return None


def _holds(disk: Disk, found: FileSlice | None, offset: int) -> bool:
    """Whether a batch has a record at ``offset``; a control batch's marker counts."""
    if found is None:
        return False
    data = disk.pread(*found)
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
