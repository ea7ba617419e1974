"""What the handlers of requests work with (Kafka's class of this name).

A handler gets it with its request (``ctx.apis``), and reaches nothing else of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.controller.controller import Controller
    from kept.node.coordinator.groups.coordinator import Coordinator
    from kept.node.kafka.fetch_sessions import FetchSessions
    from kept.node.kafka.forwarding import ForwardingManager
    from kept.node.kafka.handlers.init_producer_id import ProducerIds
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.cluster_link import ClusterLink
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.leadership_barrier import LeadershipBarrier
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.memory_budget import BudgetShare, MemoryBudget
    from kept.node.runtime.runtime import Runtime
    from kept.replication.quota import ReplicationQuotas


@dataclass(frozen=True, slots=True)
class KafkaApis:
    """See the module."""

    runtime: Runtime
    config: LiveConfig
    counters: Counters
    budget: MemoryBudget
    """What requests and responses hold."""
    inflating: BudgetShare
    """What threads inflate batches into."""
    open_files: OpenFiles

    identity: NodeIdentity
    metadata: Metadata
    addresses: AddressBook
    cluster_link: ClusterLink
    detector: FailureDetector
    barrier: LeadershipBarrier
    lease: ServingLease
    controller: Controller

    table: ReplicaTable
    replicas: ReplicaManager
    quotas: ReplicationQuotas
    fetch_sessions: FetchSessions
    groups: Coordinator
    producer_ids: ProducerIds
    forwarding: ForwardingManager
