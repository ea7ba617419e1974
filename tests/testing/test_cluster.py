"""``kept.testing``: nodes that start, stop, die and come back; the plugin as a user has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kept import testing
from kept.client.admin.readiness import cluster_is_up
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.node.config.local_cluster import NODE_PORT_OFFSET, cluster_settings
from kept.storage.errors import ConfigurationError
from kept.testing import Cluster, NodeFailed, ports
from kept.testing import cluster as module
from kept.testing.ports import HIGHEST, LOWEST, free_port, give_back, is_free
from tests.support.slow import rest_slow


def test_a_node_keeps_port_and_data_through_stop_and_kill(kept_cluster):
    cluster = kept_cluster()
    bootstrap, pid = cluster.bootstrap, cluster.pid()
    assert LOWEST <= cluster.port() <= HIGHEST
    topic = cluster.create_topic(partitions=2)
    assert os.path.isdir(os.path.join(cluster.log_dir(), f"{topic}-1"))
    assert cluster.stop() == 0
    assert not cluster.running()
    with pytest.raises(NodeFailed, match="does not run"):
        cluster.pid()
    cluster.start()
    cluster.kill()
    assert not cluster.running()
    cluster.start()
    with pytest.raises(NodeFailed, match="runs already"):
        cluster.start()
    assert cluster.bootstrap == bootstrap
    assert cluster.pid() != pid
    assert cluster.log().count(" ready on ") == 3
    with cluster.client() as client:
        assert len(client.topic(topic).partitions) == 2


def test_a_first_start_without_waiting_keeps_its_port_and_its_files_are_removed_at_the_end():
    cluster = Cluster()
    try:
        cluster.start(wait=False)
        port, temporary = cluster.port(), cluster.directory
        cluster.await_ready()
        assert os.path.isdir(temporary)
        cluster.kill()
        cluster.start()
        assert cluster.port() == port
    finally:
        cluster.close()
    assert not os.path.exists(temporary)


def test_nodes_started_one_by_one_are_one_cluster():
    cluster = Cluster(nodes=3)
    try:
        for node in range(3):
            cluster.start(node, wait=False)
        cluster.await_ready()
        with cluster.client() as client:
            client.metadata()
            found = {node: endpoint.port for node, endpoint in client.view.nodes.items()}
        assert found == {node: cluster.port(node) for node in range(3)}
    finally:
        cluster.close()


@pytest.mark.parametrize("nodes", rest_slow([2, 1], 1))
def test_entering_keeps_what_runs(nodes):
    cluster = Cluster(nodes=nodes)
    try:
        cluster.start(wait=False)
        pid, port = cluster.pid(), cluster.port()
        with cluster:
            assert (cluster.pid(), cluster.port()) == (pid, port)
            assert all(map(cluster.running, range(nodes)))
            assert cluster.log().count(" ready on ") == 1
            assert f":{port}" in cluster.bootstrap
    finally:
        cluster.close()


def test_settings_reach_the_node(kept_cluster):
    cluster = kept_cluster(num_partitions=5, auto_create_topics_enable=False)
    with cluster.client() as client:
        assert {c.name: c.value for c in client.broker_configs("0")}["num.partitions"] == "5"
    cluster.stop()
    cluster.start(num_partitions=6)
    with cluster.client() as client:
        assert {c.name: c.value for c in client.broker_configs("0")}["num.partitions"] == "6"


def test_a_node_that_cannot_start_says_why():
    with pytest.raises(NodeFailed, match=r"before ready(.|\n)*num\.partitions"):
        Cluster(num_partitions="many").__enter__()


def test_files_stay_where_a_directory_was_given(tmp_path):
    with Cluster(directory=tmp_path / "mine") as cluster:
        assert cluster.data_dir().startswith(str(tmp_path))
    assert (tmp_path / "mine" / "node-0" / "kept.log").exists()


def test_a_port_that_is_taken_meanwhile_is_given_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        drawn = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(module, "free_port", lambda: drawn.pop(0))
        with Cluster() as cluster:
            assert cluster.port() != taken.getsockname()[1]
    assert drawn == []


def test_free_ports_are_free():
    port = free_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


DRAWS = """
import sys
from kept.testing import ports
ports.LOWEST, ports.HIGHEST = map(int, sys.argv[1:])
try:
    print(ports.free_port(above=[2]))
