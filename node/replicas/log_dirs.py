"""``log.dirs`` from start to end: a broken disk costs what is on it, not the node.

A directory that cannot be read or written is offline from the start, like one that fails later.
What the others lack may be on it, so no log of this node is created anew meanwhile
(:meth:`kept.node.replicas.replica_manager.ReplicaManager.start`). One that is missing, empty or
another's is no broken disk: it is refused (:mod:`kept.node.metadata.directory_ids`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kept.node.metadata import directory_ids
from kept.node.replicas import checkpoint_offsets
from kept.node.replicas.local_replica import LocalDirectory
from kept.node.runtime.executors import FlushPool
from kept.node.runtime.ids import new_id
from kept.node.runtime.logging import log
from kept.storage import layout
from kept.storage.directory import Checkpoint, LogDirectory, previous_broker_epoch, refuse_kafka
from kept.storage.errors import MachineError

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.storage.producers.producer_states import ProducerQuota


class LogDirs:
    """The entries of ``log.dirs``; they are in the replica table once they are open."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: NodeConfig,
        identity: NodeIdentity,
        table: ReplicaTable,
        failures: LogDirFailureChannel,
        counters: Counters,
        producer_quota: ProducerQuota,
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._table = table
        self._failures = failures
        self._counters = counters
        self._producer_quota = producer_quota
        self._paths = config.log_dirs if config.is_broker else ()
        self._metadata_path = config.metadata_log_dir
        self._fsync_threads = config.fsync_threads
        self._broken: Mapping[str, MachineError] = {}

    def find_usable(self) -> list[str]:
        """The paths that are not broken, before anything is created anywhere. Raises
        DirectoryRefused for Apache Kafka's, and MachineError when none is left.
        """
        broken: dict[str, MachineError] = {}
        for path in self._paths:
            try:
                refuse_kafka(self._runtime.disk, path)
            except MachineError as error:
                broken[path] = error
        self._refuse_none(broken)
        self._broken = broken
        return [path for path in self._paths if path not in broken]

    def open(self) -> None:
        """Open those that :meth:`find_usable` found. Raises as :meth:`LogDirectory.open` and
        :func:`directory_ids.refuse_missing`, MachineError only when no directory is left.
        """
        disk, table = self._runtime.disk, self._table
        broken = dict(self._broken)
        directory_ids.refuse_missing(disk, self._metadata_path, self._paths, broken)
        table.reads_in_memory = False
        for number, path in enumerate(self._paths):
            if path not in broken:
                try:
                    directory = self._open(path)
                except MachineError as error:
                    broken[path] = error
            if path in broken:
                directory = LogDirectory.broken(path, disk, broken[path])
            table.directories.append(LocalDirectory(directory, self._threads(number), path))
        self._refuse_none(broken)
        for local in table.directories:
            if local.name in broken:
                self._failures.fail(local, broken[local.name])
        opened = [local for local in table.directories if local.offline is None]
        directory_ids.remember(
            disk, self._metadata_path, [local.directory for local in opened], broken
        )
        for local in opened:
            purging = self._runtime.in_thread(local.directory.finish_deletions)
            purging.add_done_callback(self._purged)

    def _open(self, path: str) -> LogDirectory:
        disk = self._runtime.disk
        directory = LogDirectory.open(
            path,
            disk,
            cluster_id=self._identity.cluster_id,
            node_id=self._identity.node_id,
            new_directory_id=new_id(),
            now_ms=self._runtime.now_ms(),
            producer_quota=self._producer_quota,
        )
        try:
            probe = disk.open_read(f"{path}/{layout.META_PROPERTIES}")
            if disk.preadv_nowait(probe, 0, 1) is None:
                self._table.reads_in_memory = True
        except MachineError:
            directory.close(clean=False)
            raise
        return directory

    def _threads(self, number: int) -> FlushPool:
        def failed(error: MachineError) -> None:
            self._failures.fail(self._table.directories[number], error)

        return FlushPool(
            self._runtime.loop,
            self._fsync_threads,
            str(number),
            failed,
            self._counters,
        )

    def _purged(self, finished: asyncio.Future[Any]) -> None:
        error = finished.exception()
        if isinstance(error, MachineError):
            self._failures.machine_failed(error)
        elif error is not None:
            log.exception("background job failed", error)

    def _refuse_none(self, broken: Mapping[str, MachineError]) -> None:
        if self._paths and len(broken) == len(self._paths):
            raise broken[self._paths[0]]

    @property
    def clean_epoch(self) -> int:
        """The broker epoch that this node stopped with, if it stopped cleanly; else -1."""
        return previous_broker_epoch(local.directory for local in self._table.directories)

    # The end.

    async def close(self) -> None:
        """Flush and close all logs, write the checkpoints, leave the marks of a clean stop."""
        for local in self._table.directories:
            await local.pool.drain()
            await self._close(local)

    async def _close(self, local: LocalDirectory) -> None:
        replicas = [r for r in self._table.replicas.values() if r.directory is local]
        clean = local.offline is None
        if clean:
            closing = [local.pool.run(replica.partition.log.close) for replica in replicas]
            for outcome in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    clean = False
                    log.error("log not closed", path=local.name, error=str(outcome))
        try:
            if clean:
                self._write_checkpoints(local)
            local.directory.close(clean=clean, broker_epoch=self._identity.broker_epoch)
        except MachineError as error:
            log.error("directory not closed cleanly", path=local.name, error=str(error))

    def _write_checkpoints(self, local: LocalDirectory) -> None:
        values: dict[Checkpoint, Callable[[Any], int | None]] = {
            Checkpoint.HIGH_WATERMARKS: checkpoint_offsets.high_watermark,
            Checkpoint.RECOVERY_POINTS: checkpoint_offsets.recovery_point,
            Checkpoint.LOG_STARTS: checkpoint_offsets.log_start,
        }
        for kind, value in values.items():
            offsets = checkpoint_offsets.collect(self._table, local, value)
            local.directory.write_checkpoints(kind, offsets)

    def release(self) -> None:
        """Let other processes have the directories, whatever was closed before."""
        for local in self._table.directories:
            local.pool.close()
            local.directory.close(clean=False)
