"""Drives the cleaner: which log next, its worker process, and what the result does to the log.

Every ``log.cleaner.backoff.ms``, and at once when somebody asks, the planner looks at all compacted
logs and picks (rules 1 to 3). A pass runs in a niced worker process that is exec'ed, never forked
(FACTS.md); it only creates files, and what it made is applied here, in the one place that knows
leader epoch and applied generation: a pass during which either changed is thrown away (rule 13).
Before the first swap the high watermark is raised to the pass's end and checkpointed (rule 12). The
loop does the renames of one group of segments at a time; all that blocks longer runs in the
directory's threads (:mod:`kept.storage.replacement`). A log that fails keeps its reason and is
tried again later; the others go on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kept.compaction import apply as applying
from kept.compaction import job as jobs
from kept.compaction.apply import CompactionState, Published
from kept.compaction.manifest import Identity
from kept.compaction.pass_ import Result, discard
from kept.compaction.planner import (
    Failure,
    Failures,
    Limits,
    NotNow,
    Plan,
    choose,
    next_identity,
    plan,
)
from kept.compaction.view import job_for, view
from kept.compaction.worker import COMMAND, result_from
from kept.node import timers
from kept.node.child import Child, ChildFailed, spawn
from kept.node.logging import log
from kept.storage.directory import Checkpoint
from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kept.node.hosting import HostedDirectory, HostedPartition
    from kept.node.server import Node
    from kept.replication.partition import Partition
    from kept.storage.replacement import Replacement

LINE_BYTES: Final = 1 << 20
"""Longest line that a worker may say."""
AWAITS_MANIFESTS: Final = "awaits-manifests"
"""Why a log with several replicas is not cleaned: each replica alone must not decide (rule 13)."""
STOP_WAIT_S: Final = 5.0


class PassFailed(KeptError):
    """A worker said that its pass failed. ``kind`` is the class of the error there."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Running:
    """A pass in progress; ``done_bytes`` of ``total_bytes`` are read or written."""

    plan: Plan
    started_ms: int
    leader_epoch: int
    truncations: int
    done_bytes: int = 0
    total_bytes: int = 0
    process: Child | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Totals:
    """Since the node started, for metrics."""

    passes: int = 0
    failures: int = 0
    cleaned_bytes: int = 0
    removed_records: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Status:
    """One compacted log: what is due or why not, what runs, what was done, what failed."""

    topic_partition: TopicPartition
    next: Plan | NotNow
    state: CompactionState
    running: Running | None
    failure: Failure | None
    last: Result | None


@dataclass(slots=True)
class _Asked:
    """Those who asked for a pass over a log now."""

    waiters: list[asyncio.Future[Result | NotNow]] = field(default_factory=list)


def replicated(partition: Partition) -> bool:
    """Whether other nodes hold the log too."""
    return partition.replicated


