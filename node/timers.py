"""What a node does on a clock: checkpoints, retention, rolling of idle logs, flushes, expiry.

Each job runs on the loop and hands what blocks to the threads of its directory. A job that raises
is logged and runs again at its next turn: one log's trouble never stops the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kept.node.logging import log
from kept.storage.directory import Checkpoint
from kept.storage.errors import KeptError, MachineError
from kept.storage.types import MAX_INT64, TopicPartition

if TYPE_CHECKING:
    from kept.node.hosting import HostedDirectory, HostedPartition
    from kept.node.server import Node
    from kept.replication.partition import Partition

FLUSH_TICK_MS: Final = 500
"""How often logs are asked whether a flush is due; ``flush.ms`` is kept to this."""
ROLL_TICK_MS: Final = 5_000
DELETE_TICK_MS: Final = 5_000
IDLE_TICK_MS: Final = 10_000
EXPIRY_TICK_MS: Final = 60_000


class Timers:
    """The periodic jobs of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._stopped = False
        self._writing: set[tuple[str, Checkpoint]] = set()

    def start(self) -> None:
        """Begin all jobs."""
        config = self._node.config
        hw_ms = config.replica_high_watermark_checkpoint_interval_ms
        self._every(hw_ms, "high watermarks", self.checkpoint_high_watermarks)
        recovery_ms = config.log_flush_offset_checkpoint_interval_ms
        self._every(recovery_ms, "recovery points", self.checkpoint_recovery_points)
        start_ms = config.log_flush_start_offset_checkpoint_interval_ms
        self._every(start_ms, "log starts", self.checkpoint_log_starts)
        self._every(config.log_retention_check_interval_ms, "retention", self.retention)
        self._every(ROLL_TICK_MS, "roll", self.roll_idle)
        self._every(FLUSH_TICK_MS, "flush", self.flush_due)
        self._every(DELETE_TICK_MS, "delete", self.delete_expired)
        self._every(EXPIRY_TICK_MS, "producers", self.expire_producers)
        idle_ms = min(max(config.connections_max_idle_ms // 4, 100), IDLE_TICK_MS)
        self._every(idle_ms, "idle connections", self.close_idle)

    def stop(self) -> None:
        """End all jobs."""
        self._stopped = True
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _every(self, interval_ms: int, name: str, job: Callable[[], None]) -> None:
        seconds = min(interval_ms, 86_400_000) / 1000

        def run() -> None:
            if self._stopped:
                return
            try:
                job()
            except MachineError as error:
                self._node.machine_failed(error)
            except Exception as error:  # noqa: BLE001 - reported, and the job goes on
                log.exception("timer failed", error, job=name)
            self._handles[name] = self._node.loop.call_later(seconds, run)

        self._handles[name] = self._node.loop.call_later(seconds, run)

    def _each(self, job: Callable[[HostedPartition], Any]) -> None:
        """Run a job for every partition; a disk error takes its directory offline only."""
        for tp, hosted in list(self._node.hosting.hosted.items()):
            try:
                job(hosted)
            except MachineError as error:
                self._node.hosting.fail(hosted.directory, error)
            except KeptError as error:
                log.error("job failed", topic=tp.topic, partition=tp.partition, error=str(error))

    # Checkpoints.

    def checkpoint_high_watermarks(self) -> None:
        """replication-offset-checkpoint."""
        self._checkpoint(Checkpoint.HIGH_WATERMARKS, high_watermark)

    def checkpoint_recovery_points(self) -> None:
        """recovery-point-offset-checkpoint."""
        self._checkpoint(Checkpoint.RECOVERY_POINTS, recovery_point)

    def checkpoint_log_starts(self) -> None:
        """log-start-offset-checkpoint."""
        self._checkpoint(Checkpoint.LOG_STARTS, log_start)

    def _checkpoint(self, kind: Checkpoint, value: Callable[[Partition], int | None]) -> None:
        """Write what changed since the last time, in the directory's threads."""
        for directory in self._node.hosting.directories:
            key = (directory.name, kind)
            if directory.offline is not None or key in self._writing:
                continue
            offsets = collect(self._node, directory, value)
            if offsets == directory.directory.checkpoints.get(kind):
                continue
            self._writing.add(key)
            future = directory.pool.run(directory.directory.write_checkpoints, kind, offsets)
            future.add_done_callback(partial(self._checkpointed, key, directory))

    def _checkpointed(
        self,
        key: tuple[str, Checkpoint],
        directory: HostedDirectory,
        done: asyncio.Future[Any],
    ) -> None:
        self._writing.discard(key)
        error = done.exception()
        if isinstance(error, MachineError):
            self._node.hosting.fail(directory, error)
        elif error is not None:
            log.exception("checkpoint failed", error, path=directory.name)

    # Logs.

    def retention(self) -> None:
        """Delete what is too old or too much; only the leader decides (rule 43)."""
        now_ms = self._node.now_ms()

        def one(hosted: HostedPartition) -> None:
            for base_offset, reason in hosted.partition.retention(now_ms) or ():
                tp = hosted.partition.topic_partition
                log.info(
                    "segment deleted",
                    topic=tp.topic,
                    partition=tp.partition,
                    base_offset=base_offset,
                    reason=reason,
                )

        self._each(one)

    def roll_idle(self) -> None:
        """Roll active segments that are too old though nobody appends (rule 3)."""
        now_ms = self._node.now_ms()
        self._each(lambda hosted: hosted.partition.log.maybe_roll(now_ms))

    def flush_due(self) -> None:
        """Flush by ``flush.ms`` and ``flush.messages``, and every rolled segment."""
        now_ms = self._node.now_ms()

        def one(hosted: HostedPartition) -> None:
            log_ = hosted.partition.log
            due = log_.config.flush_ms < MAX_INT64 and log_.flush_due(now_ms)
            if due or log_.recovery_point < log_.active_segment.base_offset:
                hosted.directory.pool.flush(log_)

        self._each(one)

    def delete_expired(self) -> None:
        """Remove files and logs whose ``file.delete.delay.ms`` is over, in threads."""
        now_ms = self._node.now_ms()
        unlink = self._node.disk.unlink

        def one(hosted: HostedPartition) -> None:
            log_ = hosted.partition.log
            if not log_.waiting_deletes:
                return
            due = [entry for entry in log_.waiting_deletes if entry[0] <= now_ms]
            if due:
                log_.waiting_deletes = [e for e in log_.waiting_deletes if e[0] > now_ms]
                for _, paths in due:
                    for path in paths:
                        self._in_thread(hosted.directory, unlink, path)

        self._each(one)
        for directory in self._node.hosting.directories:
            if directory.offline is None:
                self._in_thread(directory, directory.directory.purge, now_ms)

    def _in_thread(self, directory: HostedDirectory, function: Any, *args: Any) -> None:
        def done(finished: asyncio.Future[Any]) -> None:
            error = finished.exception()
            if isinstance(error, MachineError):
                self._node.hosting.fail(directory, error)
            elif error is not None:
                log.exception("deletion failed", error, path=directory.name)

        directory.pool.run(function, *args).add_done_callback(done)

    def expire_producers(self) -> None:
        """Forget producers that were silent for ``producer.id.expiration.ms``."""
        now_ms = self._node.now_ms()
        self._each(lambda hosted: hosted.partition.log.expire_producers(now_ms))

    def close_idle(self) -> None:
        """Close idle connections."""
        for listener in self._node.listeners:
            listener.close_idle()


def collect(
    node: Node, directory: HostedDirectory, value: Callable[[Partition], int | None]
) -> dict[TopicPartition, int]:
    """What a checkpoint of a directory holds now."""
    found = {}
    for tp, hosted in node.hosting.hosted.items():
        if hosted.directory is directory:
            number = value(hosted.partition)
            if number is not None:
                found[tp] = number
    return found


def high_watermark(partition: Partition) -> int:
    """What the high-watermark checkpoint says of a partition."""
    return partition.high_watermark


def recovery_point(partition: Partition) -> int:
    """What the recovery-point checkpoint says of a partition."""
    return partition.log.recovery_point


def log_start(partition: Partition) -> int | None:
    """What the log-start checkpoint says: only starts inside the first segment need words."""
    log_ = partition.log
    start = log_.log_start_offset
    return start if start > log_.segments[0].base_offset else None
