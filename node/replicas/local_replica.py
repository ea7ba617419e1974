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
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from kept.compaction.cleaner.cleaner_run import Result
    from kept.compaction.manifest.apply import CompactionState
    from kept.compaction.manifest.manifest import Manifest
    from kept.node.replicas.manifests.retry import RetrySchedule
    from kept.node.replicas.manifests.workers import ManifestWork
    from kept.node.runtime.executors import Callback, FlushPool
    from kept.replication import manifests_events
    from kept.replication.events import ManifestPublished
    from kept.replication.manifests_events import ManifestRef, PullRequest, PullResponse
    from kept.replication.partition import Partition
    from kept.replication.partition_core import Effect
    from kept.replication.replica_effects import Report
    from kept.storage.directory import LogDirectory
    from kept.storage.errors import MachineError
    from kept.storage.producers.cut_preparation import CutPreparation


class LocalDirectory:
    """One of ``log.dirs`` with its threads. ``offline`` is the reason once it failed, as clients
    may be told it.
    """

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


class ManifestShell(Protocol):
    """:class:`kept.node.replicas.manifests.replica.ReplicaManifests`, for those that call it.

    What it decides on is in the partition's core (``PartitionCore.manifests``).
    """

    retry_schedule: RetrySchedule
    renew: bool

    @property
    def busy(self) -> bool:
        """Segments are being swapped."""

    @property
    def pass_blocked_by(self) -> str | None:
        """Why no pass may begin; None when one may."""

    @property
    def pass_expected(self) -> bool:
        """A pass may begin soon."""

    def waits_for_appliers(self, *, overdue: bool = False) -> bool:
        """The next pass gives other replicas time to apply the last one's manifest."""

    def begin_pass(self, work: ManifestWork) -> None:
        """A pass computes from now on."""

    def end_pass(self) -> None:
        """It computes no more."""

    async def pass_completed(
        self, result: Result, leader_epoch: int, based_on: ManifestRef | None, truncations: int
    ) -> None:
        """Offer what a pass made; done when it is applied here."""

    def lead(self, record: PartitionRecord) -> None:
        """This node leads."""

    def resign_if_lost(self, record: PartitionRecord) -> None:
        """Have another one lead, while this leader cannot read what it held."""

    def follow(self, record: PartitionRecord) -> None:
        """Another node leads, or none; or the ISR changed."""

    def perform(self, effect: ManifestPublished | manifests_events.Effect) -> None:
        """Do what the core decided."""

    def step(self, event: manifests_events.Event) -> None:
        """Step the partition's core."""

    def fetched(self, leader_epoch: int, agreed: bool) -> None:
        """The response to a fetch was applied."""

    def check_cut(self) -> None:
        """Raises ReplicaNotAvailable while a manifest's files are worked on."""

    def schedule_pull(self) -> None:
        """Pull from the leader soon."""

    def start_pull(self) -> PullRequest | None:
        """The next request to the leader; None: not now."""

    def receive_pull_response(
        self, request: PullRequest, response: PullResponse, bodies: dict[ManifestRef, Manifest]
    ) -> None:
        """The leader responded."""

    def receive_pull(self, request: PullRequest) -> PullResponse:
        """A follower pulls from this leader."""

    async def encoded(self, ref: ManifestRef) -> bytes:
        """A manifest that is here, as it travels."""

    def retry(self) -> bool:
        """Try again what failed; False: nothing had."""

    def abandon(self) -> None:
        """Begin nothing any more."""

    async def close(self) -> None:
        """As :meth:`abandon`; done when no file is worked on."""


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
        self.manifests: ManifestShell
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

    def prepare_cut(self, preparation: CutPreparation) -> None:
        """Run it in a thread of the directory."""
        self.directory.pool.run_apart(preparation.run)

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

        def complete(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.flush(end_offset, complete)
        return done


class LocalTopic:
    """A topic's partitions on this node, by number."""

    __slots__ = ("bytes_out", "count", "name", "offline", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: uuid.UUID, count: int = 0) -> None:
        self.name = name
        self.topic_id = topic_id
        self.count = count
        """Partitions of the topic, here and elsewhere."""
        self.partitions: dict[int, LocalReplica] = {}
        self.offline: dict[int, str] = {}
        self.bytes_out = 0
        """Bytes of records that this node sent to consumers."""

    def not_served_error(self, index: int) -> KeptError:
        """Why a partition is not served."""
        place = TopicPartition(self.name, index).place
        if index in self.offline:
            return KafkaStorageError(f"{place}: {self.offline[index]}")
        if 0 <= index < self.count:
            return NotLeaderOrFollower(f"{place} has no open replica on this node")
        return UnknownTopicOrPartition(f"{self.name} has no partition {index}")