class Cleaner:
    """The cleaner of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.totals = Totals()
        self.running: dict[TopicPartition, Running] = {}
        self.failures = Failures()
        self._last: dict[TopicPartition, Result] = {}
        self._asked: dict[TopicPartition, _Asked] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._applying: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stopping = False

    # What the node calls.

    def start(self) -> None:
        """Begin to look for work, unless ``log.cleaner.enable`` is false."""
        if self._node.config.log_cleaner_enable:
            self._loop_task = self._node.loop.create_task(self._run())

    async def stop(self) -> None:
        """End the workers; what they made is thrown away by the next pass. What is being put into
        place is finished, or withdrawn.
        """
        self._stopping = True
        self._wake.set()
        for running in list(self.running.values()):
            self._cancel(running)
        tasks = [*self._tasks, *([self._loop_task] if self._loop_task else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_WAIT_S)
        if self._applying:
            await asyncio.wait(self._applying)

    def forget(self, tp: TopicPartition) -> None:
        """The partition is gone from here."""
        running = self.running.get(tp)
        if running is not None:
            self._cancel(running)
        self.failures.succeeded(tp)
        self._last.pop(tp, None)
        self._answer(tp, NotNow(tp, "the partition is not here any more"))

    def _cancel(self, running: Running) -> None:
        running.cancelled = True
        if running.process is not None:
            running.process.kill()

    # What operations call.

    def state(self, hosted: HostedPartition) -> CompactionState:
        """What compaction has come to in a log."""
        return hosted.compaction or CompactionState()

    def plan_for(
        self, hosted: HostedPartition, *, asked: bool = False, limits: Limits | None = None
    ) -> Plan | NotNow:
        """What a pass would do now, or why none is due."""
        partition = hosted.partition
        found = view(
            partition.log,
            self.state(hosted),
            partition.last_stable_offset,
            AWAITS_MANIFESTS if replicated(partition) else None,
        )
        limits = limits or self.limits(hosted)
        return plan(found, self._node.now_ms(), limits, asked=asked)

    def limits(self, hosted: HostedPartition) -> Limits:
        """What one pass may use."""
        config = self._node.config
        threads = max(config.log_cleaner_threads, 1)
        return Limits(
            dedupe_buffer_bytes=config.log_cleaner_dedupe_buffer_size // threads,
            load_factor=config.log_cleaner_io_buffer_load_factor,
            max_bytes_per_second=config.log_cleaner_io_max_bytes_per_second / threads,
            free_bytes=self._node.disk.free_bytes(hosted.directory.name),
        )

    def status(self, tp: TopicPartition) -> Status:
        """Everything about one log. Raises UnknownTopicOrPartition and its like."""
        self._node.partition(tp)
        hosted = self._node.hosting.hosted[tp]
        return Status(
            tp,
            self.plan_for(hosted),
            self.state(hosted),
            self.running.get(tp),
            self.failures.all().get(tp),
            self._last.get(tp),
        )

    def request(self, tp: TopicPartition) -> asyncio.Future[Result | NotNow]:
        """Clean a log now, whatever its dirty ratio; done when it is, or with why it can't be.

        The active segment is rolled first, so that everything committed takes part. The future
        raises PassFailed, MachineError.
        """
        self._node.partition(tp)
        hosted = self._node.hosting.hosted[tp]
        log_ = hosted.partition.log
        may = log_.config.compact and not replicated(hosted.partition)
        if may and log_.active_segment.size_bytes:
            log_.roll(self._node.now_ms())
        self.failures.retry(tp)
        future: asyncio.Future[Result | NotNow] = self._node.loop.create_future()
        self._asked.setdefault(tp, _Asked()).waiters.append(future)
        if self._loop_task is None:
            self._loop_task = self._node.loop.create_task(self._run())
        self._wake.set()
        return future

    def retry(self, tp: TopicPartition) -> bool:
        """Try a log that failed without waiting any longer; False: it had not failed."""
        found = self.failures.retry(tp)
        self._wake.set()
        return found

    # The loop.

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                await self._start_due()
            except MachineError as error:
                self._node.machine_failed(error)
            except Exception as error:  # noqa: BLE001 - reported, and the cleaner goes on
                log.exception("cleaner failed", error)
            backoff_s = max(self._node.config.log_cleaner_backoff_ms, 10) / 1000
            try:
                await asyncio.wait_for(self._wake.wait(), backoff_s)
            except TimeoutError:
                continue

    async def _start_due(self) -> None:
        """Start passes until the workers are used up or nothing is due."""
        config = self._node.config
        while not self._stopping and len(self.running) < max(config.log_cleaner_threads, 1):
            chosen = await self._choose()
            if chosen is None:
                return
            hosted = self._node.hosting.hosted.get(chosen.topic_partition)
            if hosted is None:
                continue
            partition = hosted.partition
            running = Running(
                chosen, self._node.now_ms(), partition.leader_epoch, partition.log.truncations
            )
            self.running[chosen.topic_partition] = running
            task = self._node.loop.create_task(self._pass(hosted, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _choose(self) -> Plan | None:
        plans: list[Plan] = []
        await timers.in_slices(self._look_for_work(plans))
        return choose(plans, self.running, self.failures, self._node.now_ms())

    def _look_for_work(self, plans: list[Plan]) -> Iterator[None]:
        """Plan every log that may need it, in steps. One with only an active segment never does."""
        enabled = self._node.config.log_cleaner_enable
        hosting = self._node.hosting
        limits: dict[HostedDirectory, Limits] = {}
        for tp, hosted in list(hosting.hosted.items()):
            yield
            partition = hosted.partition
            asked = tp in self._asked
            wanted = asked or (
                enabled and len(partition.log.segments) > 1 and partition.config.compact
            )
            if not wanted or tp in self.running or hosting.hosted.get(tp) is not hosted:
                continue
            if partition.offline is not None or not partition.is_leader:
                if asked:
                    self._answer(tp, NotNow(tp, "this node does not lead the partition"))
                continue
            if hosted.directory not in limits:
                limits[hosted.directory] = self.limits(hosted)
            found = self.plan_for(hosted, asked=asked, limits=limits[hosted.directory])
            if isinstance(found, Plan):
                plans.append(found)
            elif asked:
                self._answer(tp, found)

    def _answer(self, tp: TopicPartition, outcome: Result | NotNow | BaseException) -> None:
        asked = self._asked.pop(tp, None)
        for waiter in asked.waiters if asked is not None else ():
            if waiter.done():
                continue
            if isinstance(outcome, BaseException):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)

    # One pass.

    async def _pass(self, hosted: HostedPartition, running: Running) -> None:
        tp = running.plan.topic_partition
        mine = self._asked.get(tp) if running.plan.asked else None
        try:
            result = await self._clean(hosted, running)
        except KeptError as error:
            self._failed(hosted, running, error)
        except Exception as error:  # noqa: BLE001 - reported, and the cleaner goes on
            log.exception("cleaning failed", error, topic=tp.topic, partition=tp.partition)
            self._failed(hosted, running, PassFailed(repr(error), type(error).__name__))
        else:
            self.failures.succeeded(tp)
            self._last[tp] = result
            self._note(running, result)
            if mine is not None and self._asked.get(tp) is mine:
                self._answer(tp, result)
        finally:
            self.running.pop(tp, None)
            self._wake.set()

    def _note(self, running: Running, result: Result) -> None:
        tp = running.plan.topic_partition
        took_ms = self._node.now_ms() - running.started_ms
        totals = self.totals
        totals.passes += 1
        totals.cleaned_bytes += max(result.bytes_before - result.bytes_after, 0)
        totals.removed_records += result.records_removed
        totals.seconds += took_ms / 1000
        self._node.metrics.compacted(tp, result, took_ms / 1000)
        log.info(
            "log cleaned",
            topic=tp.topic,
            partition=tp.partition,
            generation=f"{result.identity.epoch}.{result.identity.generation}",
            why=running.plan.why,
            records_removed=result.records_removed,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            clean_to=result.clean_to,
            took_ms=took_ms,
        )

    def _failed(self, hosted: HostedPartition, running: Running, error: KeptError) -> None:
        tp = running.plan.topic_partition
        if running.cancelled or self._stopping:
            self._answer(tp, NotNow(tp, "the pass was cancelled"))
            return
        self.totals.failures += 1
        failure = self.failures.note(tp, str(error), self._node.now_ms())
        log.error(
            "log not cleaned",
            topic=tp.topic,
            partition=tp.partition,
            error=str(error),
            failures=failure.count,
        )
        self._answer(tp, error)
        if isinstance(error, MachineError):
            self._node.hosting.fail(hosted.directory, error)

    async def _clean(self, hosted: HostedPartition, running: Running) -> Result:
        """Plan to result: run the worker, then put its files into place."""
        node = self._node
        partition = hosted.partition
        log_ = partition.log
        expected: Identity | None = self.state(hosted).applied
        await node.in_pool(discard, log_.directory, node.disk)
        job = job_for(
            log_,
            running.plan,
            next_identity(expected, partition.leader_epoch),
            now_ms=node.now_ms(),
            hash_key=os.urandom(jobs.HASH_KEY_BYTES),
            limits=self.limits(hosted),
        )
        result = await self._work(job, running)
        self._check(hosted, running)
        hosted.applying = done = node.loop.create_future()
        self._applying.add(done)
        try:
            await self._apply(hosted, running, result, expected)
        finally:
            hosted.applying = None
            self._applying.discard(done)
            done.set_result(None)
        return result

    def _check(self, hosted: HostedPartition, running: Running) -> None:
        """A pass is thrown away when it was cancelled, or leadership or directory are gone."""
        partition = hosted.partition
        if running.cancelled or self._stopping:
            raise PassFailed("cancelled", "Cancelled")
        if not partition.is_leader or partition.leader_epoch != running.leader_epoch:
            raise NotLeaderOrFollower(f"{partition.topic_partition}: leadership changed meanwhile")
        if replicated(partition):
            running.cancelled = True
            raise PassFailed(AWAITS_MANIFESTS, "Cancelled")
        if partition.log.truncations != running.truncations:
            raise PassFailed(f"{partition.topic_partition}: the log was truncated", "Truncated")

    async def _apply(
        self, hosted: HostedPartition, running: Running, result: Result, expected: Identity | None
    ) -> None:
        """Put the files of a pass into place: the steps of :func:`kept.compaction.apply.apply`."""
        node, pool = self._node, hosted.directory.pool
        log_ = hosted.partition.log
        hosted.partition.raise_high_watermark(result.end_offset)
        created = hosted.directory.directory.created
        offsets: dict[TopicPartition, int] = {}
        await timers.in_slices(
            timers.collecting(node, hosted.directory, timers.high_watermark, offsets)
        )
        await self._checkpoint(hosted, Checkpoint.HIGH_WATERMARKS, offsets, created)
        published = await pool.run(applying.publish, log_.directory, node.disk, result, expected)
        await self._swap(hosted, running, published)
        hosted.compaction = await pool.run(
            partial(
                applying.conclude,
                log_.directory,
                node.disk,
                published,
                history_bytes=node.config.compaction_history_bytes,
            )
        )
        created = hosted.directory.directory.created
        cleaned = {
            tp: self.state(one).clean_to
            for tp, one in node.hosting.hosted.items()
            if one.directory is hosted.directory and one.compaction is not None
        }
        await self._checkpoint(hosted, Checkpoint.CLEANER, cleaned, created)

    async def _checkpoint(
        self, hosted: HostedPartition, kind: Checkpoint, *what: dict[TopicPartition, int] | int
    ) -> None:
        directory = hosted.directory
        await directory.pool.run(directory.directory.write_checkpoints, kind, *what)

    async def _swap(self, hosted: HostedPartition, running: Running, published: Published) -> None:
        """Prepare in a thread, place group by group here. Until the first group is placed, a plan
        that does not fit any more is withdrawn; after that all of it is.
        """
        node, directory, log_ = self._node, hosted.directory, hosted.partition.log
        replacement: Replacement | None = None
        try:
            try:
                self._check(hosted, running)
                replacement = applying.begin(log_, published)
                await directory.pool.run(replacement.prepare)
                self._check(hosted, running)
                more = replacement.place_next(node.now_ms())
            except MachineError:
                raise
            except Exception:
                if directory.offline is None:
                    await directory.pool.run(
                        applying.withdraw, log_.directory, node.disk, published, replacement
                    )
                raise
            while more:
                await asyncio.sleep(0)
                if directory.offline is not None:
                    raise KafkaStorageError(f"{log_}: {directory.offline}")
                more = replacement.place_next(node.now_ms())
            await directory.pool.run(replacement.finish)
        finally:
            if replacement is not None:
                replacement.end()

    async def _work(self, job: jobs.Job, running: Running) -> Result:
        """Run the worker process. Raises PassFailed."""
        child = running.process = await spawn(COMMAND, LINE_BYTES)
        if running.cancelled:
            child.kill()
        last: Mapping[str, Any] = {}

        def heard(message: Mapping[str, Any]) -> None:
            nonlocal last
            last = message
            if "progress" in message:
                running.done_bytes = message["progress"]
                running.total_bytes = message["total"]

        try:
            code, words = await child.converse(jobs.encode(job), heard)
        except ChildFailed as error:
            raise PassFailed(f"the worker process went wrong: {error}", "Worker") from error
        if "result" in last:
            return result_from(last)
        if "error" in last:
            raise PassFailed(last["error"], last["kind"])
        raise PassFailed(f"the worker process ended with code {code}: {words}", "Worker")
