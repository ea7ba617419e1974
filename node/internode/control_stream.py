"""A broker's Control stream to the active controller: heartbeats go over it.

The stream is kept open, so that the controller hears at once when the broker's process dies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode import grpc_options, protobuf_conversion
from kept.node.internode.controller_rpc import HeartbeatReply, HeartbeatRequest
from kept.node.internode.hello import HELLO
from kept.node.internode.rpc_errors import error_of
from kept.node.proto import peers_pb2
from kept.storage.errors import KeptError, NetworkException, PolicyViolation, RequestTimedOut

# isort: split
import grpc.aio

if TYPE_CHECKING:
    from kept.node.internode.peers import Peers


AGAIN_S: Final = 0.02
"""Between two attempts; the channel below waits longer the longer nobody answers."""


class Control:
    """The stream to whoever is the controller now; nobody at first."""

    def __init__(self, peers: Peers) -> None:
        self.node_id: int | None = None
        self._peers = peers
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None
        self._opened: asyncio.Future[None] | None = None
        self._number = 0
        self._asked: dict[int, asyncio.Future[HeartbeatReply]] = {}
        self._writing = asyncio.Lock()

    def hold(self, node_id: int | None) -> None:
        """Keep a stream to this node and to no other; None: to nobody."""
        if node_id == self.node_id:
            return
        self.node_id = node_id
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._broken(NetworkException("another node is held as controller now"))
        if node_id is not None and node_id != self._peers.node_id:
            self._task = asyncio.ensure_future(self._run(node_id))

    async def stop(self) -> None:
        """Close it."""
        task = self._task
        self.hold(None)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def heartbeat(self, request: HeartbeatRequest, timeout_s: float) -> HeartbeatReply:
        """Send a heartbeat. Raises what the controller's handler raised, RequestTimedOut,
        NetworkException (no controller is held, or the stream broke), PolicyViolation.
        """
        node_id = self.node_id
        if node_id is None:
            raise NetworkException("Heartbeat: no controller is known")
        if node_id == self._peers.node_id:
            found: HeartbeatReply = await self._peers.answer("Heartbeat", request)
            return found
        codec, _ = protobuf_conversion.of_call("Heartbeat")
        try:
            async with asyncio.timeout(timeout_s):
                if self._stream is None:
                    await self._until_open()
                self._number += 1
                number = self._number
                answer: asyncio.Future[HeartbeatReply] = asyncio.get_running_loop().create_future()
                self._asked[number] = answer
                frame = peers_pb2.ControlFrame(number=number, heartbeat=codec.encode(request))
                try:
                    async with self._writing:  # gRPC takes one write at a time
                        await self._stream.write(frame)
                    return await answer
                finally:
                    self._asked.pop(number, None)
        except TimeoutError:
            raise RequestTimedOut(
                f"node {node_id}: Heartbeat: no answer within {timeout_s:g} s"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttributeError) as error:
            raise NetworkException(f"node {node_id}: Heartbeat: the stream broke") from error

    async def _until_open(self) -> None:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._opened)

    async def _run(self, node_id: int) -> None:
        error: KeptError
        while True:
            try:
                channel = await self._peers.channel(node_id).ready()
                await self._converse(channel, node_id)
                error = NetworkException(f"node {node_id}: the Control stream broke")
            except (NetworkException, PolicyViolation) as failed:
                error = failed
            except (grpc.aio.AioRpcError, grpc.aio.UsageError) as failed:
                error = NetworkException(f"node {node_id}: {failed}")
            if self.node_id == node_id:
                self._broken(error)
            await asyncio.sleep(AGAIN_S)

    def _broken(self, error: KeptError) -> None:
        self._stream = None
        opened, self._opened = self._opened, None
        for waiting in (opened, *self._asked.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting

    async def _converse(self, channel: Any, node_id: int) -> None:
        _, codec = protobuf_conversion.of_call("Heartbeat")
        frame_type = peers_pb2.ControlFrame
        stream = channel.stream_stream(
            grpc_options.CONTROL,
            request_serializer=frame_type.SerializeToString,
            response_deserializer=frame_type.FromString,
        )()
        try:
            hello = HELLO.encode(self._peers.hello(wanted=node_id))
            await stream.write(frame_type(hello=hello))
            if await stream.read() is grpc.aio.EOF:
                raise PolicyViolation(str(await stream.details()))
            if self.node_id != node_id:
                return
            self._stream = stream
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
            while (frame := await stream.read()) is not grpc.aio.EOF:
                answer = self._asked.get(frame.number)
                if answer is None or answer.done():
                    continue
                if frame.HasField("failure"):
                    answer.set_exception(
                        error_of(protobuf_conversion.FAILURE.decode(frame.failure))
                    )
                else:
                    answer.set_result(codec.decode(frame.answer))
        except asyncio.InvalidStateError as error:
            raise NetworkException(f"node {node_id}: the Control stream broke") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NetworkException(f"node {node_id}: the connection was closed") from None
        finally:
            stream.cancel()
