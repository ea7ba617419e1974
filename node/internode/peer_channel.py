"""The way to one peer: a connection that this node makes, when there is something to send.

Hellos first (a refused connection is known from a silent one at once), then the connection is
opened: messages, calls and heartbeats share it. What breaks is made again after a jittered
back-off. A large snapshot has a connection of its own, so that heartbeats never wait behind one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from kept.node.internode import hello as greeting
from kept.node.internode import protobuf_conversion, snapshot_chunks
from kept.node.internode.connection import Connection
from kept.node.internode.frames import MAX_BODY_BYTES, Frame, FrameKind
from kept.node.internode.hello import hello_from
from kept.node.internode.identity import Hello, refusal
from kept.node.internode.outbox import Outbox
from kept.node.internode.protobuf_conversion import METHODS, codecs
from kept.node.internode.rpc_errors import error_of
from kept.node.runtime.logging import bugs, log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import (
    CorruptMessage,
    KeptError,
    MessageTooLarge,
    NetworkException,
    PolicyViolation,
    RequestTimedOut,
)

if TYPE_CHECKING:
    from kept.cluster.raft.messages import InstallSnapshot, Message
    from kept.node.internode.peers import Peers

BACKOFF_S: Final = 0.02
"""Before the second attempt; doubled up to the maximum, and multiplied by 0.5 to 1.5."""
BACKOFF_MAX_S: Final = 0.5
HELD_BACKOFF_S: Final = 0.02
"""The same where the peer is the active controller: it is waited for."""
PAUSE_S: Final = 0.01
"""Between two attempts, however urgent."""
CONNECT_S: Final = 2.0
"""For the Hellos, and again for the opening."""
SNAPSHOT_S: Final = 300.0
"""A snapshot that takes longer is given up; Raft sends a newer one."""
MAX_QUEUED_BYTES: Final = 2 * MAX_BODY_BYTES
"""Of requests to one peer that wait to be sent; further calls fail."""
MAX_CALL_ID: Final = (1 << 32) - 1
SNAPSHOT_ID: Final = 0
"""Under which a snapshot is answered; calls count from 1."""


class Messages(Protocol):
    """What is sent in order and has no answer."""

    def next_message(self) -> tuple[FrameKind, bytes] | None:
        """The next one with its kind; None: there is none now."""


class _RaftMessages:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def next_message(self) -> tuple[FrameKind, bytes] | None:
        message = self._outbox.pop()
        return (
            None
            if message is None
            else (FrameKind.MESSAGE, protobuf_conversion.encode_raft(message))
        )


class _SnapshotFrames:
    def __init__(self, message: InstallSnapshot) -> None:
        self._frames = self._cut(message)

    @staticmethod
    def _cut(message: InstallSnapshot) -> Iterator[tuple[FrameKind, bytes]]:
        yield FrameKind.SNAPSHOT_HEAD, protobuf_conversion.encode_snapshot_head(message)
        for piece in snapshot_chunks.pieces(message.image_bytes):
            yield FrameKind.SNAPSHOT_CHUNK, protobuf_conversion.encode_snapshot_chunk(piece)

    def next_message(self) -> tuple[FrameKind, bytes] | None:
        return next(self._frames, None)


class ChannelSession:
    """A connection to a peer, and the calls that wait for it. A handler of :class:`.Connection`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: Any, name: str, messages: Messages
    ) -> None:
        self.opened: asyncio.Future[Hello] = loop.create_future()
        """The peer's Hello, which may refuse this node."""
        self.lost: asyncio.Future[None] = loop.create_future()
        self.connection = Connection(loop, transport, self, name)
        self._loop = loop
        self._name = name
        self._messages = messages
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._last_id = SNAPSHOT_ID

    async def open(self, own: Hello) -> Hello:
        """The peer's Hello of an open connection. Raises NetworkException, PolicyViolation
        (refused, and why); it is closed then.
        """
        self.connection.start()
        self.connection.send(FrameKind.OPEN, body=codecs().hello.to_bytes(own))
        try:
            async with asyncio.timeout(CONNECT_S):
                hello = await self.opened
            if hello.refusal:
                raise PolicyViolation(hello.refusal)
        except TimeoutError:
            self.connection.abort()
            raise NetworkException(f"{self._name}: no Hello came back") from None
        except BaseException:
            self.connection.abort()
            raise
        return hello

    async def call(self, method: int, body: bytes) -> bytes:
        """The body of the response. Raises what the peer's handler raised, NetworkException."""
        queued = self.connection.queued_bytes
        if queued + len(body) > MAX_QUEUED_BYTES:
            raise NetworkException(f"{self._name}: {queued} bytes wait to be sent to it")
        self._last_id = self._last_id % MAX_CALL_ID + 1
        return await self._answer(self._last_id, FrameKind.REQUEST, method, body)

    async def send_snapshot(self) -> None:
        """Send all frames of a snapshot. Raises what the peer says, NetworkException."""
        self._loop.call_soon(self.connection.message_due)
        await self._answer(SNAPSHOT_ID, None)

    async def _answer(
        self, call_id: int, kind: FrameKind | None, method: int = 0, body: bytes = b""
    ) -> bytes:
        if self.connection.closed:
            raise NetworkException(f"{self._name}: the connection broke")
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[call_id] = answer
        if kind is not None:
            self.connection.send(kind, call_id, method, body)
        try:
            return await answer
        except asyncio.CancelledError:
            self.connection.send(FrameKind.CANCEL, call_id)
            raise
        finally:
            del self._calls[call_id]

    def next_message(self) -> tuple[FrameKind, bytes] | None:
        """What is to be sent next."""
        return self._messages.next_message()

    def frame_received(self, frame: Frame) -> None:
        """The answer to the opening or to a call. Raises CorruptMessage."""
        if frame.kind is FrameKind.OPEN:
            hello = hello_from(frame.body)
            if not self.opened.done():
                self.opened.set_result(hello)
            elif hello.refusal:
                self.connection.abort(f"it refuses this node now: {hello.refusal}")
            return
        if frame.kind not in (FrameKind.RESPONSE, FrameKind.ERROR):
            raise CorruptMessage(f"a {frame.kind.name} from the side that answers")
        answer = self._calls.get(frame.correlation_id)
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if frame.kind is FrameKind.RESPONSE:
            answer.set_result(frame.body)
        else:
            answer.set_exception(error_of(codecs().failure.from_bytes(frame.body)))

    def connection_lost(self) -> None:
        """Whoever waits learns that nothing is known of what became of it."""
        all_waiting: tuple[asyncio.Future[Any], ...] = (self.opened, *self._calls.values())
        for waiting in all_waiting:
            if not waiting.done():
                waiting.set_exception(NetworkException(f"{self._name}: the connection broke"))
                waiting.exception()  # nobody may be waiting
        if not self.lost.done():
            self.lost.set_result(None)


