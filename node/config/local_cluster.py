"""The settings of several nodes on one machine: for ``kept local`` and ``kept.testing``.

Every node is a broker and a voter. Three and more keep three copies of everything and acknowledge
when two have it, so that one of them may die at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NODE_PORT_OFFSET: Final = 1000
"""A node's port lies so far above its client port, unless it is given."""
REPLICAS: Final = 3
IN_SYNC: Final = 2


def cluster_settings(node_ports: Sequence[int]) -> dict[str, str]:
    """What all nodes of a cluster are given alike; node i's port is ``node_ports[i]``.

    Nothing for a single node: it is its own voter and needs no node port.
    """
    if len(node_ports) == 1:
        return {}
    voters = ",".join(f"{number}@localhost:{port}" for number, port in enumerate(node_ports))
    settings = {"controller.quorum.voters": voters}
    if len(node_ports) >= REPLICAS:
        settings["default.replication.factor"] = str(REPLICAS)
        settings["min.insync.replicas"] = str(IN_SYNC)
    return settings
