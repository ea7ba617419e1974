"""Whether clients should come to this node: for ``/readyz``, gRPC's health service and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.admin.readiness import Readiness
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import Metadata
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable


class NodeHealth:
    """The health of one node, as it is now."""

    def __init__(
        self,
        *,
        readiness: Readiness,
        config: LiveConfig,
        identity: NodeIdentity,
        metadata: Metadata,
        table: ReplicaTable,
        replicas: ReplicaManager,
    ) -> None:
        self._readiness = readiness
        self._config = config
        self._identity = identity
        self._metadata = metadata
        self._table = table
        self._replicas = replicas

    @property
    def started(self) -> bool:
        """Whether it accepts clients: it neither starts nor stops."""
        return self._readiness.started

    def unready(self) -> str | None:
        """Why clients should not come here now; None when they may."""
        if not self.started:
            return "starting or stopping"
        if not self._config.current.is_broker:
            return None if self._metadata.leader_id is not None else "no controller is elected"
        offline = {d.name: d.offline for d in self._table.directories if d.offline is not None}
        return self._readiness.unready(
            self._metadata.image,
            self._identity.broker_epoch,
            offline,
            len(self._replicas.left_closed),
        )

    def stray_logs(self) -> list[str]:
        """Directories of logs set aside here, which the metadata does not know."""
        return [str(path) for path in self._replicas.strays.paths]

    def left_closed(self) -> list[str]:
        """Partitions whose replicas here were left closed for want of open files."""
        return sorted(map(str, self._replicas.left_closed))
