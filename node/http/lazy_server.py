"""The door for HTTP clients: the server is imported when the first one comes, in a thread, since
that takes 0.2 to 0.3 s where the node has not yet (``kept.node.kafka.api.preload``).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kept.node.admin.services import AdminServices
    from kept.node.config.live_config import LiveConfig
    from kept.node.http.server import HttpServer
    from kept.node.internode.controller_rpc import PeerHttpReply, PeerHttpRequest
    from kept.node.kafka.listener import HandedOver
    from kept.node.metrics.lazy_metrics import LazyMetrics
    from kept.node.runtime.memory_budget import MemoryBudget
    from kept.node.runtime.runtime import Runtime

MODULES: Final = ("kept.node.http.server", "kept.node.http.routes", "kept.node.http.peer_requests")


@dataclass(eq=False, repr=False)
class LazyHttpServer:
    """HTTP of one node, for clients and for other nodes' clients."""

    runtime: Runtime
    config: LiveConfig
    budget: MemoryBudget
    metrics: LazyMetrics
    services: Callable[[], AdminServices]

    def __post_init__(self) -> None:
        self._server: HttpServer | None = None

    def receive_connection(self, handed_over: HandedOver, first_bytes: bytes) -> None:
        """Speak HTTP on a connection from now on."""
        if self._server is not None:
            self._server.receive_connection(handed_over, first_bytes)
            return
        transport = handed_over.transport
        transport.pause_reading()

        def imported(_: asyncio.Future[None]) -> None:
            if not transport.is_closing():
                self._started().receive_connection(handed_over, first_bytes)

        self._import().add_done_callback(imported)

    async def respond_to_node(self, request: PeerHttpRequest) -> PeerHttpReply:
        """Answer a request that came through another node. Raises PolicyViolation."""
        if self._server is None:
            await self._import()
        from kept.node.http.peer_requests import respond

        return await respond(self._started().routes, request)

    def _import(self) -> asyncio.Future[None]:
        return self.runtime.in_thread(lambda: [import_module(name) for name in MODULES])

    def _started(self) -> HttpServer:
        if self._server is None:
            from kept.node.http import routes, server
            from kept.node.security.client_usage import HTTP_CLIENT_ID, ClientUsages

            services = self.services()
            self._server = server.HttpServer(
                self.runtime,
                self.config,
                self.budget,
                routes.Routes(services, self.metrics),
                ClientUsages(services.quotas, services.counters, HTTP_CLIENT_ID),
            )
        return self._server
