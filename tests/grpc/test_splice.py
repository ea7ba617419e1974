"""A client's connection joined with gRPC's socket: either side's end is the other's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from kept.node.grpc import splice as splicing
from kept.node.grpc.splice import splice

PIECE = bytes(1 << 20)


@asynccontextmanager
async def joined(
    directory: Path, closed: asyncio.Event
) -> AsyncIterator[tuple[socket.socket, asyncio.StreamWriter]]:
    """A client's socket, which takes nothing by itself, and gRPC's end."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[asyncio.StreamWriter] = loop.create_future()
    path = str(directory / "server")
    server = await asyncio.start_unix_server(lambda _, writer: accepted.set_result(writer), path)
    client, served = socket.socketpair()
    client.setblocking(False)
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=served)
    await splice(transport, b"PRI ", path, closed.set)
    yield client, await accepted
    await asyncio.wait_for(closed.wait(), 30)
    client.close()
    server.close()


def test_a_client_that_takes_nothing_is_closed_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splicing, "STALLED_S", 0.2)

    async def talk() -> None:
        async with joined(tmp_path, asyncio.Event()) as (_, server):
            for _ in range(4):
                server.write(PIECE)

    uvloop.run(talk())


def test_a_client_that_takes_it_gets_all_that_was_sent(tmp_path: Path) -> None:
    async def talk() -> None:
        async with joined(tmp_path, asyncio.Event()) as (client, server):
            server.write(PIECE)
            server.close()
            loop, size = asyncio.get_running_loop(), 0
            while more := await asyncio.wait_for(loop.sock_recv(client, 1 << 16), 30):
                size += len(more)
            assert size == len(PIECE)

    uvloop.run(talk())
