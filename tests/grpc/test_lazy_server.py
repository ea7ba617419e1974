"""The gRPC server is loaded when the first client comes, and again where that failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.node.grpc.lazy_server import LazyServer
from tests.support.given import Given
from tests.support.loops import run


class Server:
    """As much of a server as is started."""

    def __init__(self, _services: object, _callers: object) -> None:
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        pass

    async def ended(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        self.stopped.set()


@run
async def test_a_start_that_failed_in_whatever_way_is_tried_again() -> None:
    failures: list[Exception] = [
        ImportError("planted"),
        OSError("planted"),
        RuntimeError("planted"),
    ]

    async def in_thread(_load: object) -> type[Server]:
        if failures:
            raise failures.pop()
        return Server

    runtime: Any = Given(loop=asyncio.get_running_loop(), in_thread=in_thread)
    config: Any = Given()
    server = LazyServer(runtime, config, lambda: Given())  # type: ignore[arg-type,return-value]
    for kind in (RuntimeError, OSError, ImportError):
        with pytest.raises(kind, match="planted"):
            await server._started()
    assert isinstance(await server._started(), Server)
    await server.stop()
