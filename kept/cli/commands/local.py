"""``kept local``: nodes on this machine, in the background.

``DIR/node-I/`` holds ``kept.yaml``, ``kept.pid``, ``kept.log`` and ``data/``; node I serves on
PORT+I and speaks to the others on PORT+I+1000. Every node is a broker and a voter; three nodes and
more keep three replicas of everything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from kept.cli.completion import BROKER_SETTING
from kept.cli.output import counted, echo, show_json, show_table
from kept.cli.shell import Failure, Group, WholeNumber, examples, for_each, json_option, pairs
from kept.client.admin.readiness import cluster_is_up
from kept.client.core.metadata import Endpoint
from kept.client.json_api import HttpFailed, JsonApi
from kept.client.security.security import PLAINTEXT, Security
from kept.node.config.local_cluster import NODE_PORT_OFFSET, cluster_settings
from kept.node.config.local_security import USERS, LocalSecurity
from kept.storage.errors import ConfigurationError

READY_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 30.0
DOWN_DEADLINE_S: Final = 10.0
"""Longest time to stop nodes together: the last ones are without a quorum."""
ROLE_TIMEOUT_S: Final = 5.0
MAX_NODES: Final = 100
MAX_PORT: Final = 65535
FIRST_PORT: Final = 9092
_POLL_S: Final = 0.01
_TAIL_LINES: Final = 10
_OURS: Final = (
    "node.id", "listeners", "log.dirs", "metadata.log.dir", "controller.quorum.voters"
)  # fmt: skip


class _Launched(NamedTuple):
    """A process that was started, and where in its log that was."""

    process: subprocess.Popen[bytes]
    position: int


def _dir_option(function: Any) -> Any:
    return click.option(
        "--dir",
        "directory",
        metavar="DIR",
        default="./kept-local",
        show_default=True,
        help="Directory of the nodes.",
    )(function)


@click.group(
    cls=Group,
    epilog=examples("kept local up --nodes 3", "kept local kill 1", "kept local down --purge"),
)
def local() -> None:
    """Run nodes on this machine, in the background."""


@local.command(
    epilog=examples(
        "kept local up --nodes 3", "kept local up --set log.segment.bytes=1048576 --port 9192"
    )
)
@click.option(
    "--nodes",
    type=WholeNumber(1, MAX_NODES),
    help=f"Number of nodes, at most {MAX_NODES}.  [default: as many as --dir has, else 1]",
)
@_dir_option
@click.option(
    "--port",
    type=WholeNumber(1, MAX_PORT),
    help="Port of node 0; node I serves on this plus I.  "
    f"[default: the ports that the nodes have, else {FIRST_PORT}]",
)
@click.option(
    "--set",
    "settings",
    metavar="K=V",
    multiple=True,
    type=BROKER_SETTING,
    help="A setting of every node; may be repeated.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Switch on TLS, logins by SCRAM and ACLs; certificates and passwords are made in "
    "DIR/security. Nodes that were secure stay so.",
)
def up(
    *, nodes: int | None, directory: str, port: int | None, settings: tuple[str, ...], secure: bool
) -> None:
    """Start nodes and return when all are ready.

    Nodes that --dir has already keep their data, their ports and what their kept.yaml says, unless
    --port or --set says otherwise.

    With --secure commands need --command-config DIR/security/admin.properties: admin may do
    everything. Users ada and bob have files, too, and may do what ACLs allow them.
    """
    given = pairs("--set", settings)
    for name in _OURS:
        if name in given:
            raise click.UsageError(f"kept local sets {name} itself")
    there = [node.number for node in _listed_nodes(directory)]
    count = nodes or len(there) or 1
    if there and there != list(range(count)):
        raise Failure(
            f"{directory} has {counted(len(there), 'node')}, not {count}: give "
            f"--nodes {len(there)} or another --dir, or start again after kept local down --purge"
        )
    members = [_Node(directory, number) for number in range(count)]
    for node in members:
        if node.pid() is not None:
            raise Failure(
                f"node {node.number} in {directory} runs already (pid {node.pid()}): kept local "
                "down stops it, another --dir and --port make more nodes"
            )
    ports = _ports(members, port)
    if twice := sorted({number for number in ports if ports.count(number) > 1}):
        raise Failure(
            f"two nodes in {directory} have port {twice[0]} in their kept.yaml: give each its own "
            "there, or --port for all"
        )
    node_ports = [number + NODE_PORT_OFFSET for number in ports]
    if max(node_ports if count > 1 else ports) > MAX_PORT or set(ports) & set(node_ports):
        raise click.UsageError(f"--port {ports[0]}: {count} nodes do not fit there")
    if there and secure and _secured(directory) is None:
        raise Failure(
            f"the nodes in {directory} are not secure: give another --dir, or start again after "
            "kept local down --purge"
        )
    before = _secured(directory)
    security = LocalSecurity(_security_directory(directory)) if secure else before
    try:
        trees = []
        for node in members:
            secured = {} if security is None else security.settings(ports[node.number])
            shared = cluster_settings(node_ports)
            trees.append(node.merged(ports[node.number], shared, secured | given))
    except ConfigurationError:
        if security is not None and before is None:  # else the next ones would be secure
            shutil.rmtree(security.directory)
        raise
    for node, tree in zip(members, trees, strict=True):
        node.configure(tree)
    configs = {} if security is None else {u: security.command_config(u) for u in USERS}
    _start(members)
    for user, path in configs.items():
        echo(f"{user} connects with --command-config {os.path.relpath(path)}")


def _ports(members: Sequence[_Node], first: int | None) -> list[int]:
    """Where nodes serve: from ``first`` on; without it where they did, which may be anywhere."""
    if first is not None:
        return [first + node.number for node in members]
    before = [node.port() for node in members]
    first = next((port - n for n, port in enumerate(before) if port is not None), FIRST_PORT)
    return [first + n if port is None else port for n, port in enumerate(before)]


def _security_directory(directory: str) -> str:
    return os.path.join(os.path.abspath(directory), "security")


def _secured(directory: str) -> LocalSecurity | None:
    """What the nodes of a directory are secured by, if they are."""
    path = _security_directory(directory)
    return LocalSecurity(path) if os.path.isdir(path) else None


def _start(members: Sequence[_Node]) -> None:
    """Start nodes side by side; each one's ready line. What started is ended when one does not."""
    started = [(node, node.launch()) for node in members]
    try:
        lines = _await_ready(started)
        if len(members) > 1:
            _await_cluster(members)
    except BaseException:
        for node, launched in started:
            if node.pid() is not None:
                node.end(signal.SIGKILL)
            if launched.process.returncode is None:
                launched.process.wait()
        raise
    for line in lines:
        echo(line)


