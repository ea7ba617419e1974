"""Where clients connect: accepts sockets, counts them, closes idle ones, knows who speaks what.

The first four bytes of a connection tell its protocol: those in :attr:`Listener.takeovers` are
handed over with the transport (HTTP, gRPC); anything else is Kafka's length prefix. The listener
for nodes has their own gRPC, and greetings besides (``kept.node.peers``). Addresses come from
``listeners``; each listener answers with its own advertised address (SEMANTICS rule 42).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kept.node import api
from kept.node.connection import Connection
from kept.node.handlers import fetch, produce
from kept.node.logging import log
from kept.node.silent import SilentConnections
from kept.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from kept.node.config import Listener as Address
    from kept.node.server import Node

TakeOver = Callable[["Node", Any, bytes], None]

HTTP_METHODS: Final = (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC")
"""First four bytes of HTTP; each is far above the largest frame size as a length."""
NOISE_INTERVAL_S: Final = 10.0
"""At most one line about refused connections in this time."""

PIECES_PER_REPLY: Final = 4
"""A response of one partition has two or three: bytes, a slice of a file, bytes."""


class Listener:
    """One of ``listeners``: its sockets, and the connections accepted there.

    ``between_nodes``: it is the node listener, and hands gRPC and greetings to ``node.peers``.
    """

    def __init__(self, node: Node, address: Address, *, between_nodes: bool = False) -> None:
        self.node = node
        self.name = address.name
        self.address = address
        self.port = address.port
        self.connections: set[Connection] = set()
        config = node.config
        self.silent = SilentConnections(
            node.loop, config.silent_ms / 1000, config.silent_max_connections
        )
        self.takeovers: dict[bytes, TakeOver] = dict.fromkeys(HTTP_METHODS, take_over_http)
        self.takeovers[b"PRI "] = take_over_grpc
        if between_nodes:
            self.takeovers |= {b"PRI ": take_over_peer, b"KEPT": take_over_greeting}
        self.apis = api.served()
        self.produce = produce.handle
        self.fetch = fetch.handle
        self.max_frame_bytes = config.socket_request_max_bytes
        self.max_replies = config.connection_inflight_max_requests
        self.max_unsent_bytes = config.connection_inflight_max_bytes
        self.max_queued = PIECES_PER_REPLY * self.max_replies
        """Pieces of responses, bytes or slices: many small ones cost more than their bytes."""
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._foreign: set[Any] = set()
        """Transports that another protocol took over: they still count."""
        self._per_host: dict[str, int] = {}
        self._quiet_until = 0.0

    def bind(self) -> None:
        """Take the addresses; nobody is accepted yet. Raises ConfigurationError."""
        for host in self.address.bind_hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # no IPv6 here
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((host, self.port))
            except OSError as error:
                sock.close()
                if family == socket.AF_INET6 and self._sockets and error.errno != errno.EADDRINUSE:
                    continue
                self.close_sockets()
                raise self._refused(host, error) from error
            self.port = sock.getsockname()[1]
            self._sockets.append(sock)
        if not self._sockets:
            raise ConfigurationError(f"listeners: no address of {self.address} can be bound")

    def _refused(self, host: str, error: OSError) -> ConfigurationError:
        if error.errno == errno.EADDRINUSE:
            return ConfigurationError(
                f"port {self.port} on {host} is in use: is another node running? "
                "Stop it, or choose another with --port or listeners"
            )
        return ConfigurationError(f"listeners: cannot bind {self.address}: {error.strerror}")

    async def start(self) -> None:
        """Accept."""
        backlog = self.node.config.socket_listen_backlog_size
        for sock in self._sockets:
            server = await self.node.loop.create_server(
                lambda: Connection(self), sock=sock, backlog=backlog
            )
            self._servers.append(server)
        self._sockets.clear()

    def close_sockets(self) -> None:
        """Give the addresses up before anybody was accepted."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def stop_accepting(self) -> None:
        """No new connections."""
        self.close_sockets()
        for server in self._servers:
            server.close()
        self._servers.clear()

    def close_connections(self) -> None:
        """Close what is still open."""
        self.silent.stop()
        for connection in list(self.connections):
            connection.abort()
        for transport in list(self._foreign):
            transport.abort()

    # Called by connections.

    def admit(self, connection: Connection) -> bool:
        """Count a new connection; False when it is one too many."""
        config = self.node.config
        host = connection.host
        if self.node.connection_count >= config.max_connections:
            self._forget_closed()
        if self.node.connection_count >= config.max_connections:
            self._refuse(connection, "max.connections", config.max_connections)
            return False
        if self._per_host.get(host, 0) >= config.max_connections_per_ip:
            self._refuse(connection, "max.connections.per.ip", config.max_connections_per_ip)
            return False
        self.connections.add(connection)
        self.silent.add(connection)
        self.node.connection_count += 1
        self._per_host[host] = self._per_host.get(host, 0) + 1
        return True

    def _refuse(self, connection: Connection, setting: str, limit: int) -> None:
        now = self.node.loop.time()
        if now >= self._quiet_until:
            self._quiet_until = now + NOISE_INTERVAL_S
            log.warning("connection refused", peer=connection.peer, setting=setting, limit=limit)

    def leave(self, connection: Connection) -> None:
        """A connection is closed."""
        if connection in self.connections:
            self.connections.remove(connection)
            self.silent.discard(connection)
            self.node.connection_count -= 1
            host = connection.host
            left = self._per_host[host] - 1
            if left:
                self._per_host[host] = left
            else:
                del self._per_host[host]

    def hand_over(self, connection: Connection, transport: Any) -> None:
        """Another protocol has the transport now; it counts until it is closed."""
        self.leave(connection)
        self._foreign.add(transport)
        self.node.connection_count += 1

    def _forget_closed(self) -> None:
        closed = {transport for transport in self._foreign if transport.is_closing()}
        self._foreign -= closed
        self.node.connection_count -= len(closed)

    def close_idle(self) -> None:
        """Close connections idle longer than ``connections.max.idle.ms``, and those whose request
        takes longer than ``kept.request.receive.ms`` to come in; a timer calls.
        """
        self._forget_closed()
        now = self.node.loop.time()
        config = self.node.config
        idle_ms = config.connections_max_idle_ms
        oldest = now - idle_ms / 1000 if idle_ms >= 0 else -1.0
        oldest_request = now - config.request_receive_ms / 1000
        for connection in list(self.connections):
            if connection.is_late(oldest_request):
                connection.abort("a request did not come in whole within kept.request.receive.ms")
            elif connection.last_active < oldest and (connection.idle or connection.deaf):
                connection.abort()
            elif connection.last_active < now - 10:
                connection.shrink()


def take_over_http(node: Node, transport: Any, first_bytes: bytes) -> None:
    """Hand a connection to the HTTP server, imported at its first request."""
    from kept.node.http import take_over

    take_over(node, transport, first_bytes)


def take_over_grpc(node: Node, transport: Any, first_bytes: bytes) -> None:
    """Hand a connection to the gRPC server, started at its first client."""
    node.grpc_front.take_over(transport, first_bytes)


def take_over_peer(node: Any, transport: Any, first_bytes: bytes) -> None:
    """Hand a connection of another node to the gRPC server for nodes."""
    node.peers.take_over(transport, first_bytes)


def take_over_greeting(node: Any, transport: Any, first_bytes: bytes) -> None:
    """Answer a node that asks who this is."""
    node.peers.greet(transport, first_bytes)
