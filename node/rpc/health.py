"""``grpc.health.v1.Health``: serving when ``/readyz`` says ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from grpc_health.v1 import health_pb2

from kept.node.admin import Admin

# isort: split
import grpc

if TYPE_CHECKING:
    from kept.node.server import Node

NAME: Final = "grpc.health.v1.Health"
LOOK_S: Final = 1.0
"""How often a watched state is looked at."""

_STATES: Final = health_pb2.HealthCheckResponse


class Health:
    """The service of one node; ``services`` are the names that can be asked about, and ``""``."""

    def __init__(self, node: Node, services: tuple[str, ...]) -> None:
        self._admin = Admin(node)
        self._services = ("", *services)

    def handlers(self) -> Any:
        """For a gRPC server."""
        request, reply = health_pb2.HealthCheckRequest.FromString, _STATES.SerializeToString
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, request, reply),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request, reply),
            },
        )

    def _state(self, service: str) -> Any:
        if service not in self._services:
            return _STATES.SERVICE_UNKNOWN
        return _STATES.SERVING if self._admin.unready() is None else _STATES.NOT_SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        state = self._state(request.service)
        if state == _STATES.SERVICE_UNKNOWN:
            known = ", ".join(self._services[1:])
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"there is no service {request.service!r} here; there are {known}",
            )
        return _STATES(status=state)

    async def _watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        said = None
        while True:
            state = self._state(request.service)
            if state != said:
                said = state
                yield _STATES(status=state)
            await asyncio.sleep(LOOK_S)
