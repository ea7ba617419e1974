"""The asynchronous shell for requests between nodes: Kafka frames over one connection.

:class:`NodeConnection` sends requests and hands each its response, by correlation id; many may be
outstanding. It has no opinion on versions, metadata or retries: who asks knows the node, and both
run the same kept.

Responses are received into one buffer, large ones handed out as views into it, uncopied. A buffer
is used again once nobody holds a view of it any more, which the buffer itself tells (a
``bytearray`` refuses to be resized while it has exports); until then the next responses come into
another one. So a fetcher parses in place, keeps what it likes for as long as it likes, and costs
nobody anything but memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from typing import Any, Final

from kio.static.constants import EntityType

from kept.client.protocol.messages import (
    Values,
    decode_response,
    header_is_flexible,
    message_type,
    request_body,
)
from kept.storage.errors import NetworkException, RequestTimedOut

CONNECT_S: Final = 10.0
"""``socket.connection.setup.timeout.ms`` of Kafka, where nothing else is said."""
ANSWER_S: Final = 30.0
"""``replica.socket.timeout.ms`` of Kafka, where nothing else is said."""
BUFFER_BYTES: Final = 64 * 1024
"""What a connection receives into until responses turn out to be larger."""
COPIED_BYTES: Final = 4 * 1024
"""Smaller responses are copied: a view of one would keep the buffer from being used again."""
MAX_RESPONSE_BYTES: Final = 512 * 1024 * 1024
"""A longer frame is not Kafka."""
WAKE_BYTES: Final = 512 * 1024
"""So much of a large response arrives before the loop is woken (SO_RCVLOWAT): a fifth less CPU
than waking it for whatever there is."""
PATIENT_BYTES: Final = 128 * 1024
"""With less than this missing it is not worth telling the socket."""
MAX_OUTSTANDING: Final = 1_000
"""Requests without an answer on one connection; one more is an error of the asker."""
KEPT_BUFFERS: Final = 2
"""One that is parsed, one that is filled."""

NEVER: Final = float("inf")
SIZE_BYTES: Final = 4
_SIZE: Final = struct.Struct(">i").unpack_from


class _Buffers:
    """Buffers that are used again. Never blocks: a new one is made when none is free."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []
        self._typical = BUFFER_BYTES
        """About as much as the largest response of late; it shrinks by a sixteenth a response."""

    def acquire(self, size: int) -> memoryview:
        """A buffer of at least ``size`` bytes that nobody holds a view of."""
        self._typical = max(size, BUFFER_BYTES, self._typical - self._typical // 16)
        for i, buffer in enumerate(self._kept):
            if size <= len(buffer) <= 4 * self._typical and _is_free(buffer):
                if i:
                    self._kept.reverse()
                return memoryview(buffer)
        buffer = bytearray(-(-max(size, BUFFER_BYTES) // BUFFER_BYTES) * BUFFER_BYTES)
        # Who holds a view of the one that goes keeps it alive.
        self._kept = [buffer, *self._kept[: KEPT_BUFFERS - 1]]
        return memoryview(buffer)


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
        self._heads: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._next_id = 0
        self._waiting: dict[int, tuple[asyncio.Future[memoryview], float]] = {}
        """Who asked, and until when the answer may take, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = NEVER
        self._buffers = _Buffers()
        self._view = self._buffers.acquire(0)
        self._start = 0
        """Where the next response begins in the buffer."""
        self._end = 0
        self._used = 0
        """Bytes of the largest response in this buffer; 0 as long as the buffer is as new."""
        self._low_water = 1
        self._socket: socket.socket | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        client_id: str,
        timeout_s: float = CONNECT_S,
        tls: ssl.SSLContext | None = None,
    ) -> NodeConnection:
        """Connect, with ``tls`` in TLS. Raises NetworkException."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: cls(where, client_id), host, port, ssl=tls
                )
        except TimeoutError:
            raise NetworkException(f"{where}: no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise NetworkException(f"{where}: {error.strerror or error}") from error
        return protocol

    @classmethod
    async def from_socket(
        cls, sock: socket.socket, *, where: str, client_id: str
    ) -> NodeConnection:
        """Speak over a connected socket of the family AF_UNIX; ``where`` names its other end."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(lambda: cls(where, client_id), sock=sock)
        return protocol

    # Asking.

    def request(
        self, api_key: int, version: int, body: bytes | bytearray, timeout_s: float = ANSWER_S
    ) -> asyncio.Future[memoryview]:
        """Send a request's body; the future is the response's frame, from the correlation id on.

        The view stays valid for as long as it, or a slice of it, is held. The future raises
        NetworkException when the connection broke, and RequestTimedOut after ``timeout_s``: nobody
        knows then whether it was served.
        """
        loop = self._loop
        answer = loop.create_future()
        why = ""
        if self.closed:
            why = "the connection is closed"
        elif len(self._waiting) >= MAX_OUTSTANDING:
            why = f"{MAX_OUTSTANDING} requests are unanswered"
        if why:
            answer.set_exception(NetworkException(f"{self.where}: {why}"))
            return answer
        self._next_id = number = (self._next_id + 1) & 0x7FFFFFFF
        deadline = loop.time() + timeout_s
        self._waiting[number] = answer, deadline
        if deadline < self._wake_at:
            self._watch_until(deadline)
        self._transport.write(self._head(api_key, version, number, len(body)) + body)
        return answer

    async def call(
        self, api_key: int, version: int, values: Values, timeout_s: float = ANSWER_S
    ) -> Any:
        """A request through kio's codec; the typed response. Raises as :meth:`request`."""
        body = request_body(api_key, version, values)
        frame = await self.request(api_key, version, body, timeout_s)
        return decode_response(api_key, version, frame)[1]

    @property
    def receiving(self) -> bool:
        """Part of a response is here, and its rest is on its way."""
        return self._end > self._start

    def close(self) -> None:
        """Close; whoever waits gets NetworkException."""
        if self._transport is not None:
            self._transport.abort()
        self._end_with("the connection was closed here")

    def _head(self, api_key: int, version: int, number: int, body_bytes: int) -> bytes:
        head = self._heads.get((api_key, version))
        if head is None:
            flexible = header_is_flexible(message_type(api_key, version, EntityType.request))
            name = self._client_id
            tail = struct.pack(">h", len(name)) + name + (b"\0" if flexible else b"")
            head = self._heads[api_key, version] = struct.pack(">hh", api_key, version), tail
        api, tail = head
        return (8 + len(tail) + body_bytes).to_bytes(4) + api + number.to_bytes(4) + tail

    def _expire(self) -> None:
        """One timer for all requests, moved when it goes off: nearly all are answered by then."""
        now = self._loop.time()
        earliest = NEVER
        for number, (answer, deadline) in self._waiting.items():
            if deadline > now:
                earliest = min(earliest, deadline)
            elif not answer.done():
                # Its place is kept: a late response belongs to nobody else.
                self._waiting[number] = answer, NEVER
                answer.set_exception(RequestTimedOut(f"{self.where}: no answer in time"))
                answer.exception()  # who asked may have gone
        self._timer, self._wake_at = None, NEVER
        if earliest < NEVER:
            self._watch_until(earliest)

    def _watch_until(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wake_at = self._loop.call_at(deadline, self._expire), deadline

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = transport
        lent = transport.get_extra_info("socket")
        if lent is not None and transport.get_extra_info("ssl_object") is None:
            # Not with TLS, whose bytes are others. A duplicate: what the transport lends makes
            # another one for every call.
            self._socket = socket.socket(fileno=os.dup(lent.fileno()))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or we closed."""
        self._transport = None
        if self._socket is not None:
            self._socket.close()
        self._end_with(str(exc) if exc is not None else "the other side closed the connection")

    def eof_received(self) -> bool:
        """The other side sends no more."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        if self._used and self._start == self._end:
            self._change_buffer(self._used)
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in: deliver what is whole."""
        view, start = self._view, self._start
        self._end = end = self._end + nbytes
        missing = 0
        while (have := end - start) >= SIZE_BYTES:
            (size,) = _SIZE(view, start)
            if not SIZE_BYTES <= size <= MAX_RESPONSE_BYTES:
                self._transport.abort()
                self._end_with(f"not a Kafka response: frame of {size} bytes")
                return
            size += SIZE_BYTES
            if have < size:
                missing = size - have
                break
            self._deliver(view, start, start + size)
            start += size
        self._start = start
        if start == end and not self._used:
            self._start = self._end = 0
        elif end + max(missing, SIZE_BYTES) > len(view):
            self._change_buffer(max(have + missing, self._used))
        if missing >= PATIENT_BYTES or self._low_water > 1:
            self._wake_with(missing)

    def _change_buffer(self, size: int) -> None:
        """Go on in a buffer of ``size`` bytes at least, with what is not delivered yet."""
        rest = bytes(self._view[self._start : self._end])
        self._view.release()
        self._view = self._buffers.acquire(max(size, len(rest) + SIZE_BYTES))
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._used = 0

    def _wake_with(self, missing: int) -> None:
        """Have the loop woken once so many bytes are there, or the end of the response."""
        wanted = 1 if missing < PATIENT_BYTES else min(missing, WAKE_BYTES)
        if wanted != self._low_water and self._socket is not None:
            self._low_water = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _deliver(self, view: memoryview, start: int, end: int) -> None:
        frame = view[start + SIZE_BYTES : end]
        (number,) = _SIZE(frame, 0)
        answer, _ = self._waiting.pop(number, (None, 0))
        if answer is None:
            self._transport.abort()
            self._end_with(f"a response to request {number}, which nobody asked")
        elif not answer.done():
            if end - start <= COPIED_BYTES:
                frame = memoryview(bytes(frame))
            else:
                self._used = max(self._used, end - start)
            answer.set_result(frame)

    def _end_with(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for answer, _ in waiting.values():
            if not answer.done():
                answer.set_exception(NetworkException(f"{self.where}: {why}"))
                answer.exception()  # who asked may have gone
