"""Lists of voters that are old or wrong, and node ids that are taken: let in, or soon refused."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kept.client.admin import cluster as operations
from kept.node.config.local_cluster import NODE_PORT_OFFSET
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


def brokers(cluster: Cluster) -> set[int]:
    with cluster.client() as client:
        return {
            one.node_id
            for one in client.run(operations.describe_cluster()).members
            if not one.fenced
        }


def another(directory: Path, node_id: int, voters: str) -> subprocess.Popen:
    """A process of its own, on other ports and directories than the cluster's."""
    port = free_port(above=[NODE_PORT_OFFSET])
    if f"{node_id}@" in voters:
        role = "broker,controller"
        voters = re.sub(rf"{node_id}@localhost:\d+", f"{node_id}@localhost:{port + 1000}", voters)
    else:
        role = "broker"
    directory.mkdir()
    command = [sys.executable, "-m", "kept", "serve", "--node-id", str(node_id)]
    command += ["--port", str(port), "--data-dir", str(directory)]
    command += ["--set", f"process.roles={role}", "--set", f"controller.quorum.voters={voters}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory
    )


@contextlib.contextmanager
def fourth(cluster: Cluster, directory: Path, voters: str) -> Iterator[int]:
    """A broker with an id of its own that lets itself be found in time."""
    node_id = 9
    process = another(directory, node_id, voters)
    try:
        cluster.wait_until(lambda: node_id in brokers(cluster), "the fourth is let in", PROMPT_S)
        yield node_id
    finally:
        process.kill()
        process.communicate()


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


def test_a_list_without_the_present_controller_finds_it(three, tmp_path):
    leader = controller(three)
    known = (leader + 1) % 3
    with fourth(three, tmp_path / "fourth", listed(three, known)):
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
        assert "controller.quorum.voters differs from the voters" in lone.log()
        with lone.client() as client:
            assert set(client.metadata().topics) == {topic}


def test_the_id_of_a_live_voter_is_refused_soon(three, tmp_path):
    leader = controller(three)
    taken = (leader + 1) % 3
    said = end_of(another(tmp_path / "second", taken, listed(three, 0, 1, 2)), PROMPT_S)
    assert f"node id {taken} belongs to another process that is alive" in said
    three.await_ready()
    assert controller(three) == leader


def test_the_id_of_a_live_broker_is_refused_soon(three, tmp_path):
    voters = listed(three, 0, 1, 2)
    with fourth(three, tmp_path / "fourth", voters) as taken:
        follower = (controller(three) + 1) % 3
        three.kill(follower)  # when it is back it has never heard of the fourth
        three.start(follower)
        said = end_of(another(tmp_path / "second", taken, voters), PROMPT_S)
        assert f"node id {taken} belongs to another process that is alive" in said
        assert taken in brokers(three)


def test_a_node_that_is_killed_is_let_in_again_at_once(three):
    victim = (controller(three) + 1) % 3
    for _ in range(3):
        three.kill(victim)
        three.start(victim)
    three.pause(victim)
    three.kill(victim)
    three.start(victim)
    assert "belongs to another process" not in three.log(victim)
