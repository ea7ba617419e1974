"""What a node serves to its peers, on connections that they made.

A connection begins with Hellos (:mod:`.hello`), which a probe is content with. Whoever wants more
opens it within :data:`OPEN_S`, with a Hello that names the cluster, and is admitted or refused with
what would be right: strangers are refused before anything of theirs is believed. Then come
messages, calls, a broker's heartbeats, or on a connection of its own a large snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from kept.node.internode import protobuf_conversion
from kept.node.internode.connection import Connection
from kept.node.internode.frames import MAX_BODY_BYTES, Frame, FrameKind
from kept.node.internode.hello import PREFACE, hello_from, packed, unpacked
from kept.node.internode.identity import Hello, refusal
from kept.node.internode.protobuf_conversion import METHOD_NAMES, codecs
from kept.node.internode.rpc_errors import failure_of
from kept.node.internode.snapshot_chunks import Assembly
from kept.node.runtime.logging import log
from kept.storage.errors import (
    CorruptMessage,
    MessageTooLarge,
    PolicyViolation,
    UnsupportedVersion,
    is_bug,
)

if TYPE_CHECKING:
    from kept.cluster.raft.messages import InstallSnapshot
    from kept.node.internode.peers import Peers

HELLO_S: Final = 5.0
"""A connection that says KEPT and no Hello within this is closed."""
OPEN_S: Final = 5.0
"""One that is not opened within this after its Hello is closed: a probe closes it itself."""
MAX_CALLS: Final = 1_000
"""Calls of one connection at a time; further ones are refused."""

_SPEAKERS: Final = ("broker_id", "replica_id", "leader_id")
"""The fields in which a call says who makes it."""
_ON_MAIN: Final = frozenset(
    {FrameKind.REQUEST, FrameKind.CANCEL, FrameKind.MESSAGE, FrameKind.HOLD, FrameKind.RELEASE}
)


class InternodeServer:
    """The connections to one node."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._transports: set[Any] = set()
        self._holders: dict[int, PeerSession] = {}
        """Where each broker sends its heartbeats."""

    def __len__(self) -> int:
        return len(self._transports)

    def accept(
        self, transport: Any, first_bytes: bytes, closed: Callable[[], None] | None = None
    ) -> None:
        """Serve a connection of which ``first_bytes`` were read, ``KEPT`` first; ``closed`` is
        called at its end.
        """
        self._transports.add(transport)

        def ended() -> None:
            self._transports.discard(transport)
            if closed is not None:
                closed()

        greeting = _Greeting(self._peers, self, transport, ended)
        transport.set_protocol(greeting)
        transport.resume_reading()
        greeting.data_received(first_bytes[len(PREFACE) :])

    def stop(self) -> None:
        """Close every connection."""
        for transport in tuple(self._transports):
            transport.abort()

    def hold(self, session: PeerSession, broker_id: int) -> None:
        """A broker sends its heartbeats on a connection."""
        self._holders[broker_id] = session

    def release(self, session: PeerSession, broker_id: int) -> None:
        """It does so no more, if it did."""
        if self._holders.get(broker_id) is session:
            del self._holders[broker_id]
            self._peers.control_lost(broker_id)


