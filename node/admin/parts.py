"""What the operator's side of a node consists of, built when the first request comes.

Each part gets the two to six collaborators that it works with; HTTP, gRPC and metrics take parts,
never the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.node.admin.cluster_client import ClusterClient
from kept.node.admin.cluster_view import ClusterView
from kept.node.admin.compaction_admin import CompactionAdmin
from kept.node.admin.compaction_status import CleanerView, CompactionView
from kept.node.admin.consumer_lag import ConsumerLag
from kept.node.admin.health import NodeHealth
from kept.node.admin.leader_election import LeaderElection
from kept.node.admin.leader_router import LeaderRouter
from kept.node.admin.log_directories import LogDirectories
from kept.node.admin.peer_http import PeerHttp
from kept.node.admin.quorum_view import QuorumView
from kept.node.admin.record_browser import RecordBrowser
from kept.node.admin.replica_reports import ReplicaReports
from kept.node.admin.topic_lookup import TopicLookup
from kept.node.admin.topic_view import TopicView

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext


class AdminParts:
    """The operations beyond Kafka's protocol, by subject."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._build_cluster(context)
        self._build_partitions(context)

    def _build_cluster(self, context: AdminContext) -> None:
        runtime, config, table = context.runtime, context.config, context.table
        identity, metadata = context.identity, context.metadata
        self.health = NodeHealth(
            readiness=context.readiness,
            config=config,
            identity=identity,
            metadata=metadata,
            table=table,
            replicas=context.replicas,
        )
        self.peer_http = PeerHttp(identity, metadata, context.peers)
        self.lookup = TopicLookup(identity, metadata, table)
        self.log_directories = LogDirectories(runtime, table)
        self.cluster = ClusterView(
            config=config,
            identity=identity,
            metadata=metadata,
            lookup=self.lookup,
            health=self.health,
            log_directories=self.log_directories,
        )
        self.quorum = QuorumView(
            identity=identity,
            metadata=metadata,
            config=config,
            addresses=context.addresses,
            forwarding=context.forwarding,
            peer_http=self.peer_http,
        )
        self.election = LeaderElection(self.lookup, self.new_client)
        self.groups = ConsumerLag(metadata, self.new_client)

    def _build_partitions(self, context: AdminContext) -> None:
        runtime, config, table = context.runtime, context.config, context.table
        metadata = context.metadata
        self.compaction_view = CompactionView(
            runtime=runtime,
            config=config,
            identity=context.identity,
            table=table,
            cleaner=context.cleaner,
            dry_runs=context.dry_runs,
        )
        self.topics = TopicView(
            config=config,
            metadata=metadata,
            lookup=self.lookup,
            table=table,
            compaction=self.compaction_view,
            peer_http=self.peer_http,
        )
        leaders = LeaderRouter(
            metadata=metadata,
            lookup=self.lookup,
            table=table,
            view=self.compaction_view,
            peer_http=self.peer_http,
        )
        self.compaction = CompactionAdmin(
            metadata=metadata,
            lookup=self.lookup,
            replicas=context.replicas,
            view=self.compaction_view,
            leaders=leaders,
            history=context.history,
        )
        self.cleaner = CleanerView(
            context.identity, context.cleaner, context.kernels, context.counters
        )
        self.replicas = ReplicaReports(runtime, self.lookup, table, context.dry_runs)
        self.records = RecordBrowser(
            runtime=runtime,
            metadata=metadata,
            inflating=context.inflating,
            lookup=self.lookup,
            new_client=self.new_client,
        )

    def new_client(self) -> ClusterClient:
        """Calls of this node to the cluster in Kafka's protocol; whoever makes one closes it."""
        context = self._context
        return ClusterClient(
            context.runtime,
            context.config,
            identity=context.identity,
            metadata=context.metadata,
            addresses=context.addresses,
        )
