"""A real node inside the test's process: handlers are called as the connection calls them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.config.node_config import NodeConfig
from kept.node.kafka import api
from kept.node.node import Node
from kept.node.runtime.logging import bugs
from kept.node.security.session import node_session
from tests.support.request_values import topic_values


@pytest.fixture(autouse=True)
def _no_bug_was_logged_before() -> None:
    """Each test sees its own in the log."""
    bugs.clear()


class Lone:
    """A started node, its loop, and ways to ask it."""

    def __init__(self, runner: asyncio.Runner, directory: str, **settings: str) -> None:
        self._runner = runner
        self._stopped = False
        given = {name.replace("_", "."): text for name, text in settings.items()}
        port = None if "listeners" in given else 0
        data_dir = None if "log.dirs" in given else directory
        config = NodeConfig.load(None, given, {}, port=port, data_dir=data_dir)

        # In this thread: CPython 3.11 cannot compile in two at once (gh-106905), and the node's
        # own preload, in its pool, compiles what pytest rewrites.
        api.preload()

        async def start() -> Node:
            node = Node(config)
            await node.start()
            return node

        self.node = runner.run(start())

    def run(self, awaitable: Any) -> Any:
        """Run on the node's loop until it is done."""

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())

    def stop(self) -> None:
        """Stop it cleanly, if it was not yet."""
        stopped, self._stopped = self._stopped, True
        if not stopped:
            self.run(self.node.stop())

    @property
    def port(self) -> int:
        return self.node.parts.listeners[0].port

    async def request(
        self,
        key: int,
        version: int,
        *,
        listener: str = "",
        tries: tuple[UUID, ...] = (),
        **values: Any,
    ) -> Any:
        """A request through kio's codec both ways; the typed response."""
        served = api.served()[key]
        assert served.min_version <= version <= served.max_version
        cls = protocol.message_type(key, version, EntityType.request)
        request, _ = protocol.decode(cls, protocol.encode(protocol.build(cls, values)))
        listener = listener or self.node.parts.listeners[0].name
        context = api.RequestContext(key, version, "test", node_session(listener), tries)
        values = await self.node.parts.handlers.complete(context, request)
        frame = protocol.encode_response(key, version, 7, values)
        return protocol.decode_response(key, version, frame[4:])[1]

    def ask(self, key: int, version: int, **values: Any) -> Any:
        """As :meth:`request`, from outside the loop."""
        return self.run(self.request(key, version, **values))

    async def created(self, name: str, partitions: int = 1, **configs: str) -> Any:
        """Create a topic; the CreateTopics result."""
        topic = {**topic_values(name, partitions, **configs), "replication_factor": -1}
        response = await self.request(19, 7, topics=[topic], timeout=1000, validate_only=False)
        (result,) = response.topics
        assert result.error_code.name == "none", result
        return result

    def create(self, name: str, partitions: int = 1, **configs: str) -> Any:
        """As :meth:`created`, from outside the loop."""
        return self.run(self.created(name, partitions, **configs))

    def http(self, text: str) -> tuple[int, dict[str, str], bytes]:
        """Send raw bytes over HTTP and read the answer to the end: status, headers, body."""
        (answer,) = self.exchange(text.encode("latin-1"), 1)
        return answer

    def exchange(self, data: bytes, answers: int) -> list[tuple[int, dict[str, str], bytes]]:
        """Send bytes on one connection and parse so many answers."""
        return self.run(_exchange(self.port, data, answers))

    def get(self, path: str) -> Any:
        """The JSON of a GET that must succeed."""
        status, _, body = self.http(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        data = json.dumps(body)
        status, _, answer = self.http(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
            f"Content-Length: {len(data)}\r\n\r\n{data}"
        )
        return status, json.loads(answer)


async def _exchange(port: int, data: bytes, answers: int) -> list[Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return [await asyncio.wait_for(_answer(reader), 60) for _ in range(answers)]
    finally:
        writer.close()
        await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    headers = {}
    for line in head[1:-2]:
        name, _, text = line.partition(": ")
        headers[name.lower()] = text
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while headers.get("transfer-encoding") == "chunked":
        size = int(await reader.readline(), 16)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
        if not size:
            break
    return status, headers, body


@pytest.fixture
def lone_node(tmp_path) -> Iterator[Any]:
    """Starts nodes: ``lone_node(log_segment_bytes="2000")``; they are stopped at the end."""
    nodes: list[Lone] = []
    with asyncio.Runner() as runner:

        def start(**settings: str) -> Lone:
            nodes.append(Lone(runner, str(tmp_path / f"data-{len(nodes)}"), **settings))
            return nodes[-1]

        yield start
        for node in nodes:
            node.stop()


@pytest.fixture
def lone(lone_node) -> Lone:
    """One node with default settings."""
    return lone_node()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is a coroutine function of a ``lone`` node on its loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or "lone" not in pyfuncitem.funcargs:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.funcargs["lone"].run(pyfuncitem.obj(**given))
    return True