class _Greeting(asyncio.Protocol):
    """Waits for a Hello, answers it, and leaves the connection to a :class:`PeerSession`."""

    def __init__(
        self, peers: Peers, server: InternodeServer, transport: Any, ended: Callable[[], None]
    ) -> None:
        self._peers = peers
        self._server = server
        self._transport = transport
        self._ended = ended
        self._data = bytearray()
        self._timer = peers.loop.call_later(HELLO_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes after ``KEPT``."""
        self._data += data
        try:
            frames = unpacked(self._data)
        except CorruptMessage as error:
            peer = _address(self._transport)
            log.warning("connection between nodes closed", peer=peer, reason=str(error))
            self._transport.abort()
            return
        if frames is None:
            return
        hello, end = frames
        reply = self._peers.respond_to_hello(hello)
        self._transport.write(packed(reply))
        if reply.refusal:
            self._transport.close()
            return
        self._timer.cancel()
        session = PeerSession(self._peers, self._server, self._transport, self._ended)
        session.start(bytes(self._data[end:]))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It ended here."""
        self._timer.cancel()
        self._ended()


class PeerSession:
    """A connection that a peer made, from its Hello on. A handler of :class:`.Connection`."""

    def __init__(
        self, peers: Peers, server: InternodeServer, transport: Any, ended: Callable[[], None]
    ) -> None:
        self._peers = peers
        self._server = server
        self._ended = ended
        self._hello: Hello | None = None
        """Of the peer, once it is admitted."""
        self._opening = False
        self._snapshot: _IncomingSnapshot | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._connection = Connection(peers.loop, transport, self, _address(transport), serves=True)
        self._timer = peers.loop.call_later(OPEN_S, transport.abort)

    def start(self, first_bytes: bytes) -> None:
        """Serve what comes, ``first_bytes`` first."""
        self._connection.start(first_bytes)

    def next_message(self) -> None:
        """Messages of this node go by the connection that it makes."""
        return

    def connection_lost(self) -> None:
        """Nobody waits for the answers any more."""
        self._timer.cancel()
        for task in self._calls.values():
            task.cancel()
        if self._hello is not None:
            self._server.release(self, self._hello.node_id)
            self._peers.connection_lost(self._hello)
        self._ended()

    def frame_received(self, frame: Frame) -> None:
        """Act on a frame. Raises CorruptMessage."""
        hello = self._hello
        if hello is None:
            if frame.kind is not FrameKind.OPEN or self._opening:
                raise CorruptMessage(f"a {frame.kind.name} before the connection is open")
            self._opening = True
            self._peers.spawn(self._open(hello_from(frame.body)))
        elif self._snapshot is not None or frame.kind is FrameKind.SNAPSHOT_HEAD:
            self._snapshot_received(hello, frame)
        elif frame.kind not in _ON_MAIN:
            raise CorruptMessage(f"a {frame.kind.name} on an open connection")
        elif why := refusal(self._peers.hello(), hello):
            self._refuse(hello.node_id, why)  # this node learnt meanwhile where it belongs
        elif frame.kind is FrameKind.MESSAGE:
            self._message_received(hello, frame.body)
        elif frame.kind is FrameKind.REQUEST:
            self._request_received(hello, frame)
        elif frame.kind is FrameKind.CANCEL:
            if (task := self._calls.get(frame.correlation_id)) is not None:
                task.cancel()
        elif frame.kind is FrameKind.HOLD:
            self._server.hold(self, hello.node_id)
        else:
            self._server.release(self, hello.node_id)

    # The opening.

    async def _open(self, hello: Hello) -> None:
        why = await self._peers.admit(hello)
        connection = self._connection
        if connection.closed:
            return
        self._timer.cancel()
        if why:
            self._refuse(hello.node_id, why)
            return
        self._hello = hello
        connection.admitted()
        connection.peer = f"node {hello.node_id} at {connection.peer}"
        self._peers.connection_opened(hello)
        connection.send(FrameKind.OPEN, body=codecs().hello.to_bytes(self._peers.hello()))

    def _refuse(self, node_id: int, why: str) -> None:
        self._peers.record_refusal(node_id, why)
        refused = self._peers.hello(why=why)
        self._connection.send(FrameKind.OPEN, body=codecs().hello.to_bytes(refused))
        self._connection.close()

    # What comes on an open connection.

    def _message_received(self, hello: Hello, body: bytes) -> None:
        message = protobuf_conversion.decode_raft(body)
        own_id = self._peers.node_id
        if message.sender != hello.node_id or message.to != own_id:
            raise CorruptMessage(
                f"a message from {message.sender} to {message.to} on the connection from "
                f"{hello.node_id} to {own_id}"
            )
        if hello.directory_id not in (None, message.directory_id):
            raise CorruptMessage(f"a message from another disk than that of {hello.node_id}")
        self._peers.received(message)

    def _snapshot_received(self, hello: Hello, frame: Frame) -> None:
        try:
            if self._snapshot is None:
                self._snapshot = _IncomingSnapshot(self._peers, hello, frame.body)
                return
            if frame.kind is not FrameKind.SNAPSHOT_CHUNK:
                raise CorruptMessage(f"a {frame.kind.name} among the pieces of a snapshot")
            message = self._snapshot.add(frame.body)
        except CorruptMessage as error:
            log.warning("snapshot refused", peer=self._connection.peer, error=str(error))
            self._send_error(0, error)
            self._connection.close()
            return
        if message is not None:
            self._snapshot = None
            self._connection.send(FrameKind.RESPONSE)
            self._peers.received(message)

    def _request_received(self, hello: Hello, frame: Frame) -> None:
        call_id = frame.correlation_id
        if call_id in self._calls:
            raise CorruptMessage(f"call {call_id} is under way already")
        if len(self._calls) >= MAX_CALLS:
            error = PolicyViolation(f"{MAX_CALLS} calls of this node are under way already")
            self._send_error(call_id, error)
            return
        task = self._peers.loop.create_task(self._answer(hello, frame))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._calls.pop(call_id, None))

    async def _answer(self, hello: Hello, frame: Frame) -> None:
        method = METHOD_NAMES.get(frame.method)
        try:
            if method is None:
                raise UnsupportedVersion(
                    f"node {self._peers.node_id} knows no method {frame.method}: "
                    "run one version of kept on all nodes"
                )
            request_codec, reply_codec = codecs().calls[method]
            request = request_codec.from_bytes(frame.body)
            check_speaker(hello, request)
            body = reply_codec.to_bytes(await self._peers.handle_call(method, request))
            if len(body) > MAX_BODY_BYTES:
                raise MessageTooLarge(f"the answer to {method} has {len(body)} bytes")
        except Exception as error:  # noqa: BLE001 - the peer is told, our own bugs are logged
            if is_bug(error):
                log.exception("call failed", error, method=method)
            self._send_error(frame.correlation_id, error)
        else:
            self._connection.send(FrameKind.RESPONSE, frame.correlation_id, body=body)

    def _send_error(self, call_id: int, error: Exception) -> None:
        body = codecs().failure.to_bytes(failure_of(error))
        self._connection.send(FrameKind.ERROR, call_id, body=body)


