"""Where clients connect: accepts sockets, counts them, closes idle ones, knows who speaks what.

The first four bytes of a connection tell its protocol: those in :attr:`Listener.protocols` are
handed over with the transport (HTTP, gRPC); anything else is Kafka's length prefix. On the listener
for nodes these speak their own protocol, too (``kept.node.internode``). Addresses come from
``listeners``; each listener answers with its own advertised address (semantics.md, rule 42).

A connection counts until it is closed, also under another protocol: on clients' listeners against
``max.connections`` and ``max.connections.per.ip``, on the listener between nodes against
``kept.node.max.connections`` alone (:mod:`kept.node.runtime.connection_quota`). Those of this node
to itself count nowhere (:meth:`Listener.connect_here`).

Clients' limits have :data:`PROBE_CONNECTIONS` places behind them for ``GET /healthz`` and
``/readyz``: a node that is full is alive, and whoever watches it must not conclude otherwise. A
connection there is closed after one response, or when it turns out to be no probe.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kept.client.security.oauthbearer import MECHANISM as OAUTHBEARER
from kept.client.security.oauthbearer import parse_bearer
from kept.client.security.plain import MECHANISM as PLAIN
from kept.client.security.plain import parse_plain
from kept.cluster.security.acls import ANONYMOUS, CLUSTER_NAME, AclOperation, AclResourceType
from kept.node.config.sasl import SASL_PROTOCOLS
from kept.node.kafka import api
from kept.node.kafka.accept_throttle import AcceptThrottle
from kept.node.kafka.connection import Connection, ServerContext
from kept.node.kafka.handshake_timeout import HandshakeTimeouts
from kept.node.kafka.plain_socket import PlainSocket
from kept.node.runtime.logging import log
from kept.node.security.logins import parse_basic
from kept.node.security.password_checks import TooManyLogins
from kept.node.security.session import ALLOW_ALL, Session, may_change_voters, node_session
from kept.storage.errors import ConfigurationError, InvalidRequest, SaslAuthenticationFailed

if TYPE_CHECKING:
    from kept.node.config.listeners import ListenerConfig as Address
    from kept.node.kafka.tls_handshake import TlsAcceptor
    from kept.node.runtime.connection_quota import ConnectionQuota
    from kept.node.security.listener_tls import ListenerTls

ReceiveConnection = Callable[["HandedOver", bytes], None]
NewProtocol = Callable[["Listener"], asyncio.BaseProtocol]
"""What serves an accepted socket of a listener until its session is known."""

HTTP_METHODS: Final = (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC")
"""First four bytes of HTTP; each is far above the largest frame size as a length."""
HTTP2: Final = b"PRI "
"""Those of HTTP/2, which gRPC speaks."""
NOISE_INTERVAL_S: Final = 10.0
"""At most one line about refused connections in this time."""

PROBES: Final = (b"GET /healthz", b"GET /readyz", b"HEAD /healthz", b"HEAD /readyz")
"""How a request begins that is served beyond clients' limits."""
PROBE_CONNECTIONS: Final = 8
"""Connections beyond a limit that may still turn out to be probes."""
PROBE_S: Final = 2.0
"""Within this such a connection has sent the beginning of its request, or is closed."""

PIECES_PER_REPLY: Final = 4
"""A response of one partition has two or three: bytes, a slice of a file, bytes."""


class HandedOver:
    """A connection that another protocol serves from now on, and the listener that counts it.

    Whoever serves it calls :meth:`closed` when its transport is.
    """

    __slots__ = ("_open", "is_probe", "listener", "session", "transport")

    def __init__(
        self, listener: Listener, transport: Any, session: Session, *, is_probe: bool = False
    ) -> None:
        self.is_probe = is_probe
        """It stands beyond a limit: it gets one response, and is closed."""
        self.listener = listener
        self.transport = transport
        self.session = session
        self._open = True

    @property
    def host(self) -> str:
        """The peer's address."""
        return self.session.host

    @property
    def may_change_voters(self) -> bool:
        """Whether whoever speaks here may change who votes."""
        return may_change_voters(self.listener.between_nodes, self.session)

    def closed(self) -> None:
        """The transport is closed: it counts no more."""
        if self._open:
            self._open = False
            self.listener.handed_over.pop(self, None)
            self.listener.quota.leave(self.host)


