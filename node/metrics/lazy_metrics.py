"""The door to the metrics: they are imported at the first scrape, in a thread.

prometheus-client takes 30 ms to import, which would hold up everybody on the loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.node.admin.context import AdminContext
    from kept.node.admin.parts import AdminParts
    from kept.node.metrics.exposition import NodeMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class LazyMetrics:
    """The metrics of one node."""

    def __init__(self, context: AdminContext, parts: AdminParts) -> None:
        self._context = context
        self._parts = parts
        self._metrics: NodeMetrics | None = None

    async def started(self) -> NodeMetrics:
        """The metrics, made when they are first needed."""
        if self._metrics is None:
            made: NodeMetrics = await self._context.runtime.in_thread(self._make)
            self._metrics = self._metrics or made
        return self._metrics

    def _make(self) -> NodeMetrics:
        from kept.node.metrics.exposition import NodeMetrics
        from kept.node.metrics.survey import Surveyor
        from kept.node.metrics.table import Sources

        context, parts = self._context, self._parts
        surveyor = Surveyor(
            config=context.config,
            identity=context.identity,
            metadata=context.metadata,
            table=context.table,
            compaction=parts.compaction_view,
            groups=context.groups,
        )
        sources = Sources(
            counters=context.counters,
            kernels=context.kernels,
            health=parts.health,
            open_files=context.open_files,
            budget=context.budget,
            metadata=context.metadata,
        )
        return NodeMetrics(surveyor, parts.log_directories, sources)

    async def render(self) -> AsyncIterator[bytes]:
        """The text of ``/metrics``, in pieces."""
        async for chunk in (await self.started()).render():
            yield chunk
