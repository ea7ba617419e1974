"""Free ports below the kernel's ephemeral range, so that no outgoing connection takes one.

That holds for the ports that a node opens above its own, too (``NODE_PORT_OFFSET``).
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from typing import Final

from kept.node.local_settings import NODE_PORT_OFFSET

LOWEST: Final = 10_000
HIGHEST: Final = 32_767 - NODE_PORT_OFFSET


def is_free(port: int) -> bool:
    """Whether both loopback addresses could be bound to ``port`` now."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if family == socket.AF_INET6 and not _has_ipv6():
                    continue
                del error
                return False
    return True


def free_port(above: Sequence[int] = ()) -> int:
    """A port that was free a moment ago, as were those so far ``above`` it.

    Another process may take one: the caller tries again.
    """
    draw = random.Random(os.urandom(8))
    for _ in range(1000):
        port = draw.randint(LOWEST, HIGHEST)
        if all(is_free(port + distance) for distance in (0, *above)):
            return port
    raise OSError(f"no free port from {LOWEST} to {HIGHEST}")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
