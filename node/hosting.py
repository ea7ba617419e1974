"""The partitions on this node's disks: opened, created, changed, deleted with the image.

The image alone says what should be here. Opening and creating logs blocks, so it runs in the
threads of their directory; the tables that requests look into change on the loop, after. A new
partition goes to the directory with the fewest. A directory that fails goes offline with all its
partitions (rule 12); the node ends when none is left.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from kept.cluster import reassignment
from kept.cluster.records import PartitionRecord, ResourceType
from kept.cluster.settings import log_config
from kept.node.attention import Attention
from kept.node.logging import log
from kept.node.manifests import opening as manifests_found
from kept.node.manifests.replica import ReplicaManifests
from kept.node.manifests.standing import Known
from kept.node.pool import Callback, FlushPool
from kept.node.roles import Roles
from kept.node.slices import Pace
from kept.replication.partition import Partition
from kept.replication.quota import ReplicationQuota
from kept.storage import layout
from kept.storage.directory import Birth, FoundLog
from kept.storage.errors import (
    DamagedData,
    KafkaStorageError,
    KeptError,
    MachineError,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from kept.storage.records import CheckRules
from kept.storage.types import MAX_INT64, LogConfig, TopicPartition

if TYPE_CHECKING:
    from kept.cluster.image import Delta, Image, TopicImage
    from kept.compaction.apply import CompactionState
    from kept.node.server import Node
    from kept.storage.directory import LogDirectory
    from kept.storage.log import Log


LOGS_A_JOB: Final = 64
"""Logs that a thread opens, creates or renames before the loop hears of them."""


class HostedDirectory:
    """One of ``log.dirs`` with its threads. ``offline`` is the reason once it failed."""

    def __init__(self, directory: LogDirectory, pool: FlushPool, name: str) -> None:
        self.directory = directory
        self.pool = pool
        self.name = name
        self.offline: str | None = None
        self.count = 0


class HostedPartition:
    """A replica on this node, with what requests need beside it."""

    __slots__ = (
        "compaction",
        "directory",
        "manifests",
        "partition",
        "rules",
        "sync",
        "throttled_as_follower",
        "throttled_as_leader",
    )

    def __init__(self, partition: Partition, directory: HostedDirectory) -> None:
        self.partition = partition
        self.directory = directory
        self.compaction: CompactionState | None = None
        """What compaction has come to; None before the first generation."""
        self.manifests: ReplicaManifests
        self.rules = CheckRules()
        self.sync = False
        """``flush.messages`` is set: an acknowledgement waits for the fsync."""
        self.throttled_as_leader = False
        """Among its topic's ``leader.replication.throttled.replicas`` (KIP-73)."""
        self.throttled_as_follower = False

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


class HostedTopic:
    """A topic's partitions on this node, by number."""

    __slots__ = ("count", "name", "offline", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: uuid.UUID, count: int = 0) -> None:
        self.name = name
        self.topic_id = topic_id
        self.count = count
        """Partitions of the topic, here and elsewhere."""
        self.partitions: dict[int, HostedPartition] = {}
        self.offline: dict[int, str] = {}

    def absent(self, index: int) -> KeptError:
        """Why a partition is not served."""
        if index in self.offline:
            return KafkaStorageError(f"{self.name}-{index}: {self.offline[index]}")
        if 0 <= index < self.count:
            return NotLeaderOrFollower(f"{self.name}-{index} has no replica on this node")
        return UnknownTopicOrPartition(f"{self.name} has no partition {index}")


@dataclass(slots=True)
class _Opening:
    """A log to open or create."""

    tp: TopicPartition
    topic_id: uuid.UUID
    record: PartitionRecord
    config: LogConfig
    directory: HostedDirectory
    exists: bool


_Opened: TypeAlias = "tuple[Log, CompactionState | None, Known]"


