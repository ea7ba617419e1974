"""Metric families, as prometheus-client has them; it is imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric

    from kept.node.histogram import Histogram


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


def series(name: str, doc: str, *labels: str) -> GaugeMetricFamily:
    """A family of gauges for partitions: topic, partition, and further labels."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"kept_{name}", doc, labels=["topic", "partition", *labels])
