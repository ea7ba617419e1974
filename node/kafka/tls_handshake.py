"""Accepted sockets of a listener with TLS, until it is known who speaks.

Sockets are accepted here rather than by the loop's server, so that whoever connects is bounded
before OpenSSL is reached: nothing is read of a socket until its first record is there whole
(``SO_RCVLOWAT``; ``kept.silent.ms`` and ``kept.silent.max.connections`` hold as for all who have
not spoken), a first message that is no ClientHello, or one above :data:`MAX_HELLO_BYTES`, is turned
away, :data:`PER_TURN` handshakes begin in one turn of the loop, and beyond ``kept.tls.handshakes``
of them the oldest is closed. Then TLS is the loop's own (``connect_accepted_socket``), with the
context that the listener has at that moment.

The session is made of the client's certificate; on a listener with SASL what authenticates goes on
from there.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.security.acls import ANONYMOUS
from kept.node.kafka.accept_throttle import is_closed_by_peer
from kept.node.kafka.handshake_timeout import HandshakeTimeouts
from kept.node.runtime.logging import bugs
from kept.node.security.listener_tls import UnknownPeer

if TYPE_CHECKING:
    from kept.node.kafka.listener import Listener
    from kept.node.security.listener_tls import ListenerTls

MAX_HELLO_BYTES: Final = 16 * 1024
"""A ClientHello is some 0.3 to 2 KiB; TLS would allow 16 MiB."""
PER_TURN: Final = 4
"""Handshakes that begin in one turn of the loop: 0.3 ms each with ECDSA, 1 ms with RSA-2048."""
ACCEPTED_AT_ONCE: Final = 64
PAUSE_S: Final = 1.0
"""For how long nobody is accepted when there are no descriptors."""
SHUTDOWN_S: Final = 5.0
"""How long the peer's end of a connection that is closed is waited for."""

