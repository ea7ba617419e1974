"""Which connection of a producer is its newest: a request over an older one is stale.

An EndTxn that sat in a slow connection while its client gave that up, came again and began the next
transaction would end that one (KAFKA-17754). The epoch of a TV1 producer does not tell, but an
instance of a client gives a connection up for good, and each instance has an epoch of its own.

Kept by the node for each partition of ``__transaction_state``, since a stale request may come after
this node has lost that partition and leads it again. Another node may have led meanwhile, where the
client came again, and nothing here tells: so all connections of before are stale then, whoever's
they are. At the first load of a process, too: a client may have heard that the process before this
one led, or of a leadership that this node's image has skipped. Not in the first leader epoch:
nobody has led before. A request never comes to another node, nor over a restart: its connection
ends there.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from msgspec import Struct

from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.transactions.events import ClientConnection
from kept.steps import Steps

_FIELDS: Final = {
    ApiKey.ADD_PARTITIONS_TO_TXN: "add_partitions",
    ApiKey.ADD_OFFSETS_TO_TXN: "add_offsets",
    ApiKey.END_TXN: "end",
}


class NewestConnections(Struct, gc=False):
    """Ordinals of the newest connections of the present producer of a transactional id, by request,
    since clients may use a connection for each; -1: there was none.
    """

    producer_id: int
    epoch: int
    add_partitions: int = -1
    add_offsets: int = -1
    end: int = -1


class ConnectionOrdinals:
    """Numbers the connections of this process in the order in which they are accepted."""

    __slots__ = ("newest",)

    def __init__(self) -> None:
        self.newest = -1

    def __next__(self) -> int:
        self.newest += 1
        return self.newest


class ConnectionOrder:
    """Newest connections of the producers of one state partition."""

    def __init__(self) -> None:
        self._newest: dict[str, NewestConnections] = {}
        self._newest_before = -1

    def lead_again(self, newest: int) -> None:
        """Another node may have led since. ``newest``: the ordinal of the newest connection."""
        self._newest_before = newest

    def is_stale(
        self, transactional_id: str, producer: tuple[int, int], connection: ClientConnection
    ) -> bool:
        """Whether the id's present producer (id, epoch) has used a newer connection than this, or
        may have, at another node.
        """
        if connection.ordinal <= self._newest_before:
            return True
        newest = self._newest.get(transactional_id)
        if newest is None or (newest.producer_id, newest.epoch) != producer:
            newest = self._newest[transactional_id] = NewestConnections(*producer)
        name = _FIELDS[ApiKey(connection.api_key)]
        ordinal: int = getattr(newest, name)
        if connection.ordinal > ordinal:
            setattr(newest, name, connection.ordinal)
        return connection.ordinal < ordinal

    def forget(self, transactional_id: str) -> None:
        """The id is gone."""
        self._newest.pop(transactional_id, None)

    def retain(self, transactional_ids: Container[str]) -> Steps[None]:
        """Forget all other ids."""
        for known in tuple(self._newest):
            if known not in transactional_ids:
                del self._newest[known]
            yield
