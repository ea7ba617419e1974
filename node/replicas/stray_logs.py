"""Logs on this node's disks that the image does not want here: deleted, or set aside.

A log goes only where the metadata showed that it is not wanted any more: its topic was deleted, or
its replica moved away (``removed`` of :mod:`kept.cluster.metadata.replica_history`), and this node
stopped before it had acted on that. Any other log that the image does not know is evidence that
metadata was lost, and may be the only copy of its records: it is set aside under a name that ends
in ``-stray`` and stays until somebody removes that directory. Should the image want it after all
(the metadata of another voter has come), it is put back and opened.

Apache Kafka sets them aside in the same way (``LogManager.isStrayReplica``); putting back is ours.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, NamedTuple

from kept.node.runtime.logging import log
from kept.storage.errors import DamagedData, MachineError
from kept.storage.types import LogConfig, TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.replica_history import ReplicaKey
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.local_replica import LocalDirectory
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.runtime.runtime import Runtime
    from kept.storage.directory import FoundLog

WHY = (
    "the metadata does not know its topic, and nobody has seen that it was deleted: has the end of "
    "the metadata log been lost? Remove the directory if its records are not needed"
)


class Stray(NamedTuple):
    """A log that was set aside; ``name`` is that of its directory."""

    directory: LocalDirectory
    name: str

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.directory.name}/{self.name}"


class StrayLogs:
    """Deletes, or sets aside, the logs that the image does not want here. Called on the node's
    loop.
    """

    def __init__(
        self, runtime: Runtime, metadata: MetadataLog, failures: LogDirFailureChannel
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._failures = failures
        self._known: dict[ReplicaKey, Stray] = {}
        self._unknown: list[Stray] = []
        """Those that do not say whose they are."""

    @property
    def paths(self) -> list[str]:
        """The directories that were set aside, in order."""
        return sorted(stray.path for stray in (*self._known.values(), *self._unknown))

    async def add(self, directory: LocalDirectory, found: FoundLog) -> None:
        """One that an earlier start set aside; it goes if its removal was seen since."""
        stray = Stray(directory, found.directory_name)
        if found.topic_id is None:
            self._unknown.append(stray)
            return
        key = found.topic_id, found.topic_partition.partition
        if key not in self._metadata.raft_node.history.removed:
            self._known[key] = stray
            return
        log.info("log of a deleted topic", path=stray.path)
        try:
            await directory.pool.run(self._runtime.disk.remove_tree, stray.path)
        except MachineError as error:
            self._failures.fail(directory, error)

    def pop_wanted(self, key: ReplicaKey) -> Stray | None:
        """The log of a replica that the image wants here, if it was set aside: to be put back."""
        stray = self._known.get(key)
        if stray is None or stray.directory.offline is not None:
            return None
        del self._known[key]
        log.warning("log put back", path=stray.path, why="the metadata knows its topic after all")
        return stray

    async def not_wanted(
        self, directory: LocalDirectory, tp: TopicPartition, topic_id: uuid.UUID | None
    ) -> None:
        """The image does not want this log here: remove it, or set it aside; what cannot be read as
        a log is left alone.
        """
        removed = self._metadata.raft_node.history.removed
        try:
            if topic_id is None:
                await self._unborn(directory, tp)
            elif (topic_id, tp.partition) in removed:
                await self._delete(directory, tp)
            else:
                name = await directory.pool.run(directory.directory.set_aside, tp, uuid.uuid4())
                self._known[topic_id, tp.partition] = Stray(directory, name)
        except DamagedData as error:
            log.warning("a directory that is no log of this cluster is left alone", why=str(error))
        except MachineError as error:
            self._failures.fail(directory, error)

    async def _unborn(self, directory: LocalDirectory, tp: TopicPartition) -> None:
        if await directory.pool.run(directory.directory.remove_unborn, tp):
            log.info("a creation that was interrupted", topic=tp.topic, partition=tp.partition)
            return
        path = directory.directory.log_path(tp)
        log.warning(
            "a directory that is no log of this cluster is left alone",
            path=path,
            why="its partition.metadata, which says whose it is, is missing or damaged",
        )

    async def _delete(self, directory: LocalDirectory, tp: TopicPartition) -> None:
        stray = await directory.pool.run(
            lambda: directory.directory.open_log(
                tp, None, LogConfig(), now_ms=self._runtime.now_ms()
            )
        )
        log.info("log of a deleted topic", topic=tp.topic, partition=tp.partition)
        await directory.pool.run(
            directory.directory.mark_deleted, stray, uuid.uuid4(), self._runtime.now_ms()
        )

    def warn(self) -> None:
        """Name those that are there, after a start."""
        for path in self.paths:
            log.warning("log set aside", path=path, why=WHY)
