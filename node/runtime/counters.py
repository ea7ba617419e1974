"""Numbers about one node: plain counters on the hot path, read when somebody asks.

:class:`Counters` is what the node's parts call (``node.metrics.request(…)``): additions to ints, no
locks, no labels built, since one thread counts. ``kept.node.metrics.exposition`` turns it and the
node's own state into Prometheus' text. Names begin with ``kept_`` (docs/operations.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kept.node.runtime.cluster_counters import ClusterCounters
from kept.node.runtime.histogram import Histogram

if TYPE_CHECKING:
    from kept.compaction.cleaner.cleaner_run import Result
    from kept.storage.types import TopicPartition

REQUEST_BUCKETS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
"""Upper bounds in seconds; a produce takes 0.1 ms, a waiting fetch half a second."""

FSYNC_BUCKETS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)

PASS_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
"""Seconds of a compaction pass."""


THROTTLED: Final = ("produce", "fetch", "request", "controller_mutation", "connection")
"""What clients are held back for: bytes, the loop's time, changes of metadata, connections."""


class Counters:
    """The counters of a node. All methods are called on its loop."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "checked_keys",
        "checks_failed",
        "cleaned_bytes",
        "cleaner_seconds",
        "cluster",
        "compactions",
        "expired_sessions",
        "failed_compactions",
        "failed_logins",
        "fsync_seconds",
        "hung_writes",
        "logins",
        "produced_batches",
        "records_in",
        "records_out",
        "records_removed",
        "refused_batches",
        "replication_bytes_out",
        "request_seconds",
        "throttled_seconds",
        "unchecked_logins",
    )

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.replication_bytes_out = 0
        self.records_in = 0
        self.records_out = 0
        self.produced_batches = 0
        self.refused_batches = 0
        self.logins = 0
        """By SASL, and by a password over HTTP."""
        self.failed_logins = 0
        self.unchecked_logins = 0
        """Of which nobody knows whether the password was right: too many others waited."""
        self.expired_sessions = 0
        self.cluster = ClusterCounters()
        self.compactions = 0
        self.failed_compactions = 0
        self.cleaned_bytes = 0
        self.records_removed = 0
        self.checked_keys = 0
        self.checks_failed = 0
        self.cleaner_seconds = Histogram(PASS_BUCKETS)
        self.fsync_seconds = Histogram(FSYNC_BUCKETS)
        self.hung_writes = 0
        """Writes and fsyncs that hang (``executors.HANGS_S``)."""
        self.request_seconds: dict[int, Histogram] = {}
        self.throttled_seconds = dict.fromkeys(THROTTLED, 0.0)

    def request(self, api_key: int, seconds: float, requests: int = 1) -> None:
        """A request was answered so long after it was read, or several at once."""
        histogram = self.request_seconds.get(api_key)
        if histogram is None:
            histogram = self.request_seconds[api_key] = Histogram(REQUEST_BUCKETS)
        histogram.observe(seconds, requests)

    def throttled(self, kind: str, throttle_ms: int) -> None:
        """A client must wait for so long, for a quota of :data:`THROTTLED`."""
        self.throttled_seconds[kind] += throttle_ms / 1000

    def produced(self, batches: int, records: int, size_bytes: int) -> None:
        """Batches were appended for producers."""
        self.produced_batches += batches
        self.records_in += records
        self.bytes_in += size_bytes

    def refused(self, batches: int = 1) -> None:
        """Batches of producers were refused."""
        self.refused_batches += batches

    def fetched(self, size_bytes: int, *, to_replica: bool = False) -> None:
        """Bytes of records went out to a consumer, or to another replica."""
        if to_replica:
            self.replication_bytes_out += size_bytes
        else:
            self.bytes_out += size_bytes

    def fsync(self, seconds: float) -> None:
        """One fsync took so long."""
        self.fsync_seconds.observe(seconds)

    def compacted(self, _tp: TopicPartition, result: Result, seconds: float) -> None:
        """A compaction pass was applied."""
        self.compactions += 1
        self.cleaned_bytes += max(0, result.bytes_before - result.bytes_after)
        self.records_removed += result.records_removed
        self.checked_keys += result.keys_checked
        self.cleaner_seconds.observe(seconds)
