"""The door for HTTP clients: the server is imported when the first one comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kept.node.admin.services import AdminServices
    from kept.node.config.live_config import LiveConfig
    from kept.node.http.server import HttpServer
    from kept.node.internode.controller_rpc import PeerHttpReply, PeerHttpRequest
    from kept.node.kafka.listener import HandedOver
    from kept.node.runtime.memory_budget import MemoryBudget
    from kept.node.runtime.runtime import Runtime


@dataclass(eq=False, repr=False)
class LazyHttpServer:
    """HTTP of one node, for clients and for other nodes' clients."""

    runtime: Runtime
    config: LiveConfig
    budget: MemoryBudget
    services: Callable[[], AdminServices]

    def __post_init__(self) -> None:
        self._server: HttpServer | None = None

    def take_over(self, handed_over: HandedOver, first_bytes: bytes) -> None:
        """Speak HTTP on a connection from now on."""
        self._started().take_over(handed_over, first_bytes)

    async def respond_to_node(self, request: PeerHttpRequest) -> PeerHttpReply:
        """Answer a request that came through another node. Raises PolicyViolation."""
        from kept.node.http.peer_requests import respond

        return await respond(self._started().routes, request)

    def _started(self) -> HttpServer:
        if self._server is None:
            from kept.node.http import routes, server

            self._server = server.HttpServer(
                self.runtime, self.config, self.budget, routes.Routes(self.services())
            )
        return self._server
