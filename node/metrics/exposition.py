"""``/metrics``: the table of metrics as a registry of prometheus-client, and its text in slices.

prometheus-client holds and renders every family. A family of many partitions is rendered a few
samples at a time, so that no call takes the loop for more than a moment. It takes 30 ms to import,
so ``kept.node.metrics.lazy_metrics`` has this module imported in a thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast, overload

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from kept.node.metrics.definitions import COUNTER, HISTOGRAM, TABLE, Row, Sources
from kept.node.metrics.lazy_metrics import MetricsFormat
from kept.node.metrics.survey import Surveyor
from kept.node.runtime.time_slices import Pace

if TYPE_CHECKING:
    from kept.node.admin.views.log_directories import LogDirectories

CHUNK_BYTES: Final = 64 * 1024
SAMPLES_AT_ONCE: Final = 50
"""A sample takes some 8 us to render."""
UNITS: Final = ("seconds", "bytes", "ratio")
"""Units that OpenMetrics names beside the metric, whose name ends with it."""
END: Final = b"# EOF\n"
"""The last line of an OpenMetrics text."""
GENERATE: Final[dict[MetricsFormat, Callable[[Collector], bytes]]] = {
    MetricsFormat.PROMETHEUS: generate_latest,
    MetricsFormat.OPENMETRICS: generate_openmetrics,
}
"""What renders a registry in each format."""


class FlatSamples(Sequence[Sample]):
    """Samples made when they are rendered, of labels and values in one flat list."""

    def __init__(self, name: str, labels: tuple[str, ...], flat: list[Any]) -> None:
        self._name = name
        self._labels = labels
        self._flat = flat

    def __len__(self) -> int:
        return len(self._flat) // (len(self._labels) + 1)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        width = len(self._labels)
        start = range(0, len(self._flat), width + 1)[index]
        texts = self._flat[start : start + width]
        return Sample(
            self._name, dict(zip(self._labels, texts, strict=True)), self._flat[start + width]
        )


class NodeMetrics:
    """The metrics of one node. ``registry`` has what the last :meth:`survey` saw."""

    def __init__(
        self, surveyor: Surveyor, log_directories: LogDirectories, sources: Sources
    ) -> None:
        self._surveyor = surveyor
        self._log_directories = log_directories
        self._sources = sources
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Every family, for the registry."""
        for row in TABLE:
            yield _family(row, self._sources)

    def describe(self) -> list[Metric]:
        """Nothing: the registry is not to collect when it registers this."""
        return []

    async def survey(self, pace: Pace) -> None:
        """Collect partitions, groups, open files and disks."""
        self._sources = replace(
            self._sources,
            survey=await self._surveyor.survey(pace),
            directories=await self._log_directories.describe(),
        )

    async def render(
        self, text_format: MetricsFormat = MetricsFormat.PROMETHEUS
    ) -> AsyncIterator[bytes]:
        """The text, in pieces."""
        pace = Pace()
        await self.survey(pace)
        out = bytearray()
        for family in self.registry.collect():
            for text in _text(family, text_format):
                out += text
                if len(out) >= CHUNK_BYTES:
                    yield bytes(out)
                    out.clear()
                await pace.checkpoint()
        if text_format is MetricsFormat.OPENMETRICS:
            out += END
        yield bytes(out)


def _family(row: Row, sources: Sources) -> Metric:
    name = f"kept_{row.name}"
    if row.value is None:
        series = GaugeMetricFamily(name, row.help, labels=row.labels)
        flat = sources.survey.series[row.name]
        series.samples = cast(Any, FlatSamples(name, row.labels, flat))
        return series
    value = row.value(sources)
    if row.kind == HISTOGRAM:
        latencies = HistogramMetricFamily(name, row.help, labels=row.labels)
        for labels, counts in value if row.labels else [((), value)]:
            latencies.add_metric(labels, counts.buckets(), sum_value=counts.total)
        return latencies
    of_kind: Any = CounterMetricFamily if row.kind == COUNTER else GaugeMetricFamily
    family = of_kind(name, row.help, labels=row.labels)
    for labels, number in value if row.labels else [((), value)]:
        family.add_metric(labels, number)
    metric: Metric = family
    return metric


class _Single(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _unit(name: str) -> str:
    """The unit that a family's name ends with, or nothing."""
    return next((unit for unit in UNITS if name.endswith(f"_{unit}")), "")


def _text(family: Metric, text_format: MetricsFormat) -> Iterator[bytes]:
    """The text of a family, some samples at a time."""
    unit = _unit(family.name)
    has_unit_line = unit and text_format is MetricsFormat.OPENMETRICS
    head_lines = 3 if has_unit_line else 2
    for start in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
        part = Metric(family.name, family.documentation, family.type, unit)
        part.samples = family.samples[start : start + SAMPLES_AT_ONCE]
        text = GENERATE[text_format](_Single(part)).removesuffix(END)
        # HELP, TYPE and UNIT come once.
        yield text if start == 0 else text.split(b"\n", head_lines)[head_lines]
