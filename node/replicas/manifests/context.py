"""What the manifests of all replicas of a node work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.alter_partition import AlterPartitionQueue
    from kept.node.replicas.fetch_loop import Fetchers
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.manifests.notify import ManifestNotifier
    from kept.node.replicas.manifests.replicate import ManifestReplicator
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.uncompiled_kernels import Kernels
    from kept.storage.types import TopicPartition


class CompactionScheduler(Protocol):
    """Who decides when a log is cleaned, for what happens to its manifests."""

    def renew(self, tp: TopicPartition) -> None:
        """What is applied cannot be read, and others need it: make another manifest."""

    def generation_applied(self, tp: TopicPartition) -> None:
        """A generation was applied, whoever computed it."""


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """The collaborators of the manifests of all replicas. ``appliers``: generations that are built
    and put into place at a time.
    """

    runtime: Runtime
    config: LiveConfig
    metadata: MetadataLog
    identity: NodeIdentity
    table: ReplicaTable
    failures: LogDirFailureChannel
    counters: Counters
    kernels: Kernels
    fetchers: Fetchers
    alter_partition: AlterPartitionQueue
    replicator: ManifestReplicator
    notifier: ManifestNotifier
    scheduler: CompactionScheduler
    appliers: asyncio.Semaphore
