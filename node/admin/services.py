"""The operator's services of a node, built from its parts when the first request comes.

Each service gets the two to six collaborators that it works with. HTTP and gRPC read this object,
and no service does.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kept.client.consume.positions import LATEST
from kept.node.admin.actions.cluster_actions import ClusterActions
from kept.node.admin.actions.leader_election import LeaderElection
from kept.node.admin.cluster_client import ClusterClient
from kept.node.admin.compaction.compaction_admin import CompactionAdmin
from kept.node.admin.compaction.compaction_status import CleanerView, CompactionView
from kept.node.admin.compaction.replica_reports import ReplicaReports
from kept.node.admin.history.activity_view import ActivityView
from kept.node.admin.leader_router import LeaderRouter
from kept.node.admin.peer_http import PeerHttp
from kept.node.admin.readiness import NodeHealth
from kept.node.admin.records.partition_offsets import offsets_from_leaders
from kept.node.admin.records.partition_records import Readers
from kept.node.admin.records.record_browser import RecordBrowser
from kept.node.admin.records.record_search import RecordSearch
from kept.node.admin.records.record_tail import RecordTails
from kept.node.admin.topic_lookup import TopicLookup
from kept.node.admin.views.cluster_view import ClusterView
from kept.node.admin.views.consumer_lag import ConsumerLag
from kept.node.admin.views.log_directories import LogDirectories
from kept.node.admin.views.quorum_view import QuorumView
from kept.node.admin.views.topic_view import TopicView
from kept.node.admin.views.transactions_view import TransactionsView
from kept.node.security.client_usage import HTTP_CLIENT_ID
from kept.node.security.session import Session

if TYPE_CHECKING:
    from kept.node.admin.history.activity_history import ActivityHistory
    from kept.node.admin.history.dirty_history import DirtyHistory
    from kept.node.admin.readiness import Readiness
    from kept.node.compaction.dry_run import DryRuns
    from kept.node.compaction.lazy_cleaner import LazyCleaner
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.internode.peers import Peers
    from kept.node.kafka.forwarding_manager import ForwardingManager
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.uncompiled_kernels import Kernels
    from kept.node.security.audit import AuditLog
    from kept.node.security.client_quotas import ClientQuotas
    from kept.storage.types import TopicPartition


@dataclass(eq=False, repr=False, kw_only=True)
class AdminServices:
    """What a node's parts are called, and by subject the operations beyond Kafka's protocol."""

    runtime: Runtime
    config: LiveConfig
    counters: Counters
    kernels: Kernels
    inflating: BudgetShare

    identity: NodeIdentity
    metadata: MetadataLog
    addresses: AddressBook
    peers: Peers
    forwarding: ForwardingManager
    readiness: Readiness

    table: ReplicaTable
    replicas: ReplicaManager
    cleaner: LazyCleaner
    dry_runs: DryRuns
    history: DirtyHistory
    activity_history: ActivityHistory
    transactions: TransactionCoordinator
    audit: AuditLog
    quotas: ClientQuotas
    connect_here: Callable[[Session | None], Awaitable[socket.socket]]
    """A connection to this node's own Kafka side, with the rights of a session; None: of a node."""

    def __post_init__(self) -> None:
        self._build_cluster()
        self._build_partitions()

    def _build_cluster(self) -> None:
        identity, metadata, table = self.identity, self.metadata, self.table
        self.health = NodeHealth(
            readiness=self.readiness,
            config=self.config,
            identity=identity,
            metadata=metadata,
            table=table,
            replicas=self.replicas,
        )
        self.peer_http = PeerHttp(identity, metadata, self.peers)
        self.lookup = TopicLookup(identity, metadata, table)
        self.log_directories = LogDirectories(self.runtime, table)
        self.cluster = ClusterView(
            config=self.config,
            identity=identity,
            metadata=metadata,
            lookup=self.lookup,
            health=self.health,
            log_directories=self.log_directories,
        )
        self.quorum = QuorumView(
            identity=identity,
            metadata=metadata,
            config=self.config,
            addresses=self.addresses,
            forwarding=self.forwarding,
            peer_http=self.peer_http,
        )
        self.activity = ActivityView(
            metadata=metadata,
            lookup=self.lookup,
            history=self.activity_history,
            peer_http=self.peer_http,
        )
        self.actions = ClusterActions(
            runtime=self.runtime,
            metadata=metadata,
            lookup=self.lookup,
            new_client=self.new_client,
        )
        self.election = LeaderElection(self.lookup, self.new_client)
        self.consumer_lag = ConsumerLag(metadata, self.new_client)
        self.transactions_view = TransactionsView(metadata, self.transactions, self.new_client)

    def _build_partitions(self) -> None:
        runtime, metadata, lookup, table = self.runtime, self.metadata, self.lookup, self.table
        self.compaction_view = view = CompactionView(
            runtime=runtime,
            config=self.config,
            identity=self.identity,
            table=table,
            cleaner=self.cleaner,
            dry_runs=self.dry_runs,
        )
        self.topics = TopicView(
            config=self.config,
            metadata=metadata,
            lookup=lookup,
            table=table,
            compaction=view,
            peer_http=self.peer_http,
        )
        self.compaction = CompactionAdmin(
            metadata=metadata,
            lookup=lookup,
            replicas=self.replicas,
            view=view,
            leaders=LeaderRouter(
                metadata=metadata, lookup=lookup, table=table, view=view, peer_http=self.peer_http
            ),
            history=self.history,
        )
        self.cleaner_view = CleanerView(self.identity, self.cleaner, self.kernels, self.counters)
        self.replica_reports = ReplicaReports(runtime, lookup, table, self.dry_runs)
        readers = Readers(
            runtime=runtime,
            metadata=metadata,
            inflating=self.inflating,
            lookup=lookup,
            new_client=self.new_client,
        )
        self.search = RecordSearch(readers)
        self.tails = RecordTails(readers)
        self.records = RecordBrowser(readers)

    async def high_watermarks(self, tps: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Of partitions whose leaders say them."""
        client = self.new_client()
        try:
            wanted = dict.fromkeys(tps, LATEST)
            return (await offsets_from_leaders(client, self.metadata.image, wanted)).offsets
        finally:
            client.close()

    def new_client(
        self, session: Session | None = None, client_id: str = HTTP_CLIENT_ID
    ) -> ClusterClient:
        """Calls of this node to the cluster in Kafka's protocol; whoever makes one closes it.

        With a ``session`` what this node serves of them is asked in its name, and so are changes of
        metadata: with its rights, and for the audit log. Other nodes are asked as by a node.
        """
        speaker = None
        if session is not None:
            about = (session.principal, session.host, session.listener, session.mechanism)
            speaker = Session(*about, authorizer=session.authorizer)
        return ClusterClient(
            self.runtime,
            self.config,
            identity=self.identity,
            metadata=self.metadata,
            addresses=self.addresses,
            client_id=client_id,
            connect_here=partial(self.connect_here, speaker),
        )
