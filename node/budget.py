"""Bytes in flight, of one node: what requests and responses may hold in memory together.

Every connection draws on it for request bytes beyond its small base buffer and for response bytes
that its peer has not taken yet. A connection that finds it empty stops reading until bytes come
back; the first to draw always may, so that one request larger than the whole budget still passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Budget:
    """A limit in bytes with a queue of those who wait for it.

    ``limit_bytes`` is the most that may be out; ``used_bytes`` what is out now.
    """

    __slots__ = ("_waiters", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiters: deque[Callable[[], None]] = deque()

    def take(self, size_bytes: int) -> bool:
        """Draw; False when that would pass the limit and something is out already."""
        if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def force(self, size_bytes: int) -> None:
        """Draw without asking: for responses, which must leave once they are made."""
        self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Return bytes, and let those who wait try again."""
        self.used_bytes -= size_bytes
        if self._waiters and self.used_bytes < self.limit_bytes:
            waiters, self._waiters = self._waiters, deque()
            for waiter in waiters:
                waiter()

    def wait(self, callback: Callable[[], None]) -> None:
        """Call back once, when bytes have come back; the caller then takes again."""
        self._waiters.append(callback)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.used_bytes >= self.limit_bytes
