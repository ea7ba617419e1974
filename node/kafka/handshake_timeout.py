"""Connections that have not said yet what they speak: their first four bytes are missing.

Kafka clients, browsers and gRPC all speak first and at once, so silence is a port scanner, a
half-open connection or an attack. One that is silent for ``kept.silent.ms`` is closed; beyond
``kept.silent.max.connections`` of them the oldest goes. A connection costs nothing here once it has
spoken, and a node without silent ones has no timer.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Abortable(Protocol):
    """A connection."""

    def abort(self) -> None:
        """Close it at once."""


class HandshakeTimeouts:
    """The silent connections of one listener, oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float, limit: int) -> None:
        self._loop = loop
        self._patience_s = patience_s
        self._limit = limit
        self._since: dict[Abortable, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since)

    def add(self, connection: Abortable) -> None:
        """One was accepted."""
        self._since[connection] = self._loop.time()
        if len(self._since) > self._limit:
            self._close(next(iter(self._since)))
        if self._timer is None:
            self._timer = self._loop.call_later(self._patience_s, self._expire)

    def discard(self, connection: Abortable) -> None:
        """It spoke, or is gone."""
        self._since.pop(connection, None)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        oldest = self._loop.time() - self._patience_s
        while self._since:
            connection, since = next(iter(self._since.items()))
            if since > oldest:
                self._timer = self._loop.call_at(since + self._patience_s, self._expire)
                return
            self._close(connection)

    def _close(self, connection: Abortable) -> None:
        del self._since[connection]
        connection.abort()
