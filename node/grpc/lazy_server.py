"""Starts the gRPC server when the first client comes, and connects clients with it.

gRPC costs 22 MB and a third of a second to load, in a thread; a node without gRPC clients pays
neither. Until it is loaded nothing is read of the first clients. gRPC owns its sockets, so bytes go
through a unix socket (``kept.node.grpc.splice``) in a directory that only this user may enter.

Limit: ``kept.grpc.max.connections``; whose place one more takes, or whether it is closed, is told
in :mod:`kept.node.grpc.callers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.logging import log
from kept.node.runtime.tasks import TaskOwner
from kept.storage.errors import KeptError

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices
    from kept.node.config.live_config import LiveConfig
    from kept.node.grpc.callers import Caller, Callers
    from kept.node.grpc.server import GrpcServer
    from kept.node.kafka.listener import HandedOver
    from kept.node.runtime.runtime import Runtime

NOISE_INTERVAL_S: Final = 10.0
"""At most one line about refused connections in this time."""


@dataclass(eq=False, repr=False)
class LazyServer:
    """gRPC clients of one node."""

    runtime: Runtime
    config: LiveConfig
    services: Callable[[], AdminServices]

    def __post_init__(self) -> None:
        self._server: GrpcServer | None = None
        self._starting: asyncio.Task[GrpcServer] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._joining = TaskOwner(self.runtime.loop)
        self._quiet_until = 0.0
        self._stopped = False

    @cached_property
    def _callers(self) -> Callers:
        from kept.node.grpc.callers import Callers

        return Callers(self.config)

    def receive_connection(self, connection: HandedOver, first_bytes: bytes) -> None:
        """A connection that speaks HTTP/2."""
        transport = connection.transport
        transport.pause_reading()
        caller = None if self._stopped else self._callers.enter(connection)
        if caller is None:
            self._refuse(transport)
            return
        self._joining.spawn(self._join(caller, first_bytes))

    def _refuse(self, transport: Any) -> None:
        transport.abort()
        now = self.runtime.loop.time()
        if not self._stopped and now >= self._quiet_until:
            self._quiet_until = now + NOISE_INTERVAL_S
            limit = self.config.current.grpc_max_connections
            log.warning("connection refused", setting="kept.grpc.max.connections", limit=limit)

    async def _join(self, caller: Caller, first_bytes: bytes) -> None:
        transport = caller.connection.transport

        def closed() -> None:
            self._callers.leave(caller)
            caller.connection.closed()

        try:
            from kept.node.grpc.splice import splice

            server = await self._started()
        except BaseException as error:
            self._callers.leave(caller)
            transport.abort()
            if not isinstance(error, KeptError):
                raise
            log.error("gRPC can't be served", error=str(error))
            return
        if transport.is_closing():
            self._callers.leave(caller)
            return
        await splice(transport, first_bytes, server.path, closed, caller.name)

    async def _started(self) -> GrpcServer:
        if self._server is None:
            if self._starting is None:
                self._starting = self.runtime.loop.create_task(self._start())
            try:
                return await asyncio.shield(self._starting)
            except Exception:
                self._starting = None  # the next client has it tried again
                raise
        return self._server

    async def _start(self) -> GrpcServer:
        def load() -> type[GrpcServer]:
            from kept.node.grpc.server import GrpcServer

            return GrpcServer

        server_class: type[GrpcServer] = await self.runtime.in_thread(load)
        server = server_class(self.services(), self._callers)
        await server.start()
        self._server = server
        self._watching = self.runtime.loop.create_task(self._watch(server))
        return server

    async def _watch(self, server: GrpcServer) -> None:
        """A server that ended by itself is started anew by the next client."""
        await server.ended()
        if not self._stopped:
            self._server = self._starting = None
            await server.stop()

    async def stop(self) -> None:
        """End every call and stop serving."""
        self._stopped = True
        await self._joining.close()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        if self._watching is not None:
            await self._watching
