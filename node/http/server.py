"""HTTP on the client port: health, metrics and the operations beyond Kafka as JSON.

:func:`receive_connection` gets a connection whose first four bytes are an HTTP method, with the
bytes read so far. h11 holds the protocol's state; routes are in ``kept.node.http.routes``. Every
answer with a value in it is JSON or plain text with ``nosniff``, so nothing is escaped for HTML;
the page for browsers (``kept.node.http.console``) is three files that never change. Errors are
``{"error": {"status": 404, "message": "…"}}``.

What a web page elsewhere sends to ``/api/`` (``Sec-Fetch-Site``) is refused. So is a Host that is
not this node's (``kept.node.http.host_header``), against DNS rebinding, for every path but the two
of probes, which tell nothing: load balancers name hosts as they like. A POST changes something, so
it must carry the header ``X-Kept``, which a web page cannot send across sites without being asked
first. Who makes a request is told by its login (Basic, or Bearer with an access token), else by the
connection; what it may do, by the route (``kept.node.http.route_access``).

Limits: ``kept.http.request.max.bytes`` for headers, 64 KiB at most, and for the body (which draw on
``kept.inflight.max.bytes``, by address), ``kept.http.idle.ms`` for a whole request to come and for
its answer to be taken, ``kept.http.max.connections``, of which each network has a share
(:mod:`kept.node.runtime.connection_slots`): one more takes the place of one that waits for a
request or for a login, and where none does, of the newest of a network that has more than its
share. Those whose requests are served for a login give way where they hold more than three quarters
of the places: the newest of the user who has most, if he has more than a quarter.
Where there is no place some probes have some behind them, as behind the listener's limits.
One request at a time per connection; while it is served, nothing is read. Quotas of clients hold
(:mod:`kept.node.security.client_usage`): over one of them a request waits for :data:`THROTTLE_S` at
most, or is refused with 429 and ``Retry-After``. Of answers that may be large so many are held at a
time as :mod:`kept.node.http.response_limiter` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from contextlib import nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

import h11
import msgspec

import kept
from kept.cluster.security.acls import ANONYMOUS
from kept.cluster.security.addresses import network_of
from kept.node.http.host_header import host_is_known, with_port
from kept.node.http.json_results import dumps
from kept.node.http.messages import (
    JSON,
    TEXT,
    HttpRequest,
    HttpResponse,
    failure,
    failure_of,
    plain_path,
)
from kept.node.http.response_limiter import ResponseLimiter
from kept.node.http.route_access import login_wanted
from kept.node.kafka.listener import PROBE_CONNECTIONS
from kept.node.runtime.connection_slots import ConnectionSlots
from kept.node.runtime.logging import bugs
from kept.node.security.client_usage import UNMETERED
from kept.node.security.password_checks import TooManyLogins
from kept.storage.errors import InvalidRequest, KeptError, is_bug

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.http.routes import Routes
    from kept.node.kafka.listener import HandedOver
    from kept.node.runtime.memory_budget import MemoryBudget
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.client_usage import ClientUsages
    from kept.node.security.session import Session

T = TypeVar("T")

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's address and headers: they are read at a stretch, also where they may be larger."""
MAX_QUERY_FIELDS: Final = 32
"""Parameters of one request; each operation has a handful."""

UNDRAWN_BYTES: Final = 16 * 1024
"""What a request may have without drawing on the node's budget, as a Kafka connection's base buffer
does: probes and metrics are answered whatever clients hold."""
THROTTLE_S: Final = 1.0
"""Who is over a quota waits for so long at most before he is served; where that is not enough he is
told when to come again (429): a request that waits holds one of kept.http.max.connections."""
PROBE_IDLE_S: Final = 2.0
"""In place of kept.http.idle.ms, of a probe on a connection beyond a limit."""
BUSY: Final = "what is in flight holds all of kept.inflight.max.bytes; try again"
CROWDED: Final = "too many HTTP connections; see kept.http.max.connections"

