"""Sockets of a listener that were accepted and are served later, or not at all, because more come
than ``max.connection.creation.rate`` or the quota of their address allows
(:mod:`kept.node.security.connection_rates`).

Kafka's acceptor stands still while it is over a rate. Here sockets are taken from the system all
the same, and wait unread in their order, ``socket.listen.backlog.size`` of a listener at a time;
one more is closed. One over the quota of its address is closed when its delay is over, so that
whoever tries again at once gains nothing. A socket that its peer closed meanwhile has no turn.
"""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Final, Protocol

from kept.cluster.security.addresses import canonical_address
from kept.node.runtime.logging import bugs

if TYPE_CHECKING:
    from kept.node.kafka.listener import Listener

KIND: Final = "connection"
"""What the metric of throttled seconds calls it."""


class AcceptedSocket(Protocol):
    """What was accepted; nothing is read of it yet."""

    def serve(self) -> None:
        """Its turn has come."""

    def abort(self) -> None:
        """Close it at once."""

    @property
    def is_closed(self) -> bool:
        """Whether either side has closed it."""


def is_closed_by_peer(fd: int) -> bool:
    """Whether the other side of a socket says no more, also behind bytes that nobody has read."""
    peer = select.poll()
    peer.register(fd, select.POLLRDHUP)
    return bool(peer.poll(0))


class AcceptThrottle:
    """Those of one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._context = listener.context
        self._loop = listener.context.runtime.loop
        config = listener.context.config.current
        self._max_held = config.socket_listen_backlog_size
        self._own_rate = config.own_connection_creation_rate(listener.name)
        self._waiting: dict[AcceptedSocket, str] = {}
        """With their addresses, in their order; the first one's turn comes with the timer."""
        self._refused: dict[AcceptedSocket, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def admit(self, accepted: AcceptedSocket, host: str, fd: int) -> bool:
        """Whether it is served at once. If not it is served, or closed, later. ``host`` is the
        address that it came from, "" this node itself; ``fd`` its descriptor.
        """
        if not host:
            return True
        delay_ms = 0
        if self._timer is None:
            delay_ms = self._record()
            if not delay_ms:
                return self._admit_address(accepted, host, fd)
        if self._has_place(accepted, fd, "max.connection.creation.rate"):
            self._waiting[accepted] = host
            if self._timer is None:
                self._timer = self._loop.call_later(delay_ms / 1000, self._next)
        return False

    def _has_place(self, accepted: AcceptedSocket, fd: int, setting: str) -> bool:
        if len(self) >= self._max_held:
            self._discard_closed()
        if len(self) < self._max_held and not self._context.open_files.nearly_out(fd):
            return True
        self._listener.log_refusal("connection refused", setting=setting, waiting=len(self))
        accepted.abort()
        return False

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _record(self) -> int:
        """One more is accepted: ms until its turn."""
        rates, now_ms = self._context.connection_rates, self._now_ms()
        delay_ms = rates.record(now_ms, self._own_rate, self._listener.name)
        if not self._listener.between_nodes:
            rate = self._context.config.current.max_connection_creation_rate
            delay_ms = max(delay_ms, rates.record(now_ms, rate))
        if delay_ms:
            self._context.counters.throttled(KIND, delay_ms)
        return delay_ms

    def _admit_address(self, accepted: AcceptedSocket, host: str, fd: int) -> bool:
        """Whether its address may connect so often; if not, it is closed later."""
        if self._listener.between_nodes:
            return True
        address = canonical_address(host)
        delay_ms = self._context.connection_rates.record_address(self._now_ms(), address)
        if not delay_ms:
            return True
        self._context.counters.throttled(KIND, delay_ms)
        if self._has_place(accepted, fd, "connection_creation_rate"):
            timer = self._loop.call_later(delay_ms / 1000, self._close_refused, accepted)
            self._refused[accepted] = timer
        return False

    def _close_refused(self, accepted: AcceptedSocket) -> None:
        del self._refused[accepted]
        accepted.abort()

    def discard(self, accepted: AcceptedSocket) -> None:
        """It is closed: whoever comes behind it has its place, and its turn."""
        self._waiting.pop(accepted, None)
        timer = self._refused.pop(accepted, None)
        if timer is not None:
            timer.cancel()

    def _discard_closed(self) -> None:
        for accepted in [*self._waiting, *self._refused]:
            if accepted.is_closed:
                self.discard(accepted)
                accepted.abort()

    def _first(self) -> AcceptedSocket | None:
        """The first that waits and is still open."""
        for accepted in list(self._waiting):
            if not accepted.is_closed:
                return accepted
            self.discard(accepted)
            accepted.abort()
        return None

    def _next(self) -> None:
        """It is the turn of the first that waits, and of those behind it that need not wait."""
        self._timer = None
        accepted = self._first()
        while accepted is not None:
            self._serve(accepted, self._waiting.pop(accepted))
            accepted = self._first()
            if accepted is not None and (delay_ms := self._record()):
                self._timer = self._loop.call_later(delay_ms / 1000, self._next)
                return

    def _serve(self, accepted: AcceptedSocket, host: str) -> None:
        """It is its turn; an error ends this one alone."""
        try:
            if self._admit_address(accepted, host, -1):
                accepted.serve()
        except Exception as error:  # noqa: BLE001
            bugs.report("connection failed", error, listener=self._listener.name)
            accepted.abort()

    def close(self) -> None:
        """Close those that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for timer in self._refused.values():
            timer.cancel()
        held = [*self._refused, *self._waiting]
        self._refused.clear()
        self._waiting.clear()
        for accepted in held:
            accepted.abort()
