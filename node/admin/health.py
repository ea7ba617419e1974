"""Whether clients should come to this node: for ``/readyz``, gRPC's health service and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.admin.readiness import Readiness
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The health of one node, as it is now."""

    readiness: Readiness
    config: LiveConfig
    identity: NodeIdentity
    metadata: Metadata
    table: ReplicaTable
    replicas: ReplicaManager

    @property
    def started(self) -> bool:
        """Whether it accepts clients: it neither starts nor stops."""
        return self.readiness.started

    def unready(self) -> str | None:
        """Why clients should not come here now; None when they may."""
        if not self.started:
            return "starting or stopping"
        if not self.config.current.is_broker:
            return None if self.metadata.leader_id is not None else "no controller is elected"
        offline = {d.name: d.offline for d in self.table.directories if d.offline is not None}
        return self.readiness.unready(
            self.metadata.image,
            self.identity.broker_epoch,
            offline,
            len(self.replicas.left_closed),
        )

    def stray_logs(self) -> list[str]:
        """Directories of logs set aside here, which the metadata does not know."""
        return [str(path) for path in self.replicas.strays.paths]

    def left_closed(self) -> list[str]:
        """Partitions whose replicas here were left closed for want of open files."""
        return sorted(map(str, self.replicas.left_closed))
