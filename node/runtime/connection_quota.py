"""How many connections there are, in all and from each address. Pure.

Clients' listeners share one :class:`ConnectionQuota`, the listener between nodes has another: so
clients, however many, keep no node from the others (Kafka protects its inter-broker listener from
``max.connections`` for that reason). A connection counts from the moment it was accepted until it
is closed, whatever protocol it turns out to speak.
"""

from __future__ import annotations


class ConnectionQuota:
    """The connections of some listeners."""

    __slots__ = ("_per_host", "count")

    def __init__(self) -> None:
        self.count = 0
        """Open now."""
        self._per_host: dict[str, int] = {}

    def of(self, host: str) -> int:
        """Open now from one address."""
        return self._per_host.get(host, 0)

    def enter(self, host: str) -> None:
        """A connection from ``host`` was accepted."""
        self.count += 1
        self._per_host[host] = self._per_host.get(host, 0) + 1

    def leave(self, host: str) -> None:
        """A connection from ``host`` is closed."""
        self.count -= 1
        left = self._per_host[host] - 1
        if left:
            self._per_host[host] = left
        else:
            del self._per_host[host]