class _IncomingSnapshot:
    """A snapshot that comes in pieces, on a connection of its own."""

    def __init__(self, peers: Peers, hello: Hello, head: bytes) -> None:
        self._peers = peers
        message, size_bytes = protobuf_conversion.decode_snapshot_head(head)
        if message.sender != hello.node_id or message.to != peers.node_id:
            raise CorruptMessage(f"a snapshot from {message.sender} to {message.to}")
        if not peers.may_lead(message):
            raise CorruptMessage(f"a snapshot from node {message.sender}, which is no voter")
        self._message = message
        self._assembly = Assembly(size_bytes)

    def add(self, body: bytes) -> InstallSnapshot | None:
        """The next piece; the whole message with the last one. Raises CorruptMessage."""
        self._assembly.add(protobuf_conversion.decode_snapshot_chunk(body))
        if not self._assembly.whole:
            return None
        return replace(self._message, image_bytes=self._assembly.image())


def check_speaker(hello: Hello, request: Any) -> None:
    """A node speaks for itself alone. Raises PolicyViolation for a call in another one's name."""
    for field in _SPEAKERS:
        named = getattr(request, field, hello.node_id)
        if named != hello.node_id:
            raise PolicyViolation(
                f"{type(request).__name__} in the name of node {named}, from node {hello.node_id}"
            )


def _address(transport: Any) -> str:
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) > 1 else "?"
