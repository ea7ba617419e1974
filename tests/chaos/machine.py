"""What happens to a node's machine: its disk is full or slow, its clock is set forward.

The volume of node 2 is small (``compose.yaml`` here); a side container holds it, which fills it and
keeps it mounted while the node is away. A disk is slow by fail points in the node, armed from its
start and at work while a file is there. The wall clock of node 1 (``clock/sitecustomize.py``) reads
from a file how far it is ahead; the clock that only goes forward is left alone, as by ``date -s``.
"""

from __future__ import annotations

from typing import Final

from tests.deploy.containers import BASE, Compose, docker

CLOCK_NODE: Final = 1
SMALL_NODE: Final = 2
AHEAD: Final = 21_600
"""Seconds: six hours."""
DATA: Final = "/var/lib/kept"


def _holder(cluster: Compose) -> str:
    return f"{cluster.project}_holder"


def hold(cluster: Compose) -> None:
    """Keep node 2's volume mounted; until :func:`let_go`."""
    docker(
        "run",
        "-d",
        "--rm",
        "--name",
        _holder(cluster),
        "--network=none",
        "-v",
        f"{cluster.project}_kept-{SMALL_NODE}:{DATA}",
        BASE,
        "sleep",
        "infinity",
    )


def let_go(cluster: Compose) -> None:
    """Before the cluster is closed."""
    docker("rm", "-f", _holder(cluster), check=False)


def fill(cluster: Compose, _node: int) -> None:
    """Not a byte is left on the volume."""
    script = (
        f"dd if=/dev/zero of={DATA}/filler bs=1M 2>/dev/null; dd if=/dev/zero of={DATA}/rest bs=512"
    )
    docker("exec", _holder(cluster), "sh", "-c", f"{script} 2>/dev/null; true")


def empty(cluster: Compose, node: int) -> None:
    """Room again; the node comes back, by itself or started."""
    docker("exec", _holder(cluster), "rm", "-f", f"{DATA}/filler", f"{DATA}/rest")
    if not cluster.running(node):
        cluster.launch(node)
    cluster.await_ready()


def slow(cluster: Compose, node: int) -> None:
    """Its disk takes 2 ms for a write and 300 ms for what must be durable."""
    docker("exec", cluster.name(node), "touch", f"{DATA}/slow")


def quick(cluster: Compose, node: int) -> None:
    """Not any more."""
    docker("exec", cluster.name(node), "rm", "-f", f"{DATA}/slow")
    cluster.await_ready()


def _set_clock(cluster: Compose, node: int, ahead: int) -> None:
    docker("exec", cluster.name(node), "sh", "-c", f"echo {ahead} > {DATA}/clock")


def set_forward(cluster: Compose, node: int) -> None:
    """Its wall clock jumps ahead."""
    _set_clock(cluster, node, AHEAD)


def set_back(cluster: Compose, node: int) -> None:
    """And back to what it is elsewhere."""
    _set_clock(cluster, node, 0)
    cluster.await_ready()
