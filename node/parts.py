"""What a node consists of, built from the bottom up: each part gets what it works with, no more.

``docs/architecture.md`` draws the same as a picture. The order of the rooms is that of the imports:
a part is handed parts of rooms below its own. Where one below has to tell one above, the one above
subscribes (:meth:`NodeParts._subscribe`).

Long because it is the one place that knows all of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kept.node.admin.history.activity_history import ActivityHistory
from kept.node.admin.history.dirty_history import DirtyHistory
from kept.node.admin.readiness import Readiness
from kept.node.compaction.context import CleanerContext
from kept.node.compaction.dry_run import DryRuns
from kept.node.compaction.lazy_cleaner import LazyCleaner
from kept.node.config.checks import parse_super_users
from kept.node.config.live_config import LiveConfig
from kept.node.config.sasl import SASL_PROTOCOLS
from kept.node.config.security_checks import is_secured
from kept.node.controller.controller import Controller
from kept.node.coordinator.groups.coordinator import GroupCoordinator
from kept.node.coordinator.producer_ids import ProducerIds
from kept.node.coordinator.transactions.connection_order import ConnectionOrdinals
from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
from kept.node.coordinator.transactions.marker_channel import MarkerChannel
from kept.node.coordinator.transactions.marker_writer import MarkerWriter
from kept.node.coordinator.transactions.verifier import Verifier
from kept.node.grpc.lazy_server import LazyServer
from kept.node.http.lazy_server import LazyHttpServer
from kept.node.internode.hello import PREFACE
from kept.node.internode.peers import Peers
from kept.node.kafka.connection import ServerContext
from kept.node.kafka.fetch_sessions import FetchSessions
from kept.node.kafka.forwarding_manager import ForwardingManager
from kept.node.kafka.handlers.records.batch_checks import CheckResources
from kept.node.kafka.handlers.records.delayed_produce import DelayedProduceContext
from kept.node.kafka.handlers.records.fetch import FetchHandler, FetchResources
from kept.node.kafka.handlers.records.leader_hints import LeaderHints
from kept.node.kafka.handlers.records.produce import ProduceHandler
from kept.node.kafka.handlers.records.woken_fetches import WokenFetches
from kept.node.kafka.handlers.transactions.transactional_produce import TransactionalBatches
from kept.node.kafka.listener import HTTP2, HTTP_METHODS, HandedOver, Listener
from kept.node.kafka.metadata_changes import MetadataChanges
from kept.node.kafka.node_requests import NodeRequests
from kept.node.kafka.request_handlers import Collaborators, RequestHandlers
from kept.node.kafka.topic_creation import TopicCreation
from kept.node.metadata.address_book import AddressBook
from kept.node.metadata.broker_lifecycle import BrokerLifecycleManager
from kept.node.metadata.cluster_link import ClusterLink
from kept.node.metadata.failure_detector import FailureDetector
from kept.node.metadata.leadership_barrier import LeadershipBarrier
from kept.node.metadata.metadata_directory import MetadataDirectory
from kept.node.metadata.metadata_log import MetadataLog
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.metadata.serving_lease import ServingLease
from kept.node.metrics.lazy_metrics import LazyMetrics
from kept.node.replicas.alter_partition import AlterPartitionQueue
from kept.node.replicas.fetch_loop import FetchContext, Fetchers
from kept.node.replicas.log_dir_failures import LogDirFailureChannel
from kept.node.replicas.log_dirs import LogDirs
from kept.node.replicas.maintenance import DISK_TICK_MS, Maintenance
from kept.node.replicas.manifests.context import ManifestContext
from kept.node.replicas.manifests.notify import ManifestNotifier
from kept.node.replicas.manifests.replicate import ManifestReplicator, PullServer
from kept.node.replicas.replica_manager import ReplicaManager
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.replicas.role_changes import RoleChanges
from kept.node.runtime.connection_quota import ConnectionQuota
from kept.node.runtime.counters import Counters
from kept.node.runtime.fd_quota import OpenFiles
from kept.node.runtime.memory_budget import NodeMemory
from kept.node.runtime.runtime import Runtime
from kept.node.runtime.shutdown import Shutdown
from kept.node.runtime.uncompiled_kernels import Kernels
from kept.node.security.audit import AuditLog
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.client_quotas import ClientQuotas
from kept.node.security.connection_rates import ConnectionRates
from kept.node.security.logins import Logins
from kept.node.security.oauth.token_checks import TokenChecks, token_settings
from kept.node.security.session import ALLOW_ALL
from kept.node.security.tls_reload import TlsReload
from kept.replication.quota import ReplicationQuotas
from kept.storage.disk import Disk
from kept.storage.producers.producer_states import ProducerQuota

if TYPE_CHECKING:
    from kept.cluster.controller.brokers import RegisterRequest
    from kept.node.admin.services import AdminServices
    from kept.node.config.listeners import ListenerConfig
    from kept.node.config.node_config import NodeConfig
    from kept.node.kafka.sasl_handshake import SaslHandshake
    from kept.node.metrics.exposition import NodeMetrics
    from kept.node.security.listener_tls import ListenerTls
    from kept.node.security.session import Authorizer, Session
    from kept.storage.types import TopicPartition

IDLE_TICK_MS: Final = 10_000


def idle_check_ms(config: NodeConfig) -> int:
    """How often connections are looked at that may be idle."""
    return min(max(config.connections_max_idle_ms // 4, 100), IDLE_TICK_MS)


def _listener_tls(
    config: NodeConfig, address: ListenerConfig, *, between_nodes: bool = False
) -> ListenerTls:
    """TLS of a listener; its modules are imported only where one speaks it."""
    from kept.node.security.listener_tls import ListenerTls

    return ListenerTls(config, address, between_nodes=between_nodes)


def _sasl_handshake() -> type[SaslHandshake]:
    """Imported only where clients of a listener log in."""
    from kept.node.kafka.sasl_handshake import SaslHandshake

    return SaslHandshake


class NodeParts:
    """The parts of one node. Built on the node's loop; nothing is opened or started yet."""

    def __init__(self, config: NodeConfig, runtime: Runtime | None = None) -> None:
        self.live_config = LiveConfig(config)
        self.runtime = runtime or Runtime(Disk())
        self.shutdown = Shutdown()
        self.counters = Counters()
        self.kernels = Kernels()
        self.memory = NodeMemory(
            in_flight_bytes=config.inflight_max_bytes,
            in_flight_bytes_per_network=config.inflight_max_bytes_per_ip,
            inflating_bytes=config.inflating_max_bytes,
            waiting_bytes=config.waiting_max_bytes,
            responses_bytes=config.responses_max_bytes,
        )
        self.producer_quota = ProducerQuota(config.producers_max)
        self.client_quotas = ClientQuotas(
            config.quota_window_num,
            1000 * config.quota_window_size_seconds,
            config.controller_quota_window_num,
            1000 * config.controller_quota_window_size_seconds,
        )
        self.connection_rates = ConnectionRates(
            config.quota_window_num, 1000 * config.quota_window_size_seconds
        )
        self.audit = AuditLog(
            self.runtime,
            config.node_id,
            config.audit if is_secured(config) else "off",
            config.audit_path,
        )
        node = config.node_listener
        self.node_tls = (
            _listener_tls(config, node, between_nodes=True) if node and node.is_tls else None
        )
        """TLS of the listener between nodes, and of this node's connections to others'."""
        self._acls: object = None
        self._build_cluster(config)
        self.logins = Logins(
            self.runtime.loop,
            self.live_config,
            self.counters,
            lambda: self.metadata.image,
            TokenChecks(self.runtime, token_settings(config)),
        )
        self.authorizer = self._new_authorizer(config)
        self._build_replicas(config)
        self._build_services(config)
        self._subscribe()

    def _new_authorizer(self, config: NodeConfig) -> Authorizer:
        if not config.authorizer_class_name:
            return ALLOW_ALL
        return StandardAuthorizer(
            lambda: self.metadata.image.acl_index,
            parse_super_users(config.super_users),
            self.audit,
            allow_if_no_acl=config.allow_everyone_if_no_acl_found,
        )

    def _build_cluster(self, config: NodeConfig) -> None:
        """What it is in its cluster: identity, metadata log, controller."""
        runtime, live, counters = self.runtime, self.live_config, self.counters
        self.identity = NodeIdentity(config.node_id)
        self.metadata = MetadataLog(runtime.loop, counters)
        self.metadata_directory = MetadataDirectory(runtime, self.shutdown)
        self.addresses = AddressBook(live, self.metadata, self.node_tls)
        self.incarnation = uuid.uuid4()
        self.peers = Peers(
            config.node_id,
            "",
            self.incarnation,
            runtime.loop,
            self.addresses.node_addresses,
            tls=self.addresses.node_tls,
        )
        self.lease = ServingLease()
        self.detector = FailureDetector(runtime, self.metadata, self.peers, counters)
        self.barrier = LeadershipBarrier(
            runtime=runtime,
            metadata=self.metadata,
            identity=self.identity,
            peers=self.peers,
            alone=config.alone,
        )
        self.cluster_link = ClusterLink(
            runtime=runtime,
            config=live,
            metadata=self.metadata,
            identity=self.identity,
            addresses=self.addresses,
            peers=self.peers,
            detector=self.detector,
            counters=counters,
            new_lifecycle=self._new_lifecycle,
        )
        self.table = ReplicaTable()
        self.client_connections = ConnectionQuota()
        self.node_connections = ConnectionQuota()
        """Those of the listener between nodes: clients' never count among them."""
        self.open_files = OpenFiles(
            runtime,
            config.node_id,
            self.table.replicas,
            self.client_connections,
            self.node_connections,
        )
        self.controller = Controller(
            runtime=runtime,
            config=live,
            metadata=self.metadata,
            identity=self.identity,
            peers=self.peers,
            addresses=self.addresses,
            open_files=self.open_files,
            counters=counters,
        )

    def _new_lifecycle(self, registration: RegisterRequest) -> BrokerLifecycleManager:
        return BrokerLifecycleManager(
            runtime=self.runtime,
            config=self.live_config,
            metadata=self.metadata,
            identity=self.identity,
            peers=self.peers,
            lease=self.lease,
            shutdown=self.shutdown,
            replicas=self.replicas,
            registration=registration,
        )

    def _build_replicas(self, config: NodeConfig) -> None:
        """What it holds: logs, their replication and their compaction."""
        runtime, live, counters = self.runtime, self.live_config, self.counters
        identity, metadata, table = self.identity, self.metadata, self.table
        self.failures = LogDirFailureChannel(table)
        self.log_dirs = LogDirs(
            runtime=runtime,
            config=config,
            identity=identity,
            table=table,
            failures=self.failures,
            counters=counters,
            producer_quota=self.producer_quota,
        )
        self.quotas = ReplicationQuotas()
        self.cleaner = LazyCleaner(
            CleanerContext(runtime, live, table, self.failures, counters, self.kernels)
        )
        self.fetchers = Fetchers(
            FetchContext(
                runtime, live, identity, self.addresses, self.detector, self.quotas.follower
            )
        )
        self.alter_partition = AlterPartitionQueue(
            runtime=runtime, config=live, metadata=metadata, identity=identity, peers=self.peers
        )
        self.replicator = ManifestReplicator(runtime, identity, table, self.peers)
        self.notifier = ManifestNotifier(runtime, identity, table, self.peers)
        self.roles = RoleChanges(
            runtime=runtime,
            metadata=metadata,
            identity=identity,
            table=table,
            failures=self.failures,
            counters=counters,
            fetchers=self.fetchers,
            alter_partition=self.alter_partition,
            notifier=self.notifier,
        )
        self.replicas = ReplicaManager(
            runtime=runtime,
            config=live,
            metadata=metadata,
            identity=identity,
            table=table,
            failures=self.failures,
            quotas=self.quotas,
            roles=self.roles,
            manifests=self._manifest_context(config),
            open_files=self.open_files,
            shutdown=self.shutdown,
        )

    def _manifest_context(self, config: NodeConfig) -> ManifestContext:
        return ManifestContext(
            runtime=self.runtime,
            config=self.live_config,
            metadata=self.metadata,
            identity=self.identity,
            table=self.table,
            failures=self.failures,
            counters=self.counters,
            kernels=self.kernels,
            fetchers=self.fetchers,
            alter_partition=self.alter_partition,
            replicator=self.replicator,
            notifier=self.notifier,
            scheduler=self.cleaner,
            appliers=asyncio.Semaphore(max(config.log_cleaner_threads, 1)),
        )

    def _build_services(self, config: NodeConfig) -> None:
        """Whom it serves: clients, other nodes, operators."""
        live = self.live_config
        self.groups = GroupCoordinator(
            runtime=self.runtime,
            config=live,
            metadata=self.metadata,
            identity=self.identity,
            table=self.table,
            barrier=self.barrier,
        )
        self._build_transactions()
        self.fetch_sessions = FetchSessions(
            lambda: int.from_bytes(os.urandom(4), "big") & 0x7FFFFFFF,
            config.max_incremental_fetch_session_cache_slots,
            config.fetch_sessions_max_partitions,
        )
        logs = self.replicas.log_lifecycle
        self.forwarding = ForwardingManager(self.runtime, self.metadata, self.peers, logs)
        self.metadata_changes = MetadataChanges(self.controller, self.metadata, logs)
        self._build_handlers()
        self.dirty_history = DirtyHistory(self.runtime, self.table)
        self.activity_history = ActivityHistory(
            runtime=self.runtime,
            metadata=self.metadata,
            identity=self.identity,
            table=self.table,
            counters=self.counters,
            groups=self.groups,
            ends=self._high_watermarks,
        )
        self.readiness = Readiness(config.node_id)
        self.metrics = LazyMetrics(self.runtime, self._new_metrics)
        self.http = LazyHttpServer(
            self.runtime, live, self.memory.in_flight, self.metrics, lambda: self.admin
        )
        self.grpc = LazyServer(self.runtime, live, lambda: self.admin)
        self._build_listeners(config)
        self.maintenance = Maintenance(
            runtime=self.runtime,
            config=live,
            table=self.table,
            dirty_logs=self.replicas.dirty_logs,
            failures=self.failures,
            lease=self.lease,
            also={
                "metadata directory": (DISK_TICK_MS, self.metadata_directory.verify),
                "idle connections": (idle_check_ms(config), self._close_idle_connections),
            },
        )

    def _build_transactions(self) -> None:
        runtime, live, identity = self.runtime, self.live_config, self.identity
        self.marker_requests, self.verifying_requests = (
            NodeRequests(purpose, live, identity, self.incarnation, self.addresses)
            for purpose in ("markers", "verify")
        )
        self.producer_ids = ProducerIds(runtime, self.metadata, identity, self.peers)
        self.ordinals = ConnectionOrdinals()
        self.marker_writer = MarkerWriter(
            runtime, identity, self.table, self.barrier, self.groups, self.ordinals
        )
        self.transactions = TransactionCoordinator(
            runtime=runtime,
            config=live,
            metadata=self.metadata,
            identity=identity,
            table=self.table,
            barrier=self.barrier,
            cluster_link=self.cluster_link,
            producer_ids=self.producer_ids,
            markers=MarkerChannel(
                runtime,
                self.metadata,
                identity,
                self.barrier,
                self.marker_requests,
                self.marker_writer,
            ),
            ordinals=self.ordinals,
        )
        self.verifier = Verifier(runtime, live, self.transactions, self.verifying_requests)

    @cached_property
    def admin(self) -> AdminServices:
        """The operator's services: imported and built when they are first needed."""
        from kept.node.admin.services import AdminServices

        return AdminServices(
            audit=self.audit,
            quotas=self.client_quotas,
            runtime=self.runtime,
            config=self.live_config,
            counters=self.counters,
            kernels=self.kernels,
            inflating=self.memory.inflating,
            identity=self.identity,
            metadata=self.metadata,
            addresses=self.addresses,
            peers=self.peers,
            forwarding=self.forwarding,
            readiness=self.readiness,
            table=self.table,
            replicas=self.replicas,
            cleaner=self.cleaner,
            dry_runs=DryRuns(),
            history=self.dirty_history,
            activity_history=self.activity_history,
            transactions=self.transactions,
            connect_here=self._connect_here,
        )

    def _new_metrics(self) -> NodeMetrics:
        """Imported and built in a thread at the first scrape."""
        from kept.node.metrics.definitions import Sources
        from kept.node.metrics.exposition import NodeMetrics
        from kept.node.metrics.survey import Surveyor

        surveyor = Surveyor(
            config=self.live_config,
            identity=self.identity,
            metadata=self.metadata,
            table=self.table,
            compaction=self.admin.compaction_view,
            groups=self.groups,
            transactions=self.transactions,
        )
        sources = Sources(
            counters=self.counters,
            kernels=self.kernels,
            health=self.admin.health,
            open_files=self.open_files,
            memory=self.memory,
            metadata=self.metadata,
            transactions=self.transactions,
            verifier=self.verifier,
            tls_reload=self.tls_reload,
            tokens=self.logins.tokens,
        )
        return NodeMetrics(surveyor, self.admin.log_directories, sources)

    def _high_watermarks(
        self, tps: Iterable[TopicPartition]
    ) -> Awaitable[Mapping[TopicPartition, int]]:
        return self.admin.high_watermarks(tps)

    def _connect_here(self, session: Session | None) -> Awaitable[socket.socket]:
        return self.listeners[0].connect_here(session)

    def _build_handlers(self) -> None:
        """What serves requests in Kafka's protocol."""
        runtime, live, metadata, table = self.runtime, self.live_config, self.metadata, self.table
        self.topics = TopicCreation(live, metadata, self.forwarding, self.open_files)
        collaborators = Collaborators(
            runtime=runtime,
            config=live,
            open_files=self.open_files,
            metadata=metadata,
            addresses=self.addresses,
            cluster_link=self.cluster_link,
            barrier=self.barrier,
            detector=self.detector,
            controller=self.controller,
            table=table,
            fetch_sessions=self.fetch_sessions,
            groups=self.groups,
            transactions=self.transactions,
            marker_writer=self.marker_writer,
            verifier=self.verifier,
            producer_ids=self.producer_ids,
            metadata_changes=self.metadata_changes,
            topics=self.topics,
            counters=self.counters,
            logins=self.logins,
            quotas=self.client_quotas,
            inflating=self.memory.inflating,
        )
        self.handlers = RequestHandlers(collaborators, self.forwarding, self.authorizer, self.audit)
        hints = LeaderHints(live, metadata, self.addresses, self.detector, table)
        self.server = ServerContext(
            runtime=runtime,
            config=live,
            counters=self.counters,
            memory=self.memory,
            open_files=self.open_files,
            lease=self.lease,
            table=table,
            metadata=metadata,
            produce=ProduceHandler(
                table,
                self.lease,
                self.counters,
                CheckResources(runtime, live, self.memory.inflating),
                DelayedProduceContext(runtime, self.cluster_link, self.barrier, hints),
                transactional=TransactionalBatches(runtime, self.verifier),
            ),
            fetch=FetchHandler(
                FetchResources(
                    runtime,
                    live,
                    self.counters,
                    self.lease,
                    table,
                    self.fetch_sessions,
                    self.replicas,
                    self.quotas.leader,
                    hints,
                    self.memory.responses,
                    WokenFetches(runtime),
                )
            ),
            messages=self.handlers,
            authorizer=self.authorizer,
            quotas=self.client_quotas,
            connection_rates=self.connection_rates,
            logins=self.logins,
            ordinals=self.ordinals,
        )

    def _build_listeners(self, config: NodeConfig) -> None:
        def serve_node(connection: HandedOver, first_bytes: bytes) -> None:
            self.peers.accept(connection.transport, first_bytes, connection.closed)

        http = dict.fromkeys(HTTP_METHODS, self.http.receive_connection)
        tls = {a: _listener_tls(config, a) for a in config.listeners if a.is_tls}
        every = [*tls.values(), *([] if self.node_tls is None else [self.node_tls])]
        self.tls_reload = TlsReload(self.runtime, self.live_config, every)
        self.listeners = [
            Listener(
                self.server,
                address,
                self.client_connections,
                {**http, HTTP2: self.grpc.receive_connection},
                new_protocol=_sasl_handshake() if address.protocol in SASL_PROTOCOLS else None,
                tls=tls.get(address),
            )
            for address in config.listeners
        ]
        self.node_listener: Listener | None = None
        if config.node_listener is not None:
            self.node_listener = Listener(
                self.server,
                config.node_listener,
                self.node_connections,
                {**http, PREFACE: serve_node},
                between_nodes=True,
                tls=self.node_tls,
            )

    @property
    def all_listeners(self) -> list[Listener]:
        """Those of clients, and the one between nodes."""
        return [*self.listeners, *([] if self.node_listener is None else [self.node_listener])]

    def end_revoked_sessions(self) -> None:
        """Close the connections of users whose credentials were deleted."""
        for listener in self.listeners:
            listener.end_sessions(self.logins.is_revoked)

    def _end_session(self, session: Session) -> None:
        for listener in self.listeners:
            listener.end_sessions(lambda other: other is session)

    def _close_idle_connections(self) -> Iterator[None]:
        for listener in self.all_listeners:
            listener.close_idle()
            yield

    def _access_changed(self) -> None:
        """If rules of access changed, nobody is served by those of before."""
        acls = self.metadata.image.acls
        if acls is self._acls:
            return
        self._acls = acls
        node = self.node_listener
        if node is not None and self.node_tls is not None:
            node.end_sessions(lambda session: not node.is_member(session))
        connections = [one for each in self.all_listeners for one in each.connections]
        self.runtime.slices.run(self.server.fetch.access_changed(connections))

    def _subscribe(self) -> None:
        """Tell those above what happens below."""
        self.metadata.on_failure = self.shutdown.fatal
        self.metadata.on_applied = self._access_changed  # of a lone node; else the link tells
        self.detector.on_death += [self.metadata.peer_down, self.controller.peer_down]
        self.cluster_link.on_metadata_changed += [
            self._access_changed,
            self.replicas.metadata_changed,
            self.controller.metadata_changed,
            self.readiness.changed,
        ]
        self.replicas.on_gone += [
            self.cleaner.forget,
            self.groups.shards.partition_gone,
            self.transactions.shards.partition_gone,
        ]
        self.replicas.on_directory_failed = self.readiness.changed
        self.roles.on_roles_taken += [
            self.groups.shards.roles_taken,
            self.transactions.shards.roles_taken,
        ]
        pulls = PullServer(self.runtime, self.table)
        for method, answer in (
            ("Forward", self.handlers.serve_forwarded),
            ("PullManifests", pulls.pull),
            ("ManifestChunk", pulls.chunk),
            ("ManifestNews", self.replicator.receive_news),
            ("PeerHttp", self.http.respond_to_node),
        ):
            self.peers.serve(method, answer)
        self.controller.serve_brokers()
        self.logins.on_ended.append(self._end_session)
        self.logins.on_refused = self.audit.login_refused
