"""Cutting the network between containers: iptables in a side container that shares their network.

Clients on the host are never cut off, only nodes from each other.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable
from typing import Final

from tests.deploy.containers import BASE, BUILD_S, Compose, docker

CUTTER: Final = "kept-cutter:under-test"
DOCKERFILE: Final = f"""FROM {BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends iptables >/dev/null
"""


@functools.cache
def _cutter() -> str:
    """The side container's image, built once."""
    subprocess.run(
        ["docker", "build", "-q", "-t", CUTTER, "-"],
        input=DOCKERFILE,
        text=True,
        check=True,
        capture_output=True,
        timeout=BUILD_S,
    )
    return CUTTER


def _rules(cluster: Compose, node: int, script: str) -> None:
    docker(
        "run",
        "--rm",
        f"--network=container:{cluster.name(node)}",
        "--cap-add=NET_ADMIN",
        _cutter(),
        "sh",
        "-c",
        script,
    )


def cut(
    cluster: Compose, node: int, peers: Iterable[int], *, hears: bool = False, speaks: bool = False
) -> None:
    """Drop what a node gets from its peers (unless it ``hears``) and sends them (``speaks``)."""
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    commands = []
    for peer in peers:
        address = cluster.state(peer, template)
        commands += [] if hears else [f"iptables -A INPUT -s {address} -j DROP"]
        commands += [] if speaks else [f"iptables -A OUTPUT -d {address} -j DROP"]
    _rules(cluster, node, " && ".join(commands))


def heal(cluster: Compose, node: int) -> None:
    """Let everything through again."""
    _rules(cluster, node, "iptables -F")
