"""What this node's own replicas are and have: state, digests of their files, lost records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from kept.node.admin.results import PartitionResult, Remote
from kept.node.compaction import replica_digests
from kept.node.replicas import lost_records_report

if TYPE_CHECKING:
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.compaction.dry_run import DryRuns
    from kept.node.compaction.replica_digests import ReplicaState, Wanted
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime


class LostRecords(Struct, frozen=True):
    """Reports of committed records that were cut away, as their files say."""

    reports: list[Mapping[str, Any]]


class NamedReplica(PartitionResult, frozen=True):
    """The state of a replica with its partition's name."""

    INLINED: ClassVar = frozenset({"state"})

    state: ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaReports:
    """Reports about the replicas of one node."""

    runtime: Runtime
    lookup: TopicLookup
    table: ReplicaTable
    dry_runs: DryRuns

    async def lost_records(
        self, topic: str | None = None, partition: int | None = None, offset: int | None = None
    ) -> LostRecords:
        """Reports of committed records that were cut away here. Raises UnknownTopicOrPartition."""
        if topic is not None:
            self.lookup.partition(topic, partition or 0)
        directories = [
            hosted.partition.log.directory
            for tp, hosted in sorted(self.table.replicas.items())
            if topic in (None, tp.topic) and partition in (None, tp.partition)
        ]

        def read() -> list[dict[str, Any]]:
            disk = self.runtime.disk
            return [
                report for path in directories for report in lost_records_report.reports(path, disk)
            ]

        reports = await self.runtime.in_thread(read)
        return LostRecords(
            [
                report
                for report in reports
                if offset is None
                or report.get("first_offset", 0) <= offset < report.get("end_offset", 0)
            ]
        )

    def state(self, topic: str, partition: int) -> NamedReplica:
        """How far this node's replica is. Raises UnknownTopicOrPartition, NotLeaderOrFollower."""
        tp = self.lookup.partition(topic, partition)
        state = replica_digests.state(self.lookup.node_id, self.lookup.replica(tp))
        return NamedReplica(*tp, state=state)

    async def digests(self, topic: str, partition: int, wanted: Wanted) -> Remote:
        """What this node's replica has on disk, as the process of a dry run says it
        (:func:`kept.node.compaction.replica_digests.digests`).

        Raises UnknownTopicOrPartition, InvalidRequest, ConcurrentlyModified, DryRunFailed.
        """
        hosted = self.lookup.replica(self.lookup.partition(topic, partition))
        node_id = self.lookup.node_id
        return Remote(await replica_digests.digests(self.dry_runs, node_id, hosted, wanted))
