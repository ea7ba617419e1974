"""Whose each connection of gRPC's unix socket is, and who makes a call: without gRPC, which is
loaded later.
"""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.node.kafka.listener import HandedOver
    from kept.node.security.session import Session

CALLER: Final[ContextVar[Session | None]] = ContextVar("caller", default=None)
"""Who makes the call that is served, where it says so itself. gRPC hands its interceptors' findings
to nobody."""


class Callers:
    """By the name that a connection is bound to in the socket's directory."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_name: dict[str, HandedOver] = {}

    def enter(self, caller: HandedOver) -> str:
        """A name for a client's connection."""
        name = f"c-{next(self._numbers)}"
        self._by_name[name] = caller
        return name

    def leave(self, name: str) -> None:
        """It is closed."""
        self._by_name.pop(name, None)

    def session(self, peer: str) -> Session | None:
        """Who makes the call that is served, which came by the connection ``peer``."""
        caller = CALLER.get()
        if caller is not None:
            return caller
        connection = self.of(peer)
        return None if connection is None else connection.session

    def of(self, peer: str) -> HandedOver | None:
        """The client whose connection gRPC calls ``peer`` (``unix:/tmp/kept-peers-x/c-7``)."""
        return self._by_name.get(peer.rpartition("/")[2])
