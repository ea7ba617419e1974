"""How many connections there are, in all and from each address, of IPv6 from its /64: whoever has
one of those has them all. Pure.

Clients' listeners share one :class:`ConnectionQuota`, the listener between nodes has another: so
clients, however many, keep no node from the others (Kafka protects its inter-broker listener from
``max.connections`` for that reason). A connection counts from the moment it was accepted until it
is closed, whatever protocol it turns out to speak.
"""

from __future__ import annotations

from kept.cluster.security.addresses import network_of


class ConnectionQuota:
    """The connections of some listeners."""

    __slots__ = ("_per_network", "count")

    def __init__(self) -> None:
        self.count = 0
        """Open now."""
        self._per_network: dict[str, int] = {}

    def of(self, host: str) -> int:
        """Open now from an address, or its network."""
        return self._per_network.get(network_of(host), 0)

    def enter(self, host: str) -> None:
        """A connection from ``host`` was accepted."""
        network = network_of(host)
        self.count += 1
        self._per_network[network] = self._per_network.get(network, 0) + 1

    def leave(self, host: str) -> None:
        """A connection from ``host`` is closed."""
        network = network_of(host)
        self.count -= 1
        left = self._per_network[network] - 1
        if left:
            self._per_network[network] = left
        else:
            del self._per_network[network]