class Channel:
    """One peer as seen from here."""

    def __init__(self, peers: Peers, node_id: int) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self._peers = peers
        self._session: ChannelSession | None = None
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._waiting: list[asyncio.Future[ChannelSession]] = []
        self._cluster_id = ""
        """As the peer told it: what a node says that does not know it itself."""
        self._sends_snapshot = False
        self._tasks = TaskOwner(peers.loop)
        self._tasks.spawn(self._run())

    @property
    def connected(self) -> bool:
        """Whether a connection to the peer is open."""
        return self._session is not None

    def send(self, message: Message) -> None:
        """Queue a message; a large snapshot goes its own way."""
        image = getattr(message, "image_bytes", b"")
        if len(image) > snapshot_chunks.LARGE_BYTES:
            self._begin_snapshot(message)  # type: ignore[arg-type]
            return
        self.outbox.put(message)
        self._wanted.set()
        if self._session is not None:
            self._session.connection.message_due()

    def hold(self) -> None:
        """This node sends its heartbeats here from now on: stay connected."""
        if self._session is not None:
            self._session.connection.send(FrameKind.HOLD)
        else:
            self._wanted.set()
            self.retry_now()

    def release(self) -> None:
        """It does so no more."""
        if self._session is not None:
            self._session.connection.send(FrameKind.RELEASE)

    def retry_now(self) -> None:
        """There is reason to believe that the peer is there now: wait no longer to try again."""
        self._urgent.set()

    async def stop(self) -> None:
        """Close; whoever waits gets NetworkException."""
        await self._tasks.close()
        self._fail_waiting(NetworkException(f"node {self.node_id}: this node stops"))

    # The connection.

    async def _run(self) -> None:
        pause_s = BACKOFF_S
        while True:
            await self._wanted.wait()
            try:
                session, hello = await self._connect(_RaftMessages(self.outbox))
                pause_s = BACKOFF_S
                await self._serve(session, hello)
                error: KeptError = NetworkException(f"node {self.node_id}: the connection broke")
            except (NetworkException, PolicyViolation) as failed:
                error = failed
                if self._peers.shows_death(self.node_id, failed):
                    self._peers.process_gone(self.node_id)
            # A bug of ours: the peer is still reached, once that does not happen any more.
            except Exception as bug:  # noqa: BLE001
                bugs.report("connection to a node failed", bug, node_id=self.node_id)
                error = NetworkException(f"node {self.node_id}: {bug!r}")
            self.outbox.clear()
            self._fail_waiting(error)
            is_held = self._peers.is_held(self.node_id)
            if not is_held:
                self._wanted.clear()
            self._urgent.clear()
            await asyncio.sleep(PAUSE_S)
            jitter = random.uniform(0.5, 1.5)
            try:
                async with asyncio.timeout((HELD_BACKOFF_S if is_held else pause_s) * jitter):
                    await self._urgent.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _connect(self, messages: Messages) -> tuple[ChannelSession, Hello]:
        """An open connection, at the first of the peer's addresses where it is.

        Raises what the likeliest address says: NetworkException, PolicyViolation.
        """
        failed: list[NetworkException | PolicyViolation] = []
        for address in self._peers.addresses(self.node_id):
            try:
                transport = await self._greet(*address)
                break
            except (NetworkException, PolicyViolation) as error:
                failed.append(error)
        else:
            if failed:
                raise failed[0]
            raise NetworkException(f"node {self.node_id}: its address is not known")
        session = ChannelSession(self._peers.loop, transport, f"node {self.node_id}", messages)
        own = self._peers.hello(wanted=self.node_id, cluster_id=self._cluster_id)
        try:
            return session, await session.open(own)
        except PolicyViolation as error:
            self._peers.record_refusal(self.node_id, str(error))
            raise

    async def _greet(self, host: str, port: int) -> Any:
        """The transport of a connection on which Hellos were exchanged."""
        peers, node_id = self._peers, self.node_id
        own = peers.hello(wanted=node_id)
        transport, hello = await greeting.connect(host, port, own, CONNECT_S, peers.tls())
        why = hello.refusal or refusal(own, hello)
        if not why and hello.node_id != node_id:
            why = f"node {hello.node_id} is at the address of node {node_id}"
        if why:
            transport.abort()
            peers.record_refusal(node_id, why)
            raise PolicyViolation(why)
        self._cluster_id = hello.cluster_id
        return transport

    async def _serve(self, session: ChannelSession, hello: Hello) -> None:
        """Use a connection until it breaks."""
        self._peers.connection_opened(hello)
        self._session = session
        try:
            if self._peers.is_held(self.node_id):
                session.connection.send(FrameKind.HOLD)
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(session)
            self._waiting.clear()
            session.connection.message_due()
            await session.lost
        finally:
            self._session = None
            session.connection.abort()
            self._peers.connection_lost(hello)

    # Calls.

    def _fail_waiting(self, error: KeptError) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()

    async def _connected(self) -> ChannelSession:
        """An open connection; an attempt is made at once. Raises NetworkException, PolicyViolation
        (refused, and why).
        """
        if self._session is not None:
            return self._session
        waiting: asyncio.Future[ChannelSession] = self._peers.loop.create_future()
        self._waiting.append(waiting)
        self._wanted.set()
        self.retry_now()
        return await waiting

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """The reply to a request. Raises what the peer's handler raised, RequestTimedOut,
        NetworkException, PolicyViolation (refused, and why), MessageTooLarge.
        """
        what = f"node {self.node_id}: {method}"
        request_codec, reply_codec = codecs().calls[method]
        body = request_codec.to_bytes(request)
        if len(body) > MAX_BODY_BYTES:
            raise MessageTooLarge(f"{what}: {len(body)} bytes; at most {MAX_BODY_BYTES} are sent")
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._connected()
                reply = await session.call(METHODS[method], body)
        except TimeoutError:
            raise RequestTimedOut(f"{what}: no answer within {timeout_s:g} s") from None
        try:
            return reply_codec.from_bytes(reply)
        except CorruptMessage as error:
            raise NetworkException(f"{what}: {error}") from error

    # Large snapshots.

    def _begin_snapshot(self, message: InstallSnapshot) -> None:
        if not self._sends_snapshot:  # else Raft sends it again
            self._sends_snapshot = True
            self._tasks.spawn(self._try_to_send(message))

    async def _try_to_send(self, message: InstallSnapshot) -> None:
        try:
            await self._send_snapshot(message)
        except (KeptError, TimeoutError) as error:
            reason = str(error) or f"it takes longer than {SNAPSHOT_S:g} s"
            log.warning("snapshot not sent", peer=self.node_id, error=reason)
        finally:
            self._sends_snapshot = False

    async def _send_snapshot(self, message: InstallSnapshot) -> None:
        async with asyncio.timeout(SNAPSHOT_S):
            session, _ = await self._connect(_SnapshotFrames(message))
            try:
                await session.send_snapshot()
            finally:
                session.connection.abort()
