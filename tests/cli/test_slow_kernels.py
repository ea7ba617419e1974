"""``kept cluster status`` of a node without compiled kernels."""

from __future__ import annotations

from kept.kernels import FALLBACKS
from kept.testing import Cluster
from tests.cli.conftest import Kept


def test_status_names_the_node_that_is_slow():
    with Cluster(environ={"KEPT_KERNEL": "python"}) as cluster:
        slow = Kept(cluster.bootstrap)
        (node,) = slow("cluster", "status", "--json").json["nodes"]
        assert node["uncompiled_kernels"] == list(FALLBACKS)
        (line,) = (one for one in slow("cluster", "status").lines if "not compiled" in one)
        assert line == f"Node 0 is slow: kernels that are not compiled: {', '.join(FALLBACKS)}"
        assert 'event="slow Python kernels"' in cluster.log()
        assert f"uncompiled={','.join(FALLBACKS)}" in cluster.log()
