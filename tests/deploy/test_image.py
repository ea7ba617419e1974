"""The image: size, user, end, health; and what it refuses, in the last line of its log."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import tarfile
import uuid
from pathlib import Path

import pytest

from kept.testing.container import IMAGE
from kept.testing.ports import free_port
from tests.deploy.containers import BASE, docker, image, until
from tests.deploy.files import ROOT
from tests.docs.blocks import LOCAL_PORTS, Command, given_to, typed
from tests.docs.blocks import run as run_commands

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(700)]

LEAST_PRIVILEGE = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
VERSIONS = sorted((ROOT / "tests" / "golden" / "data").iterdir())
MOST_OVER_BASE = 250_000_000
ALONE = (
    "-eKEPT_LISTENERS=PLAINTEXT://:9092",
    "-eKEPT_ADVERTISED_LISTENERS=PLAINTEXT://k:9092",
)


@pytest.fixture
def run():
    """Start a container that is removed, with its volume, when the test ends."""
    names = []

    def start(*arguments, command=()):
        name = f"kept-test-{uuid.uuid4().hex[:8]}"
        names.append(name)
        docker("run", "-d", "--name", name, *LEAST_PRIVILEGE, *arguments, image(), *command)
        return name

    yield start
    for name in names:
        docker("rm", "-f", "-v", name, check=False)


def pid_of(name):
    """Its process on this machine: 0, which would be ours, is that of one that has ended."""
    pid = int(docker("inspect", "-f", "{{.State.Pid}}", name))
    assert pid > 0, docker("logs", name)
    return pid


def ended(name):
    """Exit status and last line of a container that ends by itself."""
    until(lambda: docker("inspect", "-f", "{{.State.Status}}", name).strip() == "exited", "ended")
    status = int(docker("inspect", "-f", "{{.State.ExitCode}}", name))
    return status, (docker("logs", name).splitlines() or [""])[-1]


def test_size_and_what_it_is():
    told = json.loads(docker("image", "inspect", image()))[0]
    base = json.loads(docker("image", "inspect", BASE))[0]
    over = told["Size"] - base["Size"]
    print(f"{over / 1e6:.0f} MB over the base")
    assert 0 < over < MOST_OVER_BASE
    assert told["Config"]["User"] == "10001:10001"
    assert list(told["Config"]["Volumes"]) == ["/var/lib/kept"]
    assert not [one for one in told["Config"]["Env"] if one.startswith("KEPT_")]


def test_its_bill_of_materials_has_what_is_installed():
    """CycloneDX, made where the image was: every Python package with its version."""
    shown = docker("run", "--rm", "--entrypoint", "cat", image(), "/opt/kept/kept.cdx.json")
    document = json.loads(shown)
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "kept-log",
    )
    listed = {
        one["name"].lower().replace("_", "-"): one["version"] for one in document["components"]
    }
    program = (
        "import importlib.metadata as m;"
        "print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    )
    installed = docker("run", "--rm", "--entrypoint", "python", image(), "-c", program).split()
    found = dict(line.lower().replace("_", "-").split("==") for line in installed)
    assert found.pop("kept-log") == document["metadata"]["component"]["version"]
    listed.pop("kept-log", None)
    assert listed == found and "grpcio" in listed


def test_it_serves_is_healthy_and_ends_as_pid_1(run):
    name = run(*ALONE)
    until(lambda: " ready on " in docker("logs", name), "ready")
    asked = docker("exec", name, "python", "/opt/kept/healthcheck.py", "/readyz")
    assert asked.strip() == "ready"
    until(
        lambda: docker("inspect", "-f", "{{.State.Health.Status}}", name).strip() == "healthy",
        "healthy",
    )
    docker("stop", "-t", "120", name)
    status, last = ended(name)
    assert status == 0 and "event=stopping" in last
    docker("start", name)
    until(lambda: docker("logs", name).count(" ready on ") == 2, "ready on the same volume")
    assert "recover" not in docker("logs", name)


def test_one_node_is_reached_as_the_page_runs_it(tmp_path):
    page, name = "docs/operations.md", f"kept-test-{uuid.uuid4().hex[:8]}"
    ((_, text, line),) = given_to("tests/deploy/test_image.py", ROOT / page)
    (command,) = typed(text, page, line)
    started = command.text.replace("docker run ", f"docker run -d --name {name} ")
    assert name in started and IMAGE in started
    asked = f"docker exec {name} python /opt/kept/healthcheck.py /readyz"
    commands = (
        started.replace(IMAGE, image()),
        f"timeout 100 sh -c 'until {asked}; do sleep 0.1; done' || docker logs {name}",
        "kept topic create users",
        "echo hello | kept produce users",
    )
    try:
        run_commands(
            [Command(one, (), page, line) for one in commands],
            tmp_path,
            free_port(LOCAL_PORTS),
            200,
        )
    finally:
        docker("rm", "-f", "-v", name, check=False)


def test_a_node_of_a_file_is_healthy(run, tmp_path):
    """Elsewhere than at the port that the image names."""
    tmp_path.chmod(0o755)
    listeners = "listeners: PLAINTEXT://:9095\nadvertised.listeners: PLAINTEXT://k:9095\n"
    (tmp_path / "kept.yaml").write_text(listeners)
    name = run(
        "--health-interval=1s",
        "-v",
        f"{tmp_path}:/etc/kept:ro",
        command=("serve", "--config", "/etc/kept/kept.yaml"),
    )
    until(
        lambda: docker("inspect", "-f", "{{.State.Health.Status}}", name).strip() == "healthy",
        "healthy",
    )


def test_without_listeners_it_says_that_nobody_reaches_it(run):
    name = run()
    until(lambda: " ready on " in docker("logs", name), "ready")
    told = docker("logs", name)
    assert "clients outside of this container do not reach the node" in told
    assert "KEPT_ADVERTISED_LISTENERS" in told
    other = run(*ALONE)
    until(lambda: " ready on " in docker("logs", other), "ready")
    assert "outside of this container" not in docker("logs", other)


def test_term_before_it_is_ready_ends_it(run):
    """Process 1 ignores TERM until it has a handler: that must not be the start's last step."""
    name = run(*ALONE)
    status = Path(f"/proc/{pid_of(name)}/status")
    term = 1 << (signal.SIGTERM - 1)

    def handled():
        caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.M)
        return caught is not None and int(caught[1], 16) & term

    until(handled, "it has a handler for TERM")
    docker("stop", "-t", "60", name)
    code, _ = ended(name)
    assert code in (0, 128 + signal.SIGTERM), code


