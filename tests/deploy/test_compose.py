"""deploy/compose.yaml: clients outside and inside, what is refused, a rolling upgrade under load.

Kills under load are in ``tests/chaos``, on the same file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kept.testing.ports import free_port
from tests.deploy.containers import Compose, docker, image, stand_in, until
from tests.deploy.files import ROOT
from tests.docs.blocks import given_to, typed
from tests.failover.load import PARTITIONS, under_load
from tests.failover.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(900)]


PAGE = "docs/operations.md"


class AsOnThePage(Compose):
    """Started by the commands of the page, in whose second file are two images of a registry."""

    def __init__(self) -> None:
        super().__init__(
            files=("compose.yaml", "compose.monitoring.yaml"),
            PROMETHEUS_IMAGE=stand_in(),
            PROMETHEUS_PORT=str(free_port()),
            GRAFANA_IMAGE=stand_in(),
            GRAFANA_PORT=str(free_port()),
        )

    def begin(self) -> None:
        ((_, text, line),) = given_to("tests/deploy/test_compose.py", ROOT / PAGE)
        self.run_commands(typed(text, PAGE, line))
        self.await_ready()


@pytest.fixture(scope="module")
def compose():
    with AsOnThePage() as started:
        yield started


def run_kept(*arguments, stdin=""):
    """The command line of this checkout, on the host."""
    done = subprocess.run(
        [sys.executable, "-m", "kept", *arguments],
        input=stdin,
        text=True,
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def inside(compose, *arguments):
    """The command line of the image, in a container of its own on the same network."""
    return docker("run", "--rm", "--network", f"{compose.project}_default", image(), *arguments)


def test_clients_outside_and_inside_use_one_cluster(compose):
    topic = compose.topic("both", partitions=3)
    run_kept(
        "produce",
        topic,
        "--key-separator",
        ":",
        "--bootstrap",
        compose.bootstrap,
        stdin="".join(f"key{n}:from outside {n}\n" for n in range(30)),
    )
    there = inside(
        compose, "consume", topic, "--from-beginning", "--max", "30", "--bootstrap", "kept-1:9092"
    )
    assert len(re.findall(r"from outside \d+", there)) == 30
    status = run_kept("cluster", "status", "--check", "--bootstrap", compose.bootstrap)
    assert all(f"localhost:{compose.port(node)}" in status for node in range(3)), status
    assert re.findall(r"active +\S+ +([abc]) ", status) == ["a", "b", "c"]
    inner = inside(compose, "cluster", "status", "--check", "--bootstrap", "kept-2:9092")
    assert all(f"kept-{node}:9092" in inner for node in range(3)), inner


def test_nodes_run_without_rights_and_are_healthy(compose):
    for node in range(3):
        until(lambda n=node: compose.state(n, "{{.State.Health.Status}}") == "healthy", "healthy")
        shown = docker("exec", compose.name(node), "cat", "/proc/1/status")
        assert re.search(r"^Uid:\s+10001\s+10001", shown, re.M)
        assert re.search(r"^CapEff:\s+0+$", shown, re.M)
        assert re.search(r"^NoNewPrivs:\s+1$", shown, re.M)
        touched = docker("exec", compose.name(node), "touch", "/opt/kept/x", check=False)
        assert "Read-only file system" in touched


def test_a_killed_controller_is_not_waited_for(compose):
    """Its address goes with it, so that the next controller cannot be refused there."""
    compose.await_ready()
    victim = Nodes(compose).controller()
    others = [node for node in range(3) if node != victim]

    def fenced():
        lines = "".join(compose.log(node) for node in others).splitlines()
        return [one for one in lines if "what=fence" in one and f"broker={victim}" in one]

    before = len(fenced())
    compose.kill(victim)
    until(lambda: len(fenced()) > before, "it is fenced")
    assert not [one for one in fenced()[before:] if "silent for" in one]
    compose.start(victim)


def test_a_rolling_upgrade_has_no_failed_acknowledgement(compose):
    topic = compose.topic("roll", PARTITIONS)

    def events(load):
        for node in range(3):
            before = compose.state(node, "{{.Id}}")
            begun = time.monotonic()
            compose.replace(node)
            print(f"node {node} replaced: longest gap {load.gap_s(begun):.2f} s")
            assert compose.state(node, "{{.Id}}") != before
            load.goes_on(compose)

    under_load(compose, topic, events)


def test_monitoring_is_added_by_the_second_file():
    both = Compose(files=("compose.yaml", "compose.monitoring.yaml"))
    services = yaml.safe_load(both.compose("config"))["services"]
    assert set(services) == {"kept-0", "kept-1", "kept-2", "prometheus", "grafana"}
    mounted = [str(one) for name in ("prometheus", "grafana") for one in services[name]["volumes"]]
    paths = [re.search(rf"{ROOT}/[^:']+", one) for one in mounted]
    assert sum(path is not None for path in paths) == 5
    assert all(path is None or Path(path[0]).is_file() for path in paths)


SETTINGS = {
    "KEPT_CONTROLLER_QUORUM_VOTERS": "0@kept-0:10092,1@kept-1:10092,2@kept-2:10092",
    "KEPT_LISTENERS": "INTERNAL://:9092,NODE://:10092",
    "KEPT_LISTENER_SECURITY_PROTOCOL_MAP": "INTERNAL:PLAINTEXT,NODE:PLAINTEXT",
    "KEPT_ADVERTISED_LISTENERS": "INTERNAL://stranger:9092,NODE://stranger:10092",
    "KEPT_PROCESS_ROLES": "broker",
}


@pytest.fixture
def stranger(compose):
    """Start one more container on the nodes' network; it is removed when the test ends."""
    names = []

    def start(**settings):
        name = f"{compose.project}-stranger-{len(names)}"
        names.append(name)
        given = [f"-e{key}={text}" for key, text in (SETTINGS | settings).items()]
        network = f"--network={compose.project}_default"
        docker("run", "-d", "--name", name, network, "--network-alias=stranger", *given, image())
        return name

    yield start
    for name in names:
        docker("rm", "-f", "-v", name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {
                "KEPT_NODE_ID": "1",
                "KEPT_PROCESS_ROLES": "broker,controller",
                "KEPT_CONTROLLER_QUORUM_VOTERS": "0@kept-0:10092,1@stranger:10092,2@kept-2:10092",
            },
            "node id 1 belongs to another process that is alive: give this one another node.id",
        ),
        (
            {"KEPT_NODE_ID": "9", "KEPT_CONTROLLER_QUORUM_VOTERS": "7@kept-0:10092,8@kept-1:10092"},
            "this is node 0, not node 7: correct its address in controller.quorum.voters",
        ),
    ],
    ids=["a node id that is taken", "other voters"],
)
def test_a_node_that_contradicts_the_cluster_is_refused(compose, stranger, settings, said):
    name = stranger(**settings)
    until(lambda: docker("inspect", "-f", "{{.State.Status}}", name).strip() == "exited", "it ends")
    assert docker("inspect", "-f", "{{.State.ExitCode}}", name).strip() == "1"
    last = docker("logs", name).splitlines()[-1]
    assert last.startswith("kept: ") and said in last, last
    compose.await_ready()


def test_a_broker_joins_and_leaves(compose, stranger):
    """With a list of voters that is out of date, as after ``kept cluster voter remove``."""
    voters = "0@kept-0:10092,1@kept-1:10092"
    name = stranger(KEPT_NODE_ID="9", KEPT_CONTROLLER_QUORUM_VOTERS=voters)
    until(lambda: " ready on " in docker("logs", name), "it is ready")
    (told,) = [
        line
        for line in docker("logs", name).splitlines()
        if "controller.quorum.voters differs" in line
    ]
    assert "listed=0,1 voters=0,1,2" in told
    docker("stop", "-t", "120", name)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", name).strip() == "0"
