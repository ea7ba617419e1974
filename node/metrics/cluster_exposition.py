"""``/metrics``: what there is to say of a node among others, and of the partitions that it leads.

Numbers of partitions are of those led here, so that their sum over the nodes is the cluster's;
``kept_controller_…`` are the whole cluster's, from the active controller's image, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kept.cluster.metadata.records import NO_LEADER
from kept.node.metrics.families import counter, gauge, histogram
from kept.replication.events import UNKNOWN_OFFSET

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.admin.context import AdminContext
    from kept.replication.partition import Partition


class LedPartitions:
    """Totals over the partitions that this node leads."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self.count = 0
        self.under_replicated = 0
        self.under_min_isr = 0
        self.lags: dict[int, int] = {}
        """The longest lag of each follower, in offsets."""

    def look(self, record: PartitionRecord, partition: Partition) -> None:
        """Count a partition, if it is led here."""
        if record.leader != self._node_id:
            return
        self.count += 1
        self.under_replicated += record.is_under_replicated
        core: Any = partition.core
        self.under_min_isr += core.below_min_isr
        for follower_id, follower in core.followers.items():
            known = follower.log_end_offset
            end = partition.log_start_offset if known == UNKNOWN_OFFSET else known
            lag = max(0, partition.log_end_offset - end)
            self.lags[follower_id] = max(lag, self.lags.get(follower_id, 0))

    def families(self) -> Iterator[Metric]:
        """What was counted."""
        from prometheus_client.core import GaugeMetricFamily

        yield gauge("leader_partitions", "Partitions led here.", self.count)
        yield gauge(
            "under_replicated_partitions", "Partitions led here with a short ISR.",
            self.under_replicated,
        )  # fmt: skip
        yield gauge(
            "under_min_isr_partitions", "Partitions led here that refuse acks=all.",
            self.under_min_isr,
        )  # fmt: skip
        lag = GaugeMetricFamily(
            "kept_replica_lag_max", "Offsets that a follower lacks, at most, of a partition here.",
            labels=["follower"],
        )  # fmt: skip
        for follower_id, longest in sorted(self.lags.items()):
            lag.add_metric([str(follower_id)], longest)
        yield lag


def families(context: AdminContext) -> Iterator[Metric | None]:
    """Elections, failovers, ISRs; and what the controller sees."""
    counted = context.counters.cluster
    yield counter("isr_shrinks", "Replicas that left an ISR led here.", counted.isr_shrinks)
    yield counter("isr_expands", "Replicas that entered an ISR led here.", counted.isr_expands)
    yield counter("raft_elections", "Controllers that came into office.", counted.elections)
    yield histogram(
        "raft_election_seconds", "Time without a known controller.", counted.election_seconds
    )
    yield histogram(
        "failover_seconds",
        "Time from noticing that a partition's leader is gone to taking appends here.",
        counted.failover_seconds,
    )
    leads = context.metadata.leads
    yield gauge("controller_active", "1 at the active controller.", leads)
    brokers = context.metadata.image.brokers.values() if leads else ()
    fenced = sum(broker.fenced for broker in brokers)
    yield gauge("controller_fenced_brokers", "Brokers that are registered and fenced.", fenced)
    yield counter(
        "controller_unclean_elections",
        "Leaders elected from outside the ISR: acknowledged records may be lost.",
        counted.unclean_elections,
    )
    yield counter(
        "committed_records_lost",
        "Offsets cut away here that were committed, or may have been.",
        counted.lost_records,
    )
    offline = 0
    for topic in context.metadata.image.topics.values() if leads else ():
        offline += sum(record.leader == NO_LEADER for record in topic.partitions)
        yield None
    yield gauge(
        "controller_offline_partitions", "Partitions of the cluster without a leader.", offline
    )
