"""From an older version to this one, node by node, under both checked loads.

The older version is built from its commit, so a clone without history skips this.
"""

from __future__ import annotations

import time
from typing import Final

import pytest

from tests.chaos.run import HERE, Run
from tests.deploy.containers import Compose, image, image_of
from tests.deploy.files import has_commit
from tests.tools.needs import cannot_run

OLDER: Final = "b2b9753e4c9be272c28eec9338a526dd168f06dd"
"""The last before ACLs, credentials and quotas; it speaks protocol 2 between nodes as today, which
0.1 does not (docs/adr/0010). A release, once there is one before this version."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.docker,
    pytest.mark.timeout(1500),
]
FILES: Final = ("compose.yaml", str(HERE / "compose.upgrade.yaml"))


def runs(cluster, node):
    """The image that a node's container was made from."""
    return cluster.state(node, "{{.Config.Image}}")


def test_a_cluster_is_upgraded_node_by_node_under_load():
    if not has_commit(OLDER):
        cannot_run("older_commit", f"no commit {OLDER} here")
    older, newer = image_of(OLDER), image()
    with Compose(files=FILES, IMAGE=older) as cluster:
        run = Run(cluster)

        def events(load):
            cluster.environ["IMAGE"] = newer
            for node in range(3):
                assert runs(cluster, node) == older
                begun = time.monotonic()
                cluster.replace(node)
                load.goes_on(cluster)
                print(f"node {node} upgraded: longest gap {load.gap_s(begun):.2f} s")
                assert runs(cluster, node) == newer
                lead_again(run, node, [load.topic, *run.topics])
                load.goes_on(cluster)
                print(run.command("compact", "now", run.topics[0], "--wait"))
                run.verify(run.topics[0])

        passes = run.checked(7, events)
    assert passes > 0, "nothing was compacted meanwhile"


def lead_again(run, node, topics):
    """A node leads what it is the first replica of, so that each version leads in its turn."""

    def leads():
        theirs = [
            f"{topic}:{one['partition']}"
            for topic in topics
            for one in run.nodes.ask(node, f"topics/{topic}")["partitions"]
            if one["replicas"][0] == node and one["leader"] != node
        ]
        if theirs:  # refused while it is not in sync: asked again
            print(run.command("cluster", "elect", *theirs, check=False))
        return not theirs

    run.cluster.wait_until(leads, f"node {node} leads what it is the first replica of")
    assert any(run.nodes.leader(topics[0], number) == node for number in range(3))
