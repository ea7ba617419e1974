"""Free ports below the kernel's ephemeral range, so that no outgoing connection takes one."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

LOWEST: Final = 10_000
HIGHEST: Final = 32_767


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


def free_port() -> int:
    """A port that was free a moment ago. Another process may take it: the caller tries again."""
    draw = random.Random(os.urandom(8))
    for _ in range(1000):
        port = draw.randint(LOWEST, HIGHEST)
        if is_free(port):
            return port
    raise OSError(f"no free port from {LOWEST} to {HIGHEST}")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
