"""``/metrics``: the node's counters and state as Prometheus' text format, rendered in slices.

:func:`families` yields prometheus-client's metric families, or None where others may run, so that
10,000 partitions delay no request by more than a moment. Per-partition series are made only for
partitions that need attention (above their dirty target, uncleanable, under-replicated, offline),
unless ``kept.metrics.partitions=all``. prometheus-client is imported at the first scrape, in a
thread: it would hold the loop for 30 ms.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import kept
from kept.cluster.metadata.records import NO_LEADER
from kept.node.admin.compaction_status import CompactionStatus
from kept.node.admin.service import Admin
from kept.node.metrics import cluster_exposition
from kept.node.metrics.cluster_exposition import LedPartitions
from kept.node.metrics.families import PartitionSeries, counter, gauge, histogram, series
from kept.node.runtime.yielding import Pace
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kept.node.admin.context import AdminContext

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CHUNK_BYTES: Final = 64 * 1024
LIBRARY: Final = "prometheus_client.core"
FDS_AT_ONCE: Final = 500


async def render(context: AdminContext) -> AsyncIterator[bytes]:
    """The text, in pieces."""
    if LIBRARY not in sys.modules:
        await context.runtime.in_thread(import_module, LIBRARY)
    out: list[str] = []
    size = 0
    pace = Pace()
    for family in families(context):
        for line in () if family is None else _lines(family):
            out.append(line)
            size += len(line)
            if size >= CHUNK_BYTES:
                yield "".join(out).encode()
                out.clear()
                size = 0
            await pace.checkpoint()
        await pace.checkpoint()
    if out:
        yield "".join(out).encode()


def _lines(family: Metric | PartitionSeries) -> Iterator[str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    yield f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"
    if isinstance(family, PartitionSeries):
        for labels, value in family.rows():
            yield _line(name, labels, value)
        return
    for sample in family.samples:
        yield _line(sample.name, sample.labels, sample.value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{f'{{{listed}}}' if listed else ''} {_number(value)}\n"


def _number(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Collector:
    """The same for a registry of prometheus-client: ``REGISTRY.register(Collector(context))``."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Every family, whole."""
        for family in families(self._context):
            if family is not None:
                yield family.family() if isinstance(family, PartitionSeries) else family


def families(context: AdminContext) -> Iterator[Metric | PartitionSeries | None]:
    """Every metric of the node; None is a good moment to let others run."""
    yield from _process(context)
    yield from _traffic(context)
    yield from _compaction(context)
    yield from _partitions(context)
    yield from cluster_exposition.families(context)
    yield from _groups(context)


def _process(context: AdminContext) -> Iterator[Metric | None]:
    from prometheus_client.core import GaugeMetricFamily

    build = GaugeMetricFamily("kept_build_info", "Version of kept.", labels=["version", "kernel"])
    uncompiled = len(context.kernels.uncompiled)
    build.add_metric([kept.__version__, "python" if uncompiled else "cython"], 1)
    yield build
    yield gauge(
        "uncompiled_kernels",
        "Kernels that this node or a worker of its cleaner runs as plain Python, far slower.",
        uncompiled,
    )
    yield gauge("resident_memory_bytes", "Resident memory of the node.", _resident_bytes())
    open_fds = -1  # without the one that lists them
    with os.scandir("/proc/self/fd") as listed:
        for _ in listed:
            open_fds += 1
            if open_fds % FDS_AT_ONCE == 0:
                yield None
    yield gauge("open_fds", "Open file descriptors.", open_fds)
    yield gauge("max_fds", "File descriptors that may be open.", _max_fds())
    yield gauge("ready", "1 when the node serves clients.", Admin(context).unready() is None)
    connections = context.open_files.connection_count
    yield gauge("connections", "Open connections.", connections)
    yield gauge(
        "inflight_bytes", "Bytes of requests and responses held.", context.budget.used_bytes
    )
    member = context.metadata.member
    yield gauge("raft_term", "Term of the metadata log.", member.term)
    leader = -1 if member.leader_id is None else member.leader_id
    yield gauge("raft_leader", "Node id of the metadata log's leader, -1: not known.", leader)
    lag = member.last_index - context.metadata.acted_index
    yield gauge("raft_commit_lag", "Entries of the metadata log not applied here yet.", lag)
    yield gauge(
        "metadata_index",
        "Last entry of the metadata log applied here.",
        context.metadata.image.index,
    )
    offline = sum(1 for directory in context.table.directories if directory.offline is not None)
    yield gauge("offline_log_directories", "Log directories that failed.", offline)
    strays = len(context.replicas.strays.paths)
    yield gauge("stray_logs", "Logs set aside, which the metadata does not know.", strays)
    yield from _disks(context)


