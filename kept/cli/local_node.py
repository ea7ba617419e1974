"""One node of ``kept local``: its directory, its kept.yaml and its process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from kept.cli.shell import Failure
from kept.client.core.metadata import Endpoint
from kept.client.security.security import PLAINTEXT, Security
from kept.node.config.local_security import NODE, LocalSecurity
from kept.storage.errors import ConfigurationError

READY_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.01
OWN_SETTINGS: Final = (
    "node.id",
    "listeners",
    "log.dirs",
    "metadata.log.dir",
    "controller.quorum.voters",
)
"""What follows from a node's number, its directory and its port."""
_TAIL_LINES: Final = 10
_ERROR: Final = "kept: "
"""What the line begins with that a command of ours fails with (:mod:`kept.cli.run`)."""


class Launched(NamedTuple):
    """A process that was started, and where in its log that was."""

    process: subprocess.Popen[bytes]
    position: int


class SavedNode(NamedTuple):
    """What there was of a node: its directory, and its kept.yaml as it stood there."""

    exists: bool
    config: bytes | None


class LocalNode:
    """One node's directory."""

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self.directory = os.path.join(os.path.abspath(directory), f"node-{number}")
        self.config = os.path.join(self.directory, "kept.yaml")
        self.pid_file = os.path.join(self.directory, "kept.pid")
        self.log = os.path.join(self.directory, "kept.log")

    def merged(
        self, port: int, defaults: Mapping[str, str], settings: Mapping[str, str]
    ) -> dict[str, str]:
        """What kept.yaml is to say: what it said before, but for addresses, directories and
        ``settings``; ``defaults`` are for a new node. Raises ConfigurationError where a node does
        not start with that.
        """
        from kept.node.config.node_config import NodeConfig

        data = os.path.join(self.directory, "data")
        own = {
            "node.id": str(self.number),
            "listeners": f"PLAINTEXT://localhost:{port}",
            "log.dirs": os.path.join(data, "log"),
            "metadata.log.dir": os.path.join(data, "meta"),
        }
        own |= {name: value for name, value in defaults.items() if name in OWN_SETTINGS}
        before = self.settings()
        tree = {**own, **defaults, **before, **own, **settings}
        changed = {name: text for name, text in tree.items() if before.get(name) != text}
        NodeConfig.load(self.config if before else None, changed)
        return tree

    def saved(self) -> SavedNode:
        """What there is of it now, for :meth:`restore`."""
        if not os.path.exists(self.config):
            return SavedNode(os.path.exists(self.directory), None)
        with open(self.config, "rb") as source:
            return SavedNode(True, source.read())

    def restore(self, before: SavedNode) -> bool:
        """Leave of it what there was ``before``; whether its kept.yaml said something else."""
        if not before.exists:
            shutil.rmtree(self.directory, ignore_errors=True)
            return True
        if before.config == self.saved().config:
            return False
        if before.config is None:
            os.unlink(self.config)
        else:
            with open(self.config, "wb") as target:
                target.write(before.config)
        return True

    def configure(self, tree: Mapping[str, str]) -> None:
        """Write kept.yaml, unless it says that already."""
        import yaml

        if tree == self.settings():
            return
        os.makedirs(self.directory, exist_ok=True)
        with open(self.config, "w", encoding="utf-8") as out:
            yaml.safe_dump(dict(tree), out, sort_keys=False)

    def settings(self) -> dict[str, str]:
        """What kept.yaml says: nothing before there is one. Raises ConfigurationError where it is
        damaged.
        """
        from kept.node.config.sources import from_file

        return from_file(self.config) if os.path.exists(self.config) else {}

    def port(self) -> int | None:
        """The port in kept.yaml, where it says one."""
        try:
            return int(self.settings()["listeners"].rpartition(":")[2])
        except (ConfigurationError, KeyError, ValueError):
            return None

    def pid(self) -> int | None:
        """The process id of this node, if it runs.

        kept.pid may be stale, damaged or gone: what counts is the process that was started with
        this node's kept.yaml.
        """
        try:
            with open(self.pid_file, encoding="ascii") as source:
                number = int(source.read())
        except (OSError, ValueError):
            number = -1
        if _serves(number, self.config):
            return number
        running = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return next((number for number in running if _serves(number, self.config)), None)

    def endpoint(self) -> Endpoint | None:
        """Where it serves."""
        port = self.port()
        return None if port is None else Endpoint("localhost", port)

    def security(self) -> Security:
        """How an administrator connects to it."""
        secured = security_of(os.path.dirname(self.directory))
        return PLAINTEXT if secured is None else Security(secured.client_properties())

    def launch(self) -> Launched:
        """Start the process. Raises Failure where ``kept local up`` has not made the node."""
        if not os.path.exists(self.config):
            raise Failure(f"{self.config} is not there: kept local up makes it")
        with open(self.log, "ab") as log:
            position = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kept", "serve", "--config-file", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        with open(self.pid_file, "w", encoding="ascii") as out:
            out.write(f"{process.pid}\n")
        return Launched(process, position)

    def ready_line(self, launched: Launched) -> str | None:
        """The line that it prints when it is ready; None before. A Failure when it has ended."""
        process = launched.process
        ended = process.returncode is None and process.poll() is not None
        lines = self._lines_from(launched.position)
        ready = next((line for line in lines if " ready on " in line), None)
        if ready is not None:
            process.returncode = 0  # it outlives this command; nobody is to wait for it
        elif ended:
            self.give_up(launched)
        return ready

    def give_up(self, launched: Launched) -> None:
        """End a node that did not become ready. Raises NodeNotReady with the reason."""
        process = launched.process
        lines = self._lines_from(launched.position)
        what = f"ended with status {process.returncode}"
        if process.poll() is None:
            process.kill()
            process.wait()
            what = f"was not ready in {READY_DEADLINE_S:.0f} s"
        self._forget()
        said = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        reason = said[-1] if said else "; ".join(lines[-_TAIL_LINES:]) or "it said nothing"
        raise NodeNotReady(self, what, reason)

    def _lines_from(self, position: int) -> list[str]:
        with open(self.log, "rb") as log:
            log.seek(position)
            return log.read().decode("utf-8", "replace").splitlines()

    def end(self, with_signal: signal.Signals) -> None:
        """Signal the process and wait until it is gone."""
        self.signal(with_signal)
        self.await_end(STOP_DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stalled process goes on to take it. Raises Failure where none runs."""
        pid = self.pid()
        if pid is None:
            raise Failure(f"node {self.number} does not run")
        os.kill(pid, number)
        if number != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)

    def await_end(self, deadline_s: float) -> None:
        """Wait until the process is gone. Raises Failure when that takes too long."""
        end = time.monotonic() + deadline_s
        while (pid := self.pid()) is not None and process_state(pid) not in {b"Z", b""}:
            if time.monotonic() > end:
                raise Failure(
                    f"node {self.number} (pid {pid}) did not stop in {deadline_s:.0f} s; "
                    f"kept local kill {self.number} ends it"
                )
            time.sleep(POLL_S)
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.pid_file)


class NodeNotReady(Failure):
    """A node that did not become ready. ``reason`` is the error that it ended with, or the end of
    its log where there is none.
    """

    def __init__(self, node: LocalNode, what: str, reason: str) -> None:
        super().__init__(f"node {node.number} {what}: {reason} ({node.log} has more)")
        self.node = node
        self.what = what
        self.reason = reason


def _serves(pid: int, config: str) -> bool:
    """Whether a process is ``kept serve --config-file config``, and not only its remains."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as source:
            arguments = source.read().split(b"\0")
    except OSError:
        return False
    return b"serve" in arguments and os.fsencode(config) in arguments


def process_state(pid: int) -> bytes:
    """The state letter in /proc: T is stopped, Z is a zombie; empty: the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            return source.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def listed_nodes(directory: str) -> list[LocalNode]:
    """Every node of a directory, in order; what is only named like one (``node-18``) is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    numbers = sorted(int(n[5:]) for n in names if n.startswith("node-") and n[5:].isdecimal())
    nodes = [LocalNode(directory, number) for number in numbers]
    return [node for node in nodes if any(map(os.path.exists, (node.config, node.log)))]


def existing_nodes(directory: str) -> list[LocalNode]:
    """Every node of a directory, in order. Raises Failure when there is none."""
    nodes = listed_nodes(directory)
    if not nodes:
        raise Failure(f"no nodes in {directory}: kept local up makes them")
    return nodes


def existing_node(directory: str, number: int) -> LocalNode:
    """A node of a directory. Raises Failure when it has none of that number."""
    node = LocalNode(directory, number)
    if not os.path.exists(node.config):
        raise Failure(f"no node {number} in {directory}")
    return node


def security_directory(directory: str) -> str:
    """Where certificates and passwords of the nodes of a directory are."""
    return os.path.join(os.path.abspath(directory), "security")


def security_of(directory: str) -> LocalSecurity | None:
    """What the nodes of a directory are secured by, if they are."""
    path = security_directory(directory)
    ours = os.path.exists(os.path.join(path, f"{NODE}.pem"))
    return LocalSecurity(path) if ours else None
