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
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from kept.cli.completion import BROKER_SETTING
from kept.cli.local_node import (
    OWN_SETTINGS,
    POLL_S,
    READY_DEADLINE_S,
    STOP_DEADLINE_S,
    Launched,
    LocalNode,
    NodeNotReady,
    existing_node,
    existing_nodes,
    listed_nodes,
    process_state,
    security_directory,
    security_of,
)
from kept.cli.output import counted, echo, show_json, show_table
from kept.cli.shell import Failure, Group, WholeNumber, examples, for_each, json_option, pairs
from kept.client.admin.readiness import cluster_is_up
from kept.client.json_api import HttpFailed, JsonApi
from kept.node.config.local_cluster import NODE_PORT_OFFSET, cluster_settings
from kept.node.config.local_security import USERS, LocalSecurity
from kept.node.config.sources import variable

DOWN_DEADLINE_S: Final = 10.0
"""Longest time to stop nodes together: the last ones are without a quorum."""
ROLE_TIMEOUT_S: Final = 5.0
MAX_NODES: Final = 100
MAX_PORT: Final = 65535
FIRST_PORT: Final = 9092


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
    --port or --set says otherwise. When a node does not start, all are stopped, and every kept.yaml
    is as it was; new nodes are removed.

    With --secure commands need --command-config DIR/security/admin.properties: admin may do
    everything. Users ada and bob have files, too, and may do what ACLs allow them.
    """
    given = pairs("--set", settings)
    for name in OWN_SETTINGS:
        if name in given:
            raise click.UsageError(f"kept local sets {name} itself")
    members = _members(directory, nodes)
    ports = _ports(members, port)
    if twice := sorted({number for number in ports if ports.count(number) > 1}):
        raise Failure(
            f"two nodes in {directory} have port {twice[0]} in their kept.yaml: give each its own "
            "there, or --port for all"
        )
    node_ports = [number + NODE_PORT_OFFSET for number in ports]
    alone = len(members) == 1
    if max(ports if alone else node_ports) > MAX_PORT or set(ports) & set(node_ports):
        raise click.UsageError(f"--port {ports[0]}: {len(members)} nodes do not fit there")
    _refuse_variables()
    before = security_of(directory)
    if secure and before is None and os.path.exists(security_directory(directory)):
        raise Failure(
            f"{security_directory(directory)} is there, and not of kept local: give another --dir"
        )
    if secure and before is None and listed_nodes(directory):
        raise Failure(
            f"the nodes in {directory} are not secure: give another --dir, or start again after "
            "kept local down --purge"
        )
    security = LocalSecurity(security_directory(directory)) if secure else before
    with _all_or_nothing(members, security if before is None else None, given):
        trees = []
        for node in members:
            secured = {} if security is None else security.settings(ports[node.number])
            shared = cluster_settings(node_ports)
            trees.append(node.merged(ports[node.number], shared, secured | given))
        for node, tree in zip(members, trees, strict=True):
            node.configure(tree)
        configs = {} if security is None else {u: security.command_config(u) for u in USERS}
        lines = _start(members)
    for line in lines:  # out of the block: the nodes are up, and stay when this cannot be printed
        echo(line)
    for user, path in configs.items():
        echo(f"{user} connects with --command-config {os.path.relpath(path)}")


def _refuse_variables() -> None:
    """A Failure where the environment sets for all nodes what each has for itself."""
    for name in OWN_SETTINGS:
        if variable(name) in os.environ:
            raise Failure(f"${variable(name)} is set: kept local sets {name} itself; unset it")


def _members(directory: str, wanted: int | None) -> list[LocalNode]:
    """The nodes that are to start, none of which runs: those that are there, or new ones."""
    there = [node.number for node in listed_nodes(directory)]
    count = wanted or len(there) or 1
    if there and there != list(range(count)):
        raise Failure(
            f"{directory} has {counted(len(there), 'node')}, not {count}: give "
            f"--nodes {len(there)} or another --dir, or start again after kept local down --purge"
        )
    members = [LocalNode(directory, number) for number in range(count)]
    for node in members:
        if node.pid() is not None:
            raise Failure(
                f"node {node.number} in {directory} runs already (pid {node.pid()}): kept local "
                "down stops it, another --dir and --port make more nodes"
            )
    return members


@contextlib.contextmanager
def _all_or_nothing(
    members: Sequence[LocalNode], security: LocalSecurity | None, given: Mapping[str, str]
) -> Iterator[None]:
    """Nodes start, or are left as they were: new ones are removed, as is ``security``, which is new
    if it is there. A Failure then says where the setting that is wrong came from; ``given`` are
    those of the command line.
    """
    saved = [(node, node.saved()) for node in members]
    try:
        yield
    except BaseException as error:
        changed = [node.restore(before) for node, before in saved]
        if security is not None:
            shutil.rmtree(security.directory)
        if not isinstance(error, Failure):
            raise
        if not any(before.exists for _, before in saved):
            after = "no node was made; mend that and run it again"
        elif any(changed):
            after = "every kept.yaml is as it was before; mend that and run it again"
        else:
            after = "mend that and run it again"
        raise Failure(f"{_located(error, given)}; {after}") from error


def _located(error: Failure, given: Mapping[str, str]) -> str:
    """An error with where the settings that it names were given."""
    if not isinstance(error, NodeNotReady):
        return str(error)
    from kept.node.config.definitions import BROKER_SETTINGS
    from kept.node.config.sources import ShorthandFlags, located

    node = error.node
    file = node.config if os.path.exists(node.config) else None
    reason = located(error.reason, file, given, os.environ, ShorthandFlags(), names=BROKER_SETTINGS)
    more = f" ({node.log} has more)" if os.path.exists(node.log) else ""
    return f"node {node.number} {error.what}: {reason}{more}"


def _ports(members: Sequence[LocalNode], first: int | None) -> list[int]:
    """Where nodes serve: from ``first`` on; without it where they did, which may be anywhere."""
    if first is not None:
        return [first + node.number for node in members]
    before = [node.port() for node in members]
    first = next((port - n for n, port in enumerate(before) if port is not None), FIRST_PORT)
    return [first + n if port is None else port for n, port in enumerate(before)]


def _start(members: Sequence[LocalNode]) -> list[str]:
    """Start nodes side by side; each one's ready line. What started is ended when one does not."""
    started: list[tuple[LocalNode, Launched]] = []
    try:
        for node in members:
            started.append((node, node.launch()))
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
    return lines


