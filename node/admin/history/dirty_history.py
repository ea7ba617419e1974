"""Dirty ratios over time: what the console draws, sampled by the node itself.

Every :data:`INTERVAL_S` each compacted partition that is led here and has more than one segment
gets a sample. Where nothing was appended or cleaned since the last one, that one is repeated, so an
idle node pays next to nothing. :data:`SAMPLES` samples (an hour) of at most :data:`PARTITIONS`
partitions are kept in memory, one kilobyte each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kept.node.admin.history.time_series import NO_SAMPLE, TimeSeries
from kept.node.runtime.tasks import PeriodicTask
from kept.node.runtime.time_slices import Pace

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.storage.types import TopicPartition

INTERVAL_S: Final = 15.0
SAMPLES: Final = 240
PARTITIONS: Final = 1000
UNKNOWN: Final = -1.0
"""The sample of a time when the partition was not led here, or had one segment."""


class _Line:
    """The samples of one partition."""

    __slots__ = ("seen", "series")

    def __init__(self, number: int) -> None:
        self.series = TimeSeries(number, "f", int(UNKNOWN))
        self.seen: Any = None
        """What the partition was at the last sample."""

    @property
    def last(self) -> float:
        """The last sample; UNKNOWN before the first."""
        return self.series.columns[0][-1] if len(self.series) else UNKNOWN


class DirtyHistory:
    """The samples of one node."""

    def __init__(self, runtime: Runtime, table: ReplicaTable) -> None:
        self._runtime = runtime
        self._table = table
        self._lines: dict[TopicPartition, _Line] = {}
        self._times: dict[int, int] = {}
        """When each sample was taken, in milliseconds, by its number."""
        self._number = 0
        self.sampling = PeriodicTask(
            runtime.loop, self.sample, lambda: INTERVAL_S, failure=NO_SAMPLE
        )

    async def sample(self) -> None:
        """Take one sample of every partition."""
        table, number, pace = self._table, self._number, Pace()
        self._number += 1
        self._times[number] = self._runtime.now_ms()
        self._times.pop(number - SAMPLES, None)
        for tp, hosted in list(table.replicas.items()):
            await pace.checkpoint()
            partition = hosted.partition
            if (
                not partition.is_leader
                or not partition.config.compact
                or len(partition.log.segments) < 2
                or table.replicas.get(tp) is not hosted
            ):
                continue
            line = self._lines.get(tp)
            if line is None:
                if len(self._lines) >= PARTITIONS and not self._forget_old():
                    continue
                line = self._lines[tp] = _Line(number)
            line.series.add(number, (self._ratio(hosted, line),), SAMPLES)

    def _ratio(self, hosted: LocalReplica, line: _Line) -> float:
        identity = _identity(hosted)
        lag_ms = hosted.partition.log.config.min_compaction_lag_ms
        if line.seen == identity and line.last != UNKNOWN and not lag_ms:
            return line.last
        line.seen = identity
        from kept.node.admin.compaction import compaction_status  # not before the node is ready

        return compaction_status.dirty_ratio(hosted, self._runtime.now_ms())

    def _forget_old(self) -> bool:
        """Drop partitions without a sample for as long as samples are kept; whether any was."""
        oldest = self._number - SAMPLES
        gone = [tp for tp, line in self._lines.items() if line.series.next < oldest]
        for tp in gone:
            del self._lines[tp]
        return bool(gone)

    def samples(self, tp: TopicPartition) -> list[tuple[int, float | None]]:
        """(milliseconds, dirty ratio) of a partition, oldest first; None where it is not known."""
        line = self._lines.get(tp)
        if line is None:
            return []
        return [
            (self._times[number], None if ratio == UNKNOWN else round(ratio, 4))
            for number, ratio in enumerate(line.series.columns[0], line.series.first)
            if number in self._times
        ]


def _identity(hosted: LocalReplica) -> Any:
    log, known = hosted.partition.log, hosted.compaction
    return (
        log.log_start_offset,
        len(log.segments),
        log.active_segment.base_offset,
        hosted.partition.last_stable_offset,
        None if known is None else (known.applied, known.clean_to),
    )
