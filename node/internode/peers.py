"""A node's peers: messages out and in, calls, heartbeats, probes, and who is gone.

:class:`Peers` belongs to one node and lives on its loop. It starts nothing by itself: a channel to
a peer is made by the first message or call to it. A peer is *down* when a connection to or from it
broke and a probe of its node port was refused: nobody listens, so the process is gone. The address
of a container goes with its process, so that it counts as much when every connection broke and
there is no such address any more. Silence is never taken for that. Own voters' messages stay in
this process (nothing is sent to oneself).

It uses its loop's connections and timers only, so a simulated loop drives it, too. A lone node has
it as well, never starts it, and answers its own calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from kept.cluster.controller.heartbeats import HeartbeatReply, HeartbeatRequest
from kept.node.internode import hello as greeting
from kept.node.internode.identity import Hello, node_id_taken, refusal, unnamed_cluster
from kept.node.internode.peer_channel import Channel
from kept.node.internode.protobuf_conversion import METHODS, codecs
from kept.node.internode.server import InternodeServer
from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import InvariantViolation, NetworkException, UnsupportedVersion

if TYPE_CHECKING:
    import ssl

    from kept.cluster.raft.messages import Message
    from kept.node.config.listeners import ConfiguredVoter

Address = tuple[str, int]
Handler = Callable[[Any], Awaitable[Any]]

PROBE_S: Final = 1.0
"""A probe that has no answer within this is a timeout: the peer may be slow, or cut off."""
CALL_S: Final = 2.0
MAX_NODES: Final = 4096
"""Nodes that are remembered: of those that came, and went without being known, some are forgotten
beyond that."""
TIMEOUT: Final = "timeout"


def _nothing(_: Any) -> None:
    pass


def _without_tls() -> None:
    pass


def _anybody(_: Any) -> bool:
    return True


class Peers:
    """All other nodes, as seen from this one.

    ``addresses`` says where a node's listener for nodes is, or None; it is asked at each connect.
    A node that came says so itself, and that counts: one that nobody has registered yet, or that
    moved, is reached by no other way. ``cluster_id``, ``voters``, ``has_log``,
    ``directory_id`` and ``own_address`` are what Hello tells of this node; whoever learns them sets
    them.

    ``on_message`` gets what peers send; ``on_peer_down`` the id of a node whose process is gone;
    ``on_control_lost`` the id of a broker that sends no more heartbeats here, because the
    connection that it sent them on broke, or for another controller. All are called on the loop.
    """

    def __init__(
        self,
        node_id: int,
        cluster_id: str,
        incarnation: UUID,
        loop: asyncio.AbstractEventLoop,
        addresses: Callable[[int], tuple[Address, ...]],
        *,
        tls: Callable[[], ssl.SSLContext | None] = _without_tls,
    ) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.loop = loop
        self.own_address: Address = ("", 0)
        self.tls = tls
        """The TLS of connections to others, as it is now."""
        self._addresses = addresses
        self._announced: dict[int, Address] = {}
        """Where nodes said that they are, when they came."""
        self._announced_voters: dict[int, Address] = {}
        """Where nodes with a metadata log said that its voters are: a list of settings need not
        name the voter that leads."""
        self.voters: tuple[ConfiguredVoter, ...] = ()
        self.has_log = False
        self.directory_id: UUID | None = None
        self.may_lead: Callable[[Message], bool] = _anybody
        """Whether a message's sender may lead, as the metadata log here has it."""
        self.on_message: Callable[[Message], None] = _nothing
        self.on_peer_down: Callable[[int], None] = _nothing
        self.on_control_lost: Callable[[int], None] = _nothing
        self.refusals: dict[int, str] = {}
        """Peers that refuse this node, or that it refuses, and why; until they do no more."""
        self._handlers: dict[str, Handler] = {}
        self._channels: dict[int, Channel] = {}
        self._server = InternodeServer(self)
        self._controller: int | None = None
        """Where this node sends its heartbeats."""
        self._heartbeats: set[asyncio.Task[Any]] = set()
        self._connections: dict[int, dict[UUID, int]] = {}
        """Open connections to and from each node, by the incarnation at the other end."""
        self._seen: set[int] = set()
        """Nodes that were connected, and were not found dead since."""
        self._tasks = TaskOwner(loop)
        self._running = False

    # Life.

    def start(self) -> None:
        """Answer peers from now on. Raises InvariantViolation for messages that cannot travel."""
        codecs()
        self._running = True

    async def stop(self) -> None:
        """Close every connection; messages and calls in flight are lost."""
        if not self._running:
            return
        self.hold_control(None)
        self._running = False
        await self._tasks.close()
        await asyncio.gather(*(channel.stop() for channel in self._channels.values()))
        self._server.stop()

    def accept(
        self, transport: Any, first_bytes: bytes, closed: Callable[[], None] | None = None
    ) -> None:
        """A connection to the node listener of which ``first_bytes`` were read, ``KEPT`` first;
        ``closed`` is called at its end.
        """
        if self._running:
            self._server.accept(transport, first_bytes, closed)
        else:
            transport.abort()

    def respond_to_hello(self, other: Hello) -> Hello:
        """The Hello that answers another one; it says why the other is refused, if it is."""
        why = refusal(self.hello(), other)
        if why:
            self.record_refusal(other.node_id, why)
        return self.hello(why=why)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with this node's peers."""
        self._tasks.spawn(work)

    def hello(self, *, wanted: int | None = None, why: str = "", cluster_id: str = "") -> Hello:
        """How this node presents itself; ``why`` it refuses the other; ``cluster_id`` as the other
        told it, for a node that knows none itself.
        """
        return Hello(
            self.cluster_id or cluster_id,
            self.node_id,
            self.incarnation,
            self.voters,
            self.has_log,
            self.directory_id,
            wanted,
            why,
            host=self.own_address[0],
            port=self.own_address[1],
        )

    def addresses(self, node_id: int) -> tuple[Address, ...]:
        """Where a node may be, the likeliest first: as it said itself when it came last, then as
        this node knows, then as others say. Each once.
        """
        known = self._addresses(node_id)
        places = (self._announced.get(node_id), *known, self._announced_voters.get(node_id))
        return tuple(dict.fromkeys(place for place in places if place is not None))

    # What the node does with its peers.

    def send(self, message: Message) -> None:
        """Send a message to ``message.to``. It may be lost, never repeated or reordered."""
        if self._running:
            self.channel(message.to).send(message)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer a method of a service: a coroutine function of the request that returns the reply
        or raises a KeptError.
        """
        if method not in METHODS:
            raise InvariantViolation(f"there is no method {method}")
        self._handlers[method] = handler

    async def call(self, node_id: int, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
        """The reply of a node, or of this one. Raises what its handler raises, RequestTimedOut,
        NetworkException (nothing is known of what became of it), PolicyViolation (one of the two
        refuses the other, and why), UnsupportedVersion, MessageTooLarge.
        """
        if node_id == self.node_id:
            return await self.handle_call(method, request)
        if not self._running:
            raise NetworkException(f"node {node_id}: this node stops")
        return await self.channel(node_id).call(method, request, timeout_s)

    def hold_control(self, node_id: int | None) -> None:
        """Send heartbeats to this node, the active controller, and stay connected with it; None:
        none is known.
        """
        before, self._controller = self._controller, node_id
        if before == node_id:
            return
        for heartbeat in self._heartbeats:
            heartbeat.cancel()
        if before is not None and before != self.node_id:
            self.channel(before).release()
        if node_id is not None and node_id != self.node_id and self._running:
            self.channel(node_id).hold()

    async def heartbeat(
        self, request: HeartbeatRequest, timeout_s: float = CALL_S
    ) -> HeartbeatReply:
        """A heartbeat to the controller that is held. Raises as :meth:`call`, and NetworkException
        as soon as another one is held.
        """
        controller = self._controller
        if controller is None:
            raise NetworkException("Heartbeat: no controller is known")
        call = self.loop.create_task(self.call(controller, "Heartbeat", request, timeout_s))
        self._heartbeats.add(call)
        try:
            await asyncio.wait([call])
        finally:
            self._heartbeats.discard(call)
            call.cancel()
        if call.cancelled():
            raise NetworkException("another node is held as controller now")
        reply: HeartbeatReply = call.result()
        return reply

    async def probe(
        self, node_id: int, timeout_s: float = PROBE_S
    ) -> UUID | Literal["timeout"] | None:
        """The incarnation of the process that answers at a node's address.

        None: the process that was there is gone (:meth:`shows_death`). ``"timeout"``:
        nobody knows (no answer in time, no way there, no address, or another node is there).
        Where it is not at the likeliest address, it may be at another one: whoever said last that
        it is this node need not have been.
        """
        results: list[UUID | Literal["timeout"] | None] = []
        for address in self.addresses(node_id):
            try:
                hello = await self.identify(*address, timeout_s)
            except NetworkException as error:
                results.append(None if self.shows_death(node_id, error) else TIMEOUT)
            else:
                if hello.node_id == node_id:
                    return hello.incarnation
                results.append(TIMEOUT)
        return results[0] if results else TIMEOUT

    def shows_death(self, node_id: int, error: Exception) -> bool:
        """Whether a failed attempt to reach a node shows that its process is gone: refused, or no
        such address any more after its last connection broke.
        """
        if isinstance(error, greeting.AddressGone):
            return self._connections.get(node_id) == {}
        return isinstance(error, greeting.ConnectionRefused)

    async def identify(self, host: str, port: int, timeout_s: float = PROBE_S) -> Hello:
        """The Hello of whoever serves an address: its cluster, voters, and whether it has a log.

        Raises ConnectionRefused, NetworkException.
        """
        return await greeting.identify(host, port, self.hello(), timeout_s, self.tls())

    def is_connected(self, node_id: int) -> bool:
        """Whether a connection to that node is open."""
        channel = self._channels.get(node_id)
        return channel is not None and channel.connected

    # What channels and the server report.

    def channel(self, node_id: int) -> Channel:
        """The way to a peer."""
        channel = self._channels.get(node_id)
        if channel is None:
            channel = self._channels[node_id] = Channel(self, node_id)
        return channel

    def is_held(self, node_id: int) -> bool:
        """Whether it is the active controller: a broken connection is made again before anybody
        needs it.
        """
        return self._controller == node_id

    def received(self, message: Message) -> None:
        """A message came. Were its sender found dead before (it was on its way), then whoever is
        told of it believes that it lives: the next refused connection says that it does not.
        """
        self._seen.add(message.sender)
        try:
            self.on_message(message)
        # The connection of a peer must not break over a bug of ours.
        except Exception as error:  # noqa: BLE001
            log.exception("message failed", error, kind=type(message).__name__)

    async def handle_call(self, method: str, request: Any) -> Any:
        """What this node answers. Raises what the handler raises, UnsupportedVersion."""
        handler = self._handlers.get(method)
        if handler is None:
            raise UnsupportedVersion(f"node {self.node_id} does not answer {method}")
        return await handler(request)

    async def admit(self, other: Hello) -> str:
        """Why a connection from a node is refused; empty when it is welcome."""
        own = self.hello()
        why = refusal(own, other) or unnamed_cluster(own, other) or self._crowded(other)
        return why or await self._rival(other)

    def _crowded(self, other: Hello) -> str:
        """Whether so many nodes came already that another one is not remembered."""
        open_to = self._connections
        if other.node_id in open_to or len(open_to) < MAX_NODES:
            return ""
        for node_id in [n for n, connections in open_to.items() if not connections]:
            if node_id not in self._channels and not self._addresses(node_id):
                for known in (open_to, self._announced, self._announced_voters, self.refusals):
                    known.pop(node_id, None)
        return "" if len(open_to) < MAX_NODES else f"{MAX_NODES} nodes are connected already"

    async def _rival(self, other: Hello) -> str:
        """Whether another live process has this node id."""
        incarnations = self._connections.get(other.node_id, {})
        rivals = [known for known in incarnations if known != other.incarnation]
        if not rivals:
            return ""
        if await self.probe(other.node_id) not in rivals:
            return ""
        return node_id_taken(other.node_id)

    def record_refusal(self, node_id: int, why: str) -> None:
        """A peer and this node refuse each other; logged once."""
        if self.refusals.get(node_id) != why:
            if len(self.refusals) >= MAX_NODES:
                self.refusals.clear()
            self.refusals[node_id] = why
            log.warning("peer refused", peer=node_id, reason=why)

    def connection_opened(self, hello: Hello) -> None:
        """A connection to or from a node is open."""
        counts = self._connections.setdefault(hello.node_id, {})
        counts[hello.incarnation] = counts.get(hello.incarnation, 0) + 1
        self._seen.add(hello.node_id)
        if hello.host:
            self._announced[hello.node_id] = hello.host, hello.port
        if hello.has_log:
            places = {v.node_id: (v.host, v.port) for v in hello.voters if v.host}
            self._announced_voters.update(places)
        self.refusals.pop(hello.node_id, None)
        channel = self._channels.get(hello.node_id)
        if channel is not None and not channel.connected:
            channel.retry_now()  # it may have been tried before it was there

    def connection_lost(self, hello: Hello) -> None:
        """It is open no more: the process may be gone."""
        counts = self._connections[hello.node_id]
        counts[hello.incarnation] -= 1
        if not counts[hello.incarnation]:
            del counts[hello.incarnation]
        if self._running and hello.node_id in self._seen:
            self.spawn(self._examine(hello.node_id, hello.incarnation))

    async def _examine(self, node_id: int, incarnation: UUID) -> None:
        verdict = await self.probe(node_id)
        if verdict not in (TIMEOUT, incarnation):
            self.process_gone(node_id)

    def process_gone(self, node_id: int) -> None:
        """Nobody listens at a node's address any more."""
        self.refusals.pop(node_id, None)
        if self._running and node_id in self._seen:
            self._seen.discard(node_id)
            try:
                self.on_peer_down(node_id)
            # The channel that noticed must not end over a bug of ours.
            except Exception as error:  # noqa: BLE001
                log.exception("peer down failed", error, peer=node_id)

    def control_lost(self, broker_id: int) -> None:
        """A broker sends no more heartbeats here, or its process is gone."""
        if self._running:
            self.on_control_lost(broker_id)
