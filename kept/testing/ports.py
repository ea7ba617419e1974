"""Free ports below the kernel's ephemeral range, so that no outgoing connection takes one.

That holds for the ports that a node opens above its own, too (``NODE_PORT_OFFSET``). What is drawn
stays the process's until it ends or gives it back: a node that is dead for a moment finds its port
free again, whatever tests run beside it.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from kept.node.config.local_cluster import NODE_PORT_OFFSET

LOWEST: Final = 10_000
HIGHEST: Final = 32_767 - NODE_PORT_OFFSET

_drawing = threading.Lock()
_drawn: set[int] = set()
_locks: int | None = None
"""A file that all processes of this user share; whoever has drawn a port locks that byte of it."""


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
    """A port that was free a moment ago, as were those so far ``above`` it, and that is drawn by
    nobody else who asks here.

    A process that does not ask here may take one: the caller tries again. Raises OSError when none
    is free.
    """
    draw = random.Random(os.urandom(8))
    for _ in range(1000):
        port = draw.randint(LOWEST, HIGHEST)
        ports = [port + distance for distance in (0, *above)]
        with _drawing:
            if _drawn.isdisjoint(ports) and all(map(is_free, ports)) and _reserve(ports):
                return port
    raise OSError(f"no free port from {LOWEST} to {HIGHEST}")


def give_back(ports: Iterable[int]) -> None:
    """Let these ports be drawn again."""
    with _drawing:
        _release(ports)


def _release(ports: Iterable[int]) -> None:
    for port in _drawn.intersection(ports):
        _drawn.remove(port)
        fcntl.lockf(_lock_file(), fcntl.LOCK_UN, 1, port)


def _reserve(ports: Sequence[int]) -> bool:
    """Whether none of them was drawn by another process; they are this one's then."""
    for number, port in enumerate(ports):
        try:
            fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except (BlockingIOError, PermissionError):
            _release(ports[:number])
            return False
        _drawn.add(port)
    return True


def _lock_file() -> int:
    global _locks
    if _locks is None:
        path = os.path.join(tempfile.gettempdir(), f"kept-ports-{os.getuid()}")
        _locks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return _locks


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