def _await_ready(started: Sequence[tuple[LocalNode, Launched]]) -> list[str]:
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
        time.sleep(POLL_S)


def _await_cluster(members: Sequence[LocalNode]) -> None:
    endpoints = [endpoint for node in members if (endpoint := node.endpoint()) is not None]
    end = time.monotonic() + READY_DEADLINE_S
    security = members[0].security()
    while (why := cluster_is_up(endpoints, security)) is not None:
        if time.monotonic() > end:
            raise Failure(f"the nodes found no cluster in {READY_DEADLINE_S:.0f} s: {why}")
        time.sleep(POLL_S)


@local.command(epilog=examples("kept local status", "kept local status --json"))
@_dir_option
@json_option
def status(*, directory: str, as_json: bool) -> None:
    """Show the nodes of --dir, and the roles that each reports.

    A broker serves clients, a voter decides about the cluster with the others, and one of the
    voters is the active controller.
    """
    rows = []
    for node in existing_nodes(directory):
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
    shown = [row | {"roles": _shown_roles(row["roles"])} for row in rows]
    show_table(columns, [[row[c] for c in columns] for row in shown])
    for row in rows:
        if row["role"] not in (None, "broker", "controller"):
            echo(f"node {row['node']} is not ready: {row['role']}")


def _state(pid: int | None) -> str:
    if pid is None:
        return "stopped"
    return "stalled" if process_state(pid) == b"T" else "running"


def _summary(node: LocalNode) -> dict[str, Any] | None:
    """The cluster as the node knows it; None when it does not answer."""
    endpoint = node.endpoint()
    if endpoint is None:
        return None
    try:
        summary: dict[str, Any] = JsonApi(endpoint, ROLE_TIMEOUT_S, node.security()).get("cluster")
    except HttpFailed:
        return None
    return summary


def _role(node: LocalNode, summary: dict[str, Any]) -> str:
    """``controller``, ``broker``, or why it is neither now."""
    if not summary["ready"]:
        return str(summary["reason"])
    return "controller" if summary["controller_id"] == node.number else "broker"


def _roles(node: LocalNode, summary: dict[str, Any]) -> list[str]:
    """What the node is in its cluster: ``broker``, ``voter``, ``controller``."""
    roles = {
        "broker": any(broker["node_id"] == node.number for broker in summary["brokers"]),
        "voter": node.number in summary["voters"],
        "controller": summary["controller_id"] == node.number,
    }
    return [name for name, is_so in roles.items() if is_so]


def _shown_roles(roles: list[str] | None) -> list[str] | None:
    """The same for people: in ``kept cluster status`` every voter has the role ``controller``."""
    if roles is None:
        return None
    return ["active controller" if role == "controller" else role for role in roles]


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
        existing_node(directory, int(number)).end(with_signal)
        return f"node {number} {done}"

    return for_each([str(number) for number in numbers], end)


@local.command(epilog=examples("kept local start 0", "kept local start 1 2"))
@_numbers_argument
@_dir_option
def start(*, numbers: tuple[int, ...], directory: str) -> None:
    """Start nodes N again, with their data."""
    _refuse_variables()
    nodes = [existing_node(directory, number) for number in dict.fromkeys(numbers)]
    for node in nodes:
        if node.pid() is not None:
            raise Failure(f"node {node.number} runs already (pid {node.pid()})")
    members = listed_nodes(directory)
    running = len(nodes) + sum(member.pid() is not None for member in members)
    if 2 * running > len(members):
        try:
            lines = _start(nodes)
        except NodeNotReady as error:
            raise Failure(_located(error, {})) from error
        for line in lines:
            echo(line)
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
    nodes = list(existing_nodes(directory))
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
    if purge and security_of(directory) is not None:
        shutil.rmtree(security_directory(directory))
        echo(f"removed {security_directory(directory)}")