def _await_ready(started: Sequence[tuple[_Node, _Launched]]) -> list[str]:
    """Each one's ready line; a Failure as soon as one of them ends, or all time is up."""
    end = time.monotonic() + READY_DEADLINE_S
    while True:
        lines = [node.ready_line(launched) for node, launched in started]
        ready = [line for line in lines if line is not None]
        if len(ready) == len(started):
            return ready
        if time.monotonic() > end:
            node, launched = started[lines.index(None)]
            node.give_up(launched)
        time.sleep(_POLL_S)


def _await_cluster(members: Sequence[_Node]) -> None:
    endpoints = [endpoint for node in members if (endpoint := node.endpoint()) is not None]
    end = time.monotonic() + READY_DEADLINE_S
    security = members[0].security()
    while (why := cluster_is_up(endpoints, security)) is not None:
        if time.monotonic() > end:
            raise Failure(f"the nodes found no cluster in {READY_DEADLINE_S:.0f} s: {why}")
        time.sleep(_POLL_S)


@local.command(epilog=examples("kept local status", "kept local status --json"))
@_dir_option
@json_option
def status(*, directory: str, as_json: bool) -> None:
    """Show the nodes of --dir, and the roles that each reports.

    A broker serves clients, a voter decides about the cluster with the others, and one of the
    voters is the controller.
    """
    rows = []
    for node in _nodes(directory):
        pid = node.pid()
        reported = None if pid is None else _summary(node)
        row: dict[str, Any] = {
            "node": node.number,
            "state": _state(pid),
            "role": None if reported is None else _role(node, reported),
            "roles": None if reported is None else _roles(node, reported),
            "pid": pid,
            "port": node.port(),
            "directory": node.directory,
        }
        rows.append(row)
    if as_json:
        show_json(rows)
        return
    columns = ("node", "state", "roles", "pid", "port", "directory")
    show_table(columns, [[row[c] for c in columns] for row in rows])
    for row in rows:
        if row["role"] not in (None, "broker", "controller"):
            echo(f"node {row['node']} is not ready: {row['role']}")


