"""Testing with kept: real nodes on this machine, and a pytest plugin.

::

    from kept.testing import Cluster

    with Cluster(log_segment_bytes=1 << 20) as cluster:
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})

With pytest the fixtures ``kept_broker`` and ``kept_cluster`` are there once kept is installed: see
:mod:`kept.testing.plugin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kept.testing.cluster import Cluster, NodeFailed

__all__ = ["Cluster", "NodeFailed"]


if not TYPE_CHECKING:  # a type checker would take any name for one that is here

    def __getattr__(name: str) -> Any:
        # pytest imports the plugin, and so this package, in every project of an environment that
        # has kept: only who uses a node shall wait for what it imports.
        if name == "cluster" or name in __all__:
            cluster = import_module(f"{__name__}.cluster")
            return cluster if name == "cluster" else getattr(cluster, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
