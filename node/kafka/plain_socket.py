"""Accepted sockets of a listener without TLS, until it is their turn to be served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kept.node.kafka.accept_throttle import is_closed_by_peer
from kept.node.kafka.connection import FIRST_BUFFER_BYTES

if TYPE_CHECKING:
    from kept.node.kafka.listener import Listener


class PlainSocket(asyncio.BufferedProtocol):
    """An accepted socket of a listener without TLS until it is its turn to be served. Of one that
    waits the first bytes are read (uvloop reads whatever is said while it is accepted), no more
    than a connection has room for at first.
    """

    _transport: Any = None

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._first = memoryview(b"")
        self._size = 0
        """Of it what came."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted: it is served now, later or not at all."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if peer is None:  # reset by now: nobody knows by whom, and access may go by his address
            self.abort()
            return
        host = peer[0] if isinstance(peer, tuple) and len(peer) > 1 else ""
        sock = transport.get_extra_info("socket")
        fd = -1 if sock is None else sock.fileno()
        if self._listener.throttle.admit(self, host, fd):
            self.serve()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the first bytes go (asyncio.BufferedProtocol)."""
        self._first = memoryview(bytearray(FIRST_BUFFER_BYTES))
        return self._first

    def buffer_updated(self, nbytes: int) -> None:
        """They came; more may come when it is served."""
        self._size = nbytes
        self._transport.pause_reading()

    def serve(self) -> None:
        """The listener's protocol serves the transport from now on."""
        transport = self._transport
        if transport.is_closing():
            return
        protocol = self._listener.new_protocol(self._listener)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        size = self._size
        if size and not transport.is_closing():
            transport.resume_reading()
            serves: Any = transport.get_protocol()
            serves.get_buffer(size)[:size] = self._first[:size]
            serves.buffer_updated(size)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Closed before its turn."""
        self._listener.throttle.discard(self)

    @property
    def is_closed(self) -> bool:
        """Whether either side has closed it. What said something is not read meanwhile, so the
        system is asked whether that was all.
        """
        if self._transport.is_closing():
            return True
        sock = self._transport.get_extra_info("socket")
        return sock is not None and is_closed_by_peer(sock.fileno())

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()
