"""The partitions on this node's disks: opened, created, changed, deleted with the image.

The image alone says what should be here. Opening and creating logs blocks, so it runs in the
threads of their directory; the tables that requests look into change on the loop, after. A new
partition goes to the directory with the fewest. A directory that fails goes offline with all its
partitions (rule 12); the node ends when none is left.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from kept.cluster.controller.heartbeats import ReplicaLog
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import PartitionRecord, ResourceType
from kept.node.metadata.internal_topics import COORDINATED
from kept.node.replicas.closed_replicas import ClosedReplicas
from kept.node.replicas.dirty_logs import DirtyLogs
from kept.node.replicas.local_replica import LocalDirectory, LocalReplica, LocalTopic
from kept.node.replicas.log_lifecycle import LogLifecycle
from kept.node.replicas.log_opener import LogOpener, Opened, Opening
from kept.node.replicas.manifests.replica import ReplicaManifests
from kept.node.replicas.manifests.status import ManifestStatus
from kept.node.replicas.replica_settings import ReplicaSettings, throttles_of
from kept.node.replicas.stray_logs import StrayLogs
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import Pace
from kept.replication.manifests import ManifestCore
from kept.replication.partition import Partition
from kept.replication.quota import ReplicationQuotas
from kept.storage import layout
from kept.storage.directory import FoundLog
from kept.storage.errors import (
    DETAILS_IN_LOG,
    DamagedData,
    KafkaStorageError,
    KeptError,
    MachineError,
    ResourceExhausted,
    client_message,
)
from kept.storage.types import LogConfig, TopicPartition

if TYPE_CHECKING:
    from kept.cluster.controller.heartbeats import PartitionKey
    from kept.cluster.metadata.image import BrokerImage, Delta, PartitionChange, TopicImage
    from kept.compaction.manifest.apply import CompactionState
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.manifests.context import ManifestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.replicas.role_changes import RoleChanges
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.shutdown import Shutdown
    from kept.replication.partition_core import Effect
    from kept.replication.replica_effects import Report
    from kept.storage.log.log import Log


NOISE_INTERVAL_S: Final = 10.0
"""At most one line about a damaged file in this time."""


def _nothing() -> None:
    pass


class ReplicaManager:
    """What this node hosts, for requests, timers and the cleaner."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        config: LiveConfig,
        metadata: MetadataLog,
        identity: NodeIdentity,
        table: ReplicaTable,
        failures: LogDirFailureChannel,
        quotas: ReplicationQuotas,
        roles: RoleChanges,
        manifests: ManifestContext,
        open_files: OpenFiles,
        shutdown: Shutdown,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._metadata = metadata
        self._identity = identity
        self._table = table
        self._failures = failures
        self._failures.on_failure = self._fail
        self._manifests = manifests
        self._open_files = open_files
        self._shutdown = shutdown
        self._damage_logged_until: dict[str, float] = {}
        self.left_closed = ClosedReplicas(table.replicas)
        self.roles = roles
        self.settings = ReplicaSettings(config, identity, table, quotas, roles)
        self._opener = LogOpener(runtime, config, identity)
        self.strays = StrayLogs(runtime, metadata, failures)
        self.log_lifecycle = LogLifecycle(runtime, metadata, failures, self)
        self.image = Image()
        """The newest image whose roles were taken here; logs follow it (:attr:`log_lifecycle`)."""
        self.dirty_logs = DirtyLogs()
        self._brokers: Mapping[int, BrokerImage] = {}
        """Those of the image that leaders here were told of."""
        self.on_gone: list[Callable[[TopicPartition, BaseException | None], None]] = []
        """Called when a partition is gone from here; with the error if its directory failed."""
        self.on_directory_failed: Callable[[], None] = _nothing

    # Start.

    async def start(self, image: Image) -> None:
        """Open what the image says is here; other logs go, or are set aside (:attr:`strays`).

        While a directory is offline, a log that is not found may be there: none is created.
        """
        self.image = image
        self.settings.load_defaults()
        places: dict[TopicPartition, list[tuple[LocalDirectory, uuid.UUID | None]]] = {}
        for directory in self._table.directories:
            for entry in self._scan(directory):
                if entry.is_stray:
                    await self.strays.add(directory, entry)
                elif not entry.is_delete:
                    place = (directory, entry.topic_id)
                    places.setdefault(entry.topic_partition, []).append(place)
        broken = next(
            (local for local in self._table.directories if local.offline is not None), None
        )
        openings, absent = [], 0
        for topic in image.topics.values():
            replica = self._register(topic)
            config = self.settings.config_for(image, topic.name)
            for record in topic.partitions:
                if self._identity.node_id not in record.replicas:
                    continue
                tp = TopicPartition(topic.name, record.partition)
                there = places.get(tp, [])
                mine = [entry for entry in there if entry[1] == topic.topic_id]
                if len(mine) > 1:
                    places[tp] = []
                    self._several(tp, [entry[0] for entry in mine])
                    continue
                # A deleted topic's, which had this name, goes. A flipped bit in the id, or another
                # topic's file, does not make it local: opening it says which file is wrong.
                mine = mine or [
                    entry for entry in there if not self._is_deleted(image, tp, entry[1])
                ]
                opening = Opening(tp, topic.topic_id, record, config)
                if mine:
                    opening.exists = True
                    opening.directory = mine[0][0]
                    there.remove(mine[0])
                elif self._put_back(opening):
                    pass
                elif broken is not None:
                    why = "it is not in the log directories that work, and one is offline"
                    replica.offline[record.partition] = f"{why}: {broken.offline}"
                    absent += 1
                    continue
                else:
                    opening.directory = self._emptiest()
                    self._say_missing(tp)
                opening.directory.count += 1
                openings.append(opening)
        for tp, others in places.items():
            for directory, topic_id in others:
                await self.strays.not_wanted(directory, tp, topic_id)
        self.strays.warn()
        if all(local.offline is None for local in self._table.directories):
            history = self._metadata.raft_node.history
            history.forget_removed(tuple(history.removed))
        openings = self._within_limit(openings)
        if broken is not None:
            log.error("partitions offline", count=absent, path=broken.name, error=broken.offline)
        await self._open_all(openings)

    def _within_limit(self, openings: list[Opening]) -> list[Opening]:
        """Those that the limit of open files leaves room for; the others stay closed for now."""
        opened, closed, why = self.left_closed.within_limit(openings)
        for opening in closed:
            self._unavailable(opening.tp, why)
            self.roles.replica_offline(opening.tp, opening.record)
        if closed:
            self.log_lifecycle.retry_later()
        return opened

    def may_open(self) -> list[TopicPartition]:
        """Replicas that were left closed and that there are open files for now."""
        return self.left_closed.may_open()

    def _scan(self, directory: LocalDirectory) -> list[FoundLog]:
        try:
            return [] if directory.offline is not None else directory.directory.scan()
        except ResourceExhausted:
            raise  # what was not looked for is not absent
        except MachineError as error:
            self._fail(directory, error)
            return []

    def _several(self, tp: TopicPartition, places: list[LocalDirectory]) -> None:
        """One log is in several directories, as after one was copied by hand, or an old disk came
        back. Which one holds what was acknowledged, nobody knows here: none is opened or removed.
        """
        paths = ", ".join(place.directory.log_path(tp) for place in places)
        why, remedy = "its log is there several times", "move all but the newest elsewhere"
        self._table.fail(tp, None, f"{why}: {remedy}{DETAILS_IN_LOG}")
        error = f"{why}: {paths}; {remedy}"
        log.error("partition offline", topic=tp.topic, partition=tp.partition, error=error)

    @staticmethod
    def _is_deleted(image: Image, tp: TopicPartition, stored: uuid.UUID | None) -> bool:
        """A log under the name of a topic that is there is of another one, which had this name."""
        if stored is None or stored in image.topics_by_id:
            return False
        return not layout.may_be_misread(stored, image.topics[tp.topic].topic_id)

    def _say_missing(self, tp: TopicPartition) -> None:
        for directory in self._table.directories:
            if (end := directory.directory.missing.get(tp)) is not None:
                log.error(
                    "log missing",
                    topic=tp.topic,
                    partition=tp.partition,
                    path=directory.directory.log_path(tp),
                    why=f"its records, up to offset {end} at least, are lost here: it begins anew",
                )

    def _register(self, topic: TopicImage) -> LocalTopic:
        hosted = LocalTopic(topic.name, topic.topic_id, len(topic.partitions))
        self._table.by_name[topic.name.encode()] = hosted
        self._table.by_id[topic.topic_id.bytes] = hosted
        return hosted

    def _emptiest(self) -> LocalDirectory:
        online = [one for one in self._table.directories if one.offline is None]
        if not online:
            raise KafkaStorageError("every log directory is offline")
        return min(online, key=lambda one: one.count)

    async def open_wanted(self, partitions: Iterable[TopicPartition]) -> None:
        """Create the logs among ``partitions`` that the image wants here and that are not open."""
        openings: list[Opening] = []
        configs: dict[str, LogConfig] = {}
        for tp in partitions:
            wanted = self._wanted(tp)
            if wanted is None or tp in self._table.replicas:
                continue
            topic, record = wanted
            closed = self.left_closed.get(tp)
            if closed is None and tp.partition in topic.offline:
                self.roles.replica_offline(tp, record)
                continue
            if tp.topic not in configs:
                configs[tp.topic] = self.settings.config_for(self.image, tp.topic)
            if closed is not None:
                closed.record, closed.config = record, configs[tp.topic]
                openings.append(closed)
                continue
            opening = Opening(tp, topic.topic_id, record, configs[tp.topic])
            if not self._put_back(opening):
                opening.directory = self._emptiest()
            opening.directory.count += 1
            openings.append(opening)
        openings = self._within_limit(openings)
        if openings:
            await self._open_all(openings)
        if COORDINATED & configs.keys():
            self.roles.announce(self.image)

    def _put_back(self, opening: Opening) -> bool:
        """Open the log that was set aside, if there is one."""
        stray = self.strays.pop_wanted((opening.topic_id, opening.tp.partition))
        if stray is None:
            return False
        opening.directory, opening.stray, opening.exists = stray.directory, stray.name, True
        return True

    def _wanted(self, tp: TopicPartition) -> tuple[LocalTopic, PartitionRecord] | None:
        """A partition's topic and state where the image has a replica of it here."""
        record = self.image.partition(tp.topic, tp.partition)
        topic = self._table.by_name.get(tp.topic.encode())
        if record is None or topic is None or record.topic_id != topic.topic_id:
            return None
        return (topic, record) if self._identity.node_id in record.replicas else None

    async def _open_all(self, openings: list[Opening]) -> None:
        """Open or create logs in threads, and serve each as it comes."""
        self.left_closed.begun.update(openings)
        jobs = self._opener.begin(openings, self._table.directories)
        pace, reconfigured = Pace(), self.settings.version
        for several, job in jobs:
            for opening, outcome in zip(several, await job, strict=True):
                self.left_closed.begun.discard(opening)
                wanted = self._wanted(opening.tp)
                if wanted is None or wanted[0].topic_id != opening.topic_id:
                    self._not_wanted(opening, outcome)
                elif isinstance(outcome, BaseException):
                    self._failed_to_open(opening, wanted[1], outcome)
                elif opening.directory.offline is not None:
                    self._unavailable(opening.tp, opening.directory.offline)
                else:
                    if self.settings.version != reconfigured:
                        opening.config = self.settings.config_for(self.image, opening.tp.topic)
                    self._host(opening, wanted[1], *outcome)
                await pace.checkpoint()
        await self.roles.await_elections()

    def _not_wanted(self, opening: Opening, outcome: Opened | Exception) -> None:
        """Its topic was deleted, or its replica moved away, while the log was made."""
        opening.directory.count -= 1
        if isinstance(outcome, MachineError):
            self._fail(opening.directory, outcome)
        elif isinstance(outcome, BaseException):
            log.warning("log not made, and not wanted any more", why=str(outcome))
        if opening.directory.offline is None:
            if isinstance(outcome, ResourceExhausted):
                self.log_lifecycle.remove_unwanted(opening.directory, opening.closed_log)
            elif not isinstance(outcome, BaseException):
                self.log_lifecycle.remove_unwanted(opening.directory, outcome[0])

    def _unavailable(self, tp: TopicPartition, why: str) -> None:
        if (topic := self._table.by_name.get(tp.topic.encode())) is not None:
            topic.offline[tp.partition] = why

    def _failed_to_open(self, opening: Opening, record: PartitionRecord, error: Exception) -> None:
        tp, directory, why = opening.tp, opening.directory, client_message(error)
        if directory.offline is not None:  # which has been told
            self._unavailable(tp, directory.offline)
            return
        is_new_reason = self._table.by_name[tp.topic.encode()].offline.get(tp.partition) != why
        self._unavailable(tp, why)
        self.roles.replica_offline(tp, record)
        if not isinstance(error, KeptError):
            log.exception("partition offline", error, topic=tp.topic)
        elif is_new_reason:
            log.error("partition offline", topic=tp.topic, partition=tp.partition, error=str(error))
        if isinstance(error, MachineError):
            self._fail(directory, error)
        if isinstance(error, ResourceExhausted) and opening.stray is None:
            self.left_closed[tp] = opening
            self.log_lifecycle.retry_later()
            return
        self.left_closed.pop(tp, None)
        if directory.offline is None:
            self._table.fail(tp, directory, why)

    def _host(
        self,
        opening: Opening,
        record: PartitionRecord,
        log_: Log,
        state: CompactionState | None,
        known: ManifestStatus,
    ) -> None:
        """A log is open: it is served from now on, in the role that ``record`` gives it."""
        tp = opening.tp
        high_watermark = opening.directory.directory.high_watermarks.get(tp, log_.log_start_offset)
        partition = Partition(
            log_,
            self._identity.node_id,
            high_watermark=high_watermark,
            applied_end=0 if state is None else state.end_offset,
            lag_time_max_ms=self._config.current.replica_lag_time_max_ms,
            manifests=ManifestCore(
                self._identity.node_id,
                known.held,
                known.applied,
                known.lost,
                known.complete,
                adopted=opening.directory.directory.adopted,
            ),
        )
        hosted = partition.listener = LocalReplica(partition, opening.directory, self)
        hosted.compaction = state
        hosted.manifests = ReplicaManifests(self._manifests, hosted)
        self.settings.apply(hosted, opening.config)
        self.settings.throttle(hosted, throttles_of(self.image, tp.topic))
        self._table.partitions[tp] = partition
        self._table.replicas[tp] = hosted
        opening.directory.directory.serve(tp)
        self.dirty_logs.begin(hosted)
        topic = self._table.by_name[tp.topic.encode()]
        self.left_closed.pop(tp, None)
        topic.offline.pop(tp.partition, None)
        topic.partitions[tp.partition] = hosted
        self.roles.apply(hosted, record)

    # Changes.

    async def apply(self, image: Image, delta: Delta) -> None:
        """Do what an entry of the metadata log asks of this node: roles of open logs change and
        replicas are served no more when this returns; logs come and go after, by
        :attr:`log_lifecycle`.
        """
        self.image = image
        pace = Pace()
        for gone in delta.topics_deleted:
            await self._delete(gone, pace)
        topics = [name for kind, name in delta.configs if kind == ResourceType.TOPIC]
        if len(topics) != len(delta.configs):
            await self.settings.reconfigure(image, None)
        elif topics:
            await self.settings.reconfigure(image, topics)
        for created in delta.topics_created:
            self._register(created)
        for change in delta.partitions:
            await pace.checkpoint()
            try:
                self._change(change, image.index)
            # A bug of ours: the other partitions of the entry change all the same.
            except Exception as error:  # noqa: BLE001
                tp = change.topic_partition
                log.exception(
                    "partition not changed", error, topic=tp.topic, partition=tp.partition
                )

    def _change(self, change: PartitionChange, index: int) -> None:
        me = self._identity.node_id
        tp, before, record = change.topic_partition, change.before, change.after
        hosted = self._table.replicas.get(tp)
        topic = self._table.by_name[tp.topic.encode()]
        topic.count = max(topic.count, tp.partition + 1)
        if hosted is not None and me in record.replicas:
            self.roles.apply(hosted, record)
        elif me not in record.replicas:
            self._remove(topic, tp)
        elif tp.partition in topic.offline:
            self.roles.replica_offline(tp, record)
        else:
            moved = before is not None and before.leader != me == record.leader
            self.log_lifecycle.create(tp, index, leads=moved)

    async def _delete(self, gone: TopicImage, pace: Pace) -> None:
        topic = self._table.by_id.pop(gone.topic_id.bytes, None)
        if topic is None:
            return
        if self._table.by_name.get(gone.name.encode()) is topic:
            del self._table.by_name[gone.name.encode()]
            self._table.forget_failed(topic)
        for record in gone.partitions:
            if self._identity.node_id in record.replicas:
                self._remove(topic, TopicPartition(gone.name, record.partition))
                await pace.checkpoint()

    def _remove(self, topic: LocalTopic, tp: TopicPartition) -> None:
        """A replica is not to be here any more: it is served no more, and its log goes."""
        hosted = topic.partitions.pop(tp.partition, None)
        if (closed := self.left_closed.pop(tp, None)) is not None:
            topic.offline.pop(tp.partition, None)
            if closed not in self.left_closed.begun:
                closed.directory.count -= 1
                unwanted = closed.closed_log
                self.log_lifecycle.remove_unwanted(closed.directory, unwanted, self.image.index)
                return
        if hosted is None:  # what an error did not let open stays offline, and its log as it was
            self.log_lifecycle.forget(tp, self.image.index)
            return
        topic.offline.pop(tp.partition, None)  # its role could not be changed
        self._table.failed.pop(tp, None)
        del self._table.partitions[tp], self._table.replicas[tp]
        self.dirty_logs.end(hosted)
        hosted.directory.count -= 1
        self._gone(tp)
        self.roles.leave(hosted)
        self.log_lifecycle.remove(tp, hosted, self.image.index)

    def metadata_changed(self) -> None:
        """The image moved: who leads here must know brokers that registered at once, not when that
        is acted on. A follower that restarted fetches with its new broker epoch, and is refused
        until its leader knows it.
        """
        brokers = self._metadata.image.brokers
        if brokers is not self._brokers:
            self._brokers = brokers
            self.roles.brokers_changed()

    # The broker's life.

    def suspend(self) -> None:
        """Serve nobody until :meth:`resume`."""
        self.roles.suspend()

    def resume(self, image: Image) -> None:
        """The node may serve: take every role of ``image``, or go on with it; of the image that is
        being acted on, if that is newer.
        """
        self.roles.resume(max(image, self.image, key=lambda known: known.index))

    def led_up_to(self, index: int) -> int:
        """Up to which entry, ``index`` at most, everything that was to be led here is led."""
        return self.log_lifecycle.led_up_to(index)

    async def mark_running(self, broker_epoch: int) -> None:
        """This process is registered with that epoch: what it writes from now on is lost with the
        page cache only, and the marks tell the next one whether that is the same.
        """
        for local in self._table.directories:
            if local.offline is None:
                try:
                    await local.pool.run(local.directory.mark_running, broker_epoch)
                except (MachineError, OSError) as error:
                    self._fail(local, error)

    def replica_logs(self, partitions: Iterable[PartitionKey]) -> list[ReplicaLog]:
        """How long the logs are that the controller asks for."""
        logs = []
        for topic_id, number in partitions:
            topic = self._table.by_id.get(topic_id.bytes)
            hosted = None if topic is None else topic.partitions.get(number)
            record = self._metadata.image.partition(topic_id, number)
            if hosted is None or record is None:
                continue
            partition = hosted.partition
            logs.append(
                ReplicaLog(
                    topic_id,
                    number,
                    record.leader_epoch,
                    partition.latest_epoch,
                    partition.log_end_offset,
                )
            )
        return logs

    async def close_manifests(self) -> None:
        """No generation is put into place any more; what has begun is over when this returns."""
        for hosted in self._table.replicas.values():
            hosted.manifests.abandon()
        for hosted in list(self._table.replicas.values()):
            await hosted.manifests.close()

    # Failure.

    def damaged(self, error: DamagedData) -> None:
        """Say that a log cannot be read; every file once in :data:`NOISE_INTERVAL_S`."""
        now = self._runtime.loop.time()
        if now >= self._damage_logged_until.get(error.path, 0.0):
            self._damage_logged_until = {
                path: until for path, until in self._damage_logged_until.items() if until > now
            }
            self._damage_logged_until[error.path] = now + NOISE_INTERVAL_S
            log.error("a log is damaged", path=error.path, error=str(error))

    # What the partitions here decide and meet.

    def perform(self, hosted: LocalReplica, effect: Effect | Report) -> None:
        """Do what a partition's core decided (:meth:`RoleChanges.perform`)."""
        self.roles.perform(hosted, effect)

    def machine_failed(self, hosted: LocalReplica, error: MachineError) -> None:
        """A replica could not use its files; one that was deleted has none to use."""
        if self._table.replicas.get(hosted.partition.topic_partition) is hosted:
            self._fail(hosted.directory, error)

    def _gone(self, tp: TopicPartition, error: BaseException | None = None) -> None:
        for notify in self.on_gone:
            notify(tp, error)

    def _fail(self, directory: LocalDirectory, error: BaseException) -> None:
        """Take a log directory offline with all its partitions; not for want of descriptors."""
        if directory.offline is not None:
            return
        if isinstance(error, ResourceExhausted):
            self._open_files.exhausted(error)
            return
        directory.offline = client_message(error)
        why = f"its log directory is offline: {directory.offline}"
        self.on_directory_failed()
        if isinstance(error, MachineError):
            directory.directory.fail(error)
        log.error("log directory offline", path=directory.name, error=str(error))
        for other in self._table.directories:
            other.pool.run(other.directory.forget_running)
        for tp, hosted in list(self._table.replicas.items()):
            if hosted.directory is not directory:
                continue
            del self._table.replicas[tp]
            self.dirty_logs.end(hosted)
            del self._table.partitions[tp]
            if (topic := self._table.by_name.get(tp.topic.encode())) is not None:
                topic.partitions.pop(tp.partition, None)
            self._unavailable(tp, why)
            self._gone(tp, error)
            hosted.manifests.abandon()
            hosted.partition.mark_offline(directory.offline)
            self.roles.replica_offline(tp, self._metadata.image.partition(tp.topic, tp.partition))
        not_open = self._table.directory_failed(directory)
        for tp in (*self.left_closed.directory_failed(directory), *not_open):
            self._unavailable(tp, why)
        if all(other.offline is not None for other in self._table.directories):
            self._shutdown.fatal(f"no log directory is left: {error}")
