"""The door to the metrics: they are imported at the first scrape, in a thread.

prometheus-client takes 30 ms to import, which would hold up everybody on the loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kept.node.metrics.exposition import NodeMetrics
    from kept.node.runtime.runtime import Runtime

OPENMETRICS_TYPE: Final = "application/openmetrics-text"
OPENMETRICS_VERSIONS: Final = frozenset({"", "0.0.1", "1.0.0"})
"""Versions that a scraper may ask for and be answered with 1.0.0; early Prometheus named 0.0.1."""


class MetricsFormat(Enum):
    """A text format of ``/metrics``; the value is its content type."""

    PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = f"{OPENMETRICS_TYPE}; version=1.0.0; charset=utf-8"


def accepted_format(accept: str) -> MetricsFormat:
    """The format that a request's Accept header prefers.

    OpenMetrics is given to whoever names it in a version that is known, and does not rank
    ``text/plain`` above it; everybody else gets Prometheus' own format.
    """
    plain = openmetrics = 0.0
    for media_range in accept.lower().split(","):
        media_type, *rest = (part.strip() for part in media_range.split(";"))
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        weight = _weight(parameters.get("q", "1"))
        if media_type == "text/plain":
            plain = max(plain, weight)
        if (
            media_type == OPENMETRICS_TYPE
            and parameters.get("version", "").strip('"') in OPENMETRICS_VERSIONS
        ):
            openmetrics = max(openmetrics, weight)
    if openmetrics > 0 and openmetrics >= plain:
        return MetricsFormat.OPENMETRICS
    return MetricsFormat.PROMETHEUS


def _weight(text: str) -> float:
    """A quality value; one that is none ranks last."""
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0


class LazyMetrics:
    """The metrics of one node."""

    def __init__(self, runtime: Runtime, make: Callable[[], NodeMetrics]) -> None:
        """``make`` is called in a thread."""
        self._runtime = runtime
        self._make = make
        self._metrics: NodeMetrics | None = None

    async def started(self) -> NodeMetrics:
        """The metrics, made when they are first needed."""
        if self._metrics is None:
            metrics: NodeMetrics = await self._runtime.in_thread(self._make)
            self._metrics = self._metrics or metrics
        return self._metrics

    async def render(
        self, text_format: MetricsFormat = MetricsFormat.PROMETHEUS
    ) -> AsyncIterator[bytes]:
        """The text of ``/metrics``, in pieces."""
        async for chunk in (await self.started()).render(text_format):
            yield chunk