def _disks(context: AdminContext) -> Iterator[Metric]:
    """Room on the disks of the log directories; a broken disk has no series."""
    from prometheus_client.core import GaugeMetricFamily

    free = GaugeMetricFamily(
        "kept_log_directory_free_bytes", "Free on its disk.", labels=["directory"]
    )
    size = GaugeMetricFamily(
        "kept_log_directory_size_bytes", "Size of its disk.", labels=["directory"]
    )
    for directory in context.table.directories:
        path = os.path.abspath(directory.name)
        try:
            space = os.statvfs(path)
        except OSError:  # kept_offline_log_directories counts it
            continue
        free.add_metric([path], space.f_bavail * space.f_frsize)
        size.add_metric([path], space.f_blocks * space.f_frsize)
    yield from (free, size)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _max_fds() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _traffic(context: AdminContext) -> Iterator[Metric | None]:
    from prometheus_client.core import HistogramMetricFamily

    from kept.node.kafka import api

    m = context.counters
    yield counter("bytes_in", "Bytes of record batches appended for producers.", m.bytes_in)
    yield counter("records_in", "Records appended for producers.", m.records_in)
    yield counter("batches_in", "Record batches appended for producers.", m.produced_batches)
    yield counter("batches_refused", "Record batches refused.", m.refused_batches)
    yield counter("bytes_out", "Bytes of record batches sent to consumers.", m.bytes_out)
    taken = "Offsets that consumers went on by from one fetch to the next: the records they took."
    yield counter("records_out", taken, m.records_out)
    sent = "Bytes of record batches sent to other replicas."
    yield counter("replication_bytes_out", sent, m.replication_bytes_out)
    yield histogram("fsync_seconds", "Time of an fsync.", m.fsync_seconds)
    served = api.served()
    latency = HistogramMetricFamily(
        "kept_request_seconds", "Time from a request's last byte to its answer.", labels=["api"]
    )
    for key, counts in sorted(m.request_seconds.items()):
        name = served[key].name if key in served else str(key)
        latency.add_metric([name], counts.buckets(), sum_value=counts.total)
    yield latency


def _compaction(context: AdminContext) -> Iterator[Metric | None]:
    m = context.counters
    yield counter("log_cleaner_compactions", "Compaction passes applied.", m.compactions)
    yield counter(
        "log_cleaner_failures",
        "Compaction passes that failed.",
        context.cleaner.started.totals.failures,
    )
    yield counter("log_cleaner_cleaned_bytes", "Bytes that compaction freed.", m.cleaned_bytes)
    yield counter("log_cleaner_removed_records", "Records removed.", m.records_removed)
    yield counter(
        "log_cleaner_checked_keys", "Keys that passes proved right before the swap.",
        m.checked_keys,
    )  # fmt: skip
    yield counter(
        "log_cleaner_checks_failed", "Passes that the check of their keys stopped.",
        m.checks_failed,
    )  # fmt: skip
    yield histogram("log_cleaner_duration_seconds", "Time of a pass.", m.cleaner_seconds)