except OSError as error:
    print(error)
"""


def test_a_port_is_drawn_once_in_this_process_and_in_others(monkeypatch):
    """A node that was killed has its port again when it comes back, whoever draws meanwhile."""
    first = free_port(above=[1, 2])
    give_back([first, first + 1, first + 2])
    monkeypatch.setattr(ports, "LOWEST", first)
    monkeypatch.setattr(ports, "HIGHEST", first)

    def elsewhere() -> str:
        command = [sys.executable, "-c", DRAWS, str(first), str(first)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    none = f"no free port from {first} to {first}"
    assert free_port(above=[1]) == first
    with pytest.raises(OSError, match=none):
        free_port()
    assert elsewhere() == none + "\n"
    give_back([first + 1])
    assert elsewhere() == none + "\n", "one of the two is held"
    give_back([first])
    assert elsewhere() == f"{first}\n"
    assert free_port(above=[1, 2]) == first, "whoever ended has given its ports back"
    give_back([first, first + 1, first + 2])


def test_a_closed_cluster_gives_its_ports_back(kept_cluster, monkeypatch):
    cluster = kept_cluster()
    monkeypatch.setattr(ports, "LOWEST", cluster.port())
    monkeypatch.setattr(ports, "HIGHEST", cluster.port())
    cluster.kill(0)
    with pytest.raises(OSError, match="no free port"):
        free_port()
    cluster.close()
    assert free_port(above=[NODE_PORT_OFFSET]) == cluster.port()
    give_back([cluster.port(), cluster.port() + NODE_PORT_OFFSET])


def test_a_cluster_has_a_node():
    with pytest.raises(ConfigurationError, match="one node at least"):
        Cluster(nodes=0)


def test_nodes_of_a_cluster_are_each_others_voters():
    assert cluster_settings([5]) == {}
    voters = "0@localhost:5,1@localhost:6"
    assert cluster_settings([5, 6]) == {"controller.quorum.voters": voters}
    assert cluster_settings([5, 6, 7]) == {
        "controller.quorum.voters": voters + ",2@localhost:7",
        "default.replication.factor": "3",
        "min.insync.replicas": "2",
    }


def test_a_node_stalls_and_goes_on(kept_cluster):
    cluster = kept_cluster()
    endpoint = Endpoint("localhost", cluster.port())
    assert cluster_is_up([endpoint]) is None
    cluster.pause()
    assert cluster.running()
    with pytest.raises(HttpFailed, match="no answer within"):
        JsonApi(endpoint, 0.3).get("cluster")
    cluster.resume()
    cluster.await_ready()
    cluster.pause()
    assert cluster.stop() == 0, "a stalled node is woken to stop"


def test_one_node_is_no_cluster_of_two(kept_broker):
    endpoint = Endpoint("localhost", kept_broker.port())
    assert cluster_is_up([endpoint, endpoint]) == f"{endpoint} knows 1 of 2 brokers"
    nobody = Endpoint("localhost", free_port())
    assert "connection refused" in cluster_is_up([endpoint, nobody][1:])


def test_waiting_has_a_deadline(kept_broker):
    with pytest.raises(NodeFailed, match="not so: the moon is full"):
        kept_broker.wait_until(lambda: False, "the moon is full", deadline_s=0.05)


def test_who_is_not_ready_is_named_with_its_own_log(kept_broker, monkeypatch):
    """Not the first node, which may be well."""
    (node,) = kept_broker._nodes
    well, ill = replace(node, port=1), replace(node, number=1, port=free_port())
    monkeypatch.setattr(kept_broker, "_nodes", [well, ill])
    monkeypatch.setattr(kept_broker, "log", lambda number: f"the log of {number}")
    why = "{up[1]}: GET: connection refused"
    monkeypatch.setattr("kept.testing.cluster.cluster_is_up", lambda up, _: why.format(up=up))
    with pytest.raises(NodeFailed, match=r"node 1 after(.|\n)*the log of 1"):
        kept_broker.await_ready(deadline_s=0.05)


def test_the_shared_node_keeps_records_of_any_age(kept_broker):
    topic = kept_broker.create_topic()
    with kept_broker.client() as client:
        (found,) = (e for e in client.topic_configs([topic])[topic] if e.name == "retention.ms")
    assert found.value == "-1"


def test_topic_names_are_fresh(kept_broker):
    assert len({kept_broker.topic() for _ in range(100)}) == 100


USER_TESTS = """
def test_broker(kept_broker):
    with kept_broker.client() as client:
        client.create_topic(kept_broker.topic())

