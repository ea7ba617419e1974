"""A node with the metadata of another cluster or of another node: refused, and nothing is mixed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kept.testing import Cluster
from kept.testing.cluster import NodeFailed
from kept.testing.ports import free_port

PATIENCE_MS = 25_000
"""A node that is not let in ends after so long: enough to restart the others under its eyes."""


@pytest.fixture
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def put(cluster: Cluster, node: int, source: Path) -> None:
    """Give a stopped node other directories."""
    shutil.rmtree(cluster.data_dir(node))
    shutil.copytree(source, cluster.data_dir(node))


@pytest.mark.slow
def test_the_metadata_of_another_cluster_is_not_let_in(three, tmp_path):
    with Cluster(nodes=3) as other:
        for number in range(30):  # its log is longer, and of a later term
            other.create_topic(f"foreign{number}")
        for _ in range(2):
            other.stop(0)
            other.start(0)
        other.stop(1)
        shutil.copytree(other.data_dir(1), tmp_path / "other")
    topic = three.create_topic()
    three.stop(1)
    put(three, 1, tmp_path / "other")
    three.start(1, wait=False, initial_broker_registration_timeout_ms=PATIENCE_MS)
    three.wait_until(lambda: "peer refused" in three.log(1), "it is told")
    assert "correct controller.quorum.voters, or start the one that is wrong" in three.log(1)
    # A restart of the others does not let its log win either.
    for node in (0, 2):
        three.kill(node)
    three.start(0, wait=False)
    three.start(2)
    with three.client() as client:
        assert set(client.metadata().topics) == {topic}
    assert three.wait(1, deadline_s=90) == 1, "everybody refuses it"
    said = (
        "all other nodes of controller.quorum.voters refuse this one: node 0",
        "correct controller.quorum.voters, or start the one that is wrong with empty directories",
    )
    assert any(one in three.log(1) for one in said)
    assert "Traceback" not in three.log(1) + three.log(0) + three.log(2)


@pytest.mark.slow
def test_the_metadata_of_another_node_is_refused(three, tmp_path):
    three.stop(1)
    three.stop(2)
    shutil.copytree(Path(three.data_dir(2)) / "meta", tmp_path / "data" / "meta")
    (tmp_path / "data" / "meta" / "log-directories").unlink()
    put(three, 1, tmp_path / "data")
    with pytest.raises(NodeFailed, match=r"meta belongs to node\.id '2', not to '1'"):
        three.start(1)


def test_a_voter_with_a_new_disk_says_that_it_only_observes(three):
    three.stop(1)
    shutil.rmtree(three.data_dir(1))
    three.start(1)
    assert "this node only observes the metadata" in three.log(1)
    assert "kept cluster voter add 1" in three.log(1)


@pytest.mark.slow
def test_nodes_that_all_moved_find_each_other_as_their_settings_say(three):
    topic = three.create_topic()
    for node in range(3):
        three.kill(node)
    ports = [free_port() for _ in range(3)]
    voters = ",".join(f"{node}@localhost:{port}" for node, port in enumerate(ports))
    for node, port in enumerate(ports):
        listeners = f"PLAINTEXT://localhost:{three.port(node)},NODE://localhost:{port}"
        three.start(node, wait=False, listeners=listeners, controller_quorum_voters=voters)
    three.await_ready()
    with three.client() as client:
        assert set(client.metadata().topics) == {topic}
