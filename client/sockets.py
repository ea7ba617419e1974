"""The blocking shell: sockets, with TLS where the client's security says so, under
:mod:`kept.client.core.client_core`, one thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kept.client.address_errors import UNUSABLE_ADDRESS
from kept.client.core.broker_errors import NoResponse
from kept.client.core.calls import Call
from kept.client.core.client_core import ClientCore
from kept.client.core.events import (
    Close,
    Connect,
    Connected,
    Effect,
    Filled,
    Finished,
    Lost,
    Received,
    Send,
    Waiting,
)
from kept.client.security.tls_errors import tls_failure
from kept.storage.errors import KeptError

_READ_BYTES: Final = 1024 * 1024
_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
ADDRESS_MS: Final = 2_000
"""Of a host that has several addresses the next one is tried after so long."""
UNHEARD_S: Final = 20
"""A connection whose other side has sent nothing for so long, not even that it got what was sent to
it, is taken for broken by the kernel: a machine that lost its power says nothing, nor does what
stands between and has forgotten the connection. So is one that has taken nothing of what waits to
be sent for so long. A process that stands still, and owes an answer only, is another matter."""
PROBES: Final = (
    ("SOL_SOCKET", "SO_KEEPALIVE", 1),
    ("IPPROTO_TCP", "TCP_KEEPIDLE", UNHEARD_S // 2),
    ("IPPROTO_TCP", "TCP_KEEPINTVL", 5),
    ("IPPROTO_TCP", "TCP_KEEPCNT", 2),
    ("IPPROTO_TCP", "TCP_USER_TIMEOUT", UNHEARD_S * 1000),
    ("IPPROTO_TCP", "TCP_NODELAY", 1),
)
"""Options of every socket, as far as the system has them."""


class _Socket:
    """One connection's socket, the addresses still to be tried, and the bytes still to be sent.
    ``connecting``, then ``shaking_hands`` where there is TLS.
    """

    def __init__(self, number: int, host: str, addresses: list[tuple[Any, ...]]) -> None:
        self.number = number
        self.host = host
        self.addresses = addresses
        self.socket: socket.socket | None = None
        self.connecting = True
        self.shaking_hands = False
        self.since_ms = 0
        self.unsent = bytearray()


class Sockets:
    """Runs calls to their end. ``on_wait`` hears why one waits that takes long."""

    def __init__(
        self, core: ClientCore, on_wait: Callable[[KeptError], None] | None = None
    ) -> None:
        self.core = core
        self._on_wait = on_wait
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, _Socket] = {}
        self._finished: dict[int, Finished] = {}

    def run(self, calls: Sequence[Call]) -> list[Finished]:
        """Run calls side by side until each has ended; in the order given.

        First it is seen which connections were closed since the last time: a request that may be
        sent only once must not go there, and fail for nothing.

        What interrupts it, KeyboardInterrupt or what another signal handler raises, ends all
        connections, and these calls: it may have come between a send and the note of it, and the
        next calls would send those bytes again.
        """
        try:
            self.core.security.refresh()
            if self._sockets:
                self._turn(0.0)
            for call in calls:
                self._perform(self.core.call(call, _now_ms()))
            while any(call.id not in self._finished for call in calls):
                self._turn()
        except BaseException:
            self.core.abandon(calls)
            for one in list(self._sockets.values()):
                self._gone(one, "interrupted")
            for call in calls:
                self._finished.pop(call.id, None)
            raise
        return [self._finished.pop(call.id) for call in calls]

    def flush(self, timeout_ms: int) -> None:
        """Send what is still to be sent (acks=0 has no answer to wait for). Raises NoResponse."""
        end_ms = _now_ms() + timeout_ms
        while any(s.unsent and s.socket is not None for s in self._sockets.values()):
            if _now_ms() >= end_ms:
                raise NoResponse(f"what was sent is not taken within {timeout_ms / 1000:.3g} s")
            self._turn()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._sockets.values()):
            self._drop(connection)
        self._selector.close()

    def _turn(self, longest_s: float = 1.0) -> None:
        """Wait for the network or the next tick, once."""
        self.core.security.refresh()
        due = self.core.next_tick_ms()
        pause = longest_s if due is None else max(0.0, min(longest_s, (due - _now_ms()) / 1000))
        for key, mask in self._selector.select(pause):
            connection: _Socket = key.data
            if self._sockets.get(connection.number) is not connection:
                continue
            if connection.connecting:
                self._finish_connecting(connection)
                continue
            if connection.shaking_hands:
                self._shake_hands(connection)
                continue
            if mask & selectors.EVENT_WRITE:
                self._write(connection)
            if mask & selectors.EVENT_READ and self._sockets.get(connection.number) is connection:
                self._read(connection)
        now_ms = _now_ms()
        for connection in list(self._sockets.values()):
            if (
                connection.connecting
                and connection.addresses
                and now_ms - connection.since_ms >= ADDRESS_MS
            ):
                self._try_next(connection, "no connection")
        due = self.core.next_tick_ms()
        if due is not None and due <= now_ms:
            self._perform(self.core.tick(now_ms))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                self._open(effect)
            elif isinstance(effect, Send):
                one = self._sockets.get(effect.connection)
                if one is not None:
                    one.unsent += effect.data
                    self._write(one)
            elif isinstance(effect, Close):
                gone = self._sockets.get(effect.connection)
                if gone is not None:
                    self._drop(gone)
            elif isinstance(effect, Waiting):
                if self._on_wait is not None:
                    self._on_wait(effect.why)
            elif effect.call.id:
                self._finished[effect.call.id] = effect

    def _open(self, effect: Connect) -> None:
        host, port = effect.endpoint
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = f"{host} is not a known host ({getattr(error, 'strerror', None) or error})"
            self._perform(self.core.step(Lost(effect.connection, why), _now_ms()))
            return
        connection = _Socket(effect.connection, host, list(addresses))
        self._sockets[effect.connection] = connection
        self._try_next(connection)

    def _try_next(self, one: _Socket, why: str = "", *, refused: bool = False) -> None:
        """Connect to the next address, after one that failed since ``why``; lost when none is left:
        the last one ``refused``, or failed otherwise.
        """
        self._close(one)
        while one.addresses:
            family, kind, protocol, _, address = one.addresses.pop(0)
            try:
                one.socket = socket.socket(family, kind, protocol)
                one.socket.setblocking(False)
                for level, name, value in PROBES:
                    if hasattr(socket, name):
                        one.socket.setsockopt(getattr(socket, level), getattr(socket, name), value)
                with contextlib.suppress(BlockingIOError):
                    one.socket.connect(address)
            except OSError as error:
                if not (why and error.errno in UNUSABLE_ADDRESS):
                    why, refused = _reason(error), isinstance(error, ConnectionRefusedError)
                self._close(one)
                continue
            one.since_ms = _now_ms()
            self._selector.register(one.socket, selectors.EVENT_WRITE, one)
            return
        self._gone(one, why or "no address", refused=refused)

    def _finish_connecting(self, one: _Socket) -> None:
        assert one.socket is not None
        code = one.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            error = OSError(code, "")
            self._try_next(one, _reason(error), refused=isinstance(error, ConnectionRefusedError))
            return
        one.connecting = False
        context = self.core.security.context()
        if context is None:
            self._connected(one)
            return
        self._selector.unregister(one.socket)
        try:
            one.socket = context.wrap_socket(
                one.socket, server_hostname=one.host, do_handshake_on_connect=False
            )
        except OSError as error:
            self._gone(one, _reason(error))
            return
        one.shaking_hands = True
        self._selector.register(one.socket, selectors.EVENT_READ, one)
        self._shake_hands(one)

    def _shake_hands(self, one: _Socket) -> None:
        assert isinstance(one.socket, ssl.SSLSocket)
        try:
            one.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(one.socket, selectors.EVENT_READ, one)
        except ssl.SSLWantWriteError:
            self._selector.modify(one.socket, selectors.EVENT_WRITE, one)
        except OSError as error:
            self._failed(one, error)
        else:
            one.shaking_hands = False
            self._connected(one)

    def _connected(self, one: _Socket) -> None:
        assert one.socket is not None
        self._selector.modify(one.socket, selectors.EVENT_READ, one)
        self._perform(self.core.step(Connected(one.number), _now_ms()))

    def _write(self, one: _Socket) -> None:
        if one.socket is None or one.connecting or one.shaking_hands:
            return
        try:
            while one.unsent:
                sent = one.socket.send(memoryview(one.unsent)[:_READ_BYTES])
                del one.unsent[:sent]
        except _NOT_NOW:
            pass
        except OSError as error:
            self._failed(one, error)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
        self._selector.modify(one.socket, events, one)

    def _read(self, one: _Socket) -> None:
        self._take(one)
        while self._sockets.get(one.number) is one and _is_pending(one.socket):
            self._take(one)

    def _take(self, one: _Socket) -> None:
        """Take what is there. TLS gives a record at a time, and the selector does not know of those
        that are decrypted already: it is read until there is no more.
        """
        assert one.socket is not None
        room = self.core.receive_buffer(one.number)
        chunks: list[bytes] = []
        count, ended = 0, False
        try:
            while count < (_READ_BYTES if room is None else len(room)):
                if room is None:
                    chunks.append(one.socket.recv(_READ_BYTES))
                    more = len(chunks[-1])
                else:
                    more = one.socket.recv_into(room[count:])
                count += more
                ended = not more
                if ended or not isinstance(one.socket, ssl.SSLSocket):
                    break
        except _NOT_NOW:
            pass
        except OSError as error:
            self._failed(one, error)
            return
        if count:
            data = Received(one.number, b"".join(chunks))
            event = data if room is None else Filled(one.number, count)
            self._perform(self.core.step(event, _now_ms()))
        elif ended:
            self._gone(one, "the other side closed the connection")

    def _failed(self, one: _Socket, error: OSError) -> None:
        """The socket failed. Of a server that does not accept our certificate TLS 1.3 hears when it
        reads first.
        """
        if not one.shaking_hands and not isinstance(error, ssl.SSLError):
            self._gone(one, _reason(error))
            return
        tls = self.core.security.tls
        failure = tls_failure(error, has_certificate=tls is not None and tls.keys is not None)
        self._gone(one, failure.why, mistrusted=failure.lasting)

    def _gone(
        self, one: _Socket, why: str, *, mistrusted: bool = False, refused: bool = False
    ) -> None:
        self._drop(one)
        self._perform(self.core.step(Lost(one.number, why, mistrusted, refused), _now_ms()))

    def _drop(self, one: _Socket) -> None:
        self._sockets.pop(one.number, None)
        self._close(one)

    def _close(self, one: _Socket) -> None:
        if one.socket is not None:
            if one.socket in self._selector.get_map():
                self._selector.unregister(one.socket)
            one.socket.close()
            one.socket = None


def first_failure(finished: Iterable[Finished]) -> KeptError | None:
    """The first error of several calls."""
    return next((f.error for f in finished if f.error is not None), None)


def _is_pending(one: socket.socket | None) -> bool:
    """Whether bytes are decrypted already that nobody has read."""
    return isinstance(one, ssl.SSLSocket) and one.pending() > 0


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _reason(error: OSError) -> str:
    """``connection refused`` rather than ``[Errno 111] Connection refused``."""
    import os

    text = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return text[:1].lower() + text[1:]
