"""A client's socket to a node in the test's own process: it says what a test wants."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from kept.client.protocol import messages as protocol

VERSIONS, HANDSHAKE, AUTHENTICATE, METADATA = 18, 17, 36, 3
PATIENCE_S = 60


class RawClient:
    """Requests as kio encodes them, or bytes. Closed where a context of it ends."""

    @classmethod
    async def connect(
        cls, port: int, user: str = "", password: str = "", *, host: str = "127.0.0.1"
    ) -> RawClient:
        """Connect, from an address of this machine; log in by PLAIN, if a user is given."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)))
        if user:
            assert not await client.log_in(user, password)
        return client

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.writer.close()

    def send(self, key: int, version: int, **values: Any) -> None:
        self.writer.write(protocol.encode_request(key, version, 7, "test", values))

    def send_bare(self, token: bytes) -> None:
        """A token of SASL without a request around it."""
        self.writer.write(struct.pack(">i", len(token)) + token)

    async def receive(self, key: int, version: int) -> Any:
        """The next response."""
        correlation_id, response = protocol.decode_response(key, version, await self.frame())
        assert correlation_id == 7
        return response

    async def frame(self) -> bytes:
        """The next response without its length."""
        async with asyncio.timeout(PATIENCE_S):
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def ask(self, key: int, version: int, **values: Any) -> Any:
        self.send(key, version, **values)
        return await self.receive(key, version)

    async def ends(self) -> bool:
        """Whether nothing comes before the node closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), PATIENCE_S) == b""
        except ConnectionResetError:  # it was aborted with bytes unread
            return True

    async def log_in(self, user: str, password: str) -> int:
        """By PLAIN; the error code."""
        await self.ask(HANDSHAKE, 1, mechanism="PLAIN")
        token = f"\0{user}\0{password}".encode()
        return int((await self.ask(AUTHENTICATE, 2, auth_bytes=token)).error_code)

    async def login(self, client: Any, mechanism: str, *, version: int = 2) -> Any:
        """The whole exchange of a mechanism; the last response."""
        response = await self.ask(HANDSHAKE, 1, mechanism=mechanism)
        assert response.error_code.name == "none", response
        token = client.step(None)
        while not client.done:
            response = await self.ask(AUTHENTICATE, version, auth_bytes=token)
            if response.error_code.name != "none":
                return response
            token = client.step(response.auth_bytes)
        return response

    async def is_in(self) -> bool:
        """Whether it may ask for metadata, and somebody is named."""
        response = await self.ask(METADATA, 9, topics=None)
        return bool(response.brokers)
