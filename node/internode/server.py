"""What a node answers its peers: gRPC on a unix socket that the node listener splices to.

The socket is in a directory of its own that only this user may enter. Streams: the first frame is a
Hello, answered by ours or refused with what would be right. The Raft stream then brings messages,
the Snapshot stream pieces of a large one, the Control stream a broker's heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode import grpc_options, protobuf_conversion
from kept.node.internode.controller_rpc import HeartbeatRequest
from kept.node.internode.hello import HELLO, hello_from, hello_in
from kept.node.internode.identity import Hello, refusal, unnamed_cluster
from kept.node.internode.rpc_errors import failure_of
from kept.node.internode.snapshot_chunks import Assembly, Piece
from kept.node.internode.socket_directory import PrivateServer
from kept.node.proto import peers_pb2
from kept.node.runtime.logging import log
from kept.storage.errors import CorruptMessage, InvariantViolation, KeptError, PolicyViolation

# isort: split
import grpc
import grpc.aio

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers

SOCKET: Final = "grpc"

_SPEAKERS: Final = ("broker_id", "replica_id", "leader_id")
"""The fields in which a call says who makes it."""
_FAILED: Final = grpc.StatusCode.FAILED_PRECONDITION


class StreamDeadlines:
    """Closes connections on which no stream is open for :data:`grpc_options.STREAM_S`.

    Pings, and a call that is begun and never finished, keep a connection from being idle for gRPC.
    Nodes have a stream on each; whoever has none holds no place for long.
    """

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, peer: str, transport: Any) -> None:
        """A connection is joined with gRPC, which knows it as ``peer``."""
        self._connections[peer] = connection = _Connection(transport)
        connection.wait()

    def discard(self, peer: str) -> None:
        """It is closed."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.end_wait()

    @contextlib.contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """A stream is open on it."""
        connection = self._connections.get(peer)
        if connection is None:  # closed meanwhile
            yield
            return
        connection.streams += 1
        connection.end_wait()
        try:
            yield
        finally:
            connection.streams -= 1
            if not connection.streams and self._connections.get(peer) is connection:
                connection.wait()


