"""Lists of voters that are old or wrong, and node ids that are taken: let in, or soon refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kept.client import cluster as operations
from kept.node.local_settings import NODE_PORT_OFFSET
from kept.testing import Cluster
from kept.testing.cluster import NodeFailed
from kept.testing.ports import free_port

pytestmark = pytest.mark.slow

PROMPT_S = 20.0
"""Far less than initial.broker.registration.timeout.ms, and more than a slow machine takes."""


@pytest.fixture
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def listed(cluster: Cluster, *nodes: int) -> str:
    return ",".join(f"{node}@localhost:{cluster.port(node) + NODE_PORT_OFFSET}" for node in nodes)


def controller(cluster: Cluster) -> int:
    with cluster.client() as client:
        return client.run(operations.describe_cluster()).controller_id


def second(cluster: Cluster, directory: Path, node_id: int, role: str) -> subprocess.Popen:
    """A process of its own, on other ports and directories than the cluster's."""
    port = free_port(above=[NODE_PORT_OFFSET])
    voters = listed(cluster, *({0, 1, 2} - {node_id}))
    if "controller" in role:
        voters += f",{node_id}@localhost:{port + NODE_PORT_OFFSET}"
    command = [sys.executable, "-m", "kept", "serve", "--node-id", str(node_id)]
    command += ["--port", str(port), "--data-dir", str(directory)]
    command += ["--set", f"process.roles={role}", "--set", f"controller.quorum.voters={voters}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory
    )


def end_of(process: subprocess.Popen, deadline_s: float) -> str:
    """What it said, once it ended by itself."""
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        pytest.fail(f"it runs on after {deadline_s} s: {said}")
    assert process.returncode == 1
    return said


def test_a_list_without_the_present_controller_finds_it(three):
    topic = three.create_topic()
    leader = controller(three)
    newcomer, known = sorted({0, 1, 2} - {leader})
    three.stop(newcomer)
    shutil.rmtree(three.data_dir(newcomer))
    three.start(newcomer, process_roles="broker", controller_quorum_voters=listed(three, known))
    with three.client() as client:
        assert set(client.metadata().topics) == {topic}
    assert controller(three) == leader


def test_a_list_that_names_another_clusters_node_is_refused(three):
    with Cluster() as lone:
        topic = lone.create_topic()
        lone.stop()
        port = free_port()
        listeners = f"PLAINTEXT://localhost:{lone.port()},NODE://localhost:{port}"
        both = f"0@localhost:{port},{listed(three, 1)}"
        with pytest.raises(NodeFailed, match=r"names 1@localhost:\d+, which belongs to cluster"):
            lone.start(listeners=listeners, controller_quorum_voters=both)
        # One whom nobody answers for may be a voter of tomorrow.
        three.kill(1)
        lone.start()
        assert "controller.quorum.voters is not who votes" in lone.log()
        with lone.client() as client:
            assert set(client.metadata().topics) == {topic}


@pytest.mark.parametrize("role", ["broker", "broker,controller"])
def test_a_node_id_that_is_taken_is_refused_at_once(three, tmp_path, role):
    leader = controller(three)
    taken = (leader + 1) % 3
    began = time.monotonic()
    said = end_of(second(three, tmp_path, taken, role), PROMPT_S)
    assert f"node id {taken} belongs to another process that is alive" in said
    print(f"refused after {time.monotonic() - began:.1f} s")
    three.await_ready()
    assert controller(three) == leader


def test_a_node_that_is_killed_is_let_in_again_at_once(three):
    victim = (controller(three) + 1) % 3
    for _ in range(3):
        three.kill(victim)
        three.start(victim)
    three.pause(victim)
    three.kill(victim)
    three.start(victim)
    assert "belongs to another process" not in three.log(victim)