class Hosting:
    """What this node hosts, for requests, timers and the cleaner."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.by_name: dict[bytes, HostedTopic] = {}
        self.by_id: dict[bytes, HostedTopic] = {}
        self.partitions: dict[TopicPartition, Partition] = {}
        self.hosted: dict[TopicPartition, HostedPartition] = {}
        self.directories: list[HostedDirectory] = []
        self._defaults: dict[str, str] = {}
        self.leader_quota = ReplicationQuota()
        """What followers out of sync may take from here."""
        self.follower_quota = ReplicationQuota()
        """What replicas here that are out of sync may fetch."""
        self.roles = Roles(node)
        self.attention = Attention()
        self.appliers = asyncio.Semaphore(max(node.config.log_cleaner_threads, 1))
        """Generations that are built and put into place at a time."""
        self.compaction_moved: Callable[[TopicPartition], None] = lambda _: None
        """Called when a generation was applied."""

    # Settings.

    def config_for(self, image: Image, topic: str) -> LogConfig:
        """A topic's settings over the broker's defaults."""
        return log_config(image.config(ResourceType.TOPIC, topic), self._defaults)

    def _rules(self, config: LogConfig) -> CheckRules:
        return CheckRules(
            compacted=config.compact,
            max_batch_bytes=config.max_message_bytes,
            max_inflated_bytes=self._node.config.inflated_max_bytes,
            timestamp_type=config.message_timestamp_type,
            timestamp_before_max_ms=config.message_timestamp_before_max_ms,
            timestamp_after_max_ms=config.message_timestamp_after_max_ms,
            compression_type=config.compression_type,
        )

    def _throttle(self, image: Image, topic: str, several: Iterable[HostedPartition]) -> None:
        """Note which of a topic's partitions are throttled here."""
        as_leader = reassignment.throttled(image, topic, reassignment.LEADER_REPLICAS)
        as_follower = reassignment.throttled(image, topic, reassignment.FOLLOWER_REPLICAS)
        for hosted in several:
            mine = hosted.partition.topic_partition.partition, self._node.node_id
            hosted.throttled_as_leader = as_leader is None or mine in as_leader
            hosted.throttled_as_follower = as_follower is None or mine in as_follower
            self.roles.throttled(hosted)

    def limit_replication(self) -> None:
        """The node's rates are in force from now on."""
        config = self._node.config
        self.leader_quota.bytes_per_second = config.leader_replication_throttled_rate
        self.follower_quota.bytes_per_second = config.follower_replication_throttled_rate

    def _configure(self, hosted: HostedPartition, config: LogConfig) -> None:
        hosted.partition.update_config(config)
        hosted.rules = self._rules(config)
        hosted.sync = config.flush_messages < MAX_INT64

    def reconfigure(self, image: Image, topics: Iterable[str] | None) -> None:
        """Settings of ``topics`` (None: of all) are in force from now on."""
        self._defaults = self._node.config.topic_defaults()
        for name in [topic.name for topic in self.by_name.values()] if topics is None else topics:
            topic = self.by_name.get(name.encode())
            if topic is None:
                continue
            config = self.config_for(image, name)
            for hosted in topic.partitions.values():
                self._configure(hosted, config)
            self._throttle(image, name, topic.partitions.values())

    # Start.

    async def start(self, image: Image) -> None:
        """Open what the image says is here; logs of topics that are gone are deleted.

        While a directory is offline, a log that is not found may be there: none is created.
        """
        self._defaults = self._node.config.topic_defaults()
        found: dict[TopicPartition, list[tuple[HostedDirectory, uuid.UUID | None]]] = {}
        for directory in self.directories:
            for _, tp, topic_id, is_delete in self._scan(directory):
                if not is_delete:
                    found.setdefault(tp, []).append((directory, topic_id))
        broken = next((one for one in self.directories if one.offline is not None), None)
        openings, absent = [], 0
        for topic in image.topics.values():
            here = self._register(topic)
            config = self.config_for(image, topic.name)
            for record in topic.partitions:
                if self._node.node_id not in record.replicas:
                    continue
                tp = TopicPartition(topic.name, record.partition)
                there = found.get(tp, [])
                mine = [entry for entry in there if entry[1] == topic.topic_id]
                if len(mine) > 1:
                    found[tp] = []
                    self._several(tp, [entry[0] for entry in mine])
                    continue
                # A deleted topic's, which had this name, goes. A flipped bit in the id, or another
                # topic's file, does not make it one: opening it says which file is wrong.
                mine = mine or [
                    entry for entry in there if not self._is_deleted(image, tp, entry[1])
                ]
                if mine:
                    directory, exists = mine[0][0], True
                    there.remove(mine[0])
                elif broken is not None:
                    why = (
                        f"it is not in the log directories that work, and {broken.name} is offline"
                    )
                    here.offline[record.partition] = f"{why}: {broken.offline}"
                    absent += 1
                    continue
                else:
                    directory, exists = self._emptiest(), False
                    self._say_missing(tp)
                directory.count += 1
                openings.append(_Opening(tp, topic.topic_id, record, config, directory, exists))
        for tp, strays in found.items():
            for directory, _ in strays:
                await self._delete_stray(directory, tp)
        if broken is not None:
            log.error("partitions offline", count=absent, path=broken.name, error=broken.offline)
        await self._open_all(openings)

    def _scan(self, directory: HostedDirectory) -> list[FoundLog]:
        try:
            return [] if directory.offline is not None else directory.directory.scan()
        except MachineError as error:
            self.fail(directory, error)
            return []

    def _several(self, tp: TopicPartition, places: list[HostedDirectory]) -> None:
        """One log is in several directories, as after one was copied by hand, or an old disk came
        back. Which one holds what was acknowledged, nobody knows here: none is opened or removed.
        """
        paths = ", ".join(one.directory.log_path(tp) for one in places)
        why = f"its log is there several times: {paths}; move all but the newest elsewhere"
        self.by_name[tp.topic.encode()].offline[tp.partition] = why
        log.error("partition offline", topic=tp.topic, partition=tp.partition, error=why)

    @staticmethod
    def _is_deleted(image: Image, tp: TopicPartition, stored: uuid.UUID | None) -> bool:
        """A log under the name of a topic that is there is of another one, of the same name, that
        was deleted.
        """
        if stored is None or stored in image.topics_by_id:
            return False
        return not layout.may_be_misread(stored, image.topics[tp.topic].topic_id)

    def _say_missing(self, tp: TopicPartition) -> None:
        for one in self.directories:
            if (end := one.directory.missing.get(tp)) is not None:
                log.error(
                    "log missing",
                    topic=tp.topic,
                    partition=tp.partition,
                    path=one.directory.log_path(tp),
                    why=f"its records, up to offset {end} at least, are lost here: it begins anew",
                )

    async def _delete_stray(self, directory: HostedDirectory, tp: TopicPartition) -> None:
        """Remove a log whose topic was deleted; what cannot be read as a log is left alone."""
        try:
            if await directory.pool.run(directory.directory.remove_unborn, tp):
                log.info("a creation that was interrupted", topic=tp.topic, partition=tp.partition)
                return
            stray = await directory.pool.run(
                lambda: directory.directory.open_log(
                    tp, None, LogConfig(), now_ms=self._node.now_ms()
                )
            )
            log.info("log of a deleted topic", topic=tp.topic, partition=tp.partition)
            await directory.pool.run(
                directory.directory.mark_deleted, stray, uuid.uuid4(), self._node.now_ms()
            )
        except DamagedData as error:
            log.warning("a directory that is no log of this cluster is left alone", why=str(error))
        except MachineError as error:
            self.fail(directory, error)

    def _register(self, topic: TopicImage) -> HostedTopic:
        hosted = HostedTopic(topic.name, topic.topic_id, len(topic.partitions))
        self.by_name[topic.name.encode()] = hosted
        self.by_id[topic.topic_id.bytes] = hosted
        return hosted

    def _emptiest(self) -> HostedDirectory:
        online = [one for one in self.directories if one.offline is None]
        if not online:
            raise KafkaStorageError("every log directory is offline")
        return min(online, key=lambda one: one.count)

    async def _open_all(self, openings: list[_Opening]) -> None:
        """Open or create logs, :data:`LOGS_A_JOB` in each job of a thread: one by one they would
        cost the loop more than the disk.
        """
        jobs = []
        for directory in self.directories:
            mine = [opening for opening in openings if opening.directory is directory]
            for at in range(0, len(mine), LOGS_A_JOB):
                several = mine[at : at + LOGS_A_JOB]
                jobs.append((several, directory.pool.run(self._open_several, several)))
        pace = Pace()
        for several, job in jobs:
            for opening, outcome in zip(several, await job, strict=True):
                if isinstance(outcome, BaseException):
                    self._failed_to_open(opening, outcome)
                elif opening.directory.offline is not None:
                    self._unavailable(opening, opening.directory.offline)
                else:
                    self._host(opening, *outcome)
                await pace.breathe()
        await self.roles.elected()

    def _open_several(self, several: list[_Opening]) -> list[_Opened | Exception]:
        """Open or create logs of one directory; in a thread."""
        outcomes: list[_Opened | Exception] = []
        new = [opening for opening in several if not opening.exists]
        created: list[_Opened | Exception]
        try:
            created = [(log_, None, Known()) for log_ in self._create(new)] if new else []
        except MachineError as error:
            created = [error] * len(new)
        except KeptError as error:
            created = self._one_by_one(new) if len(new) > 1 else [error]
        made = iter(created)
        for opening in several:
            try:
                outcomes.append(self._open(opening) if opening.exists else next(made))
            except Exception as error:  # noqa: BLE001 - the loop says so
                outcomes.append(error)
        return outcomes

    def _one_by_one(self, new: list[_Opening]) -> list[_Opened | Exception]:
        """One of several cannot be created: which one, and why?"""
        return [self._open_several([opening])[0] for opening in new]

    def _create(self, new: list[_Opening]) -> list[Log]:
        births = []
        for opening in new:
            leads = opening.record.leader == self._node.node_id
            epoch = opening.record.leader_epoch if leads else None
            births.append(Birth(opening.tp, opening.topic_id, opening.config, epoch))
        return new[0].directory.directory.create_logs(
            births,
            now_ms=self._node.now_ms(),
            producer_id_expiration_ms=self._node.config.producer_id_expiration_ms,
        )

    def _open(self, opening: _Opening) -> _Opened:
        directory = opening.directory.directory
        path = directory.log_path(opening.tp)
        alone = opening.record.replicas == (self._node.node_id,)
        disk = self._node.disk
        state, known = manifests_found.before(path, disk, alone)
        found = directory.open_log(
            opening.tp,
            opening.topic_id,
            opening.config,
            now_ms=self._node.now_ms(),
            unfinished_swap=None if state is None else state.unfinished,
            compacted_to=None if state is None or state.applied is None else state.end_offset,
            producer_id_expiration_ms=self._node.config.producer_id_expiration_ms,
        )
        if state is not None:
            state, known = manifests_found.after(path, disk, state, alone, found.log_end_offset)
        return found, state, known

    def _unavailable(self, opening: _Opening, why: str) -> None:
        self.by_name[opening.tp.topic.encode()].offline[opening.tp.partition] = why

    def _failed_to_open(self, opening: _Opening, error: BaseException) -> None:
        self._unavailable(opening, str(error))
        if opening.directory.offline is not None:
            return  # which has been told
        if isinstance(error, KeptError):
            log.error(
                "partition offline",
                topic=opening.tp.topic,
                partition=opening.tp.partition,
                error=str(error),
            )
        else:
            log.exception("partition offline", error, topic=opening.tp.topic)
        if isinstance(error, MachineError):
            self.fail(opening.directory, error)

    def _host(
        self, opening: _Opening, log_: Log, state: CompactionState | None, known: Known
    ) -> None:
        tp = opening.tp
        high_watermark = opening.directory.directory.high_watermarks.get(tp, log_.log_start_offset)
        directory = opening.directory
        partition = Partition(
            log_,
            self._node.node_id,
            high_watermark=high_watermark,
            applied_end=0 if state is None else state.end_offset,
            lag_time_max_ms=self._node.config.replica_lag_time_max_ms,
            on_machine_error=lambda error: self.fail(directory, error),
            on_effect=lambda effect: self.roles.heard(hosted, effect),
        )
        hosted = HostedPartition(partition, opening.directory)
        hosted.compaction = state
        hosted.manifests = ReplicaManifests(self._node, hosted, known)
        self._configure(hosted, opening.config)
        self._throttle(self._node.image, tp.topic, (hosted,))
        self.partitions[tp] = partition
        self.hosted[tp] = hosted
        self.attention.begin(hosted)
        self.by_name[tp.topic.encode()].partitions[tp.partition] = hosted
        self.roles.take(hosted, opening.record)

    # Changes.

    async def apply(self, image: Image, delta: Delta) -> None:
        """Do what an entry of the metadata log asks of this node."""
        for gone in delta.topics_deleted:
            await self._delete(gone)
        topics = [name for kind, name in delta.configs if kind == ResourceType.TOPIC]
        if len(topics) != len(delta.configs):
            self.reconfigure(image, None)
        elif topics:
            self.reconfigure(image, topics)
        openings = []
        configs: dict[str, LogConfig] = {}
        for created in delta.topics_created:
            self._register(created)
        pace = Pace()
        for change in delta.partitions:
            await pace.breathe()
            tp, record = change.topic_partition, change.after
            hosted = self.hosted.get(tp)
            topic = self.by_name[tp.topic.encode()]
            topic.count = max(topic.count, tp.partition + 1)
            mine = self._node.node_id in record.replicas
            if hosted is not None and mine:
                self.roles.take(hosted, record)
            elif hosted is not None:
                del topic.partitions[tp.partition]
                await self._remove([(tp, hosted)])
            elif mine:
                if tp.partition in topic.offline:
                    self.roles.lost(tp, record)
                    continue
                directory = self._emptiest()
                directory.count += 1
                if tp.topic not in configs:
                    configs[tp.topic] = self.config_for(image, tp.topic)
                config = configs[tp.topic]
                openings.append(
                    _Opening(tp, topic.topic_id, record, config, directory, exists=False)
                )
        if openings:
            await self._open_all(openings)

    async def _delete(self, gone: TopicImage) -> None:
        topic = self.by_id.pop(gone.topic_id.bytes, None)
        if topic is None:
            return
        if self.by_name.get(gone.name.encode()) is topic:
            del self.by_name[gone.name.encode()]
        await self._remove(
            [(TopicPartition(gone.name, number), one) for number, one in topic.partitions.items()]
        )

    async def _remove(self, several: list[tuple[TopicPartition, HostedPartition]]) -> None:
        """Replicas are not to be here any more."""
        pace = Pace()
        for tp, hosted in several:
            self.partitions.pop(tp, None)
            self.hosted.pop(tp, None)
            self.attention.end(hosted)
            hosted.directory.count -= 1
            self._node.partition_gone(tp)
            self.roles.leave(hosted)
            await pace.breathe()
        for directory in self.directories:
            mine = [hosted for _, hosted in several if hosted.directory is directory]
            for at in range(0, len(mine), LOGS_A_JOB):
                await self._mark_deleted(directory, mine[at : at + LOGS_A_JOB])

    async def _mark_deleted(
        self, directory: HostedDirectory, several: list[HostedPartition]
    ) -> None:
        for hosted in several:
            await hosted.manifests.close()
            await directory.pool.quiet(hosted.partition.log)
        logs = [(hosted.partition.log, uuid.uuid4()) for hosted in several]
        try:
            await directory.pool.run(
                directory.directory.mark_all_deleted, logs, self._node.now_ms()
            )
        except MachineError as error:
            self.fail(directory, error)

    async def close_manifests(self) -> None:
        """No generation is put into place any more; what has begun is over when this returns."""
        for hosted in self.hosted.values():
            hosted.manifests.abandon()
        for hosted in list(self.hosted.values()):
            await hosted.manifests.close()

    # Failure.

    def directory_of(self, error: MachineError) -> HostedDirectory | None:
        """The directory whose file an error names."""
        for one in self.directories:
            if error.path == one.name or error.path.startswith(one.name.rstrip("/") + "/"):
                return one
        return None

    def fail(self, directory: HostedDirectory, error: BaseException) -> None:
        """Take a log directory offline, with all its partitions."""
        if directory.offline is not None:
            return
        directory.offline = str(error)
        self._node.readiness.on_move()
        if isinstance(error, MachineError):
            directory.directory.fail(error)
        log.error("log directory offline", path=directory.name, error=str(error))
        for tp, hosted in list(self.hosted.items()):
            if hosted.directory is not directory:
                continue
            del self.hosted[tp]
            self.attention.end(hosted)
            del self.partitions[tp]
            topic = self.by_name.get(tp.topic.encode())
            if topic is not None:
                topic.partitions.pop(tp.partition, None)
                topic.offline[tp.partition] = f"its log directory is offline: {error}"
            self._node.partition_gone(tp, error)
            hosted.manifests.abandon()
            hosted.partition.mark_offline(str(error))
            self.roles.lost(tp, self._node.image.partition(tp.topic, tp.partition))
        if all(one.offline is not None for one in self.directories):
            self._node.fatal(f"no log directory is left: {error}")
