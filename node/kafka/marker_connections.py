"""Which connection of a node brings its markers: the newest one only.

A node that did not hear of a WriteTxnMarkers in time closes its connection and sends the markers
again over the next one. What still sits in the one before must not be served later: it would end
the next transaction of a producer whose epoch stays. So the connections of a process are numbered
(``kept.node.kafka.node_requests``), and the first request over a later one closes those before it.

Kafka serves both; its coordinators rely on producers whose epoch grows with each transaction.
"""

from __future__ import annotations

import re
from typing import Any, Final, Protocol

from msgspec import Struct

_NAME: Final = re.compile(r"kept-markers-([0-9]{1,10})-([0-9a-f]{32})-([0-9]{1,10})")
MOST_NODES: Final = 1000
"""Who is remembered: names may be invented. One more takes the place of the oldest."""


class Closable(Protocol):
    """A connection."""

    def abort(self, why: str = "", **fields: Any) -> None:
        """Close it; what it brought and was not served is dropped."""
        ...


class _Newest(Struct, frozen=True):
    incarnation: str
    number: int
    connection: Closable


class MarkerConnections:
    """The newest connection of each node, as those name themselves."""

    def __init__(self) -> None:
        self._newest: dict[int, _Newest] = {}

    def admit(self, client_id: str | None, connection: Closable) -> bool:
        """Whether markers that come over ``connection`` may be written; closes older connections
        of its node. A connection that names itself otherwise, as an operator's, is always admitted.
        """
        match = _NAME.fullmatch(client_id or "")
        if match is None:
            return True
        node, incarnation, number = int(match[1]), match[2], int(match[3])
        known = self._newest.get(node)
        if known is not None and known.connection is connection:
            return True
        if known is not None:
            if known.incarnation == incarnation and known.number > number:
                return False
            known.connection.abort("markers come over a newer connection", node=node)
        elif len(self._newest) >= MOST_NODES:
            del self._newest[next(iter(self._newest))]
        self._newest[node] = _Newest(incarnation, number, connection)
        return True