class _Connection:
    """One of :class:`StreamDeadlines`."""

    __slots__ = ("_timer", "_transport", "streams")

    def __init__(self, transport: Any) -> None:
        self.streams = 0
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """It is closed unless a stream is opened in time."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(grpc_options.STREAM_S, self._transport.abort)

    def end_wait(self) -> None:
        """A stream is open, or it is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server:
    """The gRPC server of one node."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._private = PrivateServer(SOCKET)
        self.deadlines = StreamDeadlines()
        self._controls: dict[int, object] = {}
        """The newest Control stream of each broker."""
        self._judged = lru_cache(maxsize=64)(self._judge)

    @property
    def path(self) -> str:
        """Of the unix socket."""
        return self._private.path

    async def start(self) -> None:
        """Answer. Raises MachineError."""
        server = grpc.aio.server(options=grpc_options.SERVER)
        server.add_generic_rpc_handlers((self._streams(), *self._calls()))
        await self._private.start(server)

    async def stop(self) -> None:
        """Answer no more; streams break."""
        await self._private.stop()

    def _streams(self) -> Any:
        def stream(handler: Any, frame: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(
                handler, frame.FromString, frame.SerializeToString
            )

        return grpc.method_handlers_generic_handler(
            "kept.node.v1.Peers",
            {
                "Raft": stream(self._raft, peers_pb2.RaftFrame),
                "Snapshot": stream(self._snapshot, peers_pb2.SnapshotFrame),
                "Control": stream(self._control, peers_pb2.ControlFrame),
            },
        )

    def _calls(self) -> list[Any]:
        def unary(method: str) -> Any:
            request, _ = protobuf_conversion.of_call(method)
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method),
                request.message.FromString,
                lambda reply: reply.SerializeToString(),
            )

        return [
            grpc.method_handlers_generic_handler(
                service, {method: unary(method) for method in methods}
            )
            for service, (methods, _) in protobuf_conversion.SERVICES.items()
        ]

    # Streams.

    async def _admit(self, frame: Any, context: Any) -> Hello:
        """The Hello that a stream begins with; aborts the stream of a stranger."""
        if frame is grpc.aio.EOF or not frame.HasField("hello"):
            await context.abort(_FAILED, "a stream between nodes of kept begins with a Hello")
        try:
            hello = hello_in(frame.hello)
        except CorruptMessage as error:
            await context.abort(_FAILED, str(error))
        why = await self._peers.admit(hello)
        if why:
            await context.abort(_FAILED, why)
        return hello

    async def _first_frame(self, context: Any) -> Any:
        """What a stream begins with; one that begins with nothing is ended."""
        try:
            async with asyncio.timeout(grpc_options.HELLO_S):
                return await context.read()
        except TimeoutError:
            await context.abort(_FAILED, f"no Hello within {grpc_options.HELLO_S:g} s")

    @contextlib.asynccontextmanager
    async def _stream_of(self, context: Any, frame_type: Any) -> Any:
        """Greets, counts the stream while it lasts, and says so when it breaks."""
        hello = await self._admit(await self._first_frame(context), context)
        peers = self._peers
        peers.stream_opened(hello)
        try:
            with self.deadlines.stream(context.peer()):
                await context.write(frame_type(hello=HELLO.encode(peers.hello())))
                yield hello
        finally:
            peers.stream_broken(hello)

    async def _raft(self, _: Any, context: Any) -> None:
        peers = self._peers
        async with self._stream_of(context, peers_pb2.RaftFrame) as hello:
            while (frame := await context.read()) is not grpc.aio.EOF:
                for message in frame.messages:
                    try:
                        decoded = protobuf_conversion.decode_raft(message)
                    except CorruptMessage as error:
                        await context.abort(_FAILED, str(error))
                    if decoded.sender != hello.node_id or decoded.to != peers.node_id:
                        await context.abort(
                            _FAILED,
                            f"a message from {decoded.sender} to {decoded.to} on the stream from "
                            f"{hello.node_id} to {peers.node_id}",
                        )
                    if hello.directory_id not in (None, decoded.directory_id):
                        await context.abort(
                            _FAILED, f"a message from another disk than that of {hello.node_id}"
                        )
                    peers.received(decoded)

    async def _snapshot(self, _: Any, context: Any) -> None:
        async with self._stream_of(context, peers_pb2.SnapshotFrame) as hello:
            frame = await context.read()
            if frame is grpc.aio.EOF:
                return
            try:
                head = protobuf_conversion.decode_install(frame.head.message, b"")
                if head.sender != hello.node_id or head.to != self._peers.node_id:
                    raise CorruptMessage(f"a snapshot from {head.sender} to {head.to}")
                if not self._peers.believes(head):
                    raise CorruptMessage(f"a snapshot from node {head.sender}, which is no voter")
                assembly = Assembly(frame.head.size_bytes)
                while (frame := await context.read()) is not grpc.aio.EOF:
                    chunk = frame.chunk
                    assembly.add(Piece(chunk.position, chunk.data, chunk.crc))
                message = protobuf_conversion.with_image(head, assembly.image())
            except CorruptMessage as error:
                log.warning("snapshot refused", peer=hello.node_id, error=str(error))
                await context.abort(_FAILED, str(error))
            self._peers.received(message)

    async def _control(self, _: Any, context: Any) -> None:
        peers = self._peers
        request, reply = protobuf_conversion.of_call("Heartbeat")
        async with self._stream_of(context, peers_pb2.ControlFrame) as hello:
            mine = object()
            self._controls[hello.node_id] = mine
            try:
                while (frame := await context.read()) is not grpc.aio.EOF:
                    answer = peers_pb2.ControlFrame(number=frame.number)
                    try:
                        asked: HeartbeatRequest = request.decode(frame.heartbeat)
                        check_speaker(hello, asked)
                        found = await peers.answer("Heartbeat", asked)
                        answer.answer.CopyFrom(reply.encode(found))
                    except KeptError as error:
                        answer.failure.CopyFrom(
                            protobuf_conversion.FAILURE.encode(failure_of(error))
                        )
                    await context.write(answer)
            finally:
                if self._controls.get(hello.node_id) is mine:
                    del self._controls[hello.node_id]
                    peers.control_lost(hello.node_id)

    # Calls.

    def _judge(self, data: bytes, cluster_id: str) -> str:  # noqa: ARG002 - a key of the cache
        try:
            hello = hello_from(data)
        except CorruptMessage as error:
            return str(error)
        own = self._peers.hello()
        return refusal(own, hello) or unnamed_cluster(own, hello)

    def _unary(self, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        request_codec, reply_codec = protobuf_conversion.of_call(method)

        async def handle(request: Any, context: Any) -> Any:
            hello = dict(context.invocation_metadata() or ()).get(grpc_options.HELLO_KEY, b"")
            why = self._judged(hello, self._peers.cluster_id) if hello else "a call without a Hello"
            if why:
                await context.abort(_FAILED, why)
            try:
                asked = request_codec.decode(request)
                check_speaker(hello_from(hello), asked)
                reply = await self._peers.answer(method, asked)
            except KeptError as error:
                if isinstance(error, InvariantViolation):
                    log.exception("call failed", error, method=method)
                await _fail(context, error)
            # The one place that reports our own bugs.
            except Exception as error:  # noqa: BLE001
                log.exception("call failed", error, method=method)
                await _fail(context, error)
            return reply_codec.encode(reply)

        return handle


def check_speaker(hello: Hello, request: Any) -> None:
    """A node speaks for itself alone. Raises PolicyViolation for a call in another one's name."""
    for field in _SPEAKERS:
        named = getattr(request, field, hello.node_id)
        if named != hello.node_id:
            raise PolicyViolation(
                f"{type(request).__name__} in the name of node {named}, from node {hello.node_id}"
            )


async def _fail(context: Any, error: Exception) -> None:
    failed = failure_of(error)
    trailing = (
        (grpc_options.ERROR_KEY, failed.error),
        (grpc_options.LEADER_KEY, str(failed.leader_id)),
    )
    await context.abort(grpc.StatusCode.ABORTED, failed.message, trailing)