def _state(pid: int | None) -> str:
    if pid is None:
        return "stopped"
    return "stalled" if _process_state(pid) == b"T" else "running"


def _summary(node: _Node) -> dict[str, Any] | None:
    """The cluster as the node knows it; None when it does not answer."""
    endpoint = node.endpoint()
    if endpoint is None:
        return None
    try:
        summary: dict[str, Any] = JsonApi(endpoint, ROLE_TIMEOUT_S, node.security()).get("cluster")
    except HttpFailed:
        return None
    return summary


def _role(node: _Node, summary: dict[str, Any]) -> str:
    """``controller``, ``broker``, or why it is neither now."""
    if not summary["ready"]:
        return str(summary["reason"])
    return "controller" if summary["controller_id"] == node.number else "broker"


def _roles(node: _Node, summary: dict[str, Any]) -> list[str]:
    """What the node is in its cluster: ``broker``, ``voter``, ``controller``."""
    roles = {
        "broker": any(broker["node_id"] == node.number for broker in summary["brokers"]),
        "voter": node.number in summary["voters"],
        "controller": summary["controller_id"] == node.number,
    }
    return [name for name, is_so in roles.items() if is_so]


_numbers_argument = click.argument(
    "numbers", metavar="N …", nargs=-1, required=True, type=WholeNumber(0)
)


@local.command(epilog=examples("kept local stop 0", "kept local stop 1 2"))
@_numbers_argument
@_dir_option
def stop(*, numbers: tuple[int, ...], directory: str) -> int:
    """Stop nodes N cleanly, one after the other."""
    return _end_each(directory, numbers, signal.SIGTERM, "stopped")


@local.command(epilog=examples("kept local kill 0", "kept local kill 1 2"))
@_numbers_argument
@_dir_option
def kill(*, numbers: tuple[int, ...], directory: str) -> int:
    """Kill nodes N at once, as a crash would."""
    return _end_each(directory, numbers, signal.SIGKILL, "killed")


def _end_each(
    directory: str, numbers: Sequence[int], with_signal: signal.Signals, done: str
) -> int:
    def end(number: str) -> str:
        _node(directory, int(number)).end(with_signal)
        return f"node {number} {done}"

    return for_each([str(number) for number in numbers], end)


@local.command(epilog=examples("kept local start 0", "kept local start 1 2"))
@_numbers_argument
@_dir_option
def start(*, numbers: tuple[int, ...], directory: str) -> None:
    """Start nodes N again, with their data."""
    nodes = [_node(directory, number) for number in dict.fromkeys(numbers)]
    for node in nodes:
        if node.pid() is not None:
            raise Failure(f"node {node.number} runs already (pid {node.pid()})")
    members = _listed_nodes(directory)
    running = len(nodes) + sum(member.pid() is not None for member in members)
    if 2 * running > len(members):
        _start(nodes)
        return
    for node in nodes:
        node.launch()
        runs = f"{running} of {len(members)} now"
        echo(f"node {node.number} started; it serves once a majority of the nodes runs: {runs}")


