"""The door to the metrics: they are imported at the first scrape, in a thread.

prometheus-client takes 30 ms to import, which would hold up everybody on the loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.node.admin.services import AdminServices
    from kept.node.metrics.exposition import NodeMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class LazyMetrics:
    """The metrics of one node."""

    def __init__(self, services: AdminServices) -> None:
        self._services = services
        self._metrics: NodeMetrics | None = None

    async def started(self) -> NodeMetrics:
        """The metrics, made when they are first needed."""
        if self._metrics is None:
            metrics: NodeMetrics = await self._services.runtime.in_thread(self._make)
            self._metrics = self._metrics or metrics
        return self._metrics

    def _make(self) -> NodeMetrics:
        from kept.node.metrics.exposition import NodeMetrics

        return NodeMetrics.of(self._services)

    async def render(self) -> AsyncIterator[bytes]:
        """The text of ``/metrics``, in pieces."""
        async for chunk in (await self.started()).render():
            yield chunk
