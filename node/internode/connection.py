"""One connection between two nodes: frames out and in, fairly, and whether the other side is there.

:class:`Connection` is the protocol of both ends, from the Hellos on (:mod:`.hello`). What frames
mean is for its handler: :class:`.peer_channel.ChannelSession` at the node that connected, and
:class:`.server.PeerSession` at the one that was connected to. It uses nothing but its loop's timers
and its transport, so a simulated loop carries it, too.

*Out*: frames of short bodies go first, in order; then messages, one at a time; long bodies share
what room is left, a chunk each in turn. While the transport's buffer is full all wait. *In*: after
:data:`FRAMES_PER_TURN` frames others have their turn on the loop. A side that receives nothing for
:data:`KEEPALIVE_S` asks for a sign of life; without one the host is gone or cut off (a process that
ends leaves FIN or RST), and the connection is closed. So is one on which something comes that no
node sends, with one line in the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Protocol

from kept.node.internode.frames import (
    CHUNK_BYTES,
    MAX_BODY_BYTES,
    MESSAGES,
    Frame,
    FrameKind,
    FrameReader,
    LongBody,
    encode,
)
from kept.node.runtime.logging import log
from kept.storage.errors import CorruptMessage

KEEPALIVE_S: Final = 10.0
"""A connection on which nothing comes for so long is asked for a sign of life."""
KEEPALIVE_ANSWER_S: Final = 5.0
"""It is closed when none comes within this."""
LATE_S: Final = 1.0
"""A timer that is later than this shows that this process stood still, and nothing of the other."""
HIGH_WATER_BYTES: Final = 256 * 1024
"""Unsent bytes in the transport at which nothing more is given to it."""
FRAMES_PER_TURN: Final = 64
"""Frames that are worked off before others have their turn on the loop: a message takes 30 us."""
MAX_UNSENT_BYTES: Final = 8 * 1024 * 1024
"""Of answers that the other side does not take: beyond that no further request is read."""
WRITES_PER_TURN: Final = 16
"""Messages and chunks that are written in one turn: a chunk takes some 30 us."""


class Handler(Protocol):
    """Who acts on what comes, and has messages to send."""

    def frame_received(self, frame: Frame) -> None:
        """A frame came. Raises CorruptMessage for one that no node sends."""

    def next_message(self) -> tuple[FrameKind, bytes] | None:
        """The next message to send, with its kind; None: there is none
        (:meth:`Connection.message_due`).
        """

    def connection_lost(self) -> None:
        """The connection is closed, by whichever side; called once."""


class Connection(asyncio.Protocol):
    """One connection between two nodes. ``peer`` names the other side in the log. ``serves``: this
    is the side that answers, and that reads no further requests while its answers are not taken;
    the other one may send bodies of several frames once it is :meth:`admitted`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: Any,
        handler: Handler,
        peer: str,
        *,
        serves: bool = False,
    ) -> None:
        self.peer = peer
        self.closed = False
        """Nothing is sent or received any more."""
        self.queued_bytes = 0
        """What waits to be given to the transport."""
        self._loop = loop
        self._transport = transport
        self._handler = handler
        self._serves = serves
        self._lost = False
        self._reader = FrameReader(takes_long=not serves)
        self._reading = True
        self._next_read: asyncio.Handle | None = None
        """The turn of the frames that came already; nothing is read until then."""
        self._short: deque[bytes] = deque()
        self._long: deque[LongBody] = deque()
        self._long_bytes = 0
        """The other side takes bodies of :data:`MAX_BODY_BYTES` at a time: further ones wait."""
        self._long_waiting: deque[LongBody] = deque()
        self._message_due = False
        self._message_under_way = False
        self._full = False
        self._next_write: asyncio.Handle | None = None
        self._received_at = loop.time()
        self._ping_sent = False
        self._keepalive = loop.call_later(
            KEEPALIVE_S, self._check_alive, self._received_at + KEEPALIVE_S
        )

    def start(self, first_bytes: bytes = b"") -> None:
        """Serve the transport, of which ``first_bytes`` were read already."""
        self._transport.set_protocol(self)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._transport.resume_reading()
        if first_bytes:
            self.data_received(first_bytes)

    def admitted(self) -> None:
        """The other side is a node of this cluster: what it sends may be long."""
        self._reader.takes_long = True

    def close(self) -> None:
        """Send what was given to the transport, then close."""
        self._transport.close()

    def abort(self, why: str = "") -> None:
        """Close at once, with one line if there is a reason to tell."""
        if why and not self.closed:
            log.warning("connection between nodes closed", peer=self.peer, reason=why)
        self.closed = True
        self._transport.abort()

    # Out.

    def send(
        self, kind: FrameKind, correlation_id: int = 0, method: int = 0, body: bytes = b""
    ) -> None:
        """Send a body of any length up to :data:`.frames.MAX_BODY_BYTES`. After the end it is
        lost.
        """
        if self.closed:
            return
        self._enqueue(kind, correlation_id, method, body)
        self._write()

    def message_due(self) -> None:
        """The handler has messages to send: it is asked for each when there is room for it."""
        self._message_due = True
        self._write()

    def _enqueue(self, kind: FrameKind, correlation_id: int, method: int, body: bytes) -> bool:
        """Whether it is a long body."""
        if len(body) <= CHUNK_BYTES:
            frame = encode(kind, correlation_id, method, body)
            self.queued_bytes += len(frame)
            self._short.append(frame)
            return False
        self.queued_bytes += len(body)
        self._long_waiting.append(LongBody(kind, correlation_id, method, body))
        self._begin_long()
        return True

    def _begin_long(self) -> None:
        while self._long_waiting:
            size = self._long_waiting[0].size
            if self._long_bytes + size > MAX_BODY_BYTES:
                return
            self._long_bytes += size
            self._long.append(self._long_waiting.popleft())

    def _write(self) -> None:
        if self._next_write is None:
            self._write_while_there_is_room()
            if not (self._reading or self._next_read or self._backlogged):
                self._read_later()

    def _write_while_there_is_room(self) -> None:
        room = WRITES_PER_TURN
        while not self._full and not self.closed:
            if self._short:
                frame = self._short.popleft()
                self.queued_bytes -= len(frame)
                self._transport.write(frame)
                continue
            if room == 0:
                self._next_write = self._loop.call_soon(self._write_more)
                return
            room -= 1
            if self._message_due and not self._message_under_way:
                self._take_message()
            elif self._long:
                self._write_chunk()
            else:
                return

    def _take_message(self) -> None:
        message = self._handler.next_message()
        if message is None:
            self._message_due = False
            return
        kind, body = message
        self._message_under_way = self._enqueue(kind, 0, 0, body)

    def _write_chunk(self) -> None:
        body = self._long.popleft()
        before = body.rest_bytes
        self._transport.write(body.next_frame())
        self.queued_bytes -= before - body.rest_bytes
        if body.rest_bytes:
            self._long.append(body)
            return
        self._long_bytes -= body.size
        if body.kind in MESSAGES:
            self._message_under_way = False
        self._begin_long()

    def _write_more(self) -> None:
        self._next_write = None
        self._write()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """It has room again."""
        self._full = False
        if self._backlogged:
            self._received_at = self._loop.time()  # it lives: it takes answers
            self._ping_sent = False
        self._write()

    # In.

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._received_at = self._loop.time()
        self._ping_sent = False
        self._reader.feed(data)
        if self._reading:
            self._read()

    @property
    def _backlogged(self) -> bool:
        return self._serves and self.queued_bytes > MAX_UNSENT_BYTES

    def _read(self) -> None:
        self._next_read = None
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._backlogged:
                    self._pause_reading()
                    return
                frame = None if self.closed else self._reader.next()
                if frame is None:
                    self._resume_reading()
                    return
                if frame.kind is FrameKind.PING:
                    self.send(FrameKind.PONG)
                elif frame.kind is not FrameKind.PONG:
                    self._handler.frame_received(frame)
        except CorruptMessage as error:
            self.abort(str(error))
            return
        self._pause_reading()
        self._read_later()

    def _read_later(self) -> None:
        self._next_read = self._loop.call_soon(self._read)

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _check_alive(self, due: float) -> None:
        now = self._loop.time()
        next_due = self._received_at + KEEPALIVE_S
        if now >= next_due:
            if self._ping_sent and now - due < LATE_S:
                self.abort(f"no sign of life for {now - self._received_at:.0f} s")
                return
            self._ping_sent = True
            self.send(FrameKind.PING)
            next_due = now + KEEPALIVE_ANSWER_S
        self._keepalive = self._loop.call_at(next_due, self._check_alive, next_due)

    def eof_received(self) -> bool:
        """The other side sends no more: close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The transport is closed."""
        if self._lost:
            return
        self._lost = self.closed = True
        self._keepalive.cancel()
        for turn in (self._next_read, self._next_write):
            if turn is not None:
                turn.cancel()
        self._short.clear()
        self._long.clear()
        self._long_waiting.clear()
        self.queued_bytes = 0
        self._reader = FrameReader()  # bodies that came in part: up to 65 MiB
        self._handler.connection_lost()