@local.command(epilog=examples("kept local down", "kept local down --purge"))
@_dir_option
@click.option("--purge", is_flag=True, help="Also remove the nodes' directories.")
def down(*, directory: str, purge: bool) -> None:
    """Stop every node of --dir; the data stays unless --purge."""
    nodes = list(_nodes(directory))
    running = [node for node in nodes if node.pid() is not None]
    for node in running:
        node.signal(signal.SIGTERM)
    for node in running:
        try:
            node.await_end(STOP_DEADLINE_S if len(running) == 1 else DOWN_DEADLINE_S)
            echo(f"node {node.number} stopped")
        except Failure:
            if len(running) == 1:
                raise
            node.end(signal.SIGKILL)
            echo(f"node {node.number} killed: it did not stop without the others")
    for node in nodes if purge else ():
        shutil.rmtree(node.directory)
        echo(f"removed {node.directory}")
    if purge and _secured(directory) is not None:
        shutil.rmtree(_security_directory(directory))
        echo(f"removed {_security_directory(directory)}")


class _Node:
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
        own |= {name: value for name, value in defaults.items() if name in _OURS}
        before = self.settings()
        tree = {**own, **defaults, **before, **own, **settings}
        changed = {name: text for name, text in tree.items() if before.get(name) != text}
        NodeConfig.load(self.config if before else None, changed)
        return tree

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
        secured = _secured(os.path.dirname(self.directory))
        return PLAINTEXT if secured is None else Security(secured.client_properties())

    def launch(self) -> _Launched:
        """Start the process."""
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
        return _Launched(process, position)

    def ready_line(self, launched: _Launched) -> str | None:
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

    def give_up(self, launched: _Launched) -> None:
        """End a node that did not become ready. Raises Failure with the reason."""
        process = launched.process
        lines = self._lines_from(launched.position)
        why = f"ended with status {process.returncode}"
        if process.poll() is None:
            process.kill()
            process.wait()
            why = f"was not ready in {READY_DEADLINE_S:.0f} s"
        self._forget()
        last = "; ".join(lines[-_TAIL_LINES:]) or "nothing"
        raise Failure(f"node {self.number} {why}; {self.log} says: {last}")

    def _lines_from(self, position: int) -> list[str]:
        with open(self.log, "rb") as log:
            log.seek(position)
            return log.read().decode("utf-8", "replace").splitlines()

    def end(self, with_signal: signal.Signals) -> None:
        """Signal the process and wait until it is gone."""
        self.signal(with_signal)
        self.await_end(STOP_DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stalled process goes on to take it."""
        pid = self.pid()
        if pid is None:
            raise Failure(f"node {self.number} does not run")
        os.kill(pid, number)
        if number != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)

    def await_end(self, deadline_s: float) -> None:
        """Wait until the process is gone."""
        end = time.monotonic() + deadline_s
        while (pid := self.pid()) is not None and _process_state(pid) not in {b"Z", b""}:
            if time.monotonic() > end:
                raise Failure(
                    f"node {self.number} (pid {pid}) did not stop in {deadline_s:.0f} s; "
                    f"kept local kill {self.number} ends it"
                )
            time.sleep(_POLL_S)
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.pid_file)


def _serves(pid: int, config: str) -> bool:
    """Whether a process is ``kept serve --config-file config``, and not only its remains."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as source:
            arguments = source.read().split(b"\0")
    except OSError:
        return False
    return b"serve" in arguments and os.fsencode(config) in arguments


def _process_state(pid: int) -> bytes:
    """The state letter in /proc: T is stopped, Z is a zombie; empty: the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            return source.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def _listed_nodes(directory: str) -> list[_Node]:
    """Every node of a directory, in order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    numbers = sorted(int(n[5:]) for n in names if n.startswith("node-") and n[5:].isdigit())
    return [_Node(directory, number) for number in numbers]


def _nodes(directory: str) -> list[_Node]:
    """Every node of a directory, in order; an error when there is none."""
    nodes = _listed_nodes(directory)
    if not nodes:
        raise Failure(f"no nodes in {directory}: kept local up makes them")
    return nodes


def _node(directory: str, number: int) -> _Node:
    node = _Node(directory, number)
    if not os.path.exists(node.config):
        raise Failure(f"no node {number} in {directory}")
    return node
