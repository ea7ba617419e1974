"""A client's socket on a SASL listener, which says what a test wants."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from kept.client.protocol import messages as protocol

VERSIONS, HANDSHAKE, AUTHENTICATE, METADATA = 18, 17, 36, 3


class Peer:
    """Connected while the context lasts."""

    def __init__(self, lone: Any) -> None:
        self.lone = lone

    async def __aenter__(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.lone.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, key: int, version: int, **values: Any) -> None:
        self.writer.write(protocol.encode_request(key, version, 7, "test", values))

    def send_bare(self, token: bytes) -> None:
        self.writer.write(struct.pack(">i", len(token)) + token)

    async def receive(self, key: int, version: int) -> Any:
        correlation_id, response = protocol.decode_response(key, version, await self.receive_bare())
        assert correlation_id == 7
        return response

    async def receive_bare(self) -> bytes:
        (size,) = struct.unpack(">i", await asyncio.wait_for(self.reader.readexactly(4), 60))
        return await asyncio.wait_for(self.reader.readexactly(size), 60)

    async def ask(self, key: int, version: int, **values: Any) -> Any:
        self.send(key, version, **values)
        return await self.receive(key, version)

    async def ends(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 60) == b""
        except ConnectionResetError:  # it was aborted with bytes unread
            return True

    async def login(self, client: Any, mechanism: str, *, version: int = 2) -> Any:
        """The whole exchange; the last response."""
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
        response = await self.ask(METADATA, 9, topics=None)
        return bool(response.brokers)
