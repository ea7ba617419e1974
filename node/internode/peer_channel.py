"""The way to one peer: a connection of its own, made when there is something to say.

Greeting over plain TCP first (it is quick, and knows a refused connection from a silent one), then
a gRPC channel with the Raft stream on it, which unary calls and the Control stream share. What
breaks is made again after a jittered back-off. Large snapshots have a channel of their own, so that
heartbeats never wait behind one.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode import grpc_options, protobuf_conversion, snapshot_chunks
from kept.node.internode import hello as greeting
from kept.node.internode.controller_rpc import Failure
from kept.node.internode.hello import HELLO, hello_in
from kept.node.internode.identity import Hello, refusal
from kept.node.internode.outbox import Outbox
from kept.node.internode.rpc_errors import error_of
from kept.node.proto import peers_pb2
from kept.node.runtime.logging import log
from kept.storage.errors import (
    CorruptMessage,
    NetworkException,
    PolicyViolation,
    RequestTimedOut,
    UnsupportedVersion,
)

# isort: split
import grpc
import grpc.aio

if TYPE_CHECKING:
    from kept.cluster.raft.messages import InstallSnapshot, Message
    from kept.node.internode.peers import Peers

BACKOFF_S: Final = 0.02
"""Before the second attempt; doubled up to the maximum, and multiplied by 0.5 to 1.5."""
BACKOFF_MAX_S: Final = 0.5
PAUSE_S: Final = 0.01
"""Between two attempts, however much in a hurry."""
CONNECT_S: Final = 2.0
"""For greeting, and again for the first frames of the stream."""
SNAPSHOT_S: Final = 300.0
"""A snapshot that takes longer is given up; Raft sends a newer one."""


class Channel:
    """One peer as seen from here."""

    def __init__(self, peers: Peers, node_id: int) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self.connected = False
        self._peers = peers
        self._grpc: grpc.aio.Channel | None = None
        self._wanted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._wake: asyncio.Future[None] | None = None
        self._waiting: list[asyncio.Future[grpc.aio.Channel]] = []
        self._unary: dict[str, Any] = {}
        self._cluster_id = ""
        """As the peer told it: what a node says that does not know it itself."""
        self._snapshot: tuple[int, int] | None = None
        self._tasks = {asyncio.ensure_future(self._run())}

    def send(self, message: Message) -> None:
        """Queue a message; a large snapshot goes its own way."""
        image = getattr(message, "image_bytes", b"")
        if len(image) > snapshot_chunks.LARGE_BYTES:
            self._begin_snapshot(message)  # type: ignore[arg-type]
            return
        self.outbox.put(message)
        self._wanted.set()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def hurry(self) -> None:
        """There is reason to believe that the peer is there now: wait no longer to try again."""
        self._hurry.set()

    async def stop(self) -> None:
        """Close; whoever waits gets NetworkException."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting(NetworkException(f"node {self.node_id}: this node stops"))

    # The connection.

    async def _run(self) -> None:
        pause = BACKOFF_S
        while True:
            await self._wanted.wait()
            try:
                target = await self._greet()
                pause = BACKOFF_S
                await self._session(target)
                error: Exception = NetworkException(f"node {self.node_id}: the connection broke")
            except (NetworkException, PolicyViolation) as failed:
                error = failed
                if self._peers.shows_death(self.node_id, failed):
                    self._peers.found_dead(self.node_id)
            self.outbox.clear()
            self._fail_waiting(error)
            if not self._peers.keeps(self.node_id):
                self._wanted.clear()
            self._hurry.clear()
            await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(pause * random.uniform(0.5, 1.5)):
                    await self._hurry.wait()
            except TimeoutError:
                pause = min(2 * pause, BACKOFF_MAX_S)

    async def _greet(self) -> str:
        """Who is there? The target for gRPC, at the first of the peer's addresses where it is.

        Raises what the likeliest address says: NetworkException, PolicyViolation.
        """
        failed: list[NetworkException | PolicyViolation] = []
        for address in self._peers.addresses(self.node_id):
            try:
                return await self._greet_at(*address)
            except (NetworkException, PolicyViolation) as error:
                failed.append(error)
        if not failed:
            raise NetworkException(f"node {self.node_id}: its address is not known")
        raise failed[0]

    async def _greet_at(self, host: str, port: int) -> str:
        peers, node_id = self._peers, self.node_id
        own = peers.hello(wanted=node_id)
        found, target = await greeting.ask(host, port, own, CONNECT_S)
        why = found.refusal or refusal(own, found)
        if not why and found.node_id != node_id:
            why = f"node {found.node_id} is at the address of node {node_id}"
        if why:
            peers.was_refused(node_id, why)
            raise PolicyViolation(why)
        self._cluster_id = found.cluster_id
        return target

    def _hello(self) -> Hello:
        return self._peers.hello(wanted=self.node_id, cluster_id=self._cluster_id)

    async def _session(self, target: str) -> None:
        """Connect, open the Raft stream, and send until it breaks."""
        channel = grpc.aio.insecure_channel(target, options=grpc_options.CLIENT)
        try:
            open_stream = channel.stream_stream(
                grpc_options.RAFT,
                request_serializer=peers_pb2.RaftFrame.SerializeToString,
                response_deserializer=peers_pb2.RaftFrame.FromString,
            )
            call = open_stream()
            remote = await self._first_frames(call)
            self._peers.stream_opened(remote)
            try:
                self._grpc, self.connected = channel, True
                for waiting in self._waiting:
                    if not waiting.done():
                        waiting.set_result(channel)
                self._waiting.clear()
                await self._pump(call)
            finally:
                self._grpc, self.connected = None, False
                self._unary.clear()
                self._peers.stream_broken(remote)
        finally:
            await channel.close()

    async def _first_frames(self, call: Any) -> Hello:
        hello = HELLO.encode(self._hello())
        try:
            async with asyncio.timeout(CONNECT_S):
                await call.write(peers_pb2.RaftFrame(hello=hello))
                frame = await call.read()
                if frame is grpc.aio.EOF:
                    raise NetworkException(f"node {self.node_id}: {await call.details()}")
        except TimeoutError:
            raise NetworkException(f"node {self.node_id}: no Hello came back") from None
        except grpc.aio.AioRpcError as error:
            failed = _raised(f"node {self.node_id}", error)
            if isinstance(failed, PolicyViolation):
                self._peers.was_refused(self.node_id, str(failed))
            raise failed from error
        except asyncio.InvalidStateError as error:
            raise NetworkException(f"node {self.node_id}: {_words(error)}") from error
        try:
            return hello_in(frame.hello)
        except CorruptMessage as error:
            raise NetworkException(f"node {self.node_id}: {error}") from error

    async def _pump(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        watching = asyncio.ensure_future(self._watch(call))
        try:
            while not watching.done():
                messages = self.outbox.take()
                if messages:
                    encoded = [protobuf_conversion.encode_raft(message) for message in messages]
                    await call.write(peers_pb2.RaftFrame(messages=encoded))
                else:
                    self._wake = loop.create_future()
                    await self._wake
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # broken; whatever it says, it is made again
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
        finally:
            self._wake = None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, call: Any) -> None:
        """The server says nothing more on this stream: whatever comes is its end."""
        try:
            await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            call.cancel()
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    # Calls.

    def _fail_waiting(self, error: Exception) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()

    async def ready(self) -> grpc.aio.Channel:
        """A connected channel; an attempt is made at once. Raises NetworkException,
        PolicyViolation (refused, and why).
        """
        if self._grpc is not None:
            return self._grpc
        waiting: asyncio.Future[grpc.aio.Channel] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._wanted.set()
        self.hurry()
        return await waiting

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """A unary call. Raises what the peer's handler raised, RequestTimedOut, NetworkException,
        PolicyViolation (refused, and why).
        """
        what = f"node {self.node_id}: {method}"
        request_codec, reply_codec = protobuf_conversion.of_call(method)
        message = request_codec.encode(request)
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self.ready()
                unary = self._unary.get(method)
                if unary is None:
                    unary = self._unary[method] = channel.unary_unary(
                        f"/{protobuf_conversion.service_of(method)}/{method}",
                        request_serializer=lambda request: request.SerializeToString(),
                        response_deserializer=reply_codec.message.FromString,
                    )
                hello = HELLO.to_bytes(self._hello())
                metadata = ((grpc_options.HELLO_KEY, hello),)
                return reply_codec.decode(await unary(message, metadata=metadata))
        except TimeoutError:
            raise RequestTimedOut(f"{what}: no answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _raised(what, error) from error
        except grpc.aio.UsageError as error:  # closed while the call was made
            raise NetworkException(f"{what}: {error}") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise NetworkException(f"{what}: the connection broke") from None

    # Large snapshots.

    def _begin_snapshot(self, message: InstallSnapshot) -> None:
        key = (message.last_term, message.last_index)
        if self._snapshot is not None:
            return  # one is under way; Raft asks again
        self._snapshot = key
        task = asyncio.ensure_future(self._send_snapshot(message))
        self._tasks.add(task)
        task.add_done_callback(self._end_snapshot)

    def _end_snapshot(self, task: asyncio.Task[None]) -> None:
        self._snapshot = None
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("snapshot not sent", peer=self.node_id, error=_words(error))

    async def _send_snapshot(self, message: InstallSnapshot) -> None:
        frame = peers_pb2.SnapshotFrame
        target = await self._greet()
        async with (
            asyncio.timeout(SNAPSHOT_S),
            grpc.aio.insecure_channel(target, options=grpc_options.CLIENT) as channel,
        ):
            call = channel.stream_stream(
                grpc_options.SNAPSHOT,
                request_serializer=frame.SerializeToString,
                response_deserializer=frame.FromString,
            )()
            await call.write(frame(hello=HELLO.encode(self._hello())))
            if await call.read() is grpc.aio.EOF:
                raise NetworkException(str(await call.details()))
            size = len(message.image_bytes)
            head = protobuf_conversion.encode_install_head(message)
            await call.write(frame(head=peers_pb2.SnapshotHead(message=head, size_bytes=size)))
            for piece in snapshot_chunks.pieces(message.image_bytes):
                await call.write(frame(chunk=peers_pb2.SnapshotChunk(**piece._asdict())))
            await call.done_writing()
            await call.read()
            if (code := await call.code()) != grpc.StatusCode.OK:
                raise NetworkException(f"{code.name}: {await call.details()}")


def _is_cancelled() -> bool:
    """Whether it is this task that was cancelled, and not the RPC (its channel was closed)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _raised(what: str, error: grpc.aio.AioRpcError) -> Exception:
    """What a failed call means to its caller."""
    trailing = dict(error.trailing_metadata() or ())
    if (name := trailing.get(grpc_options.ERROR_KEY)) is not None:
        leader = int(trailing.get(grpc_options.LEADER_KEY, -1))
        return error_of(Failure(str(name), error.details() or "", leader))
    code = error.code()
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return PolicyViolation(error.details() or "refused")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedVersion(f"{what} is not known there; run one version of kept")
    return NetworkException(f"{what}: {_words(error)}")
