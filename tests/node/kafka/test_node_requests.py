"""Requests of a node to other brokers: over a named connection each."""

from __future__ import annotations

import asyncio
import struct
import uuid
from typing import Any

import pytest

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.kafka.node_requests import NodeRequests
from kept.node.metadata.node_identity import NodeIdentity
from kept.storage.errors import NetworkException, RequestTimedOut
from tests.support.loops import run
from tests.support.replicas import live_config

KEY, VERSION = ApiKey.LIST_GROUPS, 3
INCARNATION = uuid.UUID(int=5)
VALUES: dict[str, Any] = {}
ANSWER = {"error_code": 0, "groups": ()}


class Broker:
    """Another node, which answers, or hangs up, or says nothing, request by request."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.client_ids: list[str] = []
        self.address: tuple[str, int] | None = None
        addresses: Any = self
        identity = NodeIdentity(0, "cluster", 9)
        self.requests = NodeRequests("markers", live_config(), identity, INCARNATION, addresses)

    def node_address(self, node_id: int) -> tuple[str, int] | None:
        return self.address

    def node_tls(self) -> None:
        pass

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = server.sockets[0].getsockname()[:2]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while size := await reader.read(4):
                frame = await reader.readexactly(int.from_bytes(size))
                _, _, number, length = struct.unpack_from(">hhih", frame)
                self.client_ids.append(frame[10 : 10 + length].decode())
                answer = self.answers.pop(0)
                if answer == "hang up":
                    break
                if answer == "answer":
                    writer.write(protocol.encode_response(KEY, VERSION, number, ANSWER))
        finally:
            writer.close()

    async def ask(self, node_id: int = 1, timeout_s: float = 30) -> Any:
        return await self.requests.call(node_id, KEY, VERSION, VALUES, timeout_s)


def name(number: int) -> str:
    return f"kept-markers-0-{INCARNATION.hex}-{number}"


@run
async def test_a_connection_serves_many_requests_and_the_next_has_the_next_number() -> None:
    broker = Broker("answer", "answer", "hang up", "answer")
    async with await broker.listen():
        for _ in range(2):
            assert int((await broker.ask()).error_code) == 0
        with pytest.raises(NetworkException):
            await broker.ask()
        await broker.ask()
        assert broker.client_ids == [name(1), name(1), name(1), name(2)]
        await broker.requests.close()


@run
async def test_a_connection_without_an_answer_in_time_is_given_up() -> None:
    """What it carried may still be served: nothing more goes over it."""
    broker = Broker("nothing", "answer")
    async with await broker.listen():
        with pytest.raises(RequestTimedOut):
            await broker.ask(timeout_s=0.05)
        await broker.ask()
        assert broker.client_ids == [name(1), name(2)]
        await broker.requests.close()
        with pytest.raises(NetworkException):
            await broker.ask()


@run
async def test_a_node_without_an_address_is_not_reached() -> None:
    broker = Broker()
    with pytest.raises(NetworkException, match="node 1"):
        await broker.ask()
