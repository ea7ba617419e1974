"""Joins a connection of the node listener with gRPC's unix socket: bytes through, both ways.

gRPC's server owns its sockets, so one port for several protocols needs this: the listener reads the
first four bytes, and hands ``PRI `` (HTTP/2) over to here. Each side stops reading while the other
cannot write, so that nothing piles up; either side's end is the other's, once it has taken what is
on its way. Who does not take it for :data:`STALLED_S` is closed: gRPC's own signs of life do not
get past it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

HIGH_WATER_BYTES: Final = 256 * 1024
"""Unsent bytes of one direction at which its source is read no more."""
STALLED_S: Final = 80.0
"""How long one side may take nothing of what waits for it. A client's library takes what comes,
whatever its program reads (HTTP/2's flow control); gRPC itself waits as long for a sign of life."""


class _End(asyncio.Protocol):
    """One side; what it reads goes to ``other``. ``closed`` is called at its end."""

    def __init__(self, transport: Any = None, closed: Callable[[], None] | None = None) -> None:
        self.transport = transport
        self.other: _End | None = None
        self._closed = closed
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        loop = asyncio.get_running_loop()
        self._stalled = loop.call_later(STALLED_S, self.transport.abort)
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self._moves()
        if self.other is not None:
            self.other.transport.resume_reading()

    def _moves(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._moves()
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            other.transport.close()
        if self._closed is not None:
            self._closed()


def splice(
    transport: Any,
    first_bytes: bytes,
    path: str,
    closed: Callable[[], None] | None = None,
    name: str = "",
) -> Coroutine[Any, Any, None]:
    """Join ``transport``, of which ``first_bytes`` were read, with a unix socket; the connection to
    it comes from ``name`` in the same directory, if there is one.

    It is taken over at once; the coroutine does the rest. It is closed when the socket takes
    nobody. ``closed`` is called when it is closed, by whichever side.
    """
    transport.pause_reading()
    outer = _End(transport, closed)
    transport.set_protocol(outer)
    return _join(outer, first_bytes, path, name)


async def _join(outer: _End, first_bytes: bytes, path: str, name: str) -> None:
    transport = outer.transport
    inner = _End()
    inner.other = outer  # before it is connected: gRPC's server speaks first
    try:
        loop = asyncio.get_running_loop()
        if not name:
            inner_transport, _ = await loop.create_unix_connection(lambda: inner, path)
        else:
            sock = await _connected(path, name)
            inner_transport, _ = await loop.create_unix_connection(lambda: inner, sock=sock)
    except OSError:
        transport.abort()
        return
    except asyncio.CancelledError:
        transport.abort()
        raise
    if transport.is_closing():
        inner.other = None
        inner_transport.close()
        return
    for side in (transport, inner_transport):
        side.set_write_buffer_limits(high=HIGH_WATER_BYTES)
    outer.other = inner
    inner_transport.write(first_bytes)
    transport.resume_reading()


async def _connected(path: str, name: str) -> socket.socket:
    """A socket that is bound to ``name`` beside ``path``, and connected with it. The name is gone
    from the directory then; gRPC has it still.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = f"{path.rpartition('/')[0]}/{name}"
    try:
        sock.setblocking(False)
        sock.bind(bound)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
        finally:
            os.unlink(bound)
    except BaseException:
        sock.close()
        raise
    return sock
