"""The image and deploy/compose.yaml as tests use them, by docker and docker-compose."""

from __future__ import annotations

import functools
import os
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kept.client.admin.readiness import cluster_is_up
from kept.client.core.metadata import Endpoint
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import RetriableError
from kept.testing.ports import free_port
from tests.deploy.files import ROOT
from tests.docs.blocks import Command, run

IMAGE: Final = "kept:under-test"
STAND_IN: Final = "kept-stand-in:under-test"
BASE: Final = "python:3.11-slim-bookworm"
BUILD_S: Final = 600
READY_S: Final = 180.0
POLL_S: Final = 0.05


def docker(*arguments: str, timeout: float = 300, check: bool = True) -> str:
    """A docker command's output, both streams, in the order in which they came."""
    done = subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stdout.strip()}")
    return done.stdout


def no_base() -> str | None:
    """Why the image cannot be built here, None when it can."""
    asked = subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, check=False)
    return None if asked.returncode == 0 else f"no image {BASE} (tests/tools/base-image makes it)"


@functools.cache
def image() -> str:
    """The image of this checkout, built once in a run, or ``TEST_IMAGE``; its name."""
    if given := os.environ.get("TEST_IMAGE"):
        return given
    _build(IMAGE, "-f", f"{ROOT}/deploy/Dockerfile", str(ROOT))
    return IMAGE


def _build(name: str, *arguments: str, context: bytes | None = None) -> None:
    """Build an image and nothing that stays beside it.

    Its first stage gets a name, too, under which the next build finds the layers; the images that
    had the two names before are removed.
    """
    stage = f"{name}-build"
    before = set(_ids(name, stage))
    for target in (("--target=build", "-t", stage), ("-t", name)):
        subprocess.run(
            ["docker", "build", "-q", *target, *arguments],
            input=context,
            check=True,
            timeout=BUILD_S,
        )
    for old in before - set(_ids(name, stage)):
        docker("rmi", old, check=False)  # refused while somebody's container is of it


def _ids(*names: str) -> list[str]:
    """Of those images that there are."""
    return docker(
        "images", "-q", "--no-trunc", *(f"--filter=reference={one}" for one in names)
    ).split()


@functools.cache
def stand_in() -> str:
    """An image that does nothing, in the place of one that is in a registry; its name."""
    lines = f'FROM {BASE}\nCMD ["sleep", "infinity"]\n'
    command = ["docker", "build", "-q", "-t", STAND_IN, "-"]
    subprocess.run(command, input=lines.encode(), check=True, timeout=BUILD_S)
    return STAND_IN


@functools.cache
def image_of(commit: str) -> str:
    """The image of an older commit, which must be in this clone; its name."""
    name = f"kept:{commit[:12]}"
    asked = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    if asked.returncode:
        tree = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True, timeout=60
        ).stdout
        _build(name, "-f", "deploy/Dockerfile", "-", context=tree)
    return name


