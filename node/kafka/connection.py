"""One client's connection: frames in, responses out, in request order.

Bytes are parsed where they arrive: a request's batches are appended straight from the connection's
buffer, one ``writev`` per partition and one write of all responses per readiness event. Responses
leave in request order whatever finishes first (semantics.md, rule 41): each request that answers
takes its place in ``_replies`` when it is read. Records of a Fetch go out with ``sendfile`` (rule
44).

Limits: a frame may be ``socket.request.max.bytes``; beyond
``kept.connection.inflight.max.requests`` unanswered requests, or
``kept.connection.inflight.max.bytes`` of responses that the client does not take, no further
request is served, those that were read already included. What its buffer holds beyond
:data:`BASE_BUFFER_BYTES` and unsent responses draw on the node's :class:`NodeMemory`, by the
account of the peer's network; requests that wait draw on one of their own, since those that they
wait for must come in meanwhile. While that is used up, no further request of a connection is served
behind one that waits, and none of more than :data:`SMALL_FRAME_BYTES`, but for those of nodes.
Anything that is not a request closes the connection with one line.

Long because reading, back-pressure and answering share one buffer and one state.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.wire import skip_tags
from kept.cluster.security.addresses import network_of
from kept.node.coordinator.transactions.connection_order import ConnectionOrdinals
from kept.node.kafka import api
from kept.node.kafka.codec import parse_run
from kept.node.kafka.codec.produce import frame_end
from kept.node.kafka.codec.wire import with_throttle
from kept.node.kafka.marker_connections import MarkerConnections
from kept.node.kafka.response_memory import ResponseMemory
from kept.node.kafka.response_slot import (
    WAITING_ENTRY_BYTES,
    WAITING_REQUEST_BYTES,
    ResponseRun,
    ResponseSlot,
    Segment,
)
from kept.node.kafka.response_writer import ResponseWriter, TransportWriter
from kept.node.runtime import error_codes
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import SlicedTask
from kept.storage.disk import FileSlice
from kept.storage.errors import (
    CorruptMessage,
    InvalidRequest,
    InvariantViolation,
    KeptError,
    UnsupportedVersion,
)

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.kafka.codec.produce import PlainRequest
    from kept.node.kafka.listener import HandedOver, Listener
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.serving_lease import ServingLease
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.memory_budget import NodeMemory
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.client_quotas import ClientQuotas, ClientView
    from kept.node.security.connection_rates import ConnectionRates
    from kept.node.security.logins import Logins
    from kept.node.security.session import Authorizer, Session
    from kept.replication.partition import Partition
    from kept.steps import Steps

FIRST_BUFFER_BYTES: Final = 256
"""What a connection holds that has not spoken yet: there may be thousands."""
BASE_BUFFER_BYTES: Final = 16 * 1024
"""What an idle connection holds."""
READ_BUFFER_BYTES: Final = 256 * 1024
"""What a busy one reads into at once: enough for one call of ``recv`` to drain the socket."""
KEPT_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""What it keeps between requests, so that one of a batch of 1 MiB finds room; and the first room
for a larger frame."""
PRIVATE_MEMORY: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
GROWTH_BYTES: Final = 6 * 1024 * 1024
"""Room for a frame beyond twice what has come of it, at most."""
EXACT_FRAME_BYTES: Final = 64 * 1024
"""From this size on a read stops at the end of the frame, so that the next one is not moved."""
SPARE_BYTES: Final = 1024
"""With less room than this the rest of a frame goes elsewhere: to the front, or to more room."""
SMALL_FRAME_BYTES: Final = 512
"""A request of no more bytes cannot hold much while it waits."""
MIN_FRAME_BYTES: Final = 10
"""API key, version, correlation id, length of the client id: nothing shorter is a request."""
TURN_S: Final = 0.005
"""How long one connection is served before others get their turn."""
RUN_BYTES: Final = 64 * 1024
"""Produced bytes between two looks at the clock: some 50 us, compressed some 500."""
RUN_FRAMES: Final = 16
"""Produced frames between two looks at the clock."""

_SIZE: Final = struct.Struct(">i").unpack_from
_KEY: Final = struct.Struct(">h").unpack_from
_HEADER: Final = struct.Struct(">hhih").unpack_from


class RequestServer(Protocol):
    """Who serves the APIs of one hot path, Produce or Fetch."""

    def handle(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        frame: memoryview,
        position: int,
    ) -> None:
        """Serve one request, whose body starts at ``position`` of ``frame``."""


class FetchServer(RequestServer, Protocol):
    """Who serves Fetch."""

    def access_changed(self, connections: Sequence[Connection]) -> Steps[None]:
        """Rules of access have changed: of the sessions of these connections, too."""


