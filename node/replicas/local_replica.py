"""What is on this node's disks, as requests and jobs look at it: directories, topics, replicas."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Protocol

from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from kept.storage.records import CheckRules

if TYPE_CHECKING:
    from kept.compaction.manifest.apply import CompactionState
    from kept.node.replicas.manifests.replica import ReplicaManifests
    from kept.node.runtime.executors import Callback, FlushPool
    from kept.replication.effects import Report
    from kept.replication.partition import Partition
    from kept.replication.partition_core import Effect
    from kept.storage.directory import LogDirectory
    from kept.storage.errors import MachineError


class LocalDirectory:
    """One of ``log.dirs`` with its threads. ``offline`` is the reason once it failed."""

    def __init__(self, directory: LogDirectory, pool: FlushPool, name: str) -> None:
        self.directory = directory
        self.pool = pool
        self.name = name
        self.offline: str | None = None
        self.count = 0


class ReplicaShell(Protocol):
    """Whoever does for the replicas here what their partitions decide: the replica manager."""

    def perform(self, hosted: LocalReplica, effect: Effect | Report) -> None:
        """Do what a partition's core decided."""

    def machine_failed(self, hosted: LocalReplica, error: MachineError) -> None:
        """A partition could not use its files."""


class LocalReplica:
    """A replica on this node, with what requests need beside it."""

    __slots__ = (
        "_shell",
        "compaction",
        "directory",
        "loop_rules",
        "manifests",
        "partition",
        "rules",
        "sync",
        "throttled_as_follower",
        "throttled_as_leader",
    )

    def __init__(
        self, partition: Partition, directory: LocalDirectory, shell: ReplicaShell
    ) -> None:
        self.partition = partition
        self.directory = directory
        self._shell = shell
        self.compaction: CompactionState | None = None
        """What compaction has come to; None before the first generation."""
        self.manifests: ReplicaManifests
        self.rules = CheckRules()
        self.loop_rules = CheckRules()
        """The same for batches that are checked on the loop."""
        self.sync = False
        """``flush.messages`` is set: an acknowledgement waits for the fsync."""
        self.throttled_as_leader = False
        """Among its topic's ``leader.replication.throttled.replicas`` (KIP-73)."""
        self.throttled_as_follower = False

    # What its partition calls (:class:`kept.replication.replica.PartitionListener`).

    def perform(self, effect: Effect | Report) -> None:
        """Do what the partition's core decided."""
        self._shell.perform(self, effect)

    def machine_failed(self, error: MachineError) -> None:
        """The partition could not use its files."""
        self._shell.machine_failed(self, error)

    def check_cut(self) -> None:
        """Raises ReplicaNotAvailable while a manifest's files are worked on."""
        self.manifests.check_cut()

    def flush(self, end_offset: int, callback: Callback) -> None:
        """Call back when everything below ``end_offset`` is durable."""
        log_ = self.partition.log
        if end_offset <= log_.recovery_point:
            callback(None)
        else:
            self.directory.pool.flush(log_, callback)

    def flushed(self, end_offset: int) -> asyncio.Future[None]:
        """Done when everything below ``end_offset`` is durable, or could not be made so."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.flush(end_offset, settle)
        return done


class LocalTopic:
    """A topic's partitions on this node, by number."""

    __slots__ = ("count", "name", "offline", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: uuid.UUID, count: int = 0) -> None:
        self.name = name
        self.topic_id = topic_id
        self.count = count
        """Partitions of the topic, here and elsewhere."""
        self.partitions: dict[int, LocalReplica] = {}
        self.offline: dict[int, str] = {}

    def absent(self, index: int) -> KeptError:
        """Why a partition is not served."""
        if index in self.offline:
            return KafkaStorageError(f"{self.name}-{index}: {self.offline[index]}")
        if 0 <= index < self.count:
            return NotLeaderOrFollower(f"{self.name}-{index} has no open replica on this node")
        return UnknownTopicOrPartition(f"{self.name} has no partition {index}")
