"""A client's socket that sends damage and reads what comes, if anything does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final

QUIET_S: Final = 0.05
"""A node that says nothing for so long waits for more."""
GONE: Final = (OSError, TimeoutError, RuntimeError)
"""The node has closed it, or is quiet; RuntimeError is uvloop's for a transport that is closed."""
MAX_ANSWER_BYTES: Final = 256 * 1024


class Exchange:
    """One connection. Errors of the socket are the node's right: they end what is sent and read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes, random: Random) -> None:
        """In one piece or in several."""
        with suppress(*GONE):
            if random.random() < 0.2 and len(data) > 1:
                cut = random.randrange(1, len(data))
                self._writer.write(data[:cut])
                await asyncio.sleep(0.001)
                data = data[cut:]
            self._writer.write(data)
            await asyncio.wait_for(self._writer.drain(), 5)

    async def read(self, quiet_s: float = QUIET_S) -> bytes:
        """What comes until the node is quiet or closes."""
        read = bytearray()
        with suppress(*GONE):
            while len(read) < MAX_ANSWER_BYTES:
                more = await asyncio.wait_for(self._reader.read(65536), quiet_s)
                if not more:
                    break
                read += more
        return bytes(read)

    async def read_some(self) -> bytes:
        """The next bytes; none when it is quiet, or closed."""
        with suppress(*GONE):
            return await asyncio.wait_for(self._reader.read(65536), 10 * QUIET_S)
        return b""

    async def read_frame(self) -> bytes:
        """A frame of Kafka's without its length; none when there is none."""
        with suppress(*GONE, asyncio.IncompleteReadError):
            async with asyncio.timeout(10 * QUIET_S):
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                return await self._reader.readexactly(size)
        return b""

    def end(self) -> None:
        """Say that no more comes."""
        with suppress(*GONE):
            self._writer.write_eof()

    def close(self, *, reset: bool) -> None:
        """Go, with an end or a reset."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()


@asynccontextmanager
async def connected(port: int, random: Random) -> AsyncIterator[Exchange]:
    """A connection to the node; it is closed or reset at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    exchange = Exchange(reader, writer)
    try:
        yield exchange
    finally:
        exchange.close(reset=random.random() < 0.3)
        with suppress(*GONE):
            await writer.wait_closed()