class ProduceServer(RequestServer, Protocol):
    """Who serves Produce."""

    def handle_run(
        self, connection: Connection, requests: list[PlainRequest], buffer: memoryview, now_ms: int
    ) -> int:
        """Serve requests of one plain batch each, in order; how many were served."""

    def write(self, connection: Connection) -> None:
        """Write what the connection staged, and let its responses go on their way."""


class MessageServer(Protocol):
    """Who serves all other APIs."""

    def handle(
        self, context: api.RequestContext, body: memoryview, request: Any
    ) -> api.HandlerResult:
        """Serve a decoded request, whose encoded form is ``body``."""


@dataclass(slots=True)
class ServedRequest:
    """A request of kio's codec on its way to its response."""

    api: api.Api
    version: int
    correlation_id: int
    started: float
    """When it was read, by the loop's clock."""
    memory: ResponseMemory
    held_bytes: int = 0
    """What it holds while it waits for others."""
    throttle_ms: int = 0
    """What its response says that the client must wait."""
    blocks: bool = False
    """Those behind it wait until it is answered."""


class StagedRequest(Protocol):
    """A request that waits for what it staged to be written."""

    def written(self, failed: dict[Partition, KeptError]) -> None:
        """It is written, but for the ``failed`` partitions."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What the connections of all listeners share."""

    runtime: Runtime
    config: LiveConfig
    counters: Counters
    memory: NodeMemory
    open_files: OpenFiles
    lease: ServingLease
    table: ReplicaTable
    metadata: MetadataLog
    produce: ProduceServer
    fetch: FetchServer
    messages: MessageServer
    authorizer: Authorizer
    quotas: ClientQuotas
    connection_rates: ConnectionRates
    logins: Logins
    ordinals: ConnectionOrdinals = field(default_factory=ConnectionOrdinals)
    marker_connections: MarkerConnections = field(default_factory=MarkerConnections)