def test_term_in_its_first_moment_is_not_lost(run):
    """It is blocked from the first instruction on, and delivered once there is a handler."""
    for _ in range(3):
        name = run(*ALONE)
        os.kill(pid_of(name), signal.SIGTERM)
        code, _ = ended(name)
        assert code in (0, 128 + signal.SIGTERM), code


def test_the_health_check_says_what_is_wrong(run):
    name = run(*ALONE, command=("--version",))
    ended(name)
    there = run(*ALONE, "--entrypoint", "sleep", command=("60",))
    asked = docker("exec", there, "python", "/opt/kept/healthcheck.py", "/healthz", check=False)
    assert "127.0.0.1:9092 does not answer" in asked


VOTERS = "KEPT_CONTROLLER_QUORUM_VOTERS=0@a:10092,1@b:10092,2@c:10092"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["KEPT_LISTENERS=PLAINTEXT://:9092"], "advertised.listeners must say where clients reach"),
        (["KEPT_NODEID=1"], "KEPT_NODEID names no setting; did you mean KEPT_NODE_ID?"),
        ([VOTERS], "node.id is not set, but controller.quorum.voters names 3 nodes"),
        (
            [
                VOTERS,
                "KEPT_NODE_ID=0",
                "KEPT_LISTENERS=PLAINTEXT://:9092,NODE://:10093",
                "KEPT_ADVERTISED_LISTENERS=PLAINTEXT://a:9092",
            ],
            "give both the same port",
        ),
    ],
)
def test_a_wrong_environment_is_the_last_line_of_the_log(run, given, said):
    """What else is refused, and in which words: ``tests/node/config/test_config.py`` and its
    sister."""
    status, last = ended(run(*(f"-e{one}" for one in given)))
    assert status == 1
    assert last.startswith("kept: ") and said in last, last


def test_a_volume_of_another_user_is_refused(run, tmp_path):
    tmp_path.chmod(0o755)
    status, last = ended(run(*ALONE, "-v", f"{tmp_path}:/var/lib/kept"))
    assert status == 1
    assert re.search(r"/meta: .*Permission denied.*user 10001", last), last


def test_a_volume_of_another_node_is_refused(run):
    volume = f"kept-test-{uuid.uuid4().hex[:8]}"
    try:
        first = run(*ALONE, "-v", f"{volume}:/var/lib/kept")
        until(lambda: " ready on " in docker("logs", first), "ready")
        second = run(*ALONE, "-v", f"{volume}:/var/lib/kept")
        status, last = ended(second)
        assert status == 1 and "lock" in last, last
        docker("rm", "-f", first)
        status, last = ended(run(*ALONE, "-e", "KEPT_NODE_ID=4", "-v", f"{volume}:/var/lib/kept"))
        assert status == 1 and "node.id" in last and "0" in last and "4" in last, last
    finally:
        for name in docker("ps", "-aq", "--filter", f"volume={volume}").split():
            docker("rm", "-f", name, check=False)
        docker("volume", "rm", volume)


@pytest.mark.parametrize("kind", ["clean", "unclean"])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_the_volume_of_an_earlier_version_is_served(version, kind):
    """An upgrade is a new container on the old volume: all topics and records are there."""
    expected = json.loads((version / "expected.json").read_text())[kind]
    name = f"kept-test-{uuid.uuid4().hex[:8]}"
    forever = "-eKEPT_OFFSETS_RETENTION_MINUTES=2147483647"
    cleaner = "-eKEPT_LOG_CLEANER_ENABLE=false"
    here = (ALONE[0], "-eKEPT_ADVERTISED_LISTENERS=PLAINTEXT://localhost:9092")
    docker("create", "--name", name, *LEAST_PRIVILEGE, *here, forever, cleaner, image())
    try:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(version / kind, "data", filter=_as_the_user)
        command = ["docker", "cp", "-", f"{name}:/var/lib/kept"]
        subprocess.run(command, input=packed.getvalue(), check=True, timeout=300)
        docker("start", name)
        until(lambda: " ready on " in docker("logs", name), "ready")
        kept = ("exec", name, "kept")
        topics = json.loads(docker(*kept, "topic", "list", "--json"))
        listed = {one["name"] if isinstance(one, dict) else one for one in topics}
        assert listed >= {one for one in expected["topics"] if not one.startswith("__")}
        for partition in ("users-0", "events-1", "codecs-0"):
            topic, number = partition.rsplit("-", 1)
            wanted = [row[:2] for row in expected["partitions"][partition]["records"]]
            found = docker(
                *kept,
                "consume",
                topic,
                "--partition",
                number,
                "--from-beginning",
                "--json",
                "--max",
                str(len(wanted)),
            )
            rows = [json.loads(line) for line in found.splitlines()]
            assert [[row["offset"], row["timestamp"]] for row in rows] == wanted
    finally:
        docker("rm", "-f", "-v", name, check=False)


def _as_the_user(member):
    member.uid = member.gid = 10001
    return member
