"""``kept local``: nodes on this machine, in the background.

``DIR/node-I/`` holds ``kept.yaml``, ``kept.pid``, ``kept.log`` and ``data/``; node I serves on
PORT+I.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

import click

from kept.cli.shell import Failure, Group, examples, json_option, pairs

READY_DEADLINE_S: Final = 30.0
STOP_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.01
_TAIL_LINES: Final = 10
_OURS: Final = ("node.id", "listeners", "log.dirs", "metadata.log.dir")


def _dir_option(function: Any) -> Any:
    return click.option(
        "--dir",
        "directory",
        default="./kept-local",
        show_default=True,
        help="Where the nodes live.",
    )(function)


@click.group(
    cls=Group, epilog=examples("kept local up --port 9192", "kept local status", "kept local down")
)
def local() -> None:
    """Run nodes on this machine, in the background."""


@local.command(epilog=examples("kept local up --set log.segment.bytes=1048576"))
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@_dir_option
@click.option(
    "--port", type=click.IntRange(1, 65535), default=9092, show_default=True, help="Of node 0."
)
@click.option("--set", "settings", metavar="K=V", multiple=True, help="A setting of every node.")
def up(*, nodes: int, directory: str, port: int, settings: tuple[str, ...]) -> None:
    """Start nodes and return when they are ready."""
    if nodes > 1:
        raise Failure(
            f"--nodes {nodes}: this version of kept runs clusters of one node; use --nodes 1"
        )
    given = pairs("--set", settings)
    for name in _OURS:
        if name in given:
            raise click.UsageError(f"kept local sets {name} itself")
    for number in range(nodes):
        node = _Node(directory, number)
        if node.pid() is not None:
            raise Failure(f"node {number} in {directory} runs already (pid {node.pid()})")
        node.configure(port + number, given)
        click.echo(node.start())


@local.command(epilog=examples("kept local status --json"))
@_dir_option
@json_option
def status(*, directory: str, as_json: bool) -> None:
    """Show the nodes of --dir."""
    from kept.cli.output import show_json, show_table

    rows = []
    for node in _nodes(directory):
        pid = node.pid()
        rows.append(
            {
                "node": node.number,
                "state": "stopped" if pid is None else "running",
                "pid": pid,
                "port": node.port(),
                "directory": node.directory,
            }
        )
    if as_json:
        show_json(rows)
    else:
        columns = ("node", "state", "pid", "port", "directory")
        show_table(columns, [[row[c] for c in columns] for row in rows])


@local.command(epilog=examples("kept local stop 0"))
@click.argument("number", metavar="N", type=click.IntRange(0))
@_dir_option
def stop(*, number: int, directory: str) -> None:
    """Stop node N cleanly."""
    _node(directory, number).end(signal.SIGTERM)
    click.echo(f"node {number} stopped")


@local.command(epilog=examples("kept local kill 0"))
@click.argument("number", metavar="N", type=click.IntRange(0))
@_dir_option
def kill(*, number: int, directory: str) -> None:
    """Kill node N at once, as a crash would."""
    _node(directory, number).end(signal.SIGKILL)
    click.echo(f"node {number} killed")


@local.command(epilog=examples("kept local start 0"))
@click.argument("number", metavar="N", type=click.IntRange(0))
@_dir_option
def start(*, number: int, directory: str) -> None:
    """Start node N again, with its data."""
    node = _node(directory, number)
    if node.pid() is not None:
        raise Failure(f"node {number} runs already (pid {node.pid()})")
    click.echo(node.start())


@local.command(epilog=examples("kept local down", "kept local down --purge"))
@_dir_option
@click.option("--purge", is_flag=True, help="Remove the nodes' directories too.")
def down(*, directory: str, purge: bool) -> None:
    """Stop every node of --dir; the data stays unless --purge."""
    for node in _nodes(directory):
        if node.pid() is not None:
            node.end(signal.SIGTERM)
            click.echo(f"node {node.number} stopped")
        if purge:
            shutil.rmtree(node.directory)
            click.echo(f"removed {node.directory}")


class _Node:
    """One node's directory."""

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self.directory = os.path.join(os.path.abspath(directory), f"node-{number}")
        self.config = os.path.join(self.directory, "kept.yaml")
        self.pid_file = os.path.join(self.directory, "kept.pid")
        self.log = os.path.join(self.directory, "kept.log")

    def configure(self, port: int, settings: dict[str, str]) -> None:
        """Write kept.yaml."""
        import yaml

        data = os.path.join(self.directory, "data")
        tree: dict[str, Any] = {
            "node.id": self.number,
            "listeners": f"PLAINTEXT://localhost:{port}",
            "log.dirs": os.path.join(data, "log"),
            "metadata.log.dir": os.path.join(data, "meta"),
            **settings,
        }
        os.makedirs(self.directory, exist_ok=True)
        with open(self.config, "w", encoding="utf-8") as out:
            yaml.safe_dump(tree, out, sort_keys=False)

    def port(self) -> int | None:
        """The port in kept.yaml."""
        import yaml

        try:
            with open(self.config, encoding="utf-8") as source:
                tree = yaml.safe_load(source)
            return int(str(tree["listeners"]).rpartition(":")[2])
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
            return None

    def pid(self) -> int | None:
        """The process id if that process is this node; a stale kept.pid names nobody."""
        try:
            with open(self.pid_file, encoding="ascii") as source:
                number = int(source.read())
            with open(f"/proc/{number}/cmdline", "rb") as source:
                arguments = source.read().split(b"\0")
        except (OSError, ValueError):
            return None
        return number if os.fsencode(self.config) in arguments else None

    def start(self) -> str:
        """Start the process; the line it prints when it is ready."""
        if not os.path.exists(self.config):
            raise Failure(f"{self.config} is not there: kept local up makes it")
        with open(self.log, "ab") as log:
            position = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "kept", "serve", "--config", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        with open(self.pid_file, "w", encoding="ascii") as out:
            out.write(f"{process.pid}\n")
        end = time.monotonic() + READY_DEADLINE_S
        while True:
            ended = process.poll() is not None
            lines = self._lines_from(position)
            ready = next((line for line in lines if " ready on " in line), None)
            if ready is not None:
                process.returncode = 0  # it outlives this command; nobody is to wait for it
                return ready
            if ended or time.monotonic() > end:
                self._give_up(process, lines)
            time.sleep(_POLL_S)

    def _give_up(self, process: subprocess.Popen[bytes], lines: list[str]) -> None:
        why = f"ended with status {process.returncode}"
        if process.poll() is None:
            process.kill()
            process.wait()
            why = f"was not ready in {READY_DEADLINE_S:.0f} s"
        os.unlink(self.pid_file)
        last = "; ".join(lines[-_TAIL_LINES:]) or "nothing"
        raise Failure(f"node {self.number} {why}; {self.log} says: {last}")

    def _lines_from(self, position: int) -> list[str]:
        with open(self.log, "rb") as log:
            log.seek(position)
            return log.read().decode("utf-8", "replace").splitlines()

    def end(self, with_signal: signal.Signals) -> None:
        """Signal the process and wait until it is gone."""
        pid = self.pid()
        if pid is None:
            raise Failure(f"node {self.number} does not run")
        os.kill(pid, with_signal)
        end = time.monotonic() + STOP_DEADLINE_S
        while self.pid() is not None and not _is_zombie(pid):
            if time.monotonic() > end:
                raise Failure(
                    f"node {self.number} (pid {pid}) did not stop in {STOP_DEADLINE_S:.0f} s; "
                    f"kept local kill {self.number} ends it"
                )
            time.sleep(_POLL_S)
        os.unlink(self.pid_file)


def _is_zombie(pid: int) -> bool:
    """A node that ended, whose parent has not asked for its status."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            return source.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return True


def _nodes(directory: str) -> Iterable[_Node]:
    """Every node of a directory, in order; an error when there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    numbers = sorted(int(n[5:]) for n in names if n.startswith("node-") and n[5:].isdigit())
    if not numbers:
        raise Failure(f"no nodes in {directory}: kept local up makes them")
    return [_Node(directory, number) for number in numbers]


def _node(directory: str, number: int) -> _Node:
    node = _Node(directory, number)
    if not os.path.exists(node.config):
        raise Failure(f"no node {number} in {directory}")
    return node
