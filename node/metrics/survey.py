"""Partitions, groups and open files for ``/metrics``, collected in slices before a scrape.

Ten thousand partitions take a second of work, so others run every fraction of a millisecond. Series
of single partitions are made only for those that need attention (above their dirty target,
uncleanable, under-replicated, offline), unless ``kept.metrics.partitions=all``. Their labels and
values lie in flat lists: an object for each sample would bring the garbage collector in, which
stops everybody for longer than a whole slice may take.

Numbers of partitions led here add up over the nodes to the cluster's; ``kept_controller_…`` are the
whole cluster's, from the active controller's image, and 0 elsewhere.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kept.client.admin.group_lag import partition_lag
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.cluster.metadata.records import NO_LEADER
from kept.node.runtime.time_slices import Pace
from kept.replication.events import UNKNOWN_OFFSET
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.admin.compaction.compaction_status import CompactionStatus, CompactionView
    from kept.node.config.live_config import LiveConfig
    from kept.node.coordinator.groups.coordinator import GroupCoordinator
    from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
    from kept.node.coordinator.transactions.records import TransactionState
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.replication.partition import Partition

FDS_AT_ONCE: Final = 500


LATE_AFTER_MS: Final = 300_000
"""So much longer than ``transaction.max.timeout.ms`` a transaction is open that nobody will end."""


@dataclass(slots=True)
class MetricsSurvey:
    """The state of a node at one scrape."""

    totals: Counter[str] = field(default_factory=Counter)
    """Sums over the partitions, by what is summed."""
    series: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Metric -> label texts and value of each sample, one after the other."""
    follower_lags: dict[int, int] = field(default_factory=dict)
    """The longest lag of each follower of a partition led here, in offsets."""
    group_lags: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(group, topic) -> offsets between its commits and the high watermarks."""
    open_fds: int = 0
    transactions: Counter[TransactionState] = field(default_factory=Counter)
    """Transactional ids that this node coordinates, by state."""

    def add(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        """One more sample of a metric by partition."""
        flat = self.series[metric]
        flat += labels
        flat.append(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyor:
    """Makes surveys of one node."""

    config: LiveConfig
    identity: NodeIdentity
    metadata: MetadataLog
    table: ReplicaTable
    compaction: CompactionView
    groups: GroupCoordinator
    transactions: TransactionCoordinator

    async def survey(self, pace: Pace) -> MetricsSurvey:
        """Collect everything once; ``pace`` lets others run."""
        survey = MetricsSurvey()
        all_partitions = self.config.current.metrics_partitions == "all"
        leads = self.metadata.leads
        for topic in list(self.metadata.image.topics.values()):
            for record in topic.partitions:
                await pace.checkpoint()
                survey.totals["without leader"] += leads and record.leader == NO_LEADER
                if self.identity.node_id in record.replicas:
                    tp = TopicPartition(topic.name, record.partition)
                    self._add_partition(survey, tp, record, all_partitions)
        for group, name, index, offset in self.groups.committed():
            await pace.checkpoint()
            tp = TopicPartition(name, index)
            partition = self.table.partitions.get(tp)
            if partition is not None and self._has_leader(tp):
                lag = partition_lag(offset, partition.high_watermark)
                survey.group_lags[group, name] += lag or 0
        for state in self.transactions.states():
            survey.transactions[state] += 1
            await pace.checkpoint()
        survey.open_fds = await _open_fds(pace)
        return survey

    def _has_leader(self, tp: TopicPartition) -> bool:
        topic = self.metadata.image.topics.get(tp.topic)
        if topic is None or tp.partition >= len(topic.partitions):
            return False
        return topic.partitions[tp.partition].leader != NO_LEADER

    def _add_partition(
        self,
        survey: MetricsSurvey,
        tp: TopicPartition,
        record: PartitionRecord,
        all_partitions: bool,
    ) -> None:
        name, totals = (tp.topic, str(tp.partition)), survey.totals
        under = record.is_under_replicated
        partition = self.table.partitions.get(tp)
        totals["partitions"] += 1
        totals["internal"] += tp.topic in INTERNAL_TOPICS
        if partition is None or record.leader == NO_LEADER or tp in self.table.failed:
            totals["offline"] += 1
            survey.add("partition_offline", name, 1)
        if under or all_partitions:
            survey.add("partition_isr", name, len(record.isr))
        if partition is None:
            return
        size_bytes = partition.log.size_bytes
        totals["bytes"] += size_bytes
        totals["producer ids"] += len(partition.log.producers)
        if record.leader == self.identity.node_id:
            _add_led(survey, record, partition)
            late_ms = self.config.current.transaction_max_timeout_ms + LATE_AFTER_MS
            before_ms = self.transactions.runtime.now_ms() - late_ms
            totals["late transactions"] += partition.log.producers.count_open_before(before_ms)
        status = self.compaction.status_of(tp)
        dirty = False
        if status is not None:
            totals["compacted bytes"] += size_bytes
            target = partition.log.config.min_cleanable_dirty_ratio
            dirty = status.state == "uncleanable" or status.dirty_ratio > target
            _add_compaction(survey, name, status, dirty, all_partitions)
        if all_partitions or dirty or under:
            survey.add("partition_size_bytes", name, size_bytes)


def _add_led(survey: MetricsSurvey, record: PartitionRecord, partition: Partition) -> None:
    core: Any = partition.core
    survey.totals["led"] += 1
    survey.totals["under-replicated"] += record.is_under_replicated
    survey.totals["under min ISR"] += core.below_min_isr
    for follower_id, follower in core.followers.items():
        known = follower.log_end_offset
        end = partition.log_start_offset if known == UNKNOWN_OFFSET else known
        lag = max(0, partition.log_end_offset - end)
        survey.follower_lags[follower_id] = max(lag, survey.follower_lags.get(follower_id, 0))


def _add_compaction(
    survey: MetricsSurvey,
    name: tuple[str, str],
    status: CompactionStatus,
    dirty: bool,
    all_partitions: bool,
) -> None:
    totals = survey.totals
    totals["tombstones"] += status.tombstones_pending
    totals["dirty"] += dirty
    totals["awaiting manifests"] += bool(status.awaits)
    for replica in status.replicas:
        totals["replicas behind"] += replica.behind
        if replica.behind or all_partitions:
            behind = generations_behind(status.published, replica.applied)
            survey.add("manifest_replica_lag", (*name, str(replica.replica)), behind)
    if all_partitions or dirty:
        survey.add("log_cleaner_dirty_ratio", name, status.dirty_ratio)
        survey.add("log_cleaner_tombstones_pending", name, status.tombstones_pending)
        if status.generation is not None:
            number = int(status.generation.rpartition(".")[2])
            survey.add("manifest_generation", name, number)
    if status.state == "uncleanable":
        totals["uncleanable"] += 1
        survey.add("log_cleaner_uncleanable", (*name, status.reason), 1)


def generations_behind(published: str | None, applied: str | None) -> int:
    """How many generations an applied manifest is behind the published one.

    Generations of different leader epochs are numbered apart: all of the newer epoch are lacking.
    """
    if published is None or published == applied:
        return 0
    epoch, _, number = published.partition(".")
    known_epoch, _, known = (applied or "").partition(".")
    return max(1, int(number) - (int(known) if known_epoch == epoch else 0))


async def _open_fds(pace: Pace) -> int:
    open_fds = -1  # without the one that lists them
    with os.scandir("/proc/self/fd") as listed:
        for _ in listed:
            open_fds += 1
            if open_fds % FDS_AT_ONCE == 0:
                await pace.checkpoint()
    return open_fds