class Connection(asyncio.BufferedProtocol):
    """The protocol of one accepted socket, whose ``session`` is known. One ``from_this_node`` is
    the node's own, for whoever ``session`` is.
    """

    _tls: Any = None
    """Decrypts what comes, where it is TLS."""
    _aborted = False
    """We closed it: nothing that came is served any more."""
    _lost = False
    """The peer is gone, or we closed: nothing comes or leaves any more."""

    def __init__(
        self, listener: Listener, session: Session, *, from_this_node: bool = False
    ) -> None:
        self.listener = listener
        self.session = session
        self.from_this_node = from_this_node
        self.context = listener.context
        self.ordinal = next(self.context.ordinals)
        """Of connections to this process the newer one's is larger."""
        self.transport: Any = None
        self.peer = "?"
        self.software = ""
        self.last_active = 0.0
        self.dirty: dict[Partition, None] = {}
        """Partitions with batches of this readiness event, staged and not yet written."""
        self.unwritten: list[StagedRequest] = []
        self.run: ResponseRun | None = None
        """The last place in the order of responses, if it takes further plain requests."""
        self.event_started = 0.0
        """When this readiness event began, by ``perf_counter``."""
        self.parked: dict[api.Cancellable, None] = {}
        """Requests that wait for something to happen, and are given up with the connection."""
        self.turned_away: dict[Partition, tuple[type[KeptError], float]] = {}
        """Partitions that refused a batch of this connection to have it sent again, and until when
        those sent behind it come (``kept.node.kafka.handlers.records.delayed_produce``)."""
        self.positions: dict[tuple[bytes, int], int] = {}
        """Where this consumer was when it last fetched here, by topic and partition."""
        self.client: ClientView | None = None
        """Whose request is being served, where there are quotas of clients."""
        self.throttle_ms = 0
        """What the response to that request says that the client must wait."""
        self._client_since = 0.0
        """When its serving began, by ``perf_counter``."""
        self._muted_until = 0.0
        self._muted: asyncio.TimerHandle | None = None
        """No further request is served until this calls."""
        self._buffer: bytearray | mmap.mmap = bytearray(FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.account = self.context.memory.in_flight
        """What this peer's network may hold of the node's budget."""
        self.waiting_account = self.context.memory.waiting
        """The same of what its waiting requests hold."""
        self._reserved_bytes = 0
        """What the request buffer has drawn on it: its size beyond the base buffer."""
        self._lent = False
        """A thread reads the request buffer."""
        self._fresh = True
        self.over_limit: tuple[str, int] | None = None
        """The setting and the limit that it exceeds: it is served if it is a probe."""
        self._blocked = self._holds_back = False
        self._reading = True
        self._in_event = False
        self._replies: deque[ResponseSlot | ResponseRun] = deque()
        self._owed = 0
        """Requests in ``_replies``, but for those that the open run took after its first."""
        self._sliced: set[SlicedTask[Any]] = set()
        """Requests and responses of many entries that are worked off in slices."""
        self._sender: ResponseWriter | TransportWriter | None = None
        self._made_bytes = self._behind_bytes = 0
        """Of responses of this readiness event that are not with the sender yet, and of those that
        wait for one before them."""
        self._stalled = False
        """Requests in the buffer wait until answers have left, or for this connection's turn."""
        self._turn_scheduled = False
        self._partial_since = 0.0
        """When the first bytes of a request came whose rest is still missing; 0: of none."""
        self._handed_over: HandedOver | None = None
        """Another protocol has the connection; this object may still learn that it is closed."""

    # Life.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted: settle limits and the socket's options."""
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) > 1 else "?"
        sock = transport.get_extra_info("socket")
        if not self.listener.admit(self, -1 if sock is None else sock.fileno()):
            self.transport = None
            transport.abort()  # type: ignore[attr-defined]
            return
        self.last_active = self.context.runtime.loop.time()
        network = network_of(self.host)
        memory = self.context.memory
        self.account = memory.in_flight.account(network)
        self.waiting_account = memory.waiting.account(network)
        shared: dict[str, Any] = {
            "runtime": self.context.runtime,
            "table": self.context.table,
            "budget": self.account,
            "on_progress": self._sent,
            "on_failure": self.abort,
        }
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = transport.get_extra_info("ssl_object")
        if sock is None or self._tls is not None:
            self._sender = TransportWriter(transport=transport, **shared)
        else:
            self._sender = ResponseWriter(fd=sock.fileno(), **shared)

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        if isinstance(self._sender, TransportWriter):
            self._sender.pause()

    def resume_writing(self) -> None:
        """It is not any more."""
        if isinstance(self._sender, TransportWriter):
            self._sender.resume()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer is gone, or we closed. What came whole before is served (acks=0 asks for no
        answer, and its client may close at once), then everything is given back.
        """
        if self.transport is None:
            if self._handed_over is not None:
                self._handed_over.closed()
            return
        self._lost = True
        if self._sender is not None:
            self._sender.close()
        self._regulate()

    def _give_everything_back(self) -> None:
        self.transport = None
        if self._muted is not None:
            self._muted.cancel()
        for work in tuple(self._sliced):
            work.cancel()
        for pending in tuple(self.parked):
            pending.cancel()
        self.parked.clear()
        self.account.forget(self._unblock_soon)
        self.waiting_account.forget(self._unblock_soon)
        self.waiting_account.forget(self._regulate_soon)
        if not self._lent:
            self._drop_buffer()
        self.listener.leave(self)

    def eof_received(self) -> bool:
        """The peer sends no more: close, as Kafka does."""
        if self._sender is not None:
            self._sender.close()
        return False

    @property
    def host(self) -> str:
        """The peer's address without its port."""
        return self.session.host

    @property
    def idle(self) -> bool:
        """Nothing asked, nothing owed."""
        return not self._replies and not self._blocked and not (self._sender and self._sender.queue)

    @property
    def blocked(self) -> bool:
        """No further frame is served for now, or ever: it was aborted."""
        return self._blocked

    @property
    def has_unsent(self) -> bool:
        """Answers wait for the peer to take them, or for one before them."""
        return self._behind_bytes > 0 or (self._sender is not None and bool(self._sender.queue))

    def is_late(self, oldest: float) -> bool:
        """Whether the rest of a request is missing since before ``oldest``, though we read."""
        return self._reading and 0 < self._partial_since < oldest

    def abort(self, why: str = "", **fields: Any) -> None:
        """Close at once, with one line when there is a reason to tell."""
        if why:
            log.warning(why, peer=self.peer, listener=self.listener.name, **fields)
        if self.transport is not None:
            self._blocked = self._aborted = True
            self.transport.abort()
            if self._lost:
                self._regulate_soon()

    # Reading.

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go (asyncio.BufferedProtocol)."""
        have = self._end - self._start
        capacity = len(self._buffer)
        if have >= 4:
            need = _SIZE(self._buffer, self._start)[0] + 4
            if need > capacity - self._start and need <= capacity:
                self._compact()
            if EXACT_FRAME_BYTES < need <= capacity - self._start and need > have:
                return self._view[self._end : self._start + need]
        if capacity - self._end < SPARE_BYTES:
            self._compact()
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` arrived: serve every whole frame."""
        full = self._end + nbytes == len(self._buffer) < READ_BUFFER_BYTES
        self._end += nbytes
        if self._fresh:
            if self._end < 4 or (self.over_limit is not None and not self._is_probe()):
                return
            self._fresh = full = False
            self.listener.silent.discard(self)
            first = bytes(self._view[:4])
            if not self.listener.is_expected(self.transport, first):
                self.abort()
                return
            receive_connection = self.listener.protocols.get(first)
            if receive_connection is not None:
                self._hand_over(receive_connection)
                return
            self._resize(BASE_BUFFER_BYTES)
        self.process()
        if full and len(self._buffer) < READ_BUFFER_BYTES and not self._blocked:
            self._widen()

    def _is_probe(self) -> bool:
        """Of a connection beyond a limit: whether its first bytes are a probe's. If they are not,
        and will not be, it is closed.
        """
        is_probe = self.listener.is_probe(bytes(self._view[: self._end]))
        if is_probe is False:
            self.abort()
        return is_probe is True

    def _hand_over(self, receive_connection: Any) -> None:
        """Another protocol speaks here: it takes the transport and the bytes read so far."""
        transport, self.transport = self.transport, None
        if self._sender is not None:
            self._sender.close()
        self._handed_over = self.listener.hand_over(self, transport)
        receive_connection(self._handed_over, bytes(self._view[: self._end]))

    def process(self) -> None:
        """Serve the whole frames in the buffer, then write what they appended and answered."""
        if self._in_event:
            return
        self._in_event = True
        self._stalled = False
        self.last_active = self.context.runtime.loop.time()
        self.event_started = started = perf_counter()
        if started >= self.context.lease.until:
            self.context.lease.check()
        turn_end = started + TURN_S
        turned = False
        now_ms = 0
        max_frame_bytes = self.listener.max_frame_bytes
        # What a node opens to itself for HTTP and gRPC is metered there (ClientUsage).
        metered = self.context.quotas.active and not (self.session.is_node or self.from_this_node)
        room = 0  # not counted
        try:
            while not self._blocked:
                start = self._start
                have = self._end - start
                if have < 4:
                    break
                room = room or self._room()
                if room <= 0:
                    self._stalled = True
                    break
                (size,) = _SIZE(self._buffer, start)
                if not MIN_FRAME_BYTES <= size <= max_frame_bytes:
                    self.abort("not a Kafka request: frame size out of range", size=size)
                    break
                if have < size + 4:
                    if not self._partial_since:
                        self._partial_since = self.last_active
                    if size + 4 > len(self._buffer) < have + SPARE_BYTES:
                        self._grow(size + 4)
                    break
                if turned and perf_counter() >= turn_end:
                    self._stalled = True
                    break
                expired = self.last_active >= self.session.expires_at
                if expired and _KEY(self._buffer, start + 4)[0] not in api.BEFORE_LOGIN:
                    self.context.counters.expired_sessions += 1
                    self.abort("session expired", principal=self.session.principal)
                    break
                if size > SMALL_FRAME_BYTES and not self._may_wait():
                    break
                turned = True
                self._partial_since = 0.0
                most = room if room < RUN_FRAMES else RUN_FRAMES
                if metered:
                    most = self._charge(start + 4, size)
                plain = parse_run(self._buffer, start, self._end, most, RUN_BYTES, max_frame_bytes)
                if plain:
                    now_ms = now_ms or self.context.runtime.now_ms()
                    served = self.context.produce.handle_run(self, plain, self._view, now_ms)
                    if served:
                        self._start = frame_end(plain[served - 1])
                        room = 0 if self.throttle_ms else room - served
                        continue
                self._start = start + 4 + size
                self._serve(start + 4, self._start)
                room = 0
            if self.unwritten or self.dirty:
                self.context.produce.write(self)
        finally:
            self._in_event = False
            if self.client is not None:
                self._charge_time()
        self._finish_event()

    # Quotas.

    def _charge(self, start: int, size: int) -> int:
        """Count the request at ``start`` against its client's quotas; over one of them, no further
        request is served for as long as its response will say. How many are counted: 1.
        """
        if self.client is not None:
            self._charge_time()
        key, _, _, length = _HEADER(self._buffer, start)
        client_id = bytes(self._view[start + 10 : start + min(10 + max(length, 0), size)])
        now_ms = monotonic_ms()
        client = self.client = self.context.quotas.view(self.session.principal, client_id, now_ms)
        self._client_since = perf_counter()
        delay_ms, kind = 0, "request"
        if client.request is not None:
            delay_ms = client.request.delay_ms(now_ms)
        if key == api.PRODUCE and client.producer is not None:
            of_bytes_ms = client.producer.record(size, now_ms)
            if of_bytes_ms > delay_ms:
                delay_ms, kind = of_bytes_ms, "produce"
        self.throttle_ms = delay_ms
        if delay_ms:
            self.mute(delay_ms, kind)
        return 1

    def _charge_time(self) -> None:
        """A client's request was served: the loop's time since it began is the client's."""
        if self.client is not None and self.client.request is not None:
            spent_s = perf_counter() - self._client_since
            self.client.request.record(100 * spent_s, monotonic_ms())
        self.client, self.throttle_ms = None, 0

    def mute(self, throttle_ms: int, kind: str) -> None:
        """Serve no further request for so long (KIP-219); answers leave. ``kind`` is which quota
        was exceeded.
        """
        self.context.counters.throttled(kind, throttle_ms)
        loop = self.context.runtime.loop
        until = loop.time() + throttle_ms / 1000
        if until <= self._muted_until or self.transport is None or self.from_this_node:
            return
        if self._muted is not None:
            self._muted.cancel()
        self._muted_until = until
        self._muted = loop.call_at(until, self._unmute)
        if not self._in_event:
            self._regulate()

    def _unmute(self) -> None:
        self._muted = None
        self._regulate()

    def _finish_event(self) -> None:
        self._send_ready()
        self._made_bytes = 0
        if self._start == self._end and not self._blocked:
            self._start = self._end = 0
            reserved = self._reserved_bytes
            if reserved and (reserved > KEPT_BUFFER_BYTES or self.account.under_pressure):
                self._give_buffer_back()
        self._regulate()

    def _serve(self, start: int, stop: int) -> None:
        """One frame: ``buffer[start:stop]`` without its length."""
        buffer = self._buffer
        try:
            key, version, correlation_id, client = _HEADER(buffer, start)
            position = start + 10
            client_start = position
            if client > 0:
                position += client
                if position > stop:
                    raise CorruptMessage("the client id ends outside the request")
            served = self.listener.served.get(key)
            if served is None:
                raise UnsupportedVersion(f"API {key} is not served")
            if not served.min_version <= version <= served.max_version:
                if key != api.API_VERSIONS:
                    raise UnsupportedVersion(f"{served.name} v{version} is not served")
            elif version < served.refused_below:
                raise UnsupportedVersion(f"{served.name} v{version} has no reader any more")
            frame = self._view[:stop]
            if version >= served.flexible_from:
                position = skip_tags(frame, position) if buffer[position] else position + 1
            if key == api.PRODUCE:
                self.context.produce.handle(self, version, correlation_id, frame, position)
                return
            if self.dirty:
                # A connection sees what it produced before, answered or not.
                self.context.produce.write(self)
                if self._blocked:
                    return
            if key == api.FETCH:
                self.context.fetch.handle(self, version, correlation_id, frame, position)
            elif key == api.API_VERSIONS:
                body = api.api_versions_response(
                    version, frame[position:], self.context.metadata.image
                )
                self.reply([struct.pack(">ii", len(body) + 4, correlation_id) + body])
            else:
                name = bytes(buffer[client_start:position]) if client >= 0 else None
                text = None if name is None else name[:client].decode("utf-8", "replace")
                self._dispatch(served, version, correlation_id, text, frame, position)
        except (CorruptMessage, UnsupportedVersion, InvalidRequest) as error:
            self.abort("not a request that is served here", error=str(error))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            self.abort("not a Kafka request", error=repr(error))

    def _dispatch(  # noqa: PLR0917
        self,
        served: api.Api,
        version: int,
        correlation_id: int,
        client_id: str | None,
        frame: memoryview,
        position: int,
    ) -> None:
        """An API of kio's codec: decode, call its handler, answer now or later."""
        if (
            served.key is ApiKey.WRITE_TXN_MARKERS
            and self.listener.between_nodes
            and not self.context.marker_connections.admit(client_id, self)
        ):
            self.abort("markers over a connection that its node has replaced")
            return
        now = self.last_active
        responses = None if self.listener.between_nodes else self.context.memory.responses
        setting = ""
        try:
            self.listener.check_decoded(len(frame) - position)
            setting = " (kept.request.max.entries)"
            request = protocol.decode_request(
                served.key, version, frame, position, self.listener.max_entries
            )
        except InvalidRequest as error:
            code, why = error_codes.INVALID_REQUEST, f"{error}{setting}"
            refused = protocol.refused(served.key, version, code, why)
            if refused is None:
                raise InvalidRequest(why) from None
            log.warning("request refused", api=served.name, peer=self.peer, error=why)
            memory = ResponseMemory(responses)
            self._answer(ServedRequest(served, version, correlation_id, now, memory), refused)
            return
        context = api.RequestContext(
            served.key,
            version,
            client_id,
            self.session,
            parked=self.parked,
            connection=self.ordinal,
        )
        try:
            answer = self.context.messages.handle(context, frame[position:], request)
        # The one place that reports our own bugs.
        except Exception as error:  # noqa: BLE001
            self._fail(served, version, error)
            return
        held, size = 0, len(frame) - position
        is_small = size <= SMALL_FRAME_BYTES
        is_made = is_small and isinstance(answer, dict | bytes)
        if not is_made and served.key not in api.GROUP_MEMBERS:
            entries = size // 8
            if not is_small:
                entries = protocol.check_request(served.key, version, frame, position)
            held = WAITING_REQUEST_BYTES + size + WAITING_ENTRY_BYTES * entries
        memory = ResponseMemory(responses, held)
        self._answer(
            ServedRequest(served, version, correlation_id, now, memory, held, self.throttle_ms),
            answer,
        )

    def _answer(
        self, request: ServedRequest, answer: Any, reply: ResponseSlot | None = None
    ) -> None:
        """Send a handler's answer: values, or a body that is encoded already, or what comes to
        either later. ``reply`` is its place, once it has one. None would leave the client
        without a response, and closes the connection: every API here has one.

        While a request of many entries is worked off in slices, those behind it wait (rule 41): it
        has the effect that it would have had at once, and an answer that is made of many things
        shows none that came of them. So do those behind one of transactions.
        """
        slices, memory = self.context.runtime.slices, request.memory
        try:
            answer = self._as_far_as_it_is(answer, memory)
        except Exception as error:  # noqa: BLE001
            self._failed(request, error)
            return
        if answer is None:
            self._failed(request, InvariantViolation(f"{request.api.name}: no response"))
            return
        if isinstance(answer, dict | bytes):
            output = io.BytesIO()
            steps = protocol.response_steps(
                request.api.key, request.version, request.correlation_id, answer, output
            )
            try:
                frame = slices.run(steps, lambda: memory.drawn(output))
            except Exception as error:  # noqa: BLE001
                self._failed(request, error)
                return
            if isinstance(frame, SlicedTask):
                place = reply or self.reserve_response()
                if reply is None:
                    self._hold_back(request)

                def made(finished: bytes) -> None:
                    self._respond(request, finished, place)

                self._when_done(request, frame, made)
            else:
                self._respond(request, frame, reply)
            return
        place = reply or self.reserve_response()
        future: Any = answer
        if not isinstance(answer, CompletableFuture):
            future = asyncio.ensure_future(answer, loop=self.context.runtime.loop)
        held_bytes, is_sliced = request.held_bytes, isinstance(future, SlicedTask)
        blocks = is_sliced or request.api.key in api.IN_TURN
        if blocks and reply is None:
            self._hold_back(request)
        elif held_bytes and not is_sliced:
            waiting = self.waiting_account
            waiting.overdraw(held_bytes)
            future.add_done_callback(lambda _: waiting.release(held_bytes))
        self._when_done(request, future, lambda values: self._answer(request, values, place))
        if not is_sliced:
            memory.give_back()  # it may wait for long, and counts among those that do
        if not blocks:
            self._let_go(request)

    def _as_far_as_it_is(self, answer: Any, memory: ResponseMemory) -> Any:
        """What an answer has come to, once a few steps are done. Raises what its handler raises."""
        while True:
            if isinstance(answer, Generator):
                answer = self.context.runtime.slices.run(answer, memory.drawn)
            elif isinstance(answer, CompletableFuture) and answer.done():
                answer = answer.result()
            else:
                return answer

    def _when_done(self, request: ServedRequest, future: Any, then: Callable[[Any], None]) -> None:
        """Go on with a future's result, unless the client has gone by then."""

        def done(finished: Any) -> None:
            self._sliced.discard(finished)
            if self.transport is None:
                if not finished.cancelled():
                    finished.exception()
                request.memory.give_back()
                return
            if finished.cancelled():  # nothing answers this request any more
                request.memory.give_back()
                self.abort("request cancelled", api=request.api.name)
                return
            error = finished.exception()
            if error is not None:
                self._failed(request, error)
            else:
                then(finished.result())

        if isinstance(future, SlicedTask):
            self._sliced.add(future)
        future.add_done_callback(done)

    def _tell_throttle(self, request: ServedRequest, frame: bytes) -> bytes:
        """A response that says how long its client must wait: as the request was told, or as its
        handler found that it has changed too much, and then it is muted from now on.
        """
        key, throttle_ms = request.api.key, request.throttle_ms
        if not throttle_ms and key not in api.MUTATIONS:
            return frame
        position = protocol.throttle_position(key, request.version)
        if position is None:
            return frame
        (told_ms,) = _SIZE(frame, position)
        if told_ms > 0:
            self.mute(told_ms, "controller_mutation")
        return with_throttle(frame, position, throttle_ms) if throttle_ms > told_ms else frame

    def _respond(self, request: ServedRequest, frame: bytes, reply: ResponseSlot | None) -> None:
        request.memory.give_back()
        frame = self._tell_throttle(request, frame)
        took_s = self.context.runtime.loop.time() - request.started
        self.context.counters.request(request.api.key, took_s)
        if reply is None:
            self.reply([frame])
        else:
            self.complete(reply, [frame])
        self._let_go(request)

    def _hold_back(self, request: ServedRequest) -> None:
        """Those behind a request wait. Nearly every client waits for its response, too: reading
        goes on until something comes.
        """
        request.blocks = self._blocked = self._holds_back = True
        if not self._in_event:
            self._regulate()

    def _let_go(self, request: ServedRequest) -> None:
        """They go on, in a turn of their own: this may be within what others are doing."""
        if not request.blocks:
            return
        request.blocks = self._holds_back = False
        if self.transport is None or self._aborted:
            return
        self._blocked = False
        self._partial_since = 0.0
        if self._start != self._end:
            self._stalled = True
        if not self._in_event:
            self._regulate()

    def _failed(self, request: ServedRequest, error: BaseException) -> None:
        request.memory.give_back()
        self._fail(request.api, request.version, error)

    def _fail(self, served: api.Api, version: int, error: BaseException) -> None:
        """A handler let an error out: a bug of ours, unless it is one of our own kinds."""
        code = error_codes.code_for(
            error, "handler failed", api=served.name, version=version, peer=self.peer
        )
        if code == error_codes.UNKNOWN_SERVER_ERROR:
            self.abort()
        else:
            self.abort("request refused", api=served.name, version=version, error=str(error))

    # The buffer.

    def _compact(self) -> None:
        have = self._end - self._start
        if self._start and have:
            self._view[:have] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, have

    def _resize(self, size: int) -> None:
        """A large buffer is mapped: its pages come as bytes do, and filling them with zeros holds
        the loop for no longer than the copy of what is there.
        """
        have = self._end - self._start
        large = size > KEPT_BUFFER_BYTES
        buffer = mmap.mmap(-1, size, flags=PRIVATE_MEMORY) if large else bytearray(size)
        buffer[:have] = self._view[self._start : self._end]
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._start, self._end = 0, have

    def _grow(self, need: int) -> None:
        """Room for more of a frame of ``need`` bytes, in proportion to what has come of it: who
        says that much follows and sends nothing has reserved nothing.
        """
        have = self._end - self._start
        room = max(KEPT_BUFFER_BYTES, min(4 * have, 2 * have + GROWTH_BYTES))
        size = max(READ_BUFFER_BYTES, min(need, room))
        if self._reserve(size):
            self._resize(size)
        else:
            self._block()
            self.account.wait(self._unblock_soon)

    def _widen(self) -> None:
        """It is busy: one reading may bring more, if there is room."""
        if self._reserve(READ_BUFFER_BYTES):
            self._resize(READ_BUFFER_BYTES)

    def _reserve(self, size: int) -> bool:
        """Draw on the budget for a buffer of ``size`` bytes."""
        more = size - BASE_BUFFER_BYTES - self._reserved_bytes
        if more > 0:
            if not self.account.acquire(more, self if self._reserved_bytes else None):
                return False
            self._reserved_bytes += more
        return True

    def _release_reserved(self) -> None:
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if reserved:
            self.account.release(reserved, self)

    def _drop_buffer(self) -> None:
        """The connection is gone, and its buffer with it: the object itself may stay until garbage
        is collected, which is long after others have drawn what this one gives back.
        """
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._release_reserved()

    def _give_buffer_back(self) -> None:
        self._resize(BASE_BUFFER_BYTES)
        self._release_reserved()

    def shrink(self) -> None:
        """Give a large buffer back; the idle timer calls this."""
        if len(self._buffer) > BASE_BUFFER_BYTES and self._start == self._end and self.idle:
            self._give_buffer_back()

    # Back-pressure.

    def _block(self) -> None:
        """Serve no further frame until :meth:`unblock`."""
        self._blocked = True
        self._regulate()

    def block(self, *, lent: bool = True) -> None:
        """Its later requests wait (rule 41): a batch of this connection is in a thread, which reads
        the buffer, or (not ``lent``) what a request asks for takes slices.
        """
        self._lent = lent
        self._block()

    def unblock(self) -> None:
        """Go on after :meth:`block`."""
        self._lent = False
        if self.transport is None or self._aborted:
            if self.transport is None:
                self._drop_buffer()
            return
        self._blocked = False
        self._partial_since = 0.0
        self.process()

    def _room(self) -> int:
        """How many more requests may be served; none while too much is owed, or it is muted."""
        if self._muted is not None:
            return 0
        sender = self._sender
        listener = self.listener
        behind = self._behind_bytes
        if behind and (behind >= listener.max_unsent_bytes or self.account.exhausted):
            return 0
        if self._replies and not listener.between_nodes and self.waiting_account.exhausted:
            self.waiting_account.available(self._regulate_soon)
            return 0
        if sender.queue:  # type: ignore[union-attr]
            unsent = sender.unsent_bytes  # type: ignore[union-attr]
            if (
                len(sender.queue) >= listener.max_queued  # type: ignore[union-attr]
                or unsent + self._made_bytes >= listener.max_unsent_bytes
                or (unsent > 0 and self.account.exhausted)
            ):
                return 0
        owed = self._owed
        if self.run is not None:
            owed += len(self.run.entries) - 1
        return listener.max_replies - owed

    def _may_wait(self) -> bool:
        """Whether a large request may be served, which may have to wait; if not, it is later."""
        if self.listener.between_nodes or not self.waiting_account.exhausted:
            return True
        if self.waiting_account.available(self._unblock_soon):
            return True
        self._block()
        return False

    def _unblock_soon(self) -> None:
        """Bytes came back, in the middle of what others are doing."""
        self.context.runtime.loop.call_soon(self.unblock)

    def _regulate_soon(self) -> None:
        """The same, where its responses are waited for as well."""
        self.context.runtime.loop.call_soon(self._regulate)

    def _regulate(self) -> None:
        """Read or do not read, by what is owed; go on with requests that waited for answers."""
        if self.transport is None or self._sender is None:
            return
        if self._lost:
            self._drain()
            return
        wanted = not self._blocked and self._room() > 0
        if not wanted and self._holds_back and self._start == self._end:
            return
        if wanted and self._stalled:
            wanted = False
            self._schedule_turn()
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._partial_since = 0.0
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _drain(self) -> None:
        """The peer is gone: serve what came before, in turns as always. Nobody hears the answers,
        so that none is waited for, unless too much memory is held by what waits.
        """
        if self._in_event:
            return
        self._replies.clear()
        self._owed = 0
        if self._behind_bytes:
            self.account.release(self._behind_bytes)
            self._behind_bytes = 0
        if self._aborted or not self._has_more():
            self._give_everything_back()
        elif self._blocked or self._muted is not None:
            return
        elif self.listener.between_nodes or self.waiting_account.available(self._regulate_soon):
            self._schedule_turn()

    def _has_more(self) -> bool:
        """Whether there may be a whole request left, in the buffer or, since nothing is decrypted
        while it is not read, behind it.
        """
        if self._fresh:
            return False
        if self._blocked:
            return self._start != self._end or self._tls is not None
        if self._stalled and self._start != self._end:
            return True
        if self._tls is None:
            return False
        room = self.get_buffer(-1)
        try:
            got: int = self._tls.read(len(room), room) if room else 0
        except (OSError, ValueError):  # that was all
            return False
        self._end += got
        self._stalled = got > 0
        return self._stalled

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.context.runtime.loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._turn_scheduled = False
        if self._stalled and self.transport is not None and not self._blocked:
            self.process()

    # Answering.

    def reply(self, segments: list[Segment]) -> None:
        """Answer the request being served, now."""
        if self._replies or not self._in_event:
            self.complete(self.reserve_response(), segments)
        else:
            self._sender.stage(segments)  # type: ignore[union-attr]
            for segment in segments:
                if type(segment) is not FileSlice:
                    self._made_bytes += len(segment)

    def enqueue_response(self, reply: ResponseSlot | ResponseRun) -> None:
        """As :meth:`reserve_response`, with a place that the caller made."""
        if self.run is not None:
            self.close_run()
        self._replies.append(reply)
        self._owed += 1

    def reserve_response(self) -> ResponseSlot:
        """Keep the place of a response that is made later."""
        reply = ResponseSlot()
        self.enqueue_response(reply)
        return reply

    def open_run(self, run: ResponseRun) -> ResponseRun:
        """Keep a place that takes further plain requests until another place follows."""
        self.enqueue_response(run)
        self.unwritten.append(run)
        self.run = run
        return run

    def close_run(self) -> None:
        """The open run takes no further requests: another place follows, or it is written."""
        run, self.run = self.run, None
        if run is not None:
            run.requests = len(run.entries)
            self._owed += run.requests - 1

    def count_served(self, api_key: int, requests: int, started: float) -> None:
        """Count requests that were read at ``started`` (``perf_counter``) and are answered now."""
        self.context.counters.request(api_key, perf_counter() - started, requests)

    def complete(self, reply: ResponseSlot, segments: list[Segment]) -> None:
        """A response is made; it leaves once all before it have left."""
        reply.segments = segments
        if self._lost:
            return
        if self.transport is not None and self._replies and self._replies[0] is not reply:
            reply.behind_bytes = sum(len(s) for s in segments if type(s) is not FileSlice)
            self._behind_bytes += reply.behind_bytes
            self.account.overdraw(reply.behind_bytes)
        if not self._in_event and self.transport is not None:
            self._send_ready()
            self._regulate()

    def _send_ready(self) -> None:
        replies = self._replies
        sender = self._sender
        if sender is None or self.transport is None:
            return
        were_behind = 0
        while replies and (segments := replies[0].segments) is not None:
            reply = replies.popleft()
            self._owed -= reply.requests
            were_behind += reply.behind_bytes
            sender.stage(segments)
        sender.push()
        if were_behind and self._behind_bytes:
            self._behind_bytes -= were_behind
            self.account.release(were_behind)

    def _sent(self) -> None:
        """The peer took bytes that had to wait."""
        self.last_active = self.context.runtime.loop.time()
        self._regulate()