def until(condition: Callable[[], bool], what: str, deadline_s: float = READY_S) -> None:
    """Ask until it is so; AssertionError after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s} s not so: {what}"
        time.sleep(POLL_S)


class Compose:
    """The three nodes of deploy/compose.yaml under a project name of their own.

    It has the methods of ``kept.testing.Cluster`` that ``tests.failover`` uses. More nodes need a
    file that has them, and PORT_3 and so on in it; ``nodes`` of them are started.
    """

    NODES: Final = 3
    MOST: Final = 5

    def __init__(
        self, *, files: tuple[str, ...] = ("compose.yaml",), nodes: int = NODES, **environ: str
    ) -> None:
        self.project = f"kept-test-{uuid.uuid4().hex[:8]}"
        self.nodes = nodes
        self._files = files
        ports: list[int] = []
        while len(ports) < self.MOST:
            port = free_port()
            if port not in ports:
                ports.append(port)
        self._ports = ports
        self.environ = {
            **os.environ,
            **environ,
            "COMPOSE_PROJECT_NAME": self.project,
            **{f"PORT_{number}": str(port) for number, port in enumerate(ports)},
        }

    def compose(self, *arguments: str, timeout: float = 400) -> str:
        """A docker-compose command's output."""
        files = [f"--file={ROOT / 'deploy' / name}" for name in self._files]
        done = subprocess.run(
            ["docker-compose", *files, *arguments],
            env=self.environ,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        assert not done.returncode, f"docker-compose {' '.join(arguments)}: {done.stdout}"
        return done.stdout

    def __enter__(self) -> Compose:
        self.environ.setdefault("IMAGE", image())
        try:
            self.begin()
        except BaseException:
            print(*(self.log(node)[-2000:] for node in range(self.nodes)), sep="\n")
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.nodes

    def begin(self) -> None:
        """Start all nodes for the first time, and wait."""
        self.grow(self.nodes)

    def run_commands(self, commands: Iterable[Command]) -> None:
        """Run commands of a page in the root of this checkout, as this project, on its ports, and
        with its image, which is built already. Before a status of the cluster all must be up.
        """
        typed = []
        for command in commands:
            if "kept cluster status" in command.text:
                ready = f"{command.text} --check >/dev/null 2>&1"
                waits = f"timeout {READY_S:.0f} sh -c 'until {ready}; do sleep 0.2; done' || true"
                typed.append(command._replace(text=waits))
            typed.append(command._replace(text=command.text.replace("--build", "--no-build")))
        own = {key: text for key, text in self.environ.items() if os.environ.get(key) != text}
        run(typed, ROOT, self.port(0), 3 * READY_S, environ=own)

    def grow(self, nodes: int) -> None:
        """Start the first ``nodes`` of the files, those that do not run yet, and wait."""
        self.nodes = nodes
        self.compose("up", "-d", "--no-build", *(f"kept-{node}" for node in range(nodes)))
        self.await_ready()

    def close(self) -> None:
        """Remove containers, network and volumes."""
        self.compose("down", "-v", "-t", "2")

    def security(self) -> Security:
        """How this machine's clients log in."""
        return PLAINTEXT

    @property
    def bootstrap(self) -> str:
        """Where clients on this machine find it."""
        return ",".join(f"localhost:{port}" for port in self._ports[: self.nodes])

    def host(self, _node: int = 0) -> str:
        """Where node's port is published."""
        return "localhost"

    def port(self, node: int = 0) -> int:
        """The published port of a node."""
        return self._ports[node]

    def name(self, node: int) -> str:
        """The container of a node."""
        return f"{self.project}_kept-{node}_1"

    def running(self, node: int = 0) -> bool:
        """Whether a node's container runs."""
        return self.state(node, "{{.State.Running}}") == "true"

    def state(self, node: int, template: str) -> str:
        """What docker knows of a node."""
        return docker("inspect", "-f", template, self.name(node), check=False).strip()

    def log(self, node: int = 0) -> str:
        """What a node printed."""
        return docker("logs", self.name(node), check=False)

    def get(self, node: int, path: str) -> str:
        """What a node answers over HTTP."""
        with urllib.request.urlopen(
            f"http://localhost:{self.port(node)}{path}", timeout=10
        ) as told:
            return str(told.read().decode())

    def topic(self, prefix: str, partitions: int, config: Mapping[str, str] | None = None) -> str:
        """A new topic; its name, once its partitions are led."""
        from kept.client.client import Client

        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        with Client(self.bootstrap) as client:
            client.create_topic(name, partitions=partitions, config=dict(config or {}))

            def led() -> bool:
                try:
                    client.bounds(name)
                except RetriableError:  # a node that is busy has not heard of it yet
                    return False
                return True

            until(led, f"all partitions of {name} are led")
        return name

    def await_ready(self, deadline_s: float = READY_S) -> None:
        """Wait until every node that runs is ready and knows all the others that do."""
        up = [Endpoint("localhost", self.port(n)) for n in range(self.nodes) if self.running(n)]
        assert up, "no node runs"
        why: list[str | None] = [None]

        def ready() -> bool:
            why[0] = cluster_is_up(up, self.security())
            return why[0] is None

        try:
            until(ready, "every node is ready", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error} ({why[0]})") from None

    def wait_until(
        self, condition: Callable[[], bool], what: str, deadline_s: float = READY_S
    ) -> None:
        """As ``kept.testing.Cluster.wait_until``."""
        until(condition, what, deadline_s)

    def kill(self, node: int) -> None:
        """``docker kill``."""
        docker("kill", self.name(node))

    def stop(self, node: int) -> None:
        """``docker stop``, with the grace period of compose.yaml."""
        docker("stop", "-t", "45", self.name(node))

    def launch(self, node: int) -> None:
        """Start a stopped or killed node."""
        docker("start", self.name(node))

    def start(self, node: int) -> None:
        """Start a stopped or killed node and wait until all are ready."""
        self.launch(node)
        self.await_ready()

    def pause(self, node: int) -> None:
        """Freeze all processes of a node."""
        docker("pause", self.name(node))

    def resume(self, node: int) -> None:
        """Let them go on."""
        docker("unpause", self.name(node))

    def replace(self, node: int) -> None:
        """What an upgrade does to a node: stop it, a new container on its volume, wait for it."""
        self.compose(
            "up", "-d", "--no-build", "--no-deps", "--force-recreate", "-t", "45", f"kept-{node}"
        )
        self.await_ready()
