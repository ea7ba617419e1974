"""Metric families, as prometheus-client has them; it is imported when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric

    from kept.node.runtime.histogram import Histogram


def gauge(name: str, doc: str, value: float) -> Metric:
    """A family of one gauge."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"kept_{name}", doc, value=value)


def counter(name: str, doc: str, value: float) -> Metric:
    """A family of one counter; its sample ends in ``_total``."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"kept_{name}", doc, value=value)


def histogram(name: str, doc: str, counts: Histogram) -> Metric:
    """A family of one histogram."""
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(
        f"kept_{name}", doc, buckets=counts.buckets(), sum_value=counts.total
    )


def series(name: str, doc: str, *labels: str) -> PartitionSeries:
    """A family of gauges for partitions: topic, partition, and further labels."""
    return PartitionSeries(f"kept_{name}", doc, ("topic", "partition", *labels))


class PartitionSeries:
    """A family of gauges of which there may be tens of thousands.

    Labels and values lie in one flat list: an object for each sample would bring the garbage
    collector in, which stops everybody for longer than a whole slice of the work may take.
    """

    type = "gauge"

    def __init__(self, name: str, documentation: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self.documentation = documentation
        self._labels = labels
        self._flat: list[Any] = []

    def add_metric(self, labels: Sequence[str], value: float) -> None:
        """One more sample, with a text for each label."""
        self._flat += labels
        self._flat.append(value)

    def rows(self) -> Iterator[tuple[dict[str, str], float]]:
        """The samples: (labels, value)."""
        width = len(self._labels)
        for at in range(0, len(self._flat), width + 1):
            texts = self._flat[at : at + width]
            yield dict(zip(self._labels, texts, strict=True)), self._flat[at + width]

    def family(self) -> GaugeMetricFamily:
        """As prometheus-client has it."""
        from prometheus_client.core import GaugeMetricFamily

        found = GaugeMetricFamily(self.name, self.documentation, labels=self._labels)
        for labels, value in self.rows():
            found.add_metric(list(labels.values()), value)
        return found
