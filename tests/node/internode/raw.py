"""A connection to a node that sends what a test wants, whether or not a node would send it."""

from __future__ import annotations

import asyncio
from typing import Self

from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.messages import AppendEntries
from kept.node.internode import protobuf_conversion
from kept.node.internode.frames import CHUNK_BYTES, Frame, FrameKind, FrameReader, LongBody, encode
from kept.node.internode.hello import PREFACE, hello_from, packed, unpacked
from kept.node.internode.identity import Hello
from kept.node.internode.protobuf_conversion import METHODS, codecs


def append(sender, to, number, data=b""):
    """A Raft message that tells, by its index, which one it is."""
    entries = (Entry(1, number, data),) if data else ()
    return AppendEntries(
        term=1, sender=sender, to=to, prev_index=number, prev_term=1, entries=entries
    )


async def until(condition):
    """Wait for it; the test's own time is the deadline."""
    while not condition():
        await asyncio.sleep(0.001)


class RawConnection:
    """Made with :meth:`to`; ``async with`` closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameReader()

    @classmethod
    async def to(cls, port: int) -> Self:
        """A TCP connection to a port of this machine; nothing is sent yet."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(
        self, kind: FrameKind, correlation_id: int = 0, method: int = 0, body: bytes = b""
    ) -> None:
        """Send a body, in several frames where it is long."""
        if len(body) <= CHUNK_BYTES:
            self.writer.write(encode(kind, correlation_id, method, body))
            return
        rest = LongBody(kind, correlation_id, method, body)
        while rest.rest_bytes:
            self.writer.write(rest.next_frame())

    async def greet(self, hello: Hello) -> Hello | None:
        """Exchange Hellos; None: the node closed the connection."""
        self.writer.write(PREFACE + packed(hello))
        data = b""
        while (found := unpacked(data)) is None:
            more = await self.reader.read(65536)
            if not more:
                return None
            data += more
        hello, end = found
        self._frames.feed(data[end:])
        return hello

    async def open(self, hello: Hello) -> Hello:
        """Greet and open; the Hello that answers says whether it is refused."""
        await self.greet(hello)
        self.send(FrameKind.OPEN, body=codecs().hello.to_bytes(hello))
        frame = await self.receive()
        assert frame is not None and frame.kind is FrameKind.OPEN, frame
        return hello_from(frame.body)

    async def receive(self) -> Frame | None:
        """The next frame; None: the node closed the connection."""
        while (frame := self._frames.next()) is None:
            try:
                data = await self.reader.read(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return frame

    async def closed(self) -> None:
        """Read until the node closes the connection."""
        while await self.receive() is not None:
            pass

    async def call(self, method: str, body: bytes, call_id: int = 1) -> Frame | None:
        """The frame that answers a call; None: the connection was closed."""
        self.send(FrameKind.REQUEST, call_id, METHODS[method], body)
        return await self.receive()


async def send_messages(port: int, hello: Hello, *messages: object) -> str:
    """Open a connection, send Raft messages, and close; why it was refused, if it was."""
    async with await RawConnection.to(port) as connection:
        refusal = (await connection.open(hello)).refusal
        if not refusal:
            for message in messages:
                body = protobuf_conversion.encode_raft(message)  # type: ignore[arg-type]
                connection.send(FrameKind.MESSAGE, body=body)
            connection.send(FrameKind.PING)
            while (frame := await connection.receive()) is not None:
                if frame.kind is FrameKind.PONG:
                    break  # all before it was read
        return refusal
