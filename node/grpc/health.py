"""``grpc.health.v1.Health``: serving when ``/readyz`` says ready.

Watchers get a message when that changes. The node calls ``Readiness.on_change`` when it may have
changed; one check serves all watchers, and none is made while nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from grpc_health.v1 import health_pb2

from kept.node.grpc.status_codes import shortened

# isort: split
import grpc

if TYPE_CHECKING:
    from kept.node.admin.readiness import NodeHealth, Readiness

NAME: Final = "grpc.health.v1.Health"
PAUSE_S: Final = 0.05
"""Between two checks: thousands of partitions may change at once."""

_STATES: Final = health_pb2.HealthCheckResponse


class Health:
    """The service of one node; ``services`` are the names that can be asked about, and ``""``."""

    def __init__(self, node: NodeHealth, readiness: Readiness, services: tuple[str, ...]) -> None:
        self._node_health = node
        self._services = ("", *services)
        self._watching = 0
        self._known: Any = None
        self._moved = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None
        self._recheck = False
        readiness.on_change = self._may_have_changed

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
        return _STATES.SERVING if self._node_health.unready() is None else _STATES.NOT_SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        state = self._state(request.service)
        if state == _STATES.SERVICE_UNKNOWN:
            services = ", ".join(self._services[1:])
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                shortened(f"there is no service {request.service!r} here; there are {services}"),
            )
        return _STATES(status=state)

    async def _watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        sent = None
        self._watching += 1
        try:
            self._refresh()
            while True:
                moved, state = self._moved, self._known
                if request.service not in self._services:
                    state = _STATES.SERVICE_UNKNOWN
                if state != sent:
                    sent = state
                    yield _STATES(status=state)
                await moved.wait()
        finally:
            self._watching -= 1

    def _may_have_changed(self) -> None:
        """Check now, or when the pause after the last check is over."""
        self._recheck = bool(self._watching)
        if self._recheck and self._pause is None:
            self._check_now()

    def _check_now(self) -> None:
        self._pause = None
        if self._recheck:
            self._recheck = False
            self._refresh()
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._check_now)

    def _refresh(self) -> None:
        state = self._state("")
        if state != self._known:
            self._known = state
            self._moved.set()
            self._moved = asyncio.Event()