class Pending(asyncio.BufferedProtocol):
    """What serves an accepted socket until it is known who speaks, and counts meanwhile. ``host``
    and ``peer`` are the other side's address; ``over_limit`` is the setting and the limit that it
    exceeds: it may stay if it is a probe.
    """

    transport: Any = None
    host = ""
    peer = "?"
    over_limit: tuple[str, int] | None = None
    from_this_node = False

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()


class Accepted(asyncio.Protocol):
    """An accepted socket of a listener where nobody is asked who he is; with a ``session`` the end
    of a pair of this node's own.
    """

    def __init__(self, listener: Listener, session: Session | None = None) -> None:
        self._listener = listener
        self._session = session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is known who speaks: a connection serves it."""
        if self._session is None:
            self._listener.open(transport, self._listener.session(transport))
        else:
            self._listener.open(transport, self._session, from_this_node=True)


class Listener:
    """One of ``listeners``: its sockets, and the connections accepted there.

    ``protocols``: who serves other protocols, by the first four bytes. ``quota`` counts connections
    of this listener and of others. ``between_nodes``: it is the listener for nodes.
    ``new_protocol`` makes what serves an accepted socket until it calls :meth:`open`; without one
    the transport alone tells the session. With ``tls`` all that is in TLS.
    """

    def __init__(
        self,
        context: ServerContext,
        address: Address,
        quota: ConnectionQuota,
        protocols: Mapping[bytes, ReceiveConnection],
        *,
        between_nodes: bool = False,
        new_protocol: NewProtocol | None = None,
        tls: ListenerTls | None = None,
    ) -> None:
        self.context = context
        self.name = address.name
        self.address = address
        self.port = address.port
        self.between_nodes = between_nodes
        self.new_protocol = new_protocol or Accepted
        self.connections: dict[Connection, None] = {}
        self.logging_in: dict[Pending, None] = {}
        """Those of whom it is not known yet who speaks: they count, too."""
        self.handed_over: dict[HandedOver, None] = {}
        """Connections that another protocol took over: they still count."""
        self._from_this_node = 0
        """So many of the connections are this node's own."""
        self.quota = quota
        self.replica_warning_at = 0.0
        """From this time on, by the loop's clock, another refused replica is told of."""
        config = context.config.current
        self.silent = HandshakeTimeouts(
            context.runtime.loop, config.silent_ms / 1000, config.silent_max_connections
        )
        self.probes = HandshakeTimeouts(context.runtime.loop, PROBE_S, PROBE_CONNECTIONS)
        """Connections beyond a limit of which it is not known whether they are probes."""
        self.throttle = AcceptThrottle(self)
        """Accepted sockets that wait to be served."""
        self.protocols = protocols
        self.own_max_connections = config.own_max_connections(address.name)
        self.served = api.served()
        self.max_frame_bytes = config.socket_request_max_bytes
        self.max_entries = config.request_max_entries
        self.max_decoded_bytes = config.request_decoded_max_bytes
        self.max_replies = config.connection_inflight_max_requests
        self.max_unsent_bytes = config.connection_inflight_max_bytes
        self.max_queued = PIECES_PER_REPLY * self.max_replies
        """Pieces of responses, bytes or slices: many small ones cost more than their bytes."""
        self.acceptor: TlsAcceptor | None = None
        """Accepts where TLS is spoken."""
        if tls is not None:
            from kept.node.kafka.tls_handshake import TlsAcceptor

            self.acceptor = TlsAcceptor(self, tls, authenticates=new_protocol is not None)
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._quiet_until: dict[str, float] = {}
        """By kind of complaint."""

    @property
    def asks_login(self) -> bool:
        """Whether nobody is served here who has not said who he is."""
        return self.address.protocol in SASL_PROTOCOLS

    @property
    def http_schemes(self) -> tuple[str, ...]:
        """How HTTP and gRPC may say here who makes a request: Basic, Bearer, both, or neither."""
        return self.context.logins.settings(self.name).http_schemes

    def check_decoded(self, size_bytes: int) -> None:
        """Raises InvalidRequest for a request of which more than ``kept.request.decoded.max.bytes``
        would be decoded: few long strings hold the loop as many short ones do.
        """
        most = self.max_decoded_bytes
        if size_bytes > most:
            raise InvalidRequest(
                f"{size_bytes} bytes besides records, kept.request.decoded.max.bytes is {most}"
            )

    def bind(self) -> None:
        """Take the addresses; nobody is accepted yet. Raises ConfigurationError."""
        for host in self.address.bind_hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                sock = self.context.runtime.stream_socket(family)
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
        backlog = self.context.config.current.socket_listen_backlog_size
        for sock in self._sockets:
            if self.acceptor is not None:
                self.acceptor.listen(sock, backlog)
                continue
            server = await self.context.runtime.loop.create_server(
                lambda: PlainSocket(self), sock=sock, backlog=backlog
            )
            self._servers.append(server)
        self._sockets.clear()

    async def connect_here(self, session: Session | None = None) -> socket.socket:
        """A connection of this node to itself, which needs no login and counts against no limit of
        connections: the end of a pair of sockets whose other end is served, with the rights of a
        node or those of ``session``. The caller closes it.
        """
        ours, served = socket.socketpair()
        ours.setblocking(False)
        served.setblocking(False)
        speaker = node_session(self.name) if session is None else session
        try:
            await self.context.runtime.loop.connect_accepted_socket(
                lambda: Accepted(self, speaker), served
            )
        except BaseException:
            ours.close()
            served.close()
            raise
        return ours

    def close_sockets(self) -> None:
        """Give the addresses up before anybody was accepted."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def stop_accepting(self) -> None:
        """No new connections."""
        self.close_sockets()
        if self.acceptor is not None:
            self.acceptor.stop()
        for server in self._servers:
            server.close()
        self._servers.clear()

    def close_connections(self) -> None:
        """Close what is still open."""
        self.silent.stop()
        self.probes.stop()
        self.throttle.close()
        if self.acceptor is not None:
            self.acceptor.close()
        for connection in list(self.connections):
            connection.abort()
        for pending in list(self.logging_in):
            pending.abort()
        for handed_over in list(self.handed_over):
            handed_over.transport.abort()

    # Called by connections, and by what comes before them.

    def session(self, transport: Any, principal: str = ANONYMOUS, mechanism: str = "") -> Session:
        """A session of ``principal`` on this listener: of a node on the one between nodes, whom
        nothing is forbidden.
        """
        peer = transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) and len(peer) > 1 else ""
        authorizer = ALLOW_ALL if self.between_nodes else self.context.authorizer
        return Session(
            principal,
            host,
            self.name,
            mechanism,
            authorizer=authorizer,
            is_node=self.between_nodes,
        )

    def is_member(self, session: Session) -> bool:
        """Whether the owner of the certificate that began a session may speak for a node: a super
        user, or who may do ClusterAction. A session without a node's rights is asked about.
        """
        return self.context.authorizer.allows(
            Session(session.principal, session.host, session.listener, session.mechanism),
            AclOperation.CLUSTER_ACTION,
            AclResourceType.CLUSTER,
            CLUSTER_NAME,
        )

    async def authenticate(
        self, transport: Any, authorization: bytes, on_refused: Callable[[], None] | None = None
    ) -> Session | None:
        """A session of whom the header ``Authorization`` of HTTP, or that metadata of gRPC, names:
        by a password (Basic) or an access token (Bearer). None, after the delay of a failed login,
        where it is not believed; ``on_refused`` is called before that delay. Raises TooManyLogins,
        after one, too.
        """
        logins = self.context.logins
        scheme = "Bearer" if authorization[:7].lower() == b"bearer " else "Basic"
        if scheme not in self.http_schemes:
            why = f"the listener takes no login by {scheme}"
            return await self._refuse_login(self.session(transport), scheme, "", why, on_refused)
        if scheme == "Basic":
            user, password = parse_basic(authorization)
            return await self.authenticate_password(transport, user, password, on_refused)
        from kept.node.security.sasl_authenticator import AccessTokenChecked

        host = self.session(transport).host  # which TLS does not tell of one who goes meanwhile
        try:
            checked = await logins.check_token(self.name, parse_bearer(authorization))
        except SaslAuthenticationFailed as error:
            checked = AccessTokenChecked(why=str(error))
        session = self.session(transport, f"User:{checked.user}", OAUTHBEARER)
        session.host = host
        if checked.why:
            return await self._refuse_login(session, "Bearer", "", checked.why, on_refused)
        lifetime_ms = logins.lifetime_ms(self.name, checked.expires_at_s)
        session.expires_at = self.context.runtime.loop.time() + lifetime_ms / 1000
        self.context.counters.logins += 1
        return session

    async def authenticate_password(
        self, transport: Any, user: str, password: str, on_refused: Callable[[], None] | None = None
    ) -> Session | None:
        """A session of ``user`` whose password comes outside of SASL; None, or an error, as
        `authenticate`.
        """
        session = self.session(transport, f"User:{user}", PLAIN)
        logins = self.context.logins
        try:
            parse_plain(f"\0{user}\0{password}".encode())
            matches = await logins.password_matches(
                self.name, session.host, user, password, plain=False
            )
        except SaslAuthenticationFailed:
            matches = False
        except TooManyLogins as error:
            if on_refused:
                on_refused()
            await asyncio.sleep(logins.not_checked(self.name, session.host, "Basic", error))
            raise
        if matches and not logins.is_revoked(session):
            if lifetime_ms := logins.lifetime_ms(self.name, None):
                session.expires_at = self.context.runtime.loop.time() + lifetime_ms / 1000
            self.context.counters.logins += 1
            return session
        why = "no such user, or another password"
        return await self._refuse_login(session, "Basic", user, why, on_refused)

    async def _refuse_login(
        self, session: Session, way: str, user: str, why: str, told: Callable[[], None] | None
    ) -> Session | None:
        if told:
            told()
        await asyncio.sleep(self.context.logins.refused(self.name, session.host, way, user, why))
        return None

    def open(
        self,
        transport: Any,
        session: Session,
        unread: bytes = b"",
        *,
        logged_in: bool = False,
        from_this_node: bool = False,
    ) -> None:
        """``session`` speaks over ``transport`` from now on: a connection serves it, and first the
        bytes that came in already. It is counted from here on. Who has ``logged_in`` by Kafka's
        protocol need not say at once what he wants. One ``from_this_node`` counts nowhere.
        """
        connection = Connection(self, session, from_this_node=from_this_node)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if logged_in:
            self.silent.discard(connection)
        while unread and connection.transport is not None:
            buffer = connection.get_buffer(len(unread))
            size = min(len(buffer), len(unread))
            if not size:
                connection.abort("more was sent behind a login than is served at once")
                return
            buffer[:size], unread = unread[:size], unread[size:]
            connection.buffer_updated(size)

    def admit(self, connection: Connection | Pending, fd: int) -> bool:
        """Count a new connection, whose descriptor is ``fd``; False when it is one too many.

        One beyond a limit of clients is counted, too, if it may turn out to be a probe: what it
        exceeded is noted in its ``over_limit``. This node's own are always admitted.
        """
        members: dict[Any, None] = self.connections
        if connection.from_this_node:
            members[connection] = None
            self._from_this_node += 1
            return True
        setting, limit = self._exceeded(connection.host, fd)
        if setting:
            if not self._has_room_for_probe(fd):
                self._refuse(connection, setting, limit)
                return False
            connection.over_limit = (setting, limit)
            self.probes.add(connection)
        else:
            self.silent.add(connection)
        if isinstance(connection, Pending):
            members = self.logging_in
        members[connection] = None
        self.quota.enter(connection.host)
        return True

    def _has_room_for_probe(self, fd: int) -> bool:
        """Whether a connection beyond a limit may stay until it has spoken. Probes that are being
        served take as many places again.
        """
        if self.between_nodes or self.context.open_files.nearly_out(fd):
            return False
        handed_over = sum(other.is_probe for other in self.handed_over)
        return handed_over < PROBE_CONNECTIONS

    def _exceeded(self, host: str, fd: int) -> tuple[str, int]:
        """What allows no further connection from ``host``, a setting or RLIMIT_NOFILE, and how many
        it allows.
        """
        config, quota, open_files = self.context.config.current, self.quota, self.context.open_files
        if self.between_nodes:
            limit = config.node_max_connections
            if quota.count >= limit or open_files.nearly_out(fd):
                self._make_room()
            return ("kept.node.max.connections", limit) if quota.count >= limit else ("", 0)
        limit = self.own_max_connections
        clients = len(self.connections) - self._from_this_node
        if clients + len(self.handed_over) + len(self.logging_in) >= limit:
            return f"listener.name.{self.name.lower()}.max.connections", limit
        if quota.count >= config.max_connections:
            return "max.connections", config.max_connections
        limit = open_files.connection_limit(config.max_connections)
        if quota.count >= limit or open_files.nearly_out(fd):
            return "RLIMIT_NOFILE", limit
        if quota.of(host) >= config.max_connections_per_ip:
            return "max.connections.per.ip", config.max_connections_per_ip
        return "", 0

    def _make_room(self) -> None:
        """Close the node connection in Kafka's protocol that was idle longest, if there is one.

        Nodes that replicate are never idle for long, so whoever opens connections here and leaves
        them keeps no node out.
        """
        idle = [connection for connection in self.connections if connection.idle]
        if not idle:
            return
        oldest = min(idle, key=lambda connection: connection.last_active)
        oldest.abort("closed to make room for another node", setting="kept.node.max.connections")
        self.leave(oldest)

    def _refuse(self, connection: Connection | Pending, setting: str, limit: int) -> None:
        self.log_refusal("connection refused", peer=connection.peer, setting=setting, limit=limit)

    def log_refusal(self, what: str, **fields: Any) -> None:
        """A line about a connection that was not taken; at most one of a kind in a while."""
        now = self.context.runtime.loop.time()
        if now >= self._quiet_until.get(what, 0.0):
            self._quiet_until[what] = now + NOISE_INTERVAL_S
            log.warning(what, listener=self.name, **fields)

    @staticmethod
    def is_probe(first_bytes: bytes) -> bool | None:
        """Whether a request that begins so is a probe; None while that is open."""
        if first_bytes.startswith(PROBES):
            return True
        return None if any(probe.startswith(first_bytes) for probe in PROBES) else False

    def leave(self, connection: Connection | Pending) -> None:
        """A connection is closed, or another protocol serves it, which counts it by itself."""
        members: dict[Any, None] = self.connections
        if connection in self.logging_in:
            members = self.logging_in
        if connection in members:
            if connection.over_limit is not None:
                self._refuse(connection, *connection.over_limit)
            del members[connection]
            self.probes.discard(connection)
            self.silent.discard(connection)
            if connection.from_this_node:
                self._from_this_node -= 1
            else:
                self.quota.leave(connection.host)

    def is_expected(self, transport: Any, first: bytes) -> bool:
        """Whether the first four bytes are those of what speaks here: TLS only where it is spoken,
        and the protocol that the client named in its handshake (ALPN), if it named one.
        """
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            if first[:2] == b"\x16\x03" and first[2] < 4:
                peer = transport.get_extra_info("peername")
                what = f"speaks TLS, which this listener does not ({self.address.protocol})"
                self.log_refusal(what, peer=peer[0] if isinstance(peer, tuple) else "?")
                return False
            return True
        named = tls.selected_alpn_protocol()
        if named is None:
            return True
        return first == HTTP2 if named == "h2" else first in HTTP_METHODS

    def hand_over(self, connection: Connection, transport: Any) -> HandedOver:
        """Another protocol has the transport now; it counts until it is closed."""
        del self.connections[connection]
        is_probe = connection.over_limit is not None
        self.probes.discard(connection)
        handed_over = HandedOver(self, transport, connection.session, is_probe=is_probe)
        self.handed_over[handed_over] = None
        return handed_over

    def end_sessions(self, is_ended: Callable[[Session], bool]) -> None:
        """Close the connections of sessions that are over."""
        for connection in list(self.connections):
            if is_ended(connection.session):
                connection.abort("session ended", principal=connection.session.principal)
        for handed_over in list(self.handed_over):
            if is_ended(handed_over.session):
                handed_over.transport.abort()

    def close_idle(self) -> None:
        """Close connections idle longer than ``connections.max.idle.ms``, and those whose request
        takes longer than ``kept.request.receive.ms`` to come in; a timer calls.
        """
        now = self.context.runtime.loop.time()
        config = self.context.config.current
        idle_ms = config.connections_max_idle_ms
        oldest = now - idle_ms / 1000 if idle_ms >= 0 else -1.0
        oldest_request = now - config.request_receive_ms / 1000
        for connection in list(self.connections):
            if connection.is_late(oldest_request):
                connection.abort("a request did not come in whole within kept.request.receive.ms")
            elif connection.last_active < oldest and (connection.idle or connection.has_unsent):
                connection.abort()
            elif connection.last_active < now - 10:
                connection.shrink()
