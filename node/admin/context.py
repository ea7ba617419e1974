"""What the operator's side of a node is built of, for HTTP, gRPC and metrics.

Only what builds parts takes it (``kept.node.admin.parts`` and the lazy doors); a part gets what it
works with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.admin.dirty_history import DirtyHistory
    from kept.node.admin.readiness import Readiness
    from kept.node.compaction.dry_run import DryRuns
    from kept.node.compaction.lazy_cleaner import LazyCleaner
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.groups.coordinator import Coordinator
    from kept.node.internode.peers import Peers
    from kept.node.kafka.forwarding import ForwardingManager
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.memory_budget import BudgetShare, MemoryBudget
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.uncompiled_kernels import Kernels


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The collaborators that parts are given, by name."""

    runtime: Runtime
    config: LiveConfig
    counters: Counters
    kernels: Kernels
    budget: MemoryBudget
    inflating: BudgetShare
    open_files: OpenFiles

    identity: NodeIdentity
    metadata: Metadata
    addresses: AddressBook
    peers: Peers
    forwarding: ForwardingManager
    readiness: Readiness

    table: ReplicaTable
    replicas: ReplicaManager
    cleaner: LazyCleaner
    dry_runs: DryRuns
    history: DirtyHistory
    groups: Coordinator
