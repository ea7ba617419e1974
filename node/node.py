"""The node: joins listeners, partitions, metadata, groups and the cleaner in one process.

One thread runs the network and the logs; what blocks (fsync, the metadata log, checks of large
batches, cold reads) runs in pools; cleaning in worker processes. The node acts on the image only
(rule 35): a proposal is durable first, then applied here, then its future is done. Start: take the
addresses, lock the directories, replay the metadata, open the logs, lead, accept, print the ready
line. Stop (TERM, INT): the reverse; checkpoints before the mark of a clean stop.

Long because it is the one place that knows all parts of a node, and the order of their lives.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.controller import decisions
from kept.cluster.metadata.records import Endpoint, MetadataRecord, ResourceType
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_DIRECTORY
from kept.cluster.topic_config import validate_topic
from kept.node.admin.readiness import Readiness
from kept.node.config.core_settings import raft_settings
from kept.node.controller import unclean_elections
from kept.node.controller.proposals import Change, decided
from kept.node.coordinator.groups.coordinator import Coordinator
from kept.node.grpc.lazy_server import LazyServer
from kept.node.http.console.history import History
from kept.node.kafka import api
from kept.node.kafka.fetch_sessions import FetchSessions
from kept.node.kafka.handlers.init_producer_id import ProducerIds
from kept.node.kafka.listener import Listener
from kept.node.metadata import directory_ids, internal_topics
from kept.node.metadata.metadata_log import Metadata
from kept.node.replicas import log_dirs as log_directories
from kept.node.replicas import maintenance
from kept.node.replicas.replica_manager import LocalDirectory, ReplicaManager
from kept.node.runtime.connection_quota import ConnectionQuota
from kept.node.runtime.counters import Counters
from kept.node.runtime.executors import CALL_THREADS, FlushPool
from kept.node.runtime.fd_quota import OpenFiles, check_room
from kept.node.runtime.logging import log
from kept.node.runtime.memory_budget import BudgetShare, MemoryBudget
from kept.node.runtime.uncompiled_kernels import Kernels
from kept.node.runtime.yielding import Slices
from kept.storage import producers
from kept.storage.directory import Checkpoint, previous_broker_epoch, refuse_kafka
from kept.storage.disk import Disk
from kept.storage.errors import (
    MachineError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from kept.storage.layout import encode_uuid
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.node.cluster_link import ClusterLink
    from kept.node.compaction.cleaner import Cleaner
    from kept.node.config.node_config import NodeConfig
    from kept.node.internode.peers import Peers
    from kept.replication.partition import Partition
    from kept.storage.disk import Lock

STOP_TIMEOUT_S: Final = 20.0
METADATA_LOCK: Final = ".lock"


class Node:
    """One node. ``start`` and ``stop`` are called on its loop, in this order, once."""

    def __init__(self, config: NodeConfig, disk: Disk | None = None) -> None:
        self.config = config
        self.disk = disk or Disk()
        self.loop = asyncio.get_running_loop()
        self.slices = Slices(self.loop)
        self.node_id: int = config.node_id
        self.cluster_id = ""
        self._broker_epoch = -1
        self.metadata = Metadata(self.loop)
        self.cluster_link: ClusterLink | None = None
        """This node among others; None for a lone one."""
        self.budget = MemoryBudget(config.inflight_max_bytes, config.inflight_max_bytes_per_ip)
        self.inflating = BudgetShare(self.budget, config.inflating_max_bytes)
        """What threads inflate batches into."""
        producers.ROOM.limit = config.producers_max
        self.open_files = OpenFiles(self)
        self.replica_manager = ReplicaManager(self)
        self.client_connections = ConnectionQuota()
        self.node_connections = ConnectionQuota()
        """Those of the listener between nodes: clients' never count among them."""
        self.listeners = [Listener(self, address) for address in config.listeners]
        self.node_listener: Listener | None = None
        if config.node_listener is not None:
            self.node_listener = Listener(self, config.node_listener, between_nodes=True)
        self.fetch_sessions = FetchSessions(
            lambda: int.from_bytes(os.urandom(4), "big") & 0x7FFFFFFF,
            config.max_incremental_fetch_session_cache_slots,
            config.fetch_sessions_max_partitions,
        )
        self.producer_ids = ProducerIds(self)
        self.groups = Coordinator(self)
        self._cleaner: Cleaner | None = None
        self.dirty_history = History(self)
        self._warming: asyncio.Task[None] | None = None
        self.metrics = Counters(self)
        self.grpc_front = LazyServer(self)
        self.serve_until = float("inf")
        """Leadership is not acted on after this moment, by ``perf_counter``, without
        :meth:`check_stalled`: this process may have stood still, and another node may lead."""
        self.kernels = Kernels()
        self.ready = False
        self.readiness = Readiness(self.node_id)
        self.reads_in_memory = True
        """The file system can't say whether a read would block (tmpfs): small reads go ahead."""
        self.failure = ""
        self.stopped = asyncio.Event()
        self._pool = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="call")
        self._proposals = asyncio.Lock()
        self._timers = maintenance.Maintenance(self)
        self._metadata_lock: Lock | None = None
        self._verifying_metadata = False
        self._broken: log_directories.Broken = {}

    # What handlers use.

    @property
    def image(self) -> Image:
        """The metadata as applied here."""
        return self.metadata.image

    @property
    def is_broker(self) -> bool:
        """Whether it holds partitions; a controller alone has no log directories."""
        return "broker" in self.config.process_roles

    @property
    def broker_epoch(self) -> int:
        """Epoch of this node's registration; -1 before it."""
        return self._broker_epoch if self.cluster_link is None else self.cluster_link.broker_epoch

    @property
    def peers(self) -> Peers:
        """The other nodes. A lone node has none, and nobody asks."""
        assert self.cluster_link is not None
        return self.cluster_link.peers

    @property
    def partitions(self) -> dict[TopicPartition, Partition]:
        """The partitions that this node hosts."""
        return self.replica_manager.partitions

    @property
    def log_directories(self) -> list[LocalDirectory]:
        """The entries of ``log.dirs``."""
        return self.replica_manager.directories

    @property
    def cleaner(self) -> Cleaner:
        """The cleaner; the first to ask has it imported and started."""
        if self._cleaner is None:
            from kept.node.compaction.cleaner import Cleaner

            self._cleaner = Cleaner(self)
            self._cleaner.start()
        return self._cleaner

    @property
    def connection_count(self) -> int:
        """Connections that are open, of clients and of nodes, in every protocol."""
        return self.client_connections.count + self.node_connections.count

    def now_ms(self) -> int:
        """Wall clock."""
        return int(time.time() * 1000)

    def check_stalled(self) -> None:
        """It is later than ``serve_until``: suspend serving if this process stood still."""
        if self.cluster_link is not None and self.cluster_link.broker_lifecycle is not None:
            self.cluster_link.broker_lifecycle.check_stalled()

    def partition(self, tp: TopicPartition) -> Partition:
        """A partition that is served here.

        Raises UnknownTopicOrPartition, KafkaStorageError (its directory is offline).
        """
        found = self.replica_manager.partitions.get(tp)
        if found is not None:
            return found
        topic = self.replica_manager.by_name.get(tp.topic.encode())
        if topic is not None:
            raise topic.absent(tp.partition)
        raise UnknownTopicOrPartition(f"no topic {tp.topic!r}")

    def in_pool(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run something that blocks in a thread."""
        return self.loop.run_in_executor(self._pool, function, *args)

    def propose(self, change: Change) -> asyncio.Future[int]:
        """Make records true; done when they are durable, applied, and acted on here, down to the
        logs that they create or delete.

        ``change`` is the records, or a function from the image to them: proposals queue, and such a
        function decides when its turn has come, on the image it will change. The future raises what
        the function raises, and MachineError.
        """
        return self.loop.create_task(self._propose(change))

    async def _propose(self, change: Change) -> int:
        if self.cluster_link is not None:
            index = await self.cluster_link.controller.decide(change)
        else:
            async with self._proposals:
                records = await decided(change, lambda: self.metadata.image, self.slices)
                if not records:
                    return self.image.index
                check_room(self, self.image, records)
                index = await self.metadata.propose(records)
        await self.metadata.acted(index)
        await self.replica_manager.changes.done(index)
        return index

    async def _act_on(self, image: Image, delta: Delta) -> None:
        if any(kind == ResourceType.BROKER for kind, _ in delta.configs):
            self._reload_broker_settings()
        self.metrics.cluster.acting_on(image, delta, self.node_id)
        unclean_elections.tell(self, image, delta)
        await self.replica_manager.apply(image, delta)
        self.groups.metadata_changed(image, delta)
        if self.cluster_link is not None:
            self.cluster_link.acted_on(image)
        self.readiness.on_move()

    def _reload_broker_settings(self) -> None:
        own = self.image.config(ResourceType.BROKER, str(self.node_id))
        default = self.image.config(ResourceType.BROKER, "")
        if own or default or self.config.dynamic_own or self.config.dynamic_default:
            self.config = self.config.with_dynamic(own, default)
            self.budget.resize(
                self.config.inflight_max_bytes, self.config.inflight_max_bytes_per_ip
            )
            self.inflating.limit_bytes = self.config.inflating_max_bytes
        self.replica_manager.limit_replication()

    def new_id(self) -> uuid.UUID:
        """A random id whose text does not begin with a dash, as Kafka's."""
        while True:
            found = uuid.uuid4()
            if not encode_uuid(found).startswith("-"):
                return found

    async def create_topic(self, name: str, **fields: Any) -> None:
        """Create a topic with the node's defaults; fields are those of ``CreateTopic``."""
        if self.cluster_link is not None:
            await self.cluster_link.create_topic(name, fields)
            return

        def decide(image: Image) -> list[MetadataRecord]:
            request = decisions.CreateTopic(name, self.new_id(), **fields)
            return decisions.create_topic(image, request, self.topic_defaults, self._validate)

        await self.propose(decide)

    @property
    def topic_defaults(self) -> decisions.TopicDefaults:
        """``num.partitions`` and ``default.replication.factor``."""
        return decisions.TopicDefaults(
            self.config.num_partitions, self.config.default_replication_factor
        )

    def _validate(self, configs: Any) -> None:
        validate_topic(configs, self.config.topic_defaults())

    async def _create_internal(self, name: str) -> None:
        if name in self.image.topics:
            return
        defaults = internal_topics.defaults(self.image, self.config)
        try:
            await self.create_topic(
                name,
                num_partitions=defaults.num_partitions,
                replication_factor=defaults.replication_factor,
                configs=internal_topics.settings(self.config, {}),
            )
        except TopicAlreadyExists:
            return

    def create_internal_topic(self, name: str) -> asyncio.Future[None]:
        """Create an internal topic unless it exists; done when its partitions are served."""
        return self.loop.create_task(self._create_internal(name))

    def endpoints(self, listener_name: str) -> tuple[str, int]:
        """Where clients of a listener reach this node."""
        for listener, advertised in zip(
            self.listeners, self.config.advertised_listeners, strict=False
        ):
            if listener.name == listener_name:
                return advertised.host, advertised.port or listener.port
        if self.listeners:
            return self.endpoints(self.listeners[0].name)
        between = self.node_endpoint()
        assert between is not None, "a controller alone listens to other nodes"
        return between

    def node_endpoint(self) -> tuple[str, int] | None:
        """Where other nodes reach this one; None for a lone node."""
        advertised, listener = self.config.advertised_node_listener, self.node_listener
        if advertised is None or listener is None:
            return None
        return advertised.host, advertised.port or listener.port

    def peer_addresses(self, node_id: int) -> tuple[tuple[str, int], ...]:
        """Where another node's listener for nodes may be: as it registered, as a voter, as the
        settings say. Metadata may be old: whole clusters move between two starts.
        """
        if self.config.node_listener is None:
            return ()
        broker = self.image.brokers.get(node_id)
        endpoint = None if broker is None else broker.endpoint(self.config.node_listener.name)
        places = [] if endpoint is None else [(endpoint.host, endpoint.port)]
        for voters in (self.metadata.member.voters, self.config.controller_quorum_voters):
            places += [(v.host, v.port) for v in voters if v.node_id == node_id and v.host]
        return tuple(places)

    def peer_address(self, node_id: int) -> tuple[str, int] | None:
        """The likeliest of :meth:`peer_addresses`; None: none is known."""
        return next(iter(self.peer_addresses(node_id)), None)

    def broker_endpoint(self, broker_id: int, listener_name: str) -> tuple[str, int] | None:
        """Where clients of a listener reach any broker; None when it is not known there."""
        if broker_id == self.node_id:
            return self.endpoints(listener_name)
        broker = self.image.brokers.get(broker_id)
        endpoint = None if broker is None else broker.endpoint(listener_name)
        return None if endpoint is None else (endpoint.host, endpoint.port)

    def is_offline(self, topic: str, partition: int, replica: int) -> bool:
        """Whether a replica's directory failed."""
        if replica != self.node_id:
            return False
        hosted = self.replica_manager.by_name.get(topic.encode())
        return hosted is not None and partition in hosted.offline

    def machine_failed(self, error: MachineError) -> None:
        """A file call failed: its log directory goes offline."""
        directory = self.replica_manager.directory_of(error)
        if directory is not None:
            self.replica_manager.fail(directory, error)
        else:
            log.error("disk error", path=error.path, error=str(error))

    def look_for_metadata(self) -> None:
        """End this node when the metadata directory was removed or replaced under it: what it
        promised to the other voters would be forgotten.
        """
        lock = self._metadata_lock
        if lock is None or self._verifying_metadata:
            return

        def looked(finished: asyncio.Future[Any]) -> None:
            self._verifying_metadata = False
            if (error := finished.exception()) is not None and not self.stopped.is_set():
                self.fatal(f"the metadata log failed: {error}")

        self._verifying_metadata = True
        self.in_pool(lock.verify).add_done_callback(looked)

    def partition_gone(self, tp: TopicPartition, error: BaseException | None = None) -> None:
        """A partition was deleted, or its directory failed (``error``): tell who works on it."""
        if self._cleaner is not None:
            self._cleaner.forget(tp, error)
        self.groups.partition_gone(tp)

    def fatal(self, why: str) -> None:
        """Nothing can be served any more: end with exit code 1, and say why once more."""
        log.error("node stops", reason=why)
        self.failure = self.failure or why
        self.stopped.set()

    # Life.

    async def start(self) -> None:
        """Open everything and accept clients. Raises KeptError; nothing is left locked then."""
        self.kernels.warn()
        self.open_files.share()
        try:
            for listener in self.all_listeners():
                listener.bind()
            self._open_metadata()
            if self.node_listener is not None:
                await self._meet(self.node_listener)
            self.cluster_id = self.image.cluster_id or ""
            self._reload_broker_settings()
            if self.is_broker:
                self._open_directories()
            if self.cluster_link is None:
                self._register()
                await log_directories.mark_running(self, self.broker_epoch)
                self.replica_manager.roles.serving = True
            await self.replica_manager.start(self.metadata.begin())
            self.metadata.act(self._act_on)
            self.groups.start()
            if self.cluster_link is not None and self.is_broker:
                await self.cluster_link.register(self._endpoints(), self._clean_epoch())
            for listener in self.listeners:
                await listener.start()
            self._timers.start()
            self.ready = True
            self.readiness.on_move()
            self._warming = self.loop.create_task(self._warm_up())
        except BaseException:
            self._timers.stop()
            for listener in self.all_listeners():
                listener.stop_accepting()
            await self._leave_cluster()
            await self.replica_manager.changes.stop()
            self._release()
            raise

    def all_listeners(self) -> list[Listener]:
        """Those of clients, and the one between nodes."""
        return [*self.listeners, *([] if self.node_listener is None else [self.node_listener])]

    async def _meet(self, node_listener: Listener) -> None:
        """Speak with the other nodes until the cluster is known."""
        from kept.node.cluster_link import ClusterLink

        self.cluster_link = ClusterLink(self)
        await self.cluster_link.start()
        await node_listener.start()
        self._timers.watch_connections()
        await self.cluster_link.cluster_id()

    async def _leave_cluster(self) -> None:
        if self.cluster_link is not None:
            await self.cluster_link.stop()
        await self.metadata.close()

    async def _warm_up(self) -> None:
        """Import what is needed soon but not to be ready; then the cleaner looks for work."""
        await self.in_pool(api.preload)
        if not self.stopped.is_set():
            self.cleaner  # noqa: B018 - starts it
            self.dirty_history.start()

    async def settled(self) -> None:
        """Wait until nothing is left to import."""
        if self._warming is not None:
            await self._warming

    def _open_metadata(self) -> None:
        path = self.config.metadata_log_dir
        log_dirs = self.config.log_dirs if self.is_broker else ()
        self._broken = log_directories.look(self.disk, log_dirs)
        refuse_kafka(self.disk, path)
        directory_ids.refuse_foreign(
            self.disk,
            path,
            [one for one in log_dirs if one not in self._broken],
            node_id=self.node_id,
            alone=len(self.config.controller_quorum_voters) <= 1,
        )
        self.disk.mkdir(path)
        self._metadata_lock = self.disk.lock(f"{path}/{METADATA_LOCK}")
        self.metadata.on_failure = self.fatal
        self.metadata.open(
            path,
            self.disk,
            node_id=self.node_id,
            directory_id=self.new_id(),
            voters=tuple(
                Voter(voter.node_id, NO_DIRECTORY, voter.host, voter.port)
                for voter in self.config.controller_quorum_voters
            ),
            observer="controller" not in self.config.process_roles,
            settings=raft_settings(self.config),
            snapshot_after_bytes=self.config.metadata_log_max_record_bytes_between_snapshots,
        )

    def _open_directories(self) -> None:
        log_directories.open_all(self, self._broken, self._flush_pool)
        for one in self.log_directories:
            if one.offline is None:
                self._in_thread(one.directory.purge_found)

    def _in_thread(self, function: Callable[[], Any]) -> None:
        def done(finished: asyncio.Future[Any]) -> None:
            error = finished.exception()
            if isinstance(error, MachineError):
                self.machine_failed(error)
            elif error is not None:
                log.exception("background job failed", error)

        self.in_pool(function).add_done_callback(done)

    def _flush_pool(self, number: int) -> FlushPool:
        def failed(error: MachineError) -> None:
            self.replica_manager.fail(self.log_directories[number], error)

        def observe(seconds: float) -> None:
            self.metrics.fsync(seconds)

        return FlushPool(self.loop, self.config.fsync_threads, str(number), failed, observe)

    def _endpoints(self) -> tuple[Endpoint, ...]:
        found = [
            Endpoint(listener.name, listener.address.protocol, *self.endpoints(listener.name))
            for listener in self.listeners
        ]
        advertised, address = self.config.advertised_node_listener, self.node_endpoint()
        if advertised is not None and address is not None:
            found.append(Endpoint(advertised.name, advertised.protocol, *address))
        return tuple(found)

    def _clean_epoch(self) -> int:
        return previous_broker_epoch(one.directory for one in self.log_directories)

    def _register(self) -> None:
        """A lone node takes part at once."""
        registration = decisions.Registration(
            self.node_id,
            uuid.uuid4(),
            self._endpoints(),
            self.config.broker_rack,
            self._clean_epoch(),
        )
        records = decisions.register_broker(self.image, registration, fenced=False)
        self.metadata.propose_now(records)
        self._broker_epoch = self.image.brokers[self.node_id].broker_epoch

    async def stop(self) -> None:
        """Stop cleanly; what is acknowledged is durable when this returns."""
        self.ready = False
        self.readiness.on_move()
        if self.cluster_link is not None and not self.failure:
            await self.cluster_link.leave()
        self._timers.stop()
        for listener in self.all_listeners():
            listener.stop_accepting()
        if self._warming is not None:
            await self._warming
        await self.grpc_front.stop()
        await self.dirty_history.stop()
        if self._cleaner is not None:
            await self._cleaner.stop()
        await self.replica_manager.close_manifests()
        await self.groups.stop()
        async with self._proposals:
            for listener in self.all_listeners():
                listener.close_connections()
            await self._leave_cluster()
            await self.replica_manager.changes.stop()
            for hosted in self.replica_manager.hosted.values():
                hosted.partition.resign()
            for directory in self.log_directories:
                await directory.pool.drain()
                await self._close_directory(directory)
        self._release()

    async def _close_directory(self, directory: LocalDirectory) -> None:
        """Flush and close its logs, write its checkpoints, leave the mark."""
        mine = [h for h in self.replica_manager.hosted.values() if h.directory is directory]
        clean = directory.offline is None
        if clean:
            closing = [directory.pool.run(h.partition.log.close, self.now_ms()) for h in mine]
            for outcome in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    clean = False
                    log.error("log not closed", path=directory.name, error=str(outcome))
        try:
            if clean:
                for kind, value in (
                    (Checkpoint.HIGH_WATERMARKS, maintenance.high_watermark),
                    (Checkpoint.RECOVERY_POINTS, maintenance.recovery_point),
                    (Checkpoint.LOG_STARTS, maintenance.log_start),
                ):
                    offsets = maintenance.collect(self, directory, value)
                    directory.directory.write_checkpoints(kind, offsets)
            directory.directory.close(clean=clean, broker_epoch=self.broker_epoch)
        except MachineError as error:
            log.error("directory not closed cleanly", path=directory.name, error=str(error))

    def _release(self) -> None:
        for directory in self.log_directories:
            directory.pool.close()
            directory.directory.close(clean=False)
        if self._metadata_lock is not None:
            self._metadata_lock.release()
            self._metadata_lock = None
        self._pool.shutdown(wait=True)
