"""The asynchronous shell for requests between nodes: Kafka frames over one connection.

:class:`NodeConnection` sends requests and hands each its response, by correlation id; many may be
outstanding. It has no opinion on versions, metadata or retries: who asks knows the node and both
run the same kept. :class:`NodeLink` keeps one to an address, connects when there is something to
ask, and waits longer after each failure.

A large response (:data:`LARGE_BYTES`) is received straight into a buffer of its own and handed out
as a view into it, uncopied; the buffer is used again once nobody holds a view of it any more, which
a bytearray can tell (it refuses to be resized while it has exports). So a fetcher parses in place,
keeps what it likes for as long as it likes, and costs nobody anything but memory.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from kio.static.constants import EntityType

from kept.client.protocol import (
    Values,
    build,
    decode_response,
    encode,
    header_is_flexible,
    message_type,
)
from kept.storage.errors import NetworkException, RequestTimedOut

CONNECT_S: Final = 10.0
"""``socket.connection.setup.timeout.ms`` of Kafka, where nothing else is said."""
SMALL_BYTES: Final = 16 * 1024
"""What is received before it is known how long the response is; so much of one may be copied."""
LARGE_BYTES: Final = SMALL_BYTES
"""From this size on a response has a buffer of its own."""
MAX_RESPONSE_BYTES: Final = 512 * 1024 * 1024
"""A longer frame is not Kafka."""
WAKE_BYTES: Final = 512 * 1024
"""So much of a large response arrives before the loop is woken (SO_RCVLOWAT): a fifth less CPU
than waking it for whatever there is."""
MAX_OUTSTANDING: Final = 1_000
"""Requests without an answer on one connection; one more is an error of the asker."""
KEPT_BUFFERS: Final = 2
"""One that is parsed, one that is filled."""
BACKOFF_S: Final = 0.02
BACKOFF_MAX_S: Final = 1.0

_SIZE: Final = struct.Struct(">i").unpack_from


class _Buffers:
    """Large buffers that are used again. Never blocks: a new one is made when none is free."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes that nobody holds a view of."""
        for buffer in self._kept:
            if len(buffer) >= size and _is_free(buffer):
                return buffer
        buffer = bytearray(-(-size // 65536) * 65536)
        if len(self._kept) >= KEPT_BUFFERS:
            # The new one is the size that is asked for now; who holds the old one keeps it alive.
            self._kept.pop(0)
        self._kept.append(buffer)
        return buffer


def _is_free(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


class NodeConnection(asyncio.BufferedProtocol):
    """One connection. Made by :meth:`open`; belongs to its loop."""

    def __init__(self, where: str, client_id: str) -> None:
        self.where = where
        self.closed = False
        """No request will be answered any more."""
        self._client_id = client_id.encode()
        self._transport: Any = None
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._small = memoryview(bytearray(SMALL_BYTES))
        self._have = 0
        """Bytes in the small buffer."""
        self._buffers = _Buffers()
        self._large: memoryview | None = None
        """The large response that is being received, its length prefix left out."""
        self._filled = 0
        self._low_water = 1
        self._set_option: Callable[[int, int, int], None] = _ignore

    @classmethod
    async def open(
        cls, host: str, port: int, *, client_id: str, timeout_s: float = CONNECT_S
    ) -> NodeConnection:
        """Connect. Raises NetworkException."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: cls(where, client_id), host, port
                )
        except TimeoutError:
            raise NetworkException(f"{where}: no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise NetworkException(f"{where}: {error.strerror or error}") from error
        return protocol

    # Asking.

    def request(
        self, api_key: int, version: int, body: bytes | bytearray
    ) -> asyncio.Future[memoryview]:
        """Send a request's body; the future is the response's frame, from the correlation id on.

        The view stays valid for as long as it, or a slice of it, is held. The future raises
        NetworkException when the connection broke: nobody knows then whether it was served.
        """
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        why = ""
        if self.closed:
            why = "the connection is closed"
        elif len(self._waiting) >= MAX_OUTSTANDING:
            why = f"{MAX_OUTSTANDING} requests are unanswered"
        if why:
            answer.set_exception(NetworkException(f"{self.where}: {why}"))
            return answer
        self._next_id = number = (self._next_id + 1) & 0x7FFFFFFF
        self._waiting[number] = answer
        self._transport.write(self._head(api_key, version, number, len(body)) + body)
        return answer

    async def call(self, api_key: int, version: int, values: Values) -> Any:
        """A request through kio's codec; the typed response. Raises as :meth:`request`."""
        body = encode(build(message_type(api_key, version, EntityType.request), values))
        frame = await self.request(api_key, version, body)
        return decode_response(api_key, version, frame)[1]

    def close(self) -> None:
        """Close; whoever waits gets NetworkException."""
        if self._transport is not None:
            self._transport.abort()
        self._end("the connection was closed here")

    def _head(self, api_key: int, version: int, number: int, body_bytes: int) -> bytes:
        name = self._client_id
        tags = b"\0" if _flexible(api_key, version) else b""
        size = 10 + len(name) + len(tags) + body_bytes
        return struct.pack(">ihhih", size, api_key, version, number, len(name)) + name + tags

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = transport
        self._set_option = transport.get_extra_info("socket").setsockopt

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or we closed."""
        self._transport = None
        self._end(str(exc) if exc is not None else "the other side closed the connection")

    def eof_received(self) -> bool:
        """The other side sends no more."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._small[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in."""
        if self._large is not None:
            self._filled += nbytes
            missing = len(self._large) - self._filled
            if missing < self._low_water:
                self._wake_at(missing)
            if not missing:
                frame, self._large = self._large, None
                self._deliver(frame)
            return
        self._have += nbytes
        self._parse()

    def _parse(self) -> None:
        """Deliver what is whole in the small buffer; begin what is large; keep the rest."""
        small, start, have = self._small, 0, self._have
        while have - start >= 4:
            (size,) = _SIZE(small, start)
            if not 4 <= size <= MAX_RESPONSE_BYTES:
                self._transport.abort()
                self._end(f"not a Kafka response: frame of {size} bytes")
                return
            start += 4
            if size > LARGE_BYTES - 4:
                self._begin_large(size, small[start:have])
                self._have = 0
                return
            if have - start < size:
                start -= 4
                break
            self._deliver(memoryview(bytes(small[start : start + size])))
            start += size
        if start:
            rest = bytes(small[start:have])
            small[: len(rest)] = rest
            self._have = len(rest)

    def _begin_large(self, size: int, first: memoryview) -> None:
        self._large = memoryview(self._buffers.take(size))[:size]
        self._filled = len(first)
        self._large[: self._filled] = first
        self._wake_at(size - self._filled)

    def _wake_at(self, missing: int) -> None:
        """Have the loop woken once so many bytes are there, or the end of the response."""
        wanted = min(max(missing, 1), WAKE_BYTES)
        if wanted != self._low_water:
            self._low_water = wanted
            self._set_option(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _deliver(self, frame: memoryview) -> None:
        (number,) = _SIZE(frame, 0)
        answer = self._waiting.pop(number, None)
        if answer is None:
            self._transport.abort()
            self._end(f"a response to request {number}, which nobody asked")
        elif not answer.done():
            answer.set_result(frame)

    def _end(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._large = None
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(NetworkException(f"{self.where}: {why}"))
                answer.exception()  # who asked may have gone


class NodeLink:
    """The way to one address: connected when there is something to ask, again after it broke."""

    def __init__(self, address: Callable[[], tuple[str, int] | None], client_id: str) -> None:
        """``address`` is asked at each connect: it may change, and None is not known now."""
        self._address = address
        self._client_id = client_id
        self._connection: NodeConnection | None = None
        self._connecting = asyncio.Lock()
        self.pause_s = 0.0
        """How long the last failure makes the next attempt wait, on average."""
        self._not_before = 0.0

    @property
    def closed(self) -> bool:
        """Whether there is no connection now."""
        return self._connection is None or self._connection.closed

    async def connected(self) -> NodeConnection:
        """The connection; made if there is none, after the pause that the last failure asks for.

        Raises NetworkException.
        """
        connection = self._connection
        if connection is not None and not connection.closed:
            return connection
        async with self._connecting:
            if self._connection is not None and not self._connection.closed:
                return self._connection
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            address = self._address()
            try:
                if address is None:
                    raise NetworkException("the address of the node is not known")
                self._connection = await NodeConnection.open(*address, client_id=self._client_id)
            except NetworkException:
                self.pause_s = min(max(BACKOFF_S, 2 * self.pause_s), BACKOFF_MAX_S)
                self._not_before = loop.time() + self.pause_s * random.uniform(0.5, 1.5)
                raise
            self.pause_s = 0.0
            return self._connection

    async def request(
        self, api_key: int, version: int, body: bytes | bytearray, timeout_s: float
    ) -> memoryview:
        """As :meth:`NodeConnection.request`, with a deadline for all of it.

        Raises NetworkException, RequestTimedOut.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await (await self.connected()).request(api_key, version, body)
        except TimeoutError:
            where = self._connection.where if self._connection is not None else "the node"
            raise RequestTimedOut(f"{where}: no answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Close; the next request connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _ignore(_level: int, _option: int, _value: int) -> None:
    """Before there is a socket."""


def _flexible(api_key: int, version: int) -> bool:
    key = (api_key, version)
    found = _FLEXIBLE.get(key)
    if found is None:
        kind = message_type(api_key, version, EntityType.request)
        found = _FLEXIBLE[key] = header_is_flexible(kind)
    return found


_FLEXIBLE: Final[dict[tuple[int, int], bool]] = {}
