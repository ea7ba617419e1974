"""The table of metrics: what ``/metrics`` has, of which type, what it means, where it comes from.

A row's name is without ``kept_``; a counter's sample ends in ``_total``. ``value`` takes it from
the sources: a number, a :class:`~kept.node.runtime.histogram.Histogram`, or, where there are
``labels``, (label texts, number or Histogram) for each sample. A row without ``value`` is by
partition: its samples are the survey's (``kept.node.metrics.survey``).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

import kept
from kept.node.coordinator.transactions.records import TransactionState
from kept.node.kafka import api
from kept.node.metrics.survey import MetricsSurvey

if TYPE_CHECKING:
    from kept.node.admin.readiness import NodeHealth
    from kept.node.admin.views.log_directories import LogDirectoryView
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.coordinator.transactions.verifier import Verifier
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.fd_quota import OpenFiles
    from kept.node.runtime.histogram import Histogram
    from kept.node.runtime.memory_budget import NodeMemory
    from kept.node.runtime.uncompiled_kernels import Kernels
    from kept.node.security.oauth.token_checks import TokenChecks
    from kept.node.security.tls_reload import TlsReload

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
PARTITION: Final = ("topic", "partition")


class Sources(Struct, frozen=True):
    """Where values come from."""

    counters: Counters
    kernels: Kernels
    health: NodeHealth
    open_files: OpenFiles
    memory: NodeMemory
    metadata: MetadataLog
    transactions: TransactionCoordinator
    verifier: Verifier
    tls_reload: TlsReload
    tokens: TokenChecks
    survey: MetricsSurvey = field(default_factory=MetricsSurvey)
    directories: Sequence[LogDirectoryView] = ()


Value = Callable[[Sources], Any]


class Row(Struct, frozen=True):
    """One metric."""

    name: str
    kind: str
    value: Value | None
    labels: tuple[str, ...] = ()
    help: str = ""

    def means(self, text: str) -> Row:
        """The same row with what the metric is."""
        return replace(self, help=text)


def gauge(name: str, value: Value | None = None, labels: tuple[str, ...] = ()) -> Row:
    """A row of a number that may rise and fall."""
    return Row(name, GAUGE, value, labels)


def counter(name: str, value: Value, labels: tuple[str, ...] = ()) -> Row:
    """A row of a number that only rises."""
    return Row(name, COUNTER, value, labels)


def histogram(name: str, value: Value, labels: tuple[str, ...] = ()) -> Row:
    """A row of observations by size."""
    return Row(name, HISTOGRAM, value, labels)


def _total(of: str) -> Callable[[Sources], int]:
    return lambda s: s.survey.totals[of]


def _resident_bytes(_sources: Sources) -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _build(sources: Sources) -> Iterator[tuple[tuple[str, str], int]]:
    kernel = "python" if sources.kernels.uncompiled else "cython"
    yield (kept.__version__, kernel), 1


def _directories(size: str) -> Callable[[Sources], Iterator[tuple[tuple[str], int]]]:
    """Of each disk that answers; kept_offline_log_directories counts the others."""

    def values(sources: Sources) -> Iterator[tuple[tuple[str], int]]:
        for directory in sources.directories:
            size_bytes = getattr(directory, size)
            if size_bytes is not None:
                yield (directory.path,), size_bytes

    return values


def _offline_directories(sources: Sources) -> int:
    return sum(directory.offline is not None for directory in sources.directories)


def _requests(sources: Sources) -> Iterator[tuple[tuple[str], Histogram]]:
    served = api.served()
    for key, seconds in sorted(sources.counters.request_seconds.items()):
        yield (served[key].name if key in served else str(key),), seconds


def _fenced_brokers(sources: Sources) -> int:
    metadata = sources.metadata
    brokers = metadata.image.brokers.values() if metadata.leads else ()
    return sum(broker.fenced for broker in brokers)


def _transactions(sources: Sources) -> Iterator[tuple[tuple[str], int]]:
    for state in TransactionState:
        yield (state.kafka_name,), sources.survey.transactions[state]


def _counted(what: str) -> Value:
    return lambda sources: sources.transactions.counts()[what]


TABLE: Final = (
    gauge("build_info", _build, labels=("version", "kernel")).means("Version of kept."),
    gauge("uncompiled_kernels", lambda s: len(s.kernels.uncompiled)).means(
        "Kernels that this node or a worker of its cleaner runs as plain Python, far slower."
    ),
    gauge("resident_memory_bytes", _resident_bytes).means("Resident memory of the node."),
    gauge("open_fds", lambda s: s.survey.open_fds).means("Open file descriptors."),
    gauge("max_fds", lambda _: resource.getrlimit(resource.RLIMIT_NOFILE)[0]).means(
        "File descriptors that may be open."
    ),
    gauge("ready", lambda s: s.health.unready() is None).means("1 when the node serves clients."),
    gauge("connections", lambda s: s.open_files.connection_count).means("Open connections."),
    gauge("inflight_bytes", lambda s: s.memory.in_flight.used_bytes).means(
        "Bytes of requests and responses held."
    ),
    gauge("raft_term", lambda s: s.metadata.raft_node.term).means("Term of the metadata log."),
    gauge(
        "raft_leader",
        lambda s: -1 if s.metadata.raft_node.leader_id is None else s.metadata.raft_node.leader_id,
    ).means("Node id of the metadata log's leader, -1: not known."),
    gauge(
        "raft_commit_lag", lambda s: s.metadata.raft_node.last_index - s.metadata.acted_index
    ).means("Entries of the metadata log not applied here yet."),
    gauge("metadata_index", lambda s: s.metadata.image.index).means(
        "Last entry of the metadata log applied here."
    ),
    gauge("offline_log_directories", _offline_directories).means("Log directories that failed."),
    gauge("stray_logs", lambda s: len(s.health.stray_logs())).means(
        "Logs set aside, which the metadata does not know."
    ),
    gauge("log_directory_free_bytes", _directories("usable_bytes"), labels=("directory",)).means(
        "Free on its disk."
    ),
    gauge("log_directory_size_bytes", _directories("total_bytes"), labels=("directory",)).means(
        "Size of its disk."
    ),
    # Records and requests.
    counter("bytes_in", lambda s: s.counters.bytes_in).means(
        "Bytes of record batches appended for producers."
    ),
    counter("records_in", lambda s: s.counters.records_in).means("Records appended for producers."),
    counter("batches_in", lambda s: s.counters.produced_batches).means(
        "Record batches appended for producers."
    ),
    counter("batches_refused", lambda s: s.counters.refused_batches).means(
        "Record batches refused."
    ),
    counter("bytes_out", lambda s: s.counters.bytes_out).means(
        "Bytes of record batches sent to consumers."
    ),
    counter("records_out", lambda s: s.counters.records_out).means(
        "Offsets that consumers went on by from one fetch to the next: the records they took."
    ),
    counter("replication_bytes_out", lambda s: s.counters.replication_bytes_out).means(
        "Bytes of record batches sent to other replicas."
    ),
    histogram("fsync_seconds", lambda s: s.counters.fsync_seconds).means("Time of an fsync."),
    gauge("hung_writes", lambda s: s.counters.hung_writes).means(
        "Writes and fsyncs that have not returned for 10 seconds: a disk hangs."
    ),
    counter(
        "throttled_seconds",
        lambda s: [((kind,), value) for kind, value in s.counters.throttled_seconds.items()],
        labels=("kind",),
    ).means("Time that clients were told to wait, by the kind of quota that they exceeded."),
    histogram("request_seconds", _requests, labels=("api",)).means(
        "Time from a request's last byte to its answer."
    ),
    # Who speaks.
    counter("logins", lambda s: s.counters.logins).means(
        "Logins by SASL, those again on the same connection included, and by passwords or access "
        "tokens over HTTP and gRPC."
    ),
    counter("logins_refused", lambda s: s.counters.failed_logins).means("Logins that failed."),
    counter("logins_not_checked", lambda s: s.counters.unchecked_logins).means(
        "Logins whose password was not checked, since too many others waited."
    ),
    counter("sessions_expired", lambda s: s.counters.expired_sessions).means(
        "Connections closed because their client did not log in again in time."
    ),
    # Compaction.
    counter("log_cleaner_compactions", lambda s: s.counters.compactions).means(
        "Compaction passes applied."
    ),
    counter("log_cleaner_failures", lambda s: s.counters.failed_compactions).means(
        "Compaction passes that failed."
    ),
    counter("log_cleaner_cleaned_bytes", lambda s: s.counters.cleaned_bytes).means(
        "Bytes that compaction freed."
    ),
    counter("log_cleaner_removed_records", lambda s: s.counters.records_removed).means(
        "Records removed."
    ),
    counter("log_cleaner_checked_keys", lambda s: s.counters.checked_keys).means(
        "Keys that passes proved right before the swap."
    ),
    counter("log_cleaner_checks_failed", lambda s: s.counters.checks_failed).means(
        "Passes that the check of their keys stopped."
    ),
    histogram("log_cleaner_duration_seconds", lambda s: s.counters.cleaner_seconds).means(
        "Time of a pass."
    ),
    gauge(
        "tls_certificate_expiry_seconds", lambda s: s.tls_reload.expiry(), labels=("listener",)
    ).means("Time until the certificate of a listener expires."),
    gauge("tls_reload_failed", lambda s: s.tls_reload.failures(), labels=("listener",)).means(
        "1: the files of a listener's certificate have changed and cannot be used."
    ),
    gauge("jwks_age_seconds", lambda s: s.tokens.ages(), labels=("listener",)).means(
        "Time since the keys of access tokens were got; none where they never were."
    ),
    gauge("jwks_refresh_failed", lambda s: s.tokens.failures(), labels=("listener",)).means(
        "1: the keys of access tokens could not be got the last time; those of before are used."
    ),
    # Partitions that need attention.
    gauge("log_cleaner_dirty_ratio", labels=PARTITION).means("Dirty share of the cleanable bytes."),
    gauge("log_cleaner_uncleanable", labels=(*PARTITION, "reason")).means(
        "1: compaction fails, with the reason."
    ),
    gauge("manifest_generation", labels=PARTITION).means(
        "Generation of the last pass applied here."
    ),
    gauge("manifest_replica_lag", labels=(*PARTITION, "replica")).means(
        "Generations that a replica has not applied of what its leader here published."
    ),
    gauge("log_cleaner_tombstones_pending", labels=PARTITION).means(
        "Tombstones that wait for their delete horizon."
    ),
    gauge("partition_size_bytes", labels=PARTITION).means("Bytes on disk."),
    gauge("partition_offline", labels=PARTITION).means("1: not open, offline, or led by nobody."),
    gauge("partition_isr", labels=PARTITION).means("Replicas in sync."),
    # Partitions that are led here.
    gauge("leader_partitions", _total("led")).means("Partitions led here."),
    gauge("under_replicated_partitions", _total("under-replicated")).means(
        "Partitions led here with a short ISR."
    ),
    gauge("under_min_isr_partitions", _total("under min ISR")).means(
        "Partitions led here that refuse acks=all."
    ),
    gauge(
        "replica_lag_max",
        lambda s: [((str(node),), lag) for node, lag in sorted(s.survey.follower_lags.items())],
        labels=("follower",),
    ).means("Offsets that a follower lacks, at most, of a partition here."),
    # All partitions here.
    gauge("partitions", _total("partitions")).means(
        "Partitions hosted or meant to be here, of internal topics too."
    ),
    gauge("internal_partitions", _total("internal")).means(
        "How many of kept_partitions are of internal topics."
    ),
    gauge("log_size_bytes", _total("bytes")).means("Bytes of all partitions."),
    gauge("log_cleaner_log_size_bytes", _total("compacted bytes")).means(
        "Bytes of the partitions of compacted topics."
    ),
    gauge("log_cleaner_dirty_partitions", _total("dirty")).means(
        "Partitions above their dirty target, or uncleanable."
    ),
    gauge("offline_partitions", _total("offline")).means(
        "Replicas here that are not open, that an error took offline, or that nobody leads."
    ),
    gauge("log_cleaner_uncleanable_partitions", _total("uncleanable")).means(
        "Partitions that compaction fails on."
    ),
    gauge("log_cleaner_awaiting_manifests_partitions", _total("awaiting manifests")).means(
        "Partitions led here whose newest generation some replica in sync does not hold yet."
    ),
    gauge("log_cleaner_replicas_behind", _total("replicas behind")).means(
        "Replicas of partitions led here that have not applied what is published."
    ),
    gauge("tombstones_pending", _total("tombstones")).means(
        "Tombstones of all logs that wait for their delete horizon."
    ),
    # The cluster.
    counter("isr_shrinks", lambda s: s.counters.cluster.isr_shrinks).means(
        "Replicas that left an ISR led here."
    ),
    counter("isr_expands", lambda s: s.counters.cluster.isr_expands).means(
        "Replicas that entered an ISR led here."
    ),
    counter("raft_elections", lambda s: s.counters.cluster.elections).means(
        "Controllers that came into office."
    ),
    histogram("raft_election_seconds", lambda s: s.counters.cluster.election_seconds).means(
        "Time without a known controller."
    ),
    histogram("failover_seconds", lambda s: s.counters.cluster.failover_seconds).means(
        "Time from noticing that a partition's leader is gone to taking appends here."
    ),
    gauge("controller_active", lambda s: s.metadata.leads).means("1 at the active controller."),
    gauge("controller_fenced_brokers", _fenced_brokers).means(
        "Brokers that are registered and fenced."
    ),
    counter("controller_unclean_elections", lambda s: s.counters.cluster.unclean_elections).means(
        "Leaders elected from outside the ISR: acknowledged records may be lost."
    ),
    counter("committed_records_lost", lambda s: s.counters.cluster.lost_records).means(
        "Offsets cut away here that were committed, or may have been."
    ),
    gauge("controller_offline_partitions", _total("without leader")).means(
        "Partitions of the cluster without a leader."
    ),
    gauge(
        "group_lag", lambda s: sorted(s.survey.group_lags.items()), labels=("group", "topic")
    ).means("Offsets between commit and high watermark, all partitions."),
    # Transactions.
    gauge("transactions", _transactions, labels=("state",)).means(
        "Transactional ids that this node coordinates, by state."
    ),
    *(
        counter(f"transactions_{what}", _counted(what)).means(f"Transactions {text} here.")
        for what, text in (
            ("started", "that began"),
            ("committed", "committed, with all markers written,"),
            ("aborted", "aborted, with all markers written,"),
            ("timed_out", "aborted because of their timeout"),
        )
    ),
    gauge("transaction_markers_pending", lambda s: s.transactions.markers.sender.pending).means(
        "Partitions that have not got their marker yet."
    ),
    gauge(
        "transaction_markers_without_leader",
        lambda s: s.transactions.markers.sender.without_leader,
    ).means("Those of them that nobody leads."),
    counter(
        "transaction_append_retries", lambda s: s.transactions.counts()["append_retries"]
    ).means("Completions of transactions that were not appended at once."),
    histogram("transaction_verification_seconds", lambda s: s.verifier.seconds).means(
        "Time until coordinators say whether partitions led here are in a transaction."
    ),
    counter("transaction_verification_failures", lambda s: s.verifier.failures).means(
        "Such questions that were not answered with yes."
    ),
    histogram("transaction_end_seconds", lambda s: s.transactions.end_seconds).means(
        "Time from the decision to commit or abort until all markers are written."
    ),
    histogram("transaction_load_seconds", lambda s: s.transactions.load_seconds).means(
        "Time until a partition of __transaction_state led here was read and is served."
    ),
    gauge("producer_ids", _total("producer ids")).means(
        "Producer ids that the replicas here remember, once for each partition."
    ),
    gauge("late_transactions", _total("late transactions")).means(
        "Transactions open in partitions led here for longer than any may be: kept transaction "
        "hanging finds them."
    ),
)