def _partitions(context: AdminContext) -> Iterator[Metric | PartitionSeries | None]:
    """Totals over all partitions, and series for those that need attention."""
    dirty = series("log_cleaner_dirty_ratio", "Dirty share of the cleanable bytes.")
    uncleanable = series(
        "log_cleaner_uncleanable", "1: compaction fails, with the reason.", "reason"
    )
    size = series("partition_size_bytes", "Bytes on disk.")
    generation = series("manifest_generation", "Generation of the last pass applied here.")
    lag = series(
        "manifest_replica_lag",
        "Generations that a replica has not applied of what its leader here published.",
        "replica",
    )
    tombstones = series(
        "log_cleaner_tombstones_pending", "Tombstones that wait for their delete horizon."
    )
    offline = series("partition_offline", "1: not open, or led by nobody.")
    in_sync = series("partition_isr", "Replicas in sync.")
    led = LedPartitions(context.identity.node_id)
    all_of_them = context.config.current.metrics_partitions == "all"
    admin = Admin(context)
    totals: Counter[str] = Counter()
    for tp, record in _records(context):
        yield None
        name = [tp.topic, str(tp.partition)]
        totals["count"] += 1
        under = record.is_under_replicated
        partition = context.table.partitions.get(tp)
        if partition is None or record.leader == NO_LEADER:
            totals["offline"] += 1
            offline.add_metric(name, 1)
        if under or all_of_them:
            in_sync.add_metric(name, len(record.isr))
        if partition is None:
            continue
        led.look(record, partition)
        totals["bytes"] += partition.log.size_bytes
        status = admin.compaction_status(tp)
        above = status is not None and _needs_attention(status, partition.log.config)
        if status is not None:
            totals["tombstones"] += status.tombstones_pending
            totals["compacted"] += partition.log.size_bytes
            totals["above"] += above
            totals["awaiting"] += bool(status.awaits)
            for replica in status.replicas:
                totals["behind"] += replica.behind
                if replica.behind or all_of_them:
                    behind = generations_behind(status.published, replica.applied)
                    lag.add_metric([*name, str(replica.replica)], behind)
        if status is not None and (all_of_them or above):
            dirty.add_metric(name, status.dirty_ratio)
            tombstones.add_metric(name, status.tombstones_pending)
            if status.generation is not None:
                generation.add_metric(name, int(status.generation.rpartition(".")[2]))
        if status is not None and status.state == "uncleanable":
            totals["uncleanable"] += 1
            uncleanable.add_metric([*name, status.reason], 1)
        if all_of_them or above or under:
            size.add_metric(name, partition.log.size_bytes)
    yield from (dirty, uncleanable, generation, lag, tombstones, size, offline, in_sync)
    yield from led.families()
    yield from _totals(totals)


def _totals(totals: Counter[str]) -> Iterator[Metric]:
    yield gauge("partitions", "Partitions hosted or meant to be here.", totals["count"])
    yield gauge("log_size_bytes", "Bytes of all partitions.", totals["bytes"])
    yield gauge(
        "log_cleaner_log_size_bytes", "Bytes of the partitions of compacted topics.",
        totals["compacted"],
    )  # fmt: skip
    yield gauge(
        "log_cleaner_dirty_partitions", "Partitions above their dirty target, or uncleanable.",
        totals["above"],
    )  # fmt: skip
    yield gauge(
        "offline_partitions", "Replicas here that are not open, or that nobody leads.",
        totals["offline"],
    )  # fmt: skip
    yield gauge(
        "log_cleaner_uncleanable_partitions", "Partitions that compaction fails on.",
        totals["uncleanable"],
    )  # fmt: skip
    yield gauge(
        "log_cleaner_awaiting_manifests_partitions",
        "Partitions led here whose newest generation some replica in sync does not hold yet.",
        totals["awaiting"],
    )
    yield gauge(
        "log_cleaner_replicas_behind",
        "Replicas of partitions led here that have not applied what is published.",
        totals["behind"],
    )
    yield gauge(
        "tombstones_pending", "Tombstones of all logs that wait for their delete horizon.",
        totals["tombstones"],
    )  # fmt: skip


def generations_behind(published: str | None, applied: str | None) -> int:
    """How many generations an applied manifest is behind the published one.

    Generations of different leader epochs are numbered apart: all of the newer epoch are lacking.
    """
    if published is None or published == applied:
        return 0
    epoch, _, number = published.partition(".")
    known_epoch, _, known = (applied or "").partition(".")
    return max(1, int(number) - (int(known) if known_epoch == epoch else 0))


def _needs_attention(status: CompactionStatus, config: Any) -> bool:
    return status.state == "uncleanable" or status.dirty_ratio > config.min_cleanable_dirty_ratio


def _records(context: AdminContext) -> Iterator[tuple[TopicPartition, Any]]:
    for topic in context.metadata.image.topics.values():
        for record in topic.partitions:
            if context.identity.node_id in record.replicas:
                yield TopicPartition(topic.name, record.partition), record


def _groups(context: AdminContext) -> Iterator[Metric | None]:
    """Lag of every group: records between its committed offset and the high watermark."""
    from prometheus_client.core import GaugeMetricFamily

    lag = GaugeMetricFamily(
        "kept_group_lag", "Offsets between commit and high watermark, all partitions.",
        labels=["group", "topic"],
    )  # fmt: skip
    sums: dict[tuple[str, str], int] = {}
    for group, topic, index, offset in list(context.groups.committed()):
        yield None
        partition = context.table.partitions.get(TopicPartition(topic, index))
        if partition is not None:
            behind = max(0, partition.high_watermark - offset)
            sums[group, topic] = sums.get((group, topic), 0) + behind
    for key, behind in sorted(sums.items()):
        lag.add_metric(key, behind)
    yield lag
