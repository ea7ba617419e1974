"""Kafka requests from node to node on an event loop: one connection, many requests under way.

Unlike the shells over :mod:`kept.client.core` nothing is looked up, agreed on or sent again: who
asks knows the node and the version, and decides itself what a broken connection means. Responses
are handed over as views of a buffer of their own, read without a copy where they are large: the
data path of replication.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

from kept.client.protocol import Values, decode_response, encode_request
from kept.storage.errors import CorruptMessage, NetworkException

CONNECT_S: Final = 5.0
MAX_RESPONSE_BYTES: Final = 512 * 1024 * 1024
"""A longer frame is not Kafka's."""
_SCRATCH_BYTES: Final = 64 * 1024
"""Small responses arrive here, several at once; a larger one goes on in a buffer of its own."""
_HEADER: Final = struct.Struct(">ihhih").pack
_LENGTH: Final = struct.Struct(">i").unpack_from


class NodeConnection(asyncio.BufferedProtocol):
    """See the module. Made by :meth:`open`; used on that loop alone."""

    def __init__(self, client_id: str) -> None:
        self.closed = False
        self.peer = ""
        self._client_id = client_id
        self._name = client_id.encode()
        self._transport: Any = None
        self._correlation_id = 0
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._filled = 0
        self._frame: memoryview | None = None
        """A response too large for the scratch, and how much of it is there."""
        self._got = 0

    @classmethod
    async def open(
        cls, host: str, port: int, *, client_id: str, timeout_s: float = CONNECT_S
    ) -> NodeConnection:
        """Connect. Raises NetworkException."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, made = await loop.create_connection(lambda: cls(client_id), host, port)
        except (OSError, TimeoutError) as error:
            raise NetworkException(f"{host}:{port}: {error or 'no answer'}") from error
        made.peer = f"{host}:{port}"
        return made

    # Requests.

    def request(self, api_key: int, version: int, body: bytes) -> asyncio.Future[memoryview]:
        """Send a request of a flexible version; the future is its response's frame, from the
        correlation id on, or raises NetworkException.
        """
        future = self._expect()
        size = 11 + len(self._name) + len(body)
        head = _HEADER(size, api_key, version, self._correlation_id, len(self._name))
        if not self.closed:
            self._transport.write(b"".join((head, self._name, b"\0", body)))
        return future

    async def call(self, api_key: int, version: int, values: Values) -> Any:
        """Send any request by its values (:mod:`kept.client.protocol`); kio's typed response.

        Raises NetworkException, CorruptMessage.
        """
        future = self._expect()
        frame = encode_request(api_key, version, self._correlation_id, self._client_id, values)
        if not self.closed:
            self._transport.write(frame)
        return decode_response(api_key, version, await future)[1]

    def _expect(self) -> asyncio.Future[memoryview]:
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_exception(NetworkException(f"{self.peer}: the connection is closed"))
        else:
            self._waiting[self._correlation_id] = future
        return future

    def close(self) -> None:
        """Close; who waits for a response hears NetworkException."""
        self._end("the connection was closed")
        if self._transport is not None:
            self._transport.abort()

    # The transport's side.

    def connection_made(self, transport: Any) -> None:
        """Connected."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._end(str(exc or "the peer closed the connection"))

    def _end(self, why: str) -> None:
        self.closed = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(NetworkException(f"{self.peer}: {why}"))
                future.exception()  # who asked may have gone

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        if self._frame is not None:
            return self._frame[self._got :]
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived."""
        try:
            if self._frame is not None:
                self._got += nbytes
                if self._got == len(self._frame):
                    frame, self._frame = self._frame, None
                    self._deliver(frame)
            else:
                self._filled += nbytes
                self._take_apart()
        except CorruptMessage as error:
            self._end(str(error))
            self._transport.abort()

    def _take_apart(self) -> None:
        position = 0
        while self._filled - position >= 4:
            (size,) = _LENGTH(self._scratch, position)
            if not 4 <= size <= MAX_RESPONSE_BYTES:
                raise CorruptMessage(f"{self.peer}: a response of {size} bytes is not Kafka's")
            end = position + 4 + size
            if end > self._filled:
                if 4 + size > _SCRATCH_BYTES:
                    self._grow(position + 4, size)
                    return
                break
            self._deliver(memoryview(bytes(self._scratch[position + 4 : end])))
            position = end
        left = self._filled - position
        if position and left:
            self._scratch[:left] = bytes(self._scratch[position : self._filled])
        self._filled = left

    def _grow(self, start: int, size: int) -> None:
        """The rest of a large response is read into its own buffer."""
        self._frame = memoryview(bytearray(size))
        self._got = self._filled - start
        self._frame[: self._got] = self._scratch[start : self._filled]
        self._filled = 0

    def _deliver(self, frame: memoryview) -> None:
        (correlation_id,) = _LENGTH(frame)
        future = self._waiting.pop(correlation_id, None)
        if future is None:
            raise CorruptMessage(f"{self.peer}: a response to request {correlation_id}, not sent")
        if not future.done():
            future.set_result(frame)
