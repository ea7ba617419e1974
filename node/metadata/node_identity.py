"""Who this node is: its id, its cluster, and the epoch of its registration as a broker."""

from __future__ import annotations


class NodeIdentity:
    """``cluster_id`` is empty until the node knows it, ``broker_epoch`` -1 until it registered."""

    __slots__ = ("broker_epoch", "cluster_id", "node_id")

    def __init__(self, node_id: int, cluster_id: str = "", broker_epoch: int = -1) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.broker_epoch = broker_epoch