_HANDSHAKE: Final = 0x16
_CLIENT_HELLO: Final = 1
_HEADER: Final = struct.Struct(">BHHB3s")
"""Record: type, version, length; handshake message: type, length."""
_RECORD_HEADER_BYTES: Final = 5
_HTTP: Final = (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC")
_PLAIN_HTTP: Final = b"This port speaks TLS: use https://\n"
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsAcceptor:
    """Accepts on the sockets of one listener."""

    def __init__(self, listener: Listener, tls: ListenerTls, *, authenticates: bool) -> None:
        self.listener = listener
        self.authenticates = authenticates
        """Whether the listener's ``new_protocol`` finds out who speaks."""
        self.tls = tls
        self.runtime = listener.context.runtime
        self.begun = HandshakeTimeouts(
            self.runtime.loop,
            listener.context.config.current.silent_ms / 1000,
            listener.context.config.current.tls_handshakes,
        )
        """Handshakes that wait for their client, oldest first."""
        self._sockets: list[socket.socket] = []
        self._handshakes: set[TlsHandshake] = set()
        self._ready: deque[TlsHandshake] = deque()
        self._pumping = False

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Accept at a socket that is bound."""
        sock.setblocking(False)
        sock.listen(backlog)
        self._sockets.append(sock)
        self.runtime.loop.add_reader(sock, self._accept, sock)

    def stop(self) -> None:
        """No new connections."""
        for sock in self._sockets:
            self.runtime.loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """Close what is not a connection yet."""
        self.begun.stop()
        for handshake in list(self._handshakes):
            handshake.abort()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self.runtime.loop.remove_reader(listening)
                    self.runtime.loop.call_later(PAUSE_S, self._accept_again, listening)
                self.listener.log_refusal("cannot accept", error=error.strerror or "")
                return
            sock.setblocking(False)
            if self.listener.context.open_files.nearly_out(sock.fileno()):
                sock.close()
                self.listener.log_refusal("connection refused", setting="RLIMIT_NOFILE")
                continue
            handshake = TlsHandshake(self, sock, f"{address[0]}:{address[1]}")
            self._handshakes.add(handshake)
            if self.listener.throttle.admit(handshake, address[0], sock.fileno()):
                handshake.serve()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self.runtime.loop.add_reader(listening, self._accept, listening)

    def ready(self, handshake: TlsHandshake) -> None:
        """A ClientHello is there: the handshake begins in its turn."""
        self.listener.silent.discard(handshake)
        self.begun.add(handshake)
        self._ready.append(handshake)
        if not self._pumping:
            self._pump()

    def _pump(self) -> None:
        self._pumping = bool(self._ready)
        for _ in range(min(PER_TURN, len(self._ready))):
            self._ready.popleft().begin()
        if self._pumping:
            self.runtime.loop.call_soon(self._pump)

    def done(self, handshake: TlsHandshake) -> None:
        """It is a connection now, or closed."""
        self.listener.silent.discard(handshake)
        self.begun.discard(handshake)
        self._handshakes.discard(handshake)


class TlsHandshake(asyncio.Protocol):
    """One accepted socket until its handshake is over."""

    def __init__(self, acceptor: TlsAcceptor, sock: socket.socket, peer: str) -> None:
        self._acceptor = acceptor
        self._listener = acceptor.listener
        self._loop = acceptor.runtime.loop
        self._socket: socket.socket | None = sock
        self._task: asyncio.Task[Any] | None = None
        self.peer = peer

    def serve(self) -> None:
        """It is its turn: wait for its first message."""
        self._listener.silent.add(self)
        self.wait_for(_HEADER.size)

    @property
    def is_closed(self) -> bool:
        """Whether either side has closed it."""
        return self._socket is None or is_closed_by_peer(self._socket.fileno())

    def wait_for(self, size: int) -> None:
        """Wait for ``size`` bytes, or the end."""
        sock = self._socket
        assert sock is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self._loop.add_reader(sock, self._readable, size)

    def abort(self) -> None:
        """Close it at once."""
        if self._task is not None:
            self._task.cancel()
        self._drop()

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.remove_reader(sock)
            sock.close()
        self._acceptor.done(self)

    def _readable(self, size: int) -> None:
        """At least ``size`` bytes are there, none of which is taken."""
        sock = self._socket
        assert sock is not None
        try:
            first = sock.recv(size, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop()
            return
        if len(first) < size:  # the end came before
            self._drop()
            return
        kind, version, length, message, hello = _HEADER.unpack_from(first)
        if kind != _HANDSHAKE or version >> 8 != 3:
            self._turn_away(first)
            return
        hello_bytes = int.from_bytes(hello, "big")
        if message != _CLIENT_HELLO or max(hello_bytes, length) > MAX_HELLO_BYTES:
            self._listener.log_refusal("no ClientHello of TLS", peer=self.peer)
            self._drop()
            return
        self._loop.remove_reader(sock)
        if size < _RECORD_HEADER_BYTES + length:
            self.wait_for(_RECORD_HEADER_BYTES + length)
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._acceptor.ready(self)

    def _turn_away(self, first: bytes) -> None:
        """It does not speak TLS."""
        if first[:4] in _HTTP and self._socket is not None:
            head = (
                "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
                f"Content-Length: {len(_PLAIN_HTTP)}\r\n\r\n"
            )
            try:
                # What came is read, or the answer would be lost with a reset.
                self._socket.recv(MAX_HELLO_BYTES)
                self._socket.send(head.encode() + _PLAIN_HTTP)
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        else:
            self._listener.log_refusal(
                "does not speak TLS, which this listener does", peer=self.peer
            )
        self._drop()

    def begin(self) -> None:
        """Read the ClientHello, and go on."""
        sock = self._socket
        if sock is None:
            return
        self._socket = None
        self._task = self._loop.create_task(self._handshake(sock))
        self._task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)

    async def _handshake(self, sock: socket.socket) -> None:
        seconds = self._listener.context.config.current.silent_ms / 1000
        try:
            await self._loop.connect_accepted_socket(
                lambda: self,
                sock,
                ssl=self._acceptor.tls.context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:
            sock.close()
            self._acceptor.done(self)
            self._listener.log_refusal("TLS handshake failed", peer=self.peer, error=_reason(error))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is over: a connection, or what authenticates, serves the transport."""
        self._acceptor.done(self)
        try:
            self._serve(transport)
        except UnknownPeer as error:
            self._listener.log_refusal("certificate refused", peer=self.peer, error=str(error))
            transport.abort()  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - nobody would serve, count or close it
            bugs.report("connection failed", error, listener=self._listener.name)
            transport.abort()  # type: ignore[attr-defined]

    def _serve(self, transport: Any) -> None:
        """Raises UnknownPeer for whom the certificate does not say who he is."""
        listener: Listener = self._listener
        if transport.get_extra_info("peername") is None:  # reset meanwhile, as in PlainSocket
            transport.abort()
            return
        principal = self._acceptor.tls.principal(transport.get_extra_info("ssl_object"))
        mechanism = "" if principal == ANONYMOUS else "SSL"
        session = listener.session(transport, principal, mechanism)
        if listener.between_nodes and not listener.is_member(session):
            listener.log_refusal(
                "certificate refused: neither in super.users nor with ClusterAction",
                peer=self.peer,
                principal=principal,
            )
            transport.abort()
            return
        if self._acceptor.authenticates:
            protocol: Any = listener.new_protocol(listener)
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
        else:
            listener.open(transport, session)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return str(error) or type(error).__name__
