"""What a node does on a clock: checkpoints, retention, rolling of idle logs, flushes, expiry.

Each job runs on the loop, in slices with the loop free in between
(:mod:`kept.node.runtime.background_steps`), and hands what blocks to the threads of its directory.
What comes round every few seconds looks only at logs that something happened to
(:mod:`kept.node.replicas.dirty_logs`). A job that raises is logged and runs again at its next turn:
one log's trouble never stops the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from kept.node.replicas.checkpoint_offsets import (
    collect_in_steps,
    high_watermark,
    log_start,
    recovery_point,
)
from kept.node.replicas.dirty_logs import YIELD_EVERY, flushes_later
from kept.node.runtime.background_steps import PAUSE_S, advance
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.logging import log
from kept.storage import layout
from kept.storage.directory import Checkpoint
from kept.storage.errors import KeptError, MachineError, ResourceExhausted, vanished
from kept.storage.types import MAX_INT64, TopicPartition

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.replicas.dirty_logs import DirtyLogs
    from kept.node.replicas.local_replica import LocalDirectory, LocalReplica
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition
    from kept.storage.log.log import Log
    from kept.storage.segments.segment import Segment

FLUSH_TICK_MS: Final = 500
"""How often logs are asked whether a flush is due; ``flush.ms`` is kept to this."""
ROLL_TICK_MS: Final = 5_000
DELETE_TICK_MS: Final = 5_000
EXPIRY_TICK_MS: Final = 60_000
DISK_TICK_MS: Final = 1_000
"""How long what was removed under a running node goes on unnoticed, while it is used."""
FILES_A_JOB: Final = 1_000
"""Open files that a thread looks for, by name, before the loop hears of it."""
IDLE_FILES_A_TURN: Final = 50
"""Logs that nobody writes to are looked for, too, so many in a turn."""

Job = Callable[[], Iterator[None]]
"""Starts a job; it may be paused wherever it yields."""


class Maintenance:
    """The periodic jobs of one node. ``also`` are those of other parts: name -> (interval in ms,
    job)."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        table: ReplicaTable,
        dirty_logs: DirtyLogs,
        failures: LogDirFailureChannel,
        lease: ServingLease,
        also: Mapping[str, tuple[int, Job]],
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._table = table
        self._dirty_logs = dirty_logs
        self._failures = failures
        self._lease = lease
        self._also = also
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._stopped = False
        self._writing: set[tuple[str, Checkpoint]] = set()
        self._verifying: set[str] = set()
        """Directories that a thread looks for; it may hang where a disk does."""
        self._idle: list[LocalReplica] = []
        """Replicas whose turn to be looked for comes though nobody writes to them."""
        self._free_at = 0.0
        """When the next slice of any job may begin: slices of several would add up to a stall."""

    def start(self) -> None:
        """Begin all jobs."""
        config = self._config.current
        hw_ms = config.replica_high_watermark_checkpoint_interval_ms
        self._every(hw_ms, "high watermarks", self.checkpoint_high_watermarks)
        recovery_ms = config.log_flush_offset_checkpoint_interval_ms
        self._every(recovery_ms, "recovery points", self.checkpoint_recovery_points)
        start_ms = config.log_flush_start_offset_checkpoint_interval_ms
        self._every(start_ms, "log starts", self.checkpoint_log_starts)
        lag_ms = config.replica_lag_time_max_ms // 2
        self._every(lag_ms, "lagging replicas", self.expel_lagging)
        self._every(config.log_retention_check_interval_ms, "retention", self.retention)
        self._every(ROLL_TICK_MS, "roll", self.roll_idle)
        self._every(FLUSH_TICK_MS, "flush", self.flush_due)
        self._every(DELETE_TICK_MS, "delete", self.delete_expired)
        self._every(DISK_TICK_MS, "disks", self.verify_files)
        self._every(EXPIRY_TICK_MS, "producers", self.expire_producers)
        for name in self._also:
            self.start_job(name)

    def start_job(self, name: str) -> None:
        """Begin one of the jobs of others (``also``) before the rest, unless it runs already."""
        if name not in self._handles:
            interval_ms, job = self._also[name]
            self._every(interval_ms, name, job)

    def stop(self) -> None:
        """End all jobs."""
        self._stopped = True
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _every(self, interval_ms: int, name: str, job: Job) -> None:
        seconds = min(interval_ms, 86_400_000) / 1000
        loop = self._runtime.loop

        def work(steps: Iterator[None] | None = None) -> None:
            """One slice; of None the first."""
            if self._stopped:
                return
            wait = self._free_at - perf_counter()
            if wait > 0:
                self._handles[name] = loop.call_later(wait, work, steps)
                return
            done = True
            try:
                steps = job() if steps is None else steps
                done = advance(steps)
            except MachineError as error:
                self._failures.machine_failed(error)
            except Exception as error:  # noqa: BLE001 - reported, and the job goes on
                log.exception("timer failed", error, job=name)
            self._free_at = perf_counter() + PAUSE_S
            if done:
                self._handles[name] = loop.call_later(seconds, work)
            else:
                self._handles[name] = loop.call_later(PAUSE_S, work, steps)

        self._handles[name] = loop.call_later(seconds, work)

    def _each(
        self,
        job: Callable[[LocalReplica], Any],
        chosen: Iterable[LocalReplica] | None = None,
    ) -> Iterator[None]:
        """Run a job for every partition, or those chosen; a disk error takes its directory offline
        only.
        """
        table = self._table
        for hosted in list(table.replicas.values()) if chosen is None else chosen:
            tp = hosted.partition.topic_partition
            if table.replicas.get(tp) is not hosted:
                continue
            try:
                job(hosted)
            except MachineError as error:
                self._failures.fail(hosted.directory, error)
            except KeptError as error:
                log.error("job failed", topic=tp.topic, partition=tp.partition, error=str(error))
            yield

    # Checkpoints.

    def checkpoint_high_watermarks(self) -> Iterator[None]:
        """replication-offset-checkpoint, where one can have moved."""
        dirty_logs = self._dirty_logs
        yield from dirty_logs.gather(self._runtime.now_ms())
        if not dirty_logs.uncheckpointed and not dirty_logs.left:
            return
        if not any(kind is Checkpoint.HIGH_WATERMARKS for _, kind in self._writing):
            dirty_logs.begin_checkpoint()
        yield from self._checkpoint(Checkpoint.HIGH_WATERMARKS, high_watermark)

    def checkpoint_recovery_points(self) -> Iterator[None]:
        """recovery-point-offset-checkpoint."""
        return self._checkpoint(Checkpoint.RECOVERY_POINTS, recovery_point)

    def checkpoint_log_starts(self) -> Iterator[None]:
        """log-start-offset-checkpoint."""
        return self._checkpoint(Checkpoint.LOG_STARTS, log_start)

    def _checkpoint(
        self, kind: Checkpoint, value: Callable[[Partition], int | None]
    ) -> Iterator[None]:
        """Write what changed since the last time, in the directory's threads."""
        for directory in self._table.directories:
            key = (directory.name, kind)
            if key in self._writing:
                continue
            changes = directory.directory.version
            offsets: dict[TopicPartition, int] = {}
            yield from collect_in_steps(self._table, directory, value, offsets)
            if directory.offline is not None:
                continue
            if offsets == directory.directory.checkpoints.get(kind):
                continue
            self._writing.add(key)
            write = directory.directory.write_checkpoints
            future = directory.pool.run(write, kind, offsets, changes)
            future.add_done_callback(partial(self._checkpointed, key, directory))

    def _checkpointed(
        self,
        key: tuple[str, Checkpoint],
        directory: LocalDirectory,
        done: asyncio.Future[Any],
    ) -> None:
        self._writing.discard(key)
        error = done.exception()
        if error is not None:
            self._dirty_logs.left = True  # it is written at the next turn
        if isinstance(error, MachineError):
            self._failures.fail(directory, error)
        elif error is not None:
            log.exception("checkpoint failed", error, path=directory.name)

    # Logs.

    def expel_lagging(self) -> Iterator[None]:
        """Replicas that lag leave the ISR, half of ``replica.lag.time.max.ms`` late at most."""
        if self._config.current.alone:
            return iter(())
        if perf_counter() >= self._lease.until:
            self._lease.check()  # if this node stood still, nobody lagged
        now_ms = monotonic_ms()
        return self._each(lambda hosted: hosted.partition.tick(now_ms))

    def retention(self) -> Iterator[None]:
        """Delete what is too old or too much; only the leader decides (rule 43)."""
        now_ms = self._runtime.now_ms()

        def one(hosted: LocalReplica) -> None:
            for base_offset, reason in hosted.partition.retention(now_ms) or ():
                tp = hosted.partition.topic_partition
                log.info(
                    "segment deleted",
                    topic=tp.topic,
                    partition=tp.partition,
                    base_offset=base_offset,
                    reason=reason,
                )

        return self._each(one)

    def roll_idle(self) -> Iterator[None]:
        """Roll active segments that are too old though nobody appends (rule 3)."""
        now_ms = self._runtime.now_ms()
        dirty_logs = self._dirty_logs
        yield from dirty_logs.gather(monotonic_ms())
        yield from self._each(
            lambda hosted: hosted.partition.maybe_roll(now_ms), dirty_logs.due_to_roll(now_ms)
        )

    def flush_due(self) -> Iterator[None]:
        """Flush by ``flush.ms`` and ``flush.messages``, and every rolled segment.

        By the clock that never jumps: records wait for ``flush.ms`` whatever somebody sets.
        """
        now_ms = monotonic_ms()
        dirty_logs = self._dirty_logs
        yield from dirty_logs.gather(now_ms)
        due = []
        for number, hosted in enumerate(list(dirty_logs.unflushed)):
            log_ = hosted.partition.log
            if wants_flush(log_, now_ms):
                due.append(hosted)
            elif not flushes_later(log_):
                dirty_logs.unflushed.pop(hosted, None)
            if number % YIELD_EVERY == YIELD_EVERY - 1:
                yield
        yield from self._each(lambda hosted: hosted.directory.pool.flush(hosted.partition.log), due)

    def delete_expired(self) -> Iterator[None]:
        """Remove files and logs whose ``file.delete.delay.ms`` is over, in threads."""
        now_ms = self._runtime.now_ms()
        dirty_logs = self._dirty_logs

        def one(hosted: LocalReplica) -> None:
            log_ = hosted.partition.log
            if not log_.retired:
                dirty_logs.leaving.pop(hosted, None)
                return
            if paths := log_.pop_expired(now_ms):
                self._in_thread(hosted.directory, remove, log_, paths)

        def remove(log_: Log, paths: list[str]) -> None:
            try:
                log_.retired.remove(paths)
            except ResourceExhausted:
                self._runtime.loop.call_soon_threadsafe(log_.delete_later, paths, now_ms)
                raise

        yield from dirty_logs.gather(monotonic_ms())
        yield from self._each(one, list(dirty_logs.leaving))
        for directory in self._table.directories:
            if directory.offline is None:
                self._in_thread(directory, directory.directory.purge, now_ms)

    # Disks.

    def verify_files(self) -> Iterator[None]:
        """Log directories and the files that were appended to since the
        last time are where they were opened, and hold what was written: what was removed, replaced
        or truncated under this node fails its directory. Writes and fsyncs there succeed, and keep
        nothing. Of the other files some are looked for each time, all of them in turn.
        """
        dirty_logs = self._dirty_logs
        yield from dirty_logs.gather(monotonic_ms())
        dirty_logs.written.update(dict.fromkeys(self._next_idle()))
        chosen: dict[LocalDirectory, list[LocalReplica]] = {}
        for number, hosted in enumerate(list(dirty_logs.written)):
            chosen.setdefault(hosted.directory, []).append(hosted)
            if number % YIELD_EVERY == YIELD_EVERY - 1:
                yield
        for directory in self._table.directories:
            if directory.offline is None and directory.name not in self._verifying:
                several = chosen.get(directory, [])[:FILES_A_JOB]
                for hosted in several:
                    dirty_logs.written.pop(hosted, None)
                self._verify(directory, several)
                yield

    def _next_idle(self) -> list[LocalReplica]:
        hosted = self._table.replicas
        if not self._idle:
            self._idle = list(hosted.values())
        turn = self._idle[-IDLE_FILES_A_TURN:]
        del self._idle[-IDLE_FILES_A_TURN:]
        return [
            replica for replica in turn if hosted.get(replica.partition.topic_partition) is replica
        ]

    def _verify(self, directory: LocalDirectory, several: list[LocalReplica]) -> None:
        logs = [(replica, replica.partition.log) for replica in several]
        active = [(replica, log_.active_segment, log_.truncations) for replica, log_ in logs]

        def verify() -> list[tuple[LocalReplica, Segment, int]]:
            directory.directory.verify()
            return [chosen for chosen in active if not chosen[1].is_in_place]

        def verified(finished: asyncio.Future[Any]) -> None:
            self._verifying.discard(directory.name)
            error = finished.exception()
            if isinstance(error, MachineError):
                self._failures.fail(directory, error)
                return
            if error is not None:
                log.exception("looking for files failed", error, path=directory.name)
                return
            for hosted, segment, truncations in finished.result():
                log_ = hosted.partition.log
                is_hosted = self._table.replicas.get(hosted.partition.topic_partition) is hosted
                is_same = log_.active_segment is segment and log_.truncations == truncations
                if is_hosted and is_same:  # not rolled, cut or deleted meanwhile
                    self._failures.fail(directory, vanished(segment.path(layout.LOG)))

        self._verifying.add(directory.name)
        directory.pool.run(verify).add_done_callback(verified)

    def _in_thread(self, directory: LocalDirectory, function: Any, *args: Any) -> None:
        def done(finished: asyncio.Future[Any]) -> None:
            error = finished.exception()
            if isinstance(error, MachineError):
                self._failures.fail(directory, error)
            elif error is not None:
                log.exception("deletion failed", error, path=directory.name)

        directory.pool.run(function, *args).add_done_callback(done)

    def expire_producers(self) -> Iterator[None]:
        """Forget producers that were silent for ``producer.id.expiration.ms``."""
        now_ms = self._runtime.now_ms()
        return self._each(lambda hosted: hosted.partition.log.expire_producers(now_ms))


def wants_flush(log_: Log, now_ms: int) -> bool:
    """Whether a log has something that is to be durable by now."""
    return (
        log_.recovery_point < log_.active_segment.base_offset
        or bool(log_.durability.unsynced_snapshots)
        or (log_.config.flush_ms < MAX_INT64 and log_.flush_due(now_ms))
    )
