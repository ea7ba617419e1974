"""Drives the cleaner: which log next, its worker process, and what the result does to the log.

Every ``log.cleaner.backoff.ms``, and at once when somebody asks, the planner looks at all compacted
logs and picks (rules 1 to 3). A pass runs in a niced worker process that is exec'ed, never forked;
it only creates files. Its manifest is given to the replica's
:class:`~kept.node.replicas.manifests.replica.ReplicaManifests`, which publishes it and puts the
files into place: a pass during which leader epoch or applied generation changed is thrown away
(rule 13). A log that fails keeps its reason and is tried again later; the others go on.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner.cleaner_run import Result, discard
from kept.compaction.cleaner.job_builder import job_for
from kept.compaction.cleaner.log_snapshot import view
from kept.compaction.cleaner.planner import (
    Failure,
    Failures,
    Limits,
    PassSkipped,
    Plan,
    choose,
    next_generation,
    plan,
)
from kept.compaction.cleaner.worker import COMMAND
from kept.compaction.manifest.apply import CompactionState
from kept.node.replicas.manifests.errors import PassFailed, Withdrawn, check_stopped
from kept.node.replicas.manifests.workers import ManifestWork, or_vanished, pass_limits
from kept.node.runtime.background_steps import in_slices
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError, MachineError, NotLeaderOrFollower
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kept.node.compaction.context import CleanerContext
    from kept.node.replicas.local_replica import LocalDirectory, LocalReplica

STOP_WAIT_S: Final = 5.0
REQUEST_POLL_S: Final = 0.05
"""How often a log is looked at that somebody asked for, and that is not ready for a pass."""
PATIENCE_MS: Final = 5_000
"""How long a pass that was asked for waits for what is not committed yet."""
PLACING: Final = "kept.node.replicas.manifests.store"
"""What puts a result into place. Read in a thread: the first pass would hold the loop for 10 ms."""


@dataclass(slots=True)
class Running:
    """A pass in progress. ``computed``: its worker has ended, and what it made is published."""

    plan: Plan
    started_ms: int
    leader_epoch: int
    truncations: int
    work: ManifestWork = field(default_factory=ManifestWork)
    computed: bool = False

    @property
    def progress(self) -> float:
        """How much of its work is done: 0 to 1."""
        total = self.work.total_bytes
        return round(self.work.done_bytes / total, 3) if total else 0.0


class Status(Struct, frozen=True):
    """One compacted log: what is due or why not, what runs, what was done, what failed."""

    topic_partition: TopicPartition
    next: Plan | PassSkipped
    state: CompactionState
    running: Running | None
    failure: Failure | None
    last: Result | None


@dataclass(slots=True)
class _Request:
    """Those who asked for a pass over a log now.

    ``end_offset``: the active segment was rolled there for them, and what is committed below is
    waited for until ``patience_ms``, so that it takes part.
    """

    end_offset: int = -1
    patience_ms: int = 0
    waiters: list[asyncio.Future[Result | PassSkipped]] = field(default_factory=list)


class Cleaner:
    """The cleaner of a node."""

    def __init__(self, context: CleanerContext) -> None:
        self._runtime = context.runtime
        self._config = context.config
        self._table = context.table
        self._failures = context.failures
        self._counters = context.counters
        self._kernels = context.kernels
        self.running: dict[TopicPartition, Running] = {}
        self.failures = Failures()
        self._last: dict[TopicPartition, Result] = {}
        self._requested: dict[TopicPartition, _Request] = {}
        self._tasks = TaskOwner(self._runtime.loop)
        self._wake = asyncio.Event()
        self._started = False
        self._stopping = False

    # What the node calls.

    def start(self) -> None:
        """Begin to look for work, unless ``log.cleaner.enable`` is false."""
        if self._config.current.log_cleaner_enable:
            self._start_loop()

    def _start_loop(self) -> None:
        if not self._started:
            self._started = True
            self._tasks.spawn(self._run())

    def generation_applied(self, tp: TopicPartition) -> None:
        """A generation was applied, whoever computed it."""
        self.failures.succeeded(tp)
        self._wake.set()

    async def stop(self, close_manifests: Callable[[], Awaitable[None]]) -> None:
        """End the workers; what they made is thrown away by the next pass. What is being put into
        place is finished, or withdrawn, by ``close_manifests``.
        """
        self._stopping = True
        self._wake.set()
        for running in list(self.running.values()):
            running.work.cancel()
        await close_manifests()
        await self._tasks.finish(STOP_WAIT_S)

    def forget(self, tp: TopicPartition, error: BaseException | None = None) -> None:
        """The partition is gone from here; ``error`` is why, if its directory failed."""
        running = self.running.get(tp)
        if running is not None:
            running.work.cancel()
        self.failures.succeeded(tp)
        self._last.pop(tp, None)
        self._complete(tp, error or PassSkipped(tp, "the partition is not here any more"))

    # What operations call.

    def state(self, hosted: LocalReplica) -> CompactionState:
        """What compaction has come to in a log."""
        return hosted.compaction or CompactionState()

    def plan_for(
        self, hosted: LocalReplica, *, on_demand: bool = False, limits: Limits | None = None
    ) -> Plan | PassSkipped:
        """What a pass would do now, or why none is due."""
        partition = hosted.partition
        snapshot = view(
            partition.log,
            self.state(hosted),
            partition.last_stable_offset,
            hosted.manifests.pass_blocked_by,
        )
        limits = limits or self._limits(hosted)
        renew = hosted.manifests.renew
        return plan(snapshot, self._runtime.now_ms(), limits, on_demand=on_demand, renew=renew)

    def _limits(self, hosted: LocalReplica) -> Limits:
        return pass_limits(self._config.current, self._runtime.disk, hosted.directory.name)

    def status(self, tp: TopicPartition) -> Status:
        """Everything about one log. Raises UnknownTopicOrPartition and its like."""
        self._table.partition(tp)
        hosted = self._table.replicas[tp]
        return Status(
            tp,
            self.plan_for(hosted),
            self.state(hosted),
            self.running.get(tp),
            self.failures.all().get(tp),
            self._last.get(tp),
        )

    def request(self, tp: TopicPartition) -> asyncio.Future[Result | PassSkipped]:
        """Clean a log now, whatever its dirty ratio; done when it is, or with why it can't be.

        The active segment is rolled first, so that everything committed takes part. It waits for a
        generation that is being published or applied. The future raises PassFailed, MachineError.
        """
        self._table.partition(tp)
        self.failures.retry(tp)
        future: asyncio.Future[Result | PassSkipped] = self._runtime.loop.create_future()
        self._requested.setdefault(tp, _Request()).waiters.append(future)
        self._start_loop()
        self._wake.set()
        return future

    def renew(self, tp: TopicPartition) -> None:
        """What is applied cannot be read, and others need it: have a pass make another manifest,
        unless passes fail.
        """
        if tp not in self.failures.all():
            # Whoever reads the future hears how it ended; here the log has said so.
            self.request(tp).add_done_callback(lambda f: f.cancelled() or f.exception())

    def retry(self, tp: TopicPartition) -> bool:
        """Try a log that failed without waiting any longer; False: it had not failed."""
        hosted = self._table.replicas.get(tp)
        retried = hosted is not None and hosted.manifests.retry()
        retried = self.failures.retry(tp) or retried
        self._wake.set()
        return retried

    # The loop.

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                await self._start_due()
            except MachineError as error:
                self._failures.machine_failed(error)
            except Exception as error:  # noqa: BLE001 - reported, and the cleaner goes on
                log.exception("cleaner failed", error)
            backoff_s = max(self._config.current.log_cleaner_backoff_ms, 10) / 1000
            if self._requested.keys() - self.running.keys():
                backoff_s = min(backoff_s, REQUEST_POLL_S)
            try:
                await asyncio.wait_for(self._wake.wait(), backoff_s)
            except TimeoutError:
                continue

    async def _start_due(self) -> None:
        """Start passes until the workers are used up or nothing is due."""
        config = self._config.current
        threads = max(config.log_cleaner_threads, 1)
        while not self._stopping and self._computing < threads:
            chosen = await self._choose()
            if chosen is None:
                return
            hosted = self._table.replicas.get(chosen.topic_partition)
            if hosted is None:
                continue
            partition = hosted.partition
            running = Running(
                chosen, self._runtime.now_ms(), partition.leader_epoch, partition.log.truncations
            )
            self.running[chosen.topic_partition] = running
            self._tasks.spawn(self._pass(hosted, running))

    @property
    def _computing(self) -> int:
        """Passes that have a worker."""
        return sum(not running.computed for running in self.running.values())

    async def _choose(self) -> Plan | None:
        plans: list[Plan] = []
        await in_slices(self._plan_all(plans))
        return choose(plans, self.running, self.failures, self._runtime.now_ms())

    def _plan_all(self, plans: list[Plan]) -> Iterator[None]:
        """Plan every log that may need it, in steps. One with only an active segment never does."""
        enabled = self._config.current.log_cleaner_enable
        table = self._table
        limits: dict[LocalDirectory, Limits] = {}
        for tp, hosted in list(table.replicas.items()):
            yield
            partition = hosted.partition
            on_demand = tp in self._requested
            wanted = on_demand or (
                enabled and len(partition.log.segments) > 1 and partition.config.compact
            )
            if not wanted or tp in self.running or table.replicas.get(tp) is not hosted:
                continue
            if partition.offline is not None or not partition.is_leader:
                if on_demand:
                    self._complete(tp, PassSkipped(tp, "this node does not lead the partition"))
                continue
            if hosted.manifests.pass_expected or (on_demand and self._prepare(hosted)):
                continue
            if hosted.directory not in limits:
                limits[hosted.directory] = self._limits(hosted)
            planned = self.plan_for(hosted, on_demand=on_demand, limits=limits[hosted.directory])
            if isinstance(planned, Plan):
                if on_demand or not hosted.manifests.waits_for_appliers(overdue=planned.overdue):
                    plans.append(planned)
            elif on_demand:
                self._complete(tp, planned)

    def _prepare(self, hosted: LocalReplica) -> bool:
        """Before a pass on demand: roll, and whether to wait for what is not committed."""
        partition, now_ms = hosted.partition, self._runtime.now_ms()
        request, log_ = self._requested[partition.topic_partition], partition.log
        if not log_.config.compact or hosted.manifests.pass_blocked_by is not None:
            return False
        if request.end_offset < 0:
            if log_.active_segment.size_bytes:
                log_.roll(now_ms)
            request.end_offset = log_.active_segment.base_offset
            request.patience_ms = now_ms + PATIENCE_MS
        return partition.high_watermark < request.end_offset and now_ms < request.patience_ms

    def _complete(self, tp: TopicPartition, outcome: Result | PassSkipped | BaseException) -> None:
        request = self._requested.pop(tp, None)
        for waiter in request.waiters if request is not None else ():
            if waiter.done():
                continue
            if isinstance(outcome, BaseException):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)

    # One pass.

    async def _pass(self, hosted: LocalReplica, running: Running) -> None:
        tp = running.plan.topic_partition
        mine = self._requested.get(tp) if running.plan.on_demand else None
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
            if mine is not None and self._requested.get(tp) is mine:
                self._complete(tp, result)
        finally:
            self.running.pop(tp, None)
            self._wake.set()

    def _note(self, running: Running, result: Result) -> None:
        tp = running.plan.topic_partition
        took_ms = self._runtime.now_ms() - running.started_ms
        self._counters.compacted(tp, result, took_ms / 1000)
        log.info(
            "log cleaned",
            topic=tp.topic,
            partition=tp.partition,
            generation=str(result.generation),
            why=running.plan.why,
            records_removed=result.records_removed,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            clean_to=result.clean_to,
            took_ms=took_ms,
        )

    def _failed(self, hosted: LocalReplica, running: Running, error: KeptError) -> None:
        tp = running.plan.topic_partition
        if running.work.cancelled or self._stopping:
            self._complete(tp, PassSkipped(tp, "the pass was cancelled"))
            return
        if isinstance(error, NotLeaderOrFollower | Withdrawn):
            log.info("pass thrown away", topic=tp.topic, partition=tp.partition, why=str(error))
            self._complete(tp, PassSkipped(tp, str(error)))
            return
        self._counters.failed_compactions += 1
        stopped = check_stopped(error)
        self._counters.checks_failed += stopped
        failure = self.failures.note(
            tp, error.client_message, self._runtime.now_ms(), stopped=stopped
        )
        log.error(
            "log not cleaned",
            topic=tp.topic,
            partition=tp.partition,
            error=str(error),
            failures=failure.count,
        )
        self._complete(tp, error)
        if isinstance(error, MachineError):
            self._failures.fail(hosted.directory, error)

    async def _clean(self, hosted: LocalReplica, running: Running) -> Result:
        """Plan to result: run the worker, then publish its manifest and put its files into place.

        While that waits for other replicas the next log has its turn.
        """
        runtime, manifests = self._runtime, hosted.manifests
        partition = hosted.partition
        log_ = partition.log
        based_on = partition.core.manifests.applied
        manifests.begin_pass(running.work)
        try:
            await runtime.in_thread(discard, log_.directory, runtime.disk)
            await runtime.in_thread(import_module, PLACING)
            job = job_for(
                log_,
                running.plan,
                next_generation(self.state(hosted).applied, partition.leader_epoch),
                now_ms=runtime.now_ms(),
                hash_key=os.urandom(jobs.HASH_KEY_BYTES),
                limits=self._limits(hosted),
            )
            try:
                outcome = running.work.run(COMMAND, jobs.encode(job))
                result = await or_vanished(runtime, log_, running.work, outcome)
            finally:
                self._kernels.worker_lacks(running.work.uncompiled)
                self._check(hosted, running)
            running.computed = True
            self._wake.set()
            await manifests.pass_completed(
                result, running.leader_epoch, based_on, running.truncations
            )
        finally:
            manifests.end_pass()
        return result

    def _check(self, hosted: LocalReplica, running: Running) -> None:
        """A pass is thrown away when it was cancelled, or leadership, directory or a part of what
        it reads are gone; whatever it came to.
        """
        partition = hosted.partition
        place = partition.topic_partition.place
        if running.work.cancelled or self._stopping:
            raise Withdrawn(f"{place}: the pass was cancelled")
        if not partition.is_leader or partition.leader_epoch != running.leader_epoch:
            raise NotLeaderOrFollower(f"{place}: leadership changed meanwhile")
        if partition.log.truncations != running.truncations:
            raise PassFailed(f"{place}: the log was truncated", "Truncated")
        start = partition.log.segments[0].base_offset
        if start > running.plan.segments[0].base_offset:
            raise Withdrawn(f"{place}: segments below {start} were deleted meanwhile")