_CHALLENGES: Final = {
    "Basic": 'Basic realm="kept", charset="UTF-8"',
    "Bearer": 'Bearer realm="kept"',
}
_WAITING, _SERVED, _KNOWN = range(3)
"""Ranks of connections: one waits for a request, or for what comes of a login (a refused one waits
long); or its request is served, to anybody or to whoever has logged in."""
_ANY_HOST: Final = frozenset({"/healthz", "/readyz"})
_HELD: Final = frozenset(
    {"/api/v1/records", "/api/v1/cleaner", "/api/v1/compaction", "/api/v1/compaction/lost"}
)
_HELD_BELOW: Final = ("/api/v1/topics", "/api/v1/groups", "/api/v1/transactions")


class HttpServer:
    """HTTP on the clients' listeners of one node."""

    def __init__(
        self,
        runtime: Runtime,
        config: LiveConfig,
        budget: MemoryBudget,
        routes: Routes,
        usages: ClientUsages,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self.budget = budget
        self.routes = routes
        self.usages = usages
        self.limiter = ResponseLimiter()
        self._connections: ConnectionSlots[HttpConnection] = ConnectionSlots(3)
        self._probes: WeakSet[HttpConnection] = WeakSet()
        """Beyond the limit of those."""

    def closed(self, connection: HttpConnection) -> None:
        """A connection is closed, and counts no more, though its object may outlive it."""
        self._connections.discard(connection)
        self._probes.discard(connection)

    def rank(self, connection: HttpConnection, rank: int) -> None:
        """It waits from now on, or is served."""
        if connection in self._connections:
            self._connections.put(connection, rank)

    def receive_connection(self, handed_over: HandedOver, first_bytes: bytes) -> None:
        """Speak HTTP on a connection from now on; it belongs to this module until it is closed."""
        transport = handed_over.transport
        has_place = self._make_room(handed_over.host)
        is_crowded = not has_place
        if is_crowded and handed_over.listener.is_probe(first_bytes) is not False:
            # It may be none, as four bytes do not tell: that is seen once the request is there.
            is_crowded = len(self._probes) >= PROBE_CONNECTIONS
            handed_over.is_probe = True
        connection = HttpConnection(self, handed_over)
        transport.set_protocol(connection)
        if has_place:
            self._connections.put(connection, _WAITING)
        elif not is_crowded:
            self._probes.add(connection)
        connection.begin(first_bytes, is_crowded)
        transport.resume_reading()

    def _make_room(self, host: str) -> bool:
        """Whether there is a place for one more connection from ``host``, that of another perhaps.

        So whoever opens connections and says nothing, little at a time, or wrong passwords, keeps
        nobody else out: probes and scrapes least of all. Who waits keeps no place against anybody,
        since a request mostly comes with the first bytes.
        """
        limit = self.config.current.http_max_connections
        while len(self._connections) >= limit:
            places = self._connections
            other = places.pop_beyond_share(host, limit, (_WAITING,), (_SERVED,))
            if other is None:
                other = places.pop_of_greediest(limit, _KNOWN, lambda one: one.user)
            if other is None:
                return False
            other.give_way()
        return True


def _is_held(path: str) -> bool:
    """Whether it has to wait for its turn: its answer may be large, and is soon made."""
    return path in _HELD or path.startswith(_HELD_BELOW)


class HttpConnection(asyncio.Protocol):
    """One connection: read a request, answer it, read the next."""

    def __init__(self, server: HttpServer, handed_over: HandedOver) -> None:
        self._server = server
        self._handed_over = handed_over
        self.host = handed_over.host
        self._accepted = handed_over.session
        """Who speaks as far as the connection tells."""
        self.user = self._accepted.principal
        """Whose request is served, or was."""
        self._runtime = server.runtime
        self._config = config = server.config.current
        self._routes = server.routes
        self._transport = handed_over.transport
        self._limit = config.http_request_max_bytes
        self._head_limit = min(self._limit, MAX_HEAD_BYTES)
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=self._head_limit)
        self._idle_s = config.http_idle_ms / 1000
        if handed_over.is_probe:  # of few places, which a probe needs for a moment
            self._idle_s = min(self._idle_s, PROBE_IDLE_S)
        self._timer: asyncio.TimerHandle | None = None
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._account = server.budget.account(network_of(self.host))
        self._read_bytes = 0
        """What was read of the request."""
        self._held_bytes = 0
        """What of it is drawn on the node's budget until it is answered."""
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._endless = False
        self._turns = server.limiter
        self._has_turn = False

    def begin(self, first_bytes: bytes, crowded: bool) -> None:
        """Handle what was read before; ``crowded``: there are too many connections already."""
        if crowded:
            self._refuse(503, CROWDED)
            return
        self._await_request()
        self.data_received(first_bytes)

    def give_way(self) -> None:
        """Its place is needed."""
        if self._task is not None:
            self._transport.abort()
        elif self._request_begun:
            self._refuse(503, CROWDED)
        else:
            self._transport.close()

    def _await_request(self) -> None:
        self._server.rank(self, _WAITING)
        self._watch()

    # Callbacks of the transport.

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._endless:  # it can never be answered
            self._transport.abort()
            return
        self._read_bytes += len(data)
        more = self._read_bytes - UNDRAWN_BYTES - self._held_bytes
        if more > 0:
            if not self._account.acquire(more):
                self._refuse(503, BUSY)
                return
            self._held_bytes += more
        try:
            self._h11.receive_data(data)
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"not an HTTP request: {error}")

    def eof_received(self) -> bool:
        """The peer will send no more; what it asked is still answered, unless that has no end."""
        if self._endless:
            return False
        self.data_received(b"")
        return self._task is not None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The connection is gone. What a POST began is finished, though nobody waits for it."""
        self._handed_over.closed()
        self._server.closed(self)
        self._unwatch()
        self._give_back()
        self._writable.set()
        if self._task is not None and self._request is not None and self._request.method != b"POST":
            self._task.cancel()

    def _give_back(self) -> None:
        held, self._held_bytes, self._read_bytes = self._held_bytes, 0, 0
        if held:
            self._account.release(held)

    def pause_writing(self) -> None:
        """The peer does not read the answer."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._writable.set()

    # A request.

    def _advance(self) -> None:
        while self._task is None and not self._transport.is_closing():
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                return
            if event is h11.PAUSED:
                return
            if isinstance(event, h11.ConnectionClosed):
                self._transport.close()
                return
            if isinstance(event, h11.Request):
                size = len(event.target) + sum(len(n) + len(v) + 4 for n, v in event.headers)
                if size > self._head_limit:
                    self._refuse(431, f"address and headers have over {self._head_limit} bytes")
                    return
                if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                    # Where this request ends, a proxy in front may see otherwise (RFC 9112, 6.1).
                    self._refuse(400, "Content-Length and Transfer-Encoding are both given")
                    return
                self._request = event
                self._body.clear()
            elif isinstance(event, h11.Data):
                if len(self._body) + len(event.data) > self._limit:
                    self._refuse(413, f"the body is larger than {self._limit} bytes")
                    return
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._unwatch()
                if not self._handed_over.listener.asks_login:
                    self._rank_served(self._accepted)
                self._transport.pause_reading()
                self._task = self._runtime.loop.create_task(self._serve())

    async def _serve(self) -> None:
        request = self._request
        assert request is not None
        try:
            # Before its turn: who gives wrong passwords or is over a quota waits, and must not hold
            # one meanwhile.
            admitted = await self._or_failure(request, self._admit(request))
            is_held = isinstance(admitted, HttpRequest) and _is_held(admitted.path)
            usage = admitted.usage if isinstance(admitted, HttpRequest) else UNMETERED
            async with self._turns if is_held else nullcontext():
                self._has_turn = is_held
                if isinstance(admitted, HttpRequest):
                    work = usage.run(self._routes.respond(admitted))
                    admitted = await self._or_failure(request, work)
                await usage.run(self._respond(request, admitted))
        except Exception as error:  # noqa: BLE001 - a response that cannot be completed ends here
            bugs.report("http response failed", error, path=request.target.decode("latin-1"))
            self._transport.abort()
            return
        self._task = None
        if self._transport.is_closing():
            return
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._transport.close()
            return
        self._h11.start_next_cycle()
        self._request = None
        self._body = bytearray()
        self._give_back()
        self._await_request()
        self._transport.resume_reading()
        try:
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"not an HTTP request: {error}")

    async def _admit(self, request: h11.Request) -> HttpRequest | HttpResponse:
        """A whole request with the session of whoever makes it, or the response that refuses it.
        Raises InvalidRequest, ThrottlingQuotaExceeded, TooManyLogins.
        """
        parsed = self._parse(request)
        if self._handed_over.is_probe and parsed.path not in _ANY_HOST:
            return failure(503, CROWDED)
        try:
            session = await self._log_in(request)
        except TooManyLogins:
            if parsed.path not in _ANY_HOST:
                raise
            session = None
        if session is not None:
            parsed.session = self._handed_over.session = session
            parsed.may_change_voters = self._handed_over.may_change_voters
        elif parsed.path not in _ANY_HOST:
            return login_wanted(parsed.schemes)
        if session is not None and parsed.path not in _ANY_HOST:
            parsed.usage = self._server.usages.of(session)
            if parsed.usage.is_metered:
                await parsed.usage.admit(self._routes.draws_on(parsed), THROTTLE_S)
        return parsed

    async def _or_failure(self, request: h11.Request, work: Awaitable[T]) -> T | HttpResponse:
        """What comes of ``work``, or the response that says why nothing did; never raises."""
        try:
            return await work
        except Exception as error:  # noqa: BLE001 - a bug of ours is one answer, not the node's end
            if isinstance(error, KeptError) and not is_bug(error):
                return failure_of(error)
            bugs.report("http request failed", error, path=request.target.decode("latin-1"))
            return failure(500, "internal error; the node's log has the details")

    async def _log_in(self, request: h11.Request) -> Session | None:
        """Who makes the request: a user with a password or an access token, or whoever has opened
        the connection; None where that is not enough. Each request says it anew: a proxy may send
        those of several users on one connection. Raises TooManyLogins.
        """
        listener = self._handed_over.listener
        given = [value for name, value in request.headers if name == b"authorization"]
        if not listener.asks_login and (not given or self._accepted.is_unrestricted):
            return self._accepted
        if len(given) != 1:
            return None
        self._server.rank(self, _WAITING)
        session = await listener.authenticate(self._transport, given[0])
        if session is not None:
            self._rank_served(session)
        return session

    def _rank_served(self, session: Session) -> None:
        self.user = session.principal
        self._server.rank(self, _SERVED if session.principal == ANONYMOUS else _KNOWN)

    def _parse(self, request: h11.Request) -> HttpRequest:
        """Raises InvalidRequest."""
        method = request.method.decode("ascii")
        try:
            target = urlsplit(request.target.decode("latin-1"))
            query = dict(
                parse_qsl(
                    target.query,
                    keep_blank_values=True,
                    errors="strict",
                    max_num_fields=MAX_QUERY_FIELDS,
                )
            )
            path = unquote(plain_path(target.path), errors="strict")
        except ValueError as error:
            raise InvalidRequest(f"the address is not right: {error}") from error
        parsed = HttpRequest(method, path, query, schemes=self._handed_over.listener.http_schemes)
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        parsed.accept = headers.get("accept", "")
        parsed.address = with_port(headers.get("host", ""), https=self._by_https(headers))
        if path not in _ANY_HOST:
            self._check_host(headers)
        if path.startswith("/api/"):
            self._check_site(headers)
        if method == "POST":
            if "x-kept" not in headers:
                raise InvalidRequest("a POST needs the header X-Kept, as in: curl -H 'X-Kept: 1' …")
            self._check_browser(headers)
            parsed.body = self._json()
        return parsed

    def _by_https(self, headers: Mapping[str, str]) -> bool:
        """Whether the client speaks HTTPS: a browser says so also through a proxy that ends it."""
        origin = headers.get("origin")
        if origin is None:
            return self._transport.get_extra_info("ssl_object") is not None
        return origin.startswith("https://")

    def _check_site(self, headers: Mapping[str, str]) -> None:
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise InvalidRequest("requests of other sites' pages are refused")

    def _check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not host_is_known(self._config, host):
            raise InvalidRequest(
                f"the Host {host} is not this node's; kept.http.hosts lists further ones"
            )

    def _check_browser(self, headers: Mapping[str, str]) -> None:
        """A page may change something only if it is this node's own, and the setting allows it."""
        origin = headers.get("origin")
        if origin is None and "sec-fetch-site" not in headers:
            return
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            raise InvalidRequest(f"requests of {origin}'s pages are refused")
        if not self._config.console_actions:
            raise InvalidRequest(
                "the console only reads: kept.console.actions=true lets it change things"
            )

    def _json(self) -> Mapping[str, Any]:
        if not self._body:
            return {}
        try:
            # Half a surrogate pair is no text here, other than to the standard library.
            value = msgspec.json.decode(self._body)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequest("the body is not a JSON object")
        return value

    # A response.

    async def _respond(self, request: h11.Request, response: HttpResponse) -> None:
        head_only = request.method == b"HEAD"
        if response.chunks is None:
            if response.text is None:
                body = dumps(response.value) + b"\n"
            else:
                body = response.text.encode()
            self._send(self._head(response, len(body)))
            if not head_only:
                self._send(h11.Data(data=body))
        else:
            self._send(self._head(response, None))
            if response.endless and not head_only:
                self._endless = True
                self._transport.resume_reading()
            async for chunk in response.chunks:
                if head_only or self._transport.is_closing():
                    break
                self._send(h11.Data(data=chunk))
                await self._drained()
            self._endless = False  # a session's end has ended it: the next request may come
        self._send(h11.EndOfMessage())
        await self._drained()

    def _head(self, response: HttpResponse, length: int | None, last: bool = False) -> h11.Response:
        headers = [
            ("Server", f"kept/{kept.__version__}"),
            ("Content-Type", response.content_type or (JSON if response.text is None else TEXT)),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ]
        if response.policy:
            headers.append(("Content-Security-Policy", response.policy))
            headers.append(("Referrer-Policy", "no-referrer"))
            headers.append(("Cross-Origin-Opener-Policy", "same-origin"))
            headers.append(("X-Frame-Options", "DENY"))
        if response.status == HTTPStatus.UNAUTHORIZED:
            headers += [
                ("WWW-Authenticate", _CHALLENGES[scheme])
                for scheme in self._handed_over.listener.http_schemes
            ]
        if response.allow:
            headers.append(("Allow", response.allow))
        if response.retry_after_s is not None:
            headers.append(("Retry-After", str(response.retry_after_s)))
        if last or self._handed_over.is_probe:
            headers.append(("Connection", "close"))
        if length is not None:
            headers.append(("Content-Length", str(length)))
        reason = HTTPStatus(response.status).phrase
        return h11.Response(status_code=response.status, headers=headers, reason=reason)

    def _send(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if data and not self._transport.is_closing():
            self._transport.write(data)

    async def _drained(self) -> None:
        """Wait until the peer has taken most of the answer; give up when it does not."""
        if not self._writable.is_set():
            self._watch()
            if self._has_turn:
                self._turns.stalled(self._transport.abort)
            try:
                await self._writable.wait()
            finally:
                self._turns.resumed(self._transport.abort)
            self._unwatch()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is not a request, and close."""
        self._unwatch()
        if self._task is None and self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = failure(status, message)
            body = json.dumps(response.value).encode() + b"\n"
            self._send(self._head(response, len(body), last=True))
            if self._request is None or self._request.method != b"HEAD":
                self._send(h11.Data(data=body))
            self._send(h11.EndOfMessage())
        self._transport.close()

    # Time.

    def _watch(self) -> None:
        self._unwatch()
        self._timer = self._runtime.loop.call_later(self._idle_s, self._timed_out)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        if self._task is not None:
            self._transport.abort()
        elif self._request_begun:
            self._refuse(408, "the request did not come in time")
        else:
            self._transport.close()

    @property
    def _request_begun(self) -> bool:
        return bool(self._h11.trailing_data[0]) or self._h11.their_state is h11.SEND_BODY
