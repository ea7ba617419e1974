"""A node in a container that may have 256 MiB of memory, under a flood of everything at once.

With the settings of docs/operations.md ("With a limit on memory") it serves, throttles and refuses;
with the defaults the kernel kills it, which shows that the flood is one, and it loses nothing.
"""

from __future__ import annotations

import contextlib
import time
import urllib.request
import uuid
from pathlib import Path

import pytest

from kept.node.config.sources import variable
from kept.storage.types import Codec
from kept.testing.ports import free_port
from tests.deploy.containers import docker, image, until
from tests.deploy.flood import HALVES, INFLATED, MIB, SENT, Flood, batch_of
from tests.support.kafka_connection import Connection
from tests.tools.needs import cannot_run

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(900)]

LIMIT = "256m"
FLOOD_S = 30.0
BOUNDED = {
    "kept.inflight.max.bytes": 48 * MIB,
    "socket.request.max.bytes": 16 * MIB,
    "kept.inflated.max.bytes": 16 * MIB,
    "log.cleaner.dedupe.buffer.size": 16 * MIB,
}
"""The row for 256 MiB of docs/operations.md."""
MOST_RESIDENT = 60_000_000 + (48 + 12 + 12 + 2 * 16 + 2 * 16) * MIB
"""What that page says of it: idle, in flight, waiting, responses, two requests, two batches."""
REASON = "{{.State.Status}} {{.State.OOMKilled}} {{.State.ExitCode}}"


@pytest.fixture
def start():
    """``start(settings)``: a container with the limit; its name and its port."""
    if docker("info", "--format", "{{.MemoryLimit}}").strip() != "true":
        cannot_run("docker", "this machine's kernel or engine cannot limit a container's memory")
    names = []

    def start(settings):
        name, port = f"kept-test-{uuid.uuid4().hex[:8]}", free_port()
        names.append(name)
        given = {"listeners": f"PLAINTEXT://127.0.0.1:{port}", **settings}
        docker(
            "run",
            "-d",
            "--name",
            name,
            "--network=host",
            f"--memory={LIMIT}",
            f"--memory-swap={LIMIT}",
            *(f"-e{variable(key)}={text}" for key, text in given.items()),
            image(),
        )
        serves(name, port)
        return name, port

    yield start
    for name in names:
        docker("rm", "-f", "-v", name, check=False)


def serves(name, port):
    """Wait until it is ready."""

    def ready():
        assert state(name)[0] == "running", docker("logs", name)[-3000:]
        return answers(port, "/readyz")

    until(ready, "ready")


def answers(port, path):
    """Whether it answers a probe, with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status == 200
    except OSError:
        return False


def state(name):
    """Of a container: status, "true" if the kernel killed it for want of memory, exit status."""
    return docker("inspect", "--format", REASON, name).split()


def most_resident(name):
    """The most bytes of memory that its first process has had."""
    pid = docker("inspect", "--format", "{{.State.Pid}}", name).strip()
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )


def test_a_node_with_little_memory_lives_through_a_flood(start):
    name, port = start(BOUNDED)
    flood = Flood(port)
    flood.create_topic()
    with contextlib.closing(Connection(flood.bootstrap)) as connection:
        bomb = connection.produce(flood.topic, batch_of(b"bomb", bytes(2 * INFLATED), Codec.GZIP))
        assert int(bomb.error_code) and str(16 * MIB) in bomb.error_message
    healthy = asked = 0
    with flood.running():
        end = time.monotonic() + FLOOD_S
        while time.monotonic() < end and state(name)[0] == "running":
            healthy += answers(port, "/healthz")
            asked += 1
    assert state(name)[:2] == ["running", "false"], (
        flood.refused[:3],
        docker("logs", name)[-3000:],
    )
    told = (
        f"{len(flood.acknowledged)} acknowledged, {len(flood.refused)} refused, {flood.browsed} "
        f"browsed, of halves {[n // MIB for n in flood.taken_of_halves]} MiB a round, "
        f"at most {most_resident(name) / 1e6:.0f} MB resident, healthy {healthy} of {asked} times"
    )
    print(told)
    assert healthy == asked, told
    assert max(flood.taken_of_halves) < HALVES * SENT / 2, "what does not fit waits outside"
    assert len(flood.acknowledged) > 5 and flood.browsed, told
    assert not flood.refused, "a batch that fits waits, and is served"
    assert most_resident(name) < MOST_RESIDENT, told
    assert "Traceback" not in docker("logs", name)
    assert not flood.lost()


def test_with_the_defaults_the_kernel_kills_it_and_nothing_is_lost(start):
    name, port = start({})
    flood = Flood(port)
    flood.create_topic()
    with flood.running():
        until(lambda: state(name)[0] == "exited", "killed by the flood", 120)
    assert state(name)[1:] == ["true", "137"]
    docker("start", name)
    serves(name, port)
    print(f"{len(flood.acknowledged)} acknowledged before the kernel killed it")
    assert not flood.lost()
