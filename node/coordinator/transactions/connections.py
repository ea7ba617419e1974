"""Which connection of a producer is its newest: a request over an older one is stale.

An EndTxn that sat in a slow connection while its client gave that up, came again and began the next
transaction would end that one (KAFKA-17754). The epoch of a TV1 producer does not tell, but an
instance of a client gives a connection up for good, and each instance has an epoch of its own.

Kept by the node for each partition of ``__transaction_state``, since a stale request may come after
this node has lost that partition and leads it again. A request never comes to another node, nor
over a restart: its connection ends there.
"""

from __future__ import annotations

from collections.abc import Container

from msgspec import Struct, field

from kept.node.coordinator.transactions.events import Connection


class NewestConnections(Struct):
    """Of the present producer id and epoch of a transactional id: by API key, since clients may
    use a connection for each.
    """

    producer: tuple[int, int]
    by_api: dict[int, int] = field(default_factory=dict)


class ConnectionOrder:
    """Newest connections of the producers of one state partition."""

    def __init__(self) -> None:
        self._newest: dict[str, NewestConnections] = {}

    def is_stale(
        self, transactional_id: str, producer: tuple[int, int], connection: Connection
    ) -> bool:
        """Whether the id's present producer (id, epoch) has used a newer connection than this."""
        newest = self._newest.get(transactional_id)
        if newest is None or newest.producer != producer:
            newest = self._newest[transactional_id] = NewestConnections(producer)
        ordinal = newest.by_api.setdefault(connection.api_key, connection.ordinal)
        newest.by_api[connection.api_key] = max(ordinal, connection.ordinal)
        return connection.ordinal < ordinal

    def forget(self, transactional_id: str) -> None:
        """The id is gone."""
        self._newest.pop(transactional_id, None)

    def retain(self, transactional_ids: Container[str]) -> None:
        """Forget all other ids."""
        for gone in [i for i in self._newest if i not in transactional_ids]:
            del self._newest[gone]
