"""Strangers of gRPC, idle and half-way through a call, and those who have logged in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kept.client.security.jaas import PLAIN_MODULE
from kept.node.proto import broker_pb2
from tests.fuzz import seeds
from tests.support.grpc_calls import basic, call, calling

# isort: split
import grpc
import grpc.aio

ADMIN = basic("admin", "word")
SECURED = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "PLAIN",
    "plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_admin="word";',
}
PLACES = 4
PRODUCE = broker_pb2.ProduceRequest(topic="t", payload=b"v")
CONSUME = broker_pb2.ConsumeRequest(topic="t", partition=0, follow=True)
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


def announced(path: str, stream: int = 1) -> bytes:
    """The head of a call whose request never comes."""
    head = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    literals = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in head.items()
    )
    return seeds.h2_frame(seeds.HEADERS, seeds.END_HEADERS, stream, literals)


class Stranger:
    """A connection that speaks HTTP/2 and has not logged in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, calls: bytes = b"", host: str = "127.0.0.1") -> Stranger:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
        stranger = cls(reader, writer)
        stranger._writer.write(seeds.PREFACE + seeds.h2_frame(seeds.SETTINGS, 0, 0) + calls)
        acknowledged = reader.readuntil(b"\0\0\0\x04\x01")  # those settings
        await asyncio.wait_for(acknowledged, 60)
        return stranger

    async def closed(self) -> None:
        """Wait until it is closed."""
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(self._reader.read(), 60)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def begun(port: int, count: int) -> AsyncIterator[list[Any]]:
    """Calls over one connection whose request never comes. They have no deadline of their own."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        calls = [channel.stream_unary(CHECK)(nothing()) for _ in range(count)]
        for one in calls:
            await asyncio.wait_for(one.wait_for_connection(), 60)
        yield calls


async def first_status(calls: list[Any]) -> grpc.StatusCode:
    """That of the call that ends first."""
    codes = [asyncio.ensure_future(one.code()) for one in calls]
    return await asyncio.wait_for(next(asyncio.as_completed(codes)), 60)


@pytest.fixture
def start(lone_node: Any) -> Any:
    """A node with few places and a topic ``t``."""

    def start(**settings: str) -> Any:
        given = {"kept_grpc_max_connections": str(PLACES), "kept_grpc_max_requests": str(PLACES)}
        lone = lone_node(**{**given, **settings})
        lone.create("t")
        return lone

    return start


def test_idle_strangers_fill_no_place_of_who_has_logged_in(start: Any) -> None:
    lone = start(**SECURED)

    async def go() -> None:
        async with calling(lone.port, "Consume", CONSUME, ADMIN) as stream:
            assert (await call(lone.port, "Produce", PRODUCE, ADMIN)).offset == 0
            assert (await stream.read()).payload == b"v"
            strangers = [await Stranger.connect(lone.port) for _ in range(3 * PLACES)]
            await strangers[0].closed()
            assert (await call(lone.port, "Produce", PRODUCE, ADMIN)).offset == 1
            assert (await stream.read()).offset == 1
            for stranger in strangers:
                stranger.close()

    lone.run(go())


@pytest.mark.parametrize("settings", [SECURED, {}], ids=["secured", "nobody logs in"])
def test_calls_whose_request_never_comes_give_way(start: Any, settings: dict[str, str]) -> None:
    lone = start(**settings)
    login = ADMIN if settings else ""

    async def go() -> None:
        async with begun(lone.port, PLACES) as first, begun(lone.port, PLACES):
            assert (await call(lone.port, "Produce", PRODUCE, login)).offset == 0
            assert await first_status(first) is grpc.StatusCode.RESOURCE_EXHAUSTED

    lone.run(go())


@pytest.mark.parametrize(
    ("settings", "patience"),
    [
        (SECURED, {"kept_silent_ms": "1000"}),
        ({}, {"kept_request_receive_ms": "1000"}),
    ],
    ids=["secured", "nobody logs in"],
)
def test_a_call_whose_request_never_comes_ends(
    start: Any, settings: dict[str, str], patience: dict[str, str]
) -> None:
    lone = start(**settings, **patience)

    async def go() -> None:
        async with begun(lone.port, 1) as calls:
            assert await first_status(calls) is grpc.StatusCode.DEADLINE_EXCEEDED

    lone.run(go())


def watching(calls: int) -> bytes:
    """So many calls that do not end."""
    return b"".join(
        announced(WATCH, stream) + seeds.h2_frame(seeds.DATA, seeds.END_STREAM, stream, bytes(5))
        for stream in range(1, 2 * calls, 2)
    )


def test_watchers_without_a_login_give_way(start: Any) -> None:
    lone = start(**SECURED)

    async def go() -> None:
        strangers = [await Stranger.connect(lone.port, watching(1)) for _ in range(PLACES - 1)]
        strangers.append(await Stranger.connect(lone.port, watching(PLACES)))
        assert (await call(lone.port, "Produce", PRODUCE, ADMIN)).offset == 0
        for stranger in strangers:
            stranger.close()

    lone.run(go())


def test_watchers_of_one_address_leave_room_for_others_where_nobody_logs_in(start: Any) -> None:
    places, far = 8, "127.0.0.2"
    lone = start(kept_grpc_max_connections=str(places), kept_grpc_max_requests=str(places))

    async def go() -> None:
        one = [await Stranger.connect(lone.port, watching(1), far) for _ in range(places - 1)]
        one.append(await Stranger.connect(lone.port, watching(places), far))
        async with calling(lone.port, "Consume", CONSUME) as stream:
            assert (await call(lone.port, "Produce", PRODUCE)).offset == 0
            assert (await stream.read()).payload == b"v"
        for stranger in one:
            stranger.close()

    lone.run(go())
