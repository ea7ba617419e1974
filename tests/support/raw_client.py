"""Requests over a socket to a node in the test's own process."""

from __future__ import annotations

import asyncio
from typing import Any

from kept.client.protocol import messages as protocol

HANDSHAKE, AUTHENTICATE = 17, 36


class RawClient:
    """A client's socket: requests as kio encodes them."""

    @classmethod
    async def connect(cls, port: int, user: str = "", password: str = "") -> RawClient:
        """Connect to this machine, and log in by PLAIN as a user if one is given."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        if user:
            assert not await client.log_in(user, password)
        return client

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, key: int, version: int, **values: Any) -> Any:
        self._writer.write(protocol.encode_request(key, version, 7, "test", values))
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return protocol.decode_response(key, version, await self._reader.readexactly(size))[1]

    async def log_in(self, user: str, password: str) -> int:
        await self.ask(HANDSHAKE, 1, mechanism="PLAIN")
        token = f"\0{user}\0{password}".encode()
        return int((await self.ask(AUTHENTICATE, 2, auth_bytes=token)).error_code)

    def close(self) -> None:
        self._writer.close()
