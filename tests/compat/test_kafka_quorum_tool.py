"""Apache Kafka's metadata quorum tool on the voters of three nodes (KIP-853)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kept.client.core.metadata import Endpoint
from kept.client.json_api import JsonApi
from kept.testing import Cluster
from tests.tools.kafka_dist import tool

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]

TOOL = "org.apache.kafka.tools.MetadataQuorumCommand"


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def quorum(cluster: Cluster, *args: str) -> str:
    return tool(TOOL, "--bootstrap-server", cluster.bootstrap, *args)


def refused(cluster: Cluster, *args: str) -> str:
    with pytest.raises(AssertionError) as caught:
        quorum(cluster, *args)
    return str(caught.value)


def states(cluster: Cluster) -> dict[int, tuple[str, str]]:
    """Node -> (directory id, what it is), as the tool shows it."""
    lines = quorum(cluster, "describe", "--replication").splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    return {int(row[0]): (row[1], row[-1]) for row in rows}


def properties(cluster: Cluster, node: int, directory: str, root: Path) -> str:
    """What Kafka's tool wants to know of a controller: its configuration, and its directory."""
    api = JsonApi(Endpoint(cluster.host(0), cluster.port(0)))
    (broker,) = (b for b in api.get("cluster")["brokers"] if b["node_id"] == node)
    (address,) = (e for e in broker["endpoints"] if e.startswith("NODE://"))
    (root / "meta.properties").write_text(
        f"version=1\nnode.id={node}\ncluster.id={api.get('cluster')['cluster_id']}\n"
        f"directory.id={directory}\n"
    )
    path = root / "controller.properties"
    path.write_text(
        f"process.roles=controller\nnode.id={node}\nlisteners={address}\n"
        "controller.listener.names=NODE\nlistener.security.protocol.map=NODE:PLAINTEXT\n"
        f"metadata.log.dir={root}\n"
    )
    return str(path)


def test_a_voter_is_removed_and_added_again(three, tmp_path):
    before = states(three)
    assert sorted(what for _, what in before.values()) == ["Follower", "Follower", "Leader"]
    leader = next(node for node, (_, what) in before.items() if what == "Leader")
    follower = next(node for node, (_, what) in before.items() if what == "Follower")
    elsewhere = before[leader][0]
    name = ("remove-controller", "--controller-id", str(follower))
    told = refused(three, *name, "--controller-directory-id", elsewhere)
    assert "VoterNotFoundException" in told and "votes from directory" in told, told
    for node in (follower, leader):  # also the active controller
        directory = before[node][0]
        config = properties(three, node, directory, tmp_path)
        add = ("--command-config", config, "add-controller")
        assert "DuplicateVoterException" in refused(three, *add)
        name = ("remove-controller", "--controller-id", str(node))
        told = quorum(three, *name, "--controller-directory-id", directory)
        assert f"controller {node} with directory id {directory}" in told, told
        three.wait_until(
            lambda n=node, d=directory: states(three).get(n) == (d, "Observer"), "it observes", 60
        )
        assert len([1 for _, what in states(three).values() if what != "Observer"]) == 2
        told = quorum(three, *add)
        assert f"controller {node} with directory id {directory}" in told, told
        assert states(three)[node] == (directory, "Follower")
    assert {node: where for node, (where, _) in states(three).items()} == {
        node: where for node, (where, _) in before.items()
    }


def test_who_does_not_follow_is_not_added(three, tmp_path):
    config = Path(properties(three, 0, "AAAAAAAAAAAAAAAAAAAAEA", tmp_path))
    config.write_text(config.read_text().replace("node.id=0", "node.id=9"))
    meta = tmp_path / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=0", "node.id=9"))
    told = refused(three, "--command-config", str(config), "add-controller")
    assert "node 9 does not follow the metadata log" in told, told