def test_the_same_broker(kept_broker, request):
    assert kept_broker.running()

def test_own(kept_cluster):
    one, two = kept_cluster(), kept_cluster(num_partitions=2)
    assert one.port() != two.port()
    one.kill()
    assert two.running()

def test_that_fails(kept_broker):
    assert kept_broker is None

def test_that_kills(kept_broker):
    kept_broker.kill()

def test_that_finds_it_dead(kept_broker):
    raise AssertionError

def test_that_has_it_again(kept_broker):
    assert kept_broker.running()
"""


def run_tests(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """pytest, as a user runs it, over a module of tests."""
    (folder / "test_user.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_the_plugin_in_a_users_project(tmp_path):
    done = run_tests(tmp_path, USER_TESTS)
    assert "1 failed, 5 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "was dead before this one" in done.stdout
    assert "kept node 0 on localhost:" in done.stdout, "the log is part of the report"


CLUSTERS_THAT_DO_NOT_STOP = """
import kept.testing.cluster

class Cluster:
    closed = []

    def __init__(self, nodes, name):
        self.name = name

    def __enter__(self):
        return self

    def close(self):
        self.closed.append(self.name)
        if self.name == "second":
            raise RuntimeError("it did not stop")

kept.testing.cluster.Cluster = Cluster

def test_that_starts_three(kept_cluster):
    for name in ("first", "second", "third"):
        kept_cluster(name=name)

def test_that_looks():
    assert sorted(Cluster.closed) == ["first", "second", "third"]
"""


def test_a_cluster_that_does_not_stop_leaves_no_other_running(tmp_path):
    done = run_tests(tmp_path, CLUSTERS_THAT_DO_NOT_STOP)
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "it did not stop" in done.stdout


def test_kept_testing_needs_no_pytest():
    program = "import sys, kept.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_plugin_costs_who_does_not_use_it_no_import():
    """pytest imports it at each start, in every project of the environment."""
    program = "import kept.testing.plugin, sys; print(*sorted(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.startswith("kept")]
    assert loaded == ["kept", "kept.testing", "kept.testing.plugin"]


def test_the_module_is_there_without_an_import_of_its_own():
    program = "import kept.testing as t; print(t.cluster.Cluster is t.Cluster)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


def test_a_type_checker_finds_what_is_not_there(tmp_path):
    (tmp_path / "user.py").write_text("from kept.testing import Cluster, Clutser\n")
    package, *options = testing.__file__, "--config-file=", "--follow-imports=skip"
    command = [sys.executable, "-m", "mypy", *options, package, "user.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert 'has no attribute "Clutser"' in done.stdout and "Found 1 error" in done.stdout, done


def test_what_is_not_there_is_no_attribute():
    with pytest.raises(ImportError, match="Clusters"):
        from kept.testing import Clusters  # noqa: F401
