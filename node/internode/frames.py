"""The frames that nodes send each other, once they have exchanged Hellos. Pure.

::

    uint32  length of what follows
    uint8   kind (:class:`FrameKind`); :data:`MORE` is set where the body goes on in a later frame
    uint32  correlation id: of a call, a RESPONSE or ERROR has that of its REQUEST
    uint16  method of a call, lane of an OPEN
    bytes   body: a protobuf message, or a piece of one

Integers are big-endian. A body above :data:`CHUNK_BYTES` travels in several frames of that size and
a last one; frames of other bodies may come in between, so that nobody waits for a large one.
:class:`FrameReader` puts bodies together again, and refuses what no node sends.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kept.storage.errors import CorruptMessage

CHUNK_BYTES: Final = 64 * 1024
"""Of a body, in one frame: at 100 MB/s a heartbeat waits for less than a millisecond."""
MAX_BODY_BYTES: Final = 65 * 1024 * 1024
"""Of one body, and of all bodies of a connection that are not whole yet: the largest entry of the
metadata log and what is around it."""
MORE: Final = 0x80
"""Bit of the kind."""

_HEADER: Final = struct.Struct(">IBIH")
_LENGTH_BYTES: Final = 4
_HEAD_BYTES: Final = _HEADER.size - _LENGTH_BYTES
_COMPACT_BYTES: Final = 256 * 1024


class FrameKind(IntEnum):
    """What a frame is. Numbers are never used for anything else."""

    OPEN = 1
    """A Hello: the first frame in each direction. The receiver answers it or refuses."""
    REQUEST = 2
    RESPONSE = 3
    ERROR = 4
    """A Failure in place of a response."""
    CANCEL = 5
    """The caller of that request waits no more."""
    MESSAGE = 6
    """A message of Raft. It has no answer."""
    HOLD = 7
    """From now on the sender sends its heartbeats here: that the connection breaks is news."""
    RELEASE = 8
    """It does so no more."""
    SNAPSHOT_HEAD = 9
    SNAPSHOT_CHUNK = 10
    PING = 11
    PONG = 12


_KINDS: Final = {int(kind): kind for kind in FrameKind}
MESSAGES: Final = frozenset({FrameKind.MESSAGE, FrameKind.SNAPSHOT_HEAD, FrameKind.SNAPSHOT_CHUNK})
"""What has no answer, and travels in order."""
_CHUNKED: Final = MESSAGES | {FrameKind.REQUEST, FrameKind.RESPONSE}


class Frame(NamedTuple):
    """One frame with its whole body."""

    kind: FrameKind
    correlation_id: int
    method: int
    body: bytes


def encode(kind: FrameKind, correlation_id: int = 0, method: int = 0, body: bytes = b"") -> bytes:
    """A frame whose body is no longer than :data:`CHUNK_BYTES`."""
    return _HEADER.pack(_HEAD_BYTES + len(body), kind, correlation_id, method) + body


class LongBody:
    """A body above :data:`CHUNK_BYTES` on its way out, frame by frame."""

    def __init__(self, kind: FrameKind, correlation_id: int, method: int, body: bytes) -> None:
        self.kind = kind
        self.size = len(body)
        self._head = correlation_id, method
        self._body = memoryview(body)
        self._position = 0

    @property
    def rest_bytes(self) -> int:
        """What is still to be sent of it."""
        return self.size - self._position

    def next_frame(self) -> bytes:
        """The next frame; the last one leaves no rest."""
        start, end = self._position, min(self._position + CHUNK_BYTES, self.size)
        self._position = end
        tag = self.kind if end == self.size else self.kind | MORE
        return _HEADER.pack(_HEAD_BYTES + end - start, tag, *self._head) + self._body[start:end]


class FrameReader:
    """Bytes in, frames out. Memory grows with what has arrived, not with what was announced.
    ``takes_long``: bodies may come in several frames.
    """

    def __init__(self, *, takes_long: bool = True) -> None:
        self.takes_long = takes_long
        self._buffer = bytearray()
        self._position = 0
        self._partial: dict[tuple[FrameKind, int], bytearray] = {}
        self._partial_bytes = 0

    def feed(self, data: bytes) -> None:
        """Bytes that came."""
        if self._position == len(self._buffer):
            self._buffer = bytearray(data)
            self._position = 0
            return
        if self._position > _COMPACT_BYTES:
            del self._buffer[: self._position]
            self._position = 0
        self._buffer += data

    def next(self) -> Frame | None:
        """The next whole body, or None until more bytes have come. Raises CorruptMessage; nothing
        after that can be read.
        """
        while True:
            frame = self._next_frame()
            if frame is None:
                return None
            tag, correlation_id, method, body = frame
            kind = _KINDS.get(tag & ~MORE)
            if kind is None:
                raise CorruptMessage(f"a frame of kind {tag & ~MORE}")
            key = kind, correlation_id
            if tag & MORE:
                self._add_chunk(key, body)
                continue
            partial = self._partial.pop(key, None)
            if partial is not None:
                self._partial_bytes -= len(partial)
                partial += body
                body = bytes(partial)
            return Frame(kind, correlation_id, method, body)

    def _next_frame(self) -> tuple[int, int, int, bytes] | None:
        buffer, start = self._buffer, self._position
        available = len(buffer) - start
        if available < _LENGTH_BYTES:
            return None
        length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
        if not _HEAD_BYTES <= length <= _HEAD_BYTES + CHUNK_BYTES:
            raise CorruptMessage(
                f"a frame of {length} bytes; {_HEAD_BYTES} to {_HEAD_BYTES + CHUNK_BYTES} are right"
            )
        if available < _LENGTH_BYTES + length:
            return None
        _, tag, correlation_id, method = _HEADER.unpack_from(buffer, start)
        self._position = end = start + _LENGTH_BYTES + length
        return tag, correlation_id, method, bytes(memoryview(buffer)[start + _HEADER.size : end])

    def _add_chunk(self, key: tuple[FrameKind, int], body: bytes) -> None:
        kind, correlation_id = key
        if kind not in _CHUNKED or not self.takes_long:
            raise CorruptMessage(f"a {kind.name} in several frames")
        if len(body) != CHUNK_BYTES:
            raise CorruptMessage(
                f"{len(body)} bytes of a {kind.name} of which more follows; {CHUNK_BYTES} are right"
            )
        self._partial_bytes += len(body)
        if self._partial_bytes > MAX_BODY_BYTES:
            raise CorruptMessage(
                f"more than {MAX_BODY_BYTES} bytes of bodies that are not whole, the last one of "
                f"{kind.name} {correlation_id}"
            )
        self._partial.setdefault(key, bytearray()).extend(body)
