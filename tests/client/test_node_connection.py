"""Node-to-node requests against a server that answers as it is told."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest

from kept.client import node_connection
from kept.client.node_connection import NodeConnection
from kept.storage.errors import NetworkException, RequestTimedOut

Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


def response(correlation_id: int, body: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id) + body


def talk(server: Server, client: Callable[[NodeConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await server(reader, writer)
            finally:
                writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        connection = await NodeConnection.open("127.0.0.1", port, client_id="node-1")
        try:
            await client(connection)
        finally:
            connection.close()
            listening.close()
            await listening.wait_closed()

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [(0, 1, 3), (100, 70_000, 5, 300_000, 64 * 1024 - 8, 1)])
def test_responses_of_any_size_find_their_requests(sizes: tuple[int, ...]) -> None:
    bodies = [bytes([n % 251]) * size for n, size in enumerate(sizes)]

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ids = [struct.unpack_from(">i", await frame(reader), 4)[0] for _ in sizes]
        writer.write(b"".join(response(n, body) for n, body in zip(ids, bodies, strict=True)))
        await writer.drain()
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        futures = [connection.request(1, 17, b"x") for _ in sizes]
        found = [bytes((await future)[4:]) for future in futures]
        assert found == bodies

    talk(server, client)


def test_a_request_has_kafkas_header() -> None:
    seen: list[bytes] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await frame(reader))
        writer.write(response(1, b""))
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        await connection.request(1, 17, b"body")

    talk(server, client)
    assert seen == [struct.pack(">hhih", 1, 17, 1, 6) + b"node-1\0body"]


def test_a_broken_connection_ends_every_request() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame(reader)
        writer.write(response(1, b"")[:6])
        await writer.drain()

    async def client(connection: NodeConnection) -> None:
        first, second = connection.request(1, 17, b""), connection.request(1, 17, b"")
        for future in (first, second):
            with pytest.raises(NetworkException):
                await future
        assert connection.closed
        with pytest.raises(NetworkException):
            await connection.request(1, 17, b"")

    talk(server, client)


@pytest.mark.parametrize("wrong", [b"HTTP/1.1 400 Bad Request\r\n", response(99, b"")])
def test_what_is_no_response_closes_the_connection(wrong: bytes) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame(reader)
        writer.write(wrong)
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        with pytest.raises(NetworkException):
            await connection.request(1, 17, b"")
        assert connection.closed

    talk(server, client)


def test_nobody_there() -> None:
    async def run() -> None:
        with pytest.raises(NetworkException, match=r"127\.0\.0\.1:1"):
            await NodeConnection.open("127.0.0.1", 1, client_id="node-1")

    asyncio.run(run())


def test_a_view_stays_what_it_is_while_it_is_held_and_its_buffer_is_used_again_after() -> None:
    size = 200_000

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for n in range(1, 8):
            await frame(reader)
            writer.write(response(n, bytes([n]) * size))

    async def client(connection: NodeConnection) -> None:
        held = []
        for _ in range(4):
            held.append((await connection.request(1, 17, b""))[4:])
        assert [set(view) for view in held] == [{1}, {2}, {3}, {4}]
        del held
        first = await connection.request(1, 17, b"")
        where = first.obj
        del first
        again = await connection.request(1, 17, b"")
        assert again.obj is where
        other = await connection.request(1, 17, b"")
        assert other.obj is not where, "somebody holds a view of it"
        assert set(again[4:]) == {6}

    talk(server, client)


def test_a_request_that_nobody_waits_for_any_more_disturbs_no_other() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame(reader)
        await frame(reader)
        writer.write(response(1, b"late") + response(2, b"right"))
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        first = connection.request(1, 17, b"")
        first.cancel()
        assert bytes(await connection.request(1, 17, b""))[4:] == b"right"

    talk(server, client)


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "MAX_OUTSTANDING", 2)

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        waiting = [connection.request(1, 17, b"") for _ in range(2)]
        with pytest.raises(NetworkException, match="2 requests are unanswered"):
            await connection.request(1, 17, b"")
        connection.close()
        for answer in waiting:
            with pytest.raises(NetworkException, match="closed here"):
                await answer

    talk(server, client)


def test_an_answer_that_is_late_is_nobodys_and_the_connection_goes_on() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame(reader)
        await frame(reader)
        await frame(reader)
        writer.write(response(1, b"late") + response(2, b"right"))
        await reader.read()

    async def client(connection: NodeConnection) -> None:
        late = connection.request(1, 17, b"", timeout_s=0.02)
        other = connection.request(1, 17, b"", timeout_s=60.0)
        with pytest.raises(RequestTimedOut, match="no answer in time"):
            await late
        silent = connection.request(1, 17, b"", timeout_s=0.02)
        assert bytes(await other)[4:] == b"right"
        with pytest.raises(RequestTimedOut, match="no answer in time"):
            await silent
        assert not connection.closed

    talk(server, client)


def test_a_buffer_is_as_large_as_responses_are_of_late() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for n in range(1, 202):
            await frame(reader)
            writer.write(response(n, bytes(3_000_000 if n == 1 else 5_000)))
            await writer.drain()

    async def client(connection: NodeConnection) -> None:
        first = await connection.request(1, 17, b"")
        assert memoryview(first.obj).nbytes >= 3_000_000
        del first
        for _ in range(200):
            view = await connection.request(1, 17, b"")
        assert memoryview(view.obj).nbytes == node_connection.BUFFER_BYTES

    talk(server, client)
