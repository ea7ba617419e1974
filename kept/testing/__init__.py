"""Testing with kept: real nodes on this machine, and a pytest plugin.

::

    from kept.testing import Cluster

    with Cluster(log_segment_bytes=1 << 20) as cluster:
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})

With pytest the fixtures ``kept_broker`` and ``kept_cluster`` are there once kept is installed: see
:mod:`kept.testing.plugin`.
"""

from kept.testing.cluster import Cluster, NodeFailed

__all__ = ["Cluster", "NodeFailed"]
