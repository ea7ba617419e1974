"""Topics and their partitions, with how far replicas and compaction are.

Where nothing else is said a view is of the partitions that this node holds; in a cluster of one
these are all. With ``leaders`` those that are led elsewhere are described by their leaders
(:mod:`kept.node.admin.peer_http`); one that does not answer says why, and what is known here stands
in for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from kept.client.admin.topics import SOURCES
from kept.cluster.controller.config_changes import settings_given
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.cluster.metadata.records import PartitionRecord, ResourceType
from kept.node.admin.compaction.compaction_status import CompactionStatus
from kept.node.admin.results import OMITTED, Omitted, Remote
from kept.node.config.config_def import Source
from kept.node.config.definitions import BROKER_SETTINGS
from kept.node.config.topic_config import inherited_entries
from kept.node.runtime.tasks import gather_or_cancel
from kept.node.runtime.time_slices import checkpoint
from kept.replication.events import UNKNOWN_OFFSET
from kept.storage.errors import KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import TopicImage
    from kept.node.admin.compaction.compaction_status import CompactionView
    from kept.node.admin.peer_http import PeerHttp
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.replication.partition import Partition
    from kept.storage.log.log import Log

MAX_SEGMENTS: Final = 1000
"""Segments listed of one partition; the oldest are left out beyond, and that is said."""


class TopicSummary(Struct, frozen=True):
    """A topic in a line. ``size_bytes`` is what is here of it."""

    name: str
    topic_id: str
    internal: bool
    partition_count: int
    replication_factor: int
    size_bytes: int
    cleanup_policy: list[str]
    offline_partitions: int
    under_replicated_partitions: int


class Topics(Struct, frozen=True):
    """Every topic."""

    topics: list[TopicSummary]


class FollowerProgress(Struct, frozen=True):
    """How far another replica is, as its leader knows; None where it has not fetched yet."""

    node: int
    log_end_offset: int | None
    lag: int | None


class SegmentSummary(Struct, frozen=True):
    """One segment: clean, dirty or active; ``closed`` in a log that is not compacted."""

    base_offset: int
    next_offset: int
    size_bytes: int
    kind: str


class ReplicaSummary(Struct, frozen=True):
    """A partition's log on this node."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    log_end_offset: int
    size_bytes: int
    directory: str
    followers: list[FollowerProgress]
    segments: list[SegmentSummary]
    segments_left_out: int
    compaction: CompactionStatus | None


class PartitionSummary(Struct, frozen=True):
    """A partition: what the metadata say, and its log if it is here. ``unanswered`` is why its
    leader does not describe it.
    """

    INLINED: ClassVar = frozenset({"log"})

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    offline: str | None
    log: ReplicaSummary | Omitted = OMITTED
    unanswered: str | Omitted | None = OMITTED


class TopicDetail(Struct, frozen=True):
    """A topic with its partitions, and its settings for who may see them."""

    INLINED: ClassVar = frozenset({"summary"})

    summary: TopicSummary
    config: Mapping[str, str] | Omitted
    broker_defaults: Mapping[str, str] | Omitted
    partitions: list[PartitionSummary | Remote]


class TopicSetting(Struct, frozen=True):
    """A setting of a topic: the ``value`` in force, and the ``default`` that it has where the topic
    sets none; None is unset. ``allowed`` is the range in words, or empty.
    """

    name: str
    value: str | None
    default: str | None
    source: str
    type: str
    allowed: str
    documentation: str


class TopicConfig(Struct, frozen=True):
    """All settings of a topic, by name."""

    topic: str
    settings: list[TopicSetting]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicView:
    """Describes topics."""

    config: LiveConfig
    metadata: MetadataLog
    lookup: TopicLookup
    table: ReplicaTable
    compaction: CompactionView
    peer_http: PeerHttp

    async def topics(self) -> Topics:
        """Every topic in a line, by name."""
        summaries = []
        ordered = sorted(self.metadata.image.topics.values(), key=lambda topic: topic.name)
        for number, topic in enumerate(ordered):
            summaries.append(await self._summary(topic))
            await checkpoint(number)
        return Topics(summaries)

    async def _summary(self, topic: TopicImage) -> TopicSummary:
        size_bytes = offline = 0
        policy: list[str] = []
        for number, record in enumerate(topic.partitions):
            partition = self.table.partitions.get(TopicPartition(topic.name, record.partition))
            if partition is not None:
                size_bytes += partition.log.size_bytes
                policy = policy or sorted(partition.log.config.cleanup_policy)
            offline += self.lookup.why_offline(topic.name, record) is not None
            await checkpoint(number)
        return TopicSummary(
            name=topic.name,
            topic_id=str(topic.topic_id),
            internal=topic.name in INTERNAL_TOPICS,
            partition_count=len(topic.partitions),
            replication_factor=len(topic.partitions[0].replicas) if topic.partitions else 0,
            size_bytes=size_bytes,
            cleanup_policy=policy,
            offline_partitions=offline,
            under_replicated_partitions=sum(r.is_under_replicated for r in topic.partitions),
        )

    async def topic(
        self,
        name: str,
        *,
        leaders: bool = False,
        partition: int | None = None,
        limit: int | None = None,
        segments: int = MAX_SEGMENTS,
    ) -> TopicDetail:
        """One topic: settings in force, and each partition (or one, or the first ``limit``) with
        its newest segments; with ``leaders`` as the leaders know. Raises UnknownTopicOrPartition.
        """
        topic = self.lookup.topic(name)
        wanted: Iterable[PartitionRecord] = topic.partitions[:limit]
        if partition is not None:
            wanted = [topic.partitions[self.lookup.partition(name, partition).partition]]
        partitions = []
        for number, record in enumerate(wanted):
            partitions.append(self._partition(name, record, segments))
            await checkpoint(number)
        described: list[PartitionSummary | Remote] = list(partitions)
        if leaders:
            query = {"segments": str(segments)}
            for parameter, value in (("partition", partition), ("limit", limit)):
                if value is not None:
                    query[parameter] = str(value)
            described = await self._from_leaders(partitions, f"/api/v1/topics/{name}", query)
        return TopicDetail(
            summary=await self._summary(topic),
            config=settings_given(self.metadata.image, ResourceType.TOPIC, name),
            broker_defaults=self.config.current.topic_defaults(),
            partitions=described,
        )

    def topic_config(self, name: str) -> TopicConfig:
        """Every setting of a topic, also those at their default. Raises UnknownTopicOrPartition."""
        topic = self.lookup.topic(name).name
        given = settings_given(self.metadata.image, ResourceType.TOPIC, topic)
        settings = []
        for entry in inherited_entries(BROKER_SETTINGS, self.config.current.layers).values():
            setting = entry.setting
            source = Source.DYNAMIC_TOPIC_CONFIG if setting.name in given else entry.source
            settings.append(
                TopicSetting(
                    name=setting.name,
                    value=given.get(setting.name, entry.value),
                    default=entry.value,
                    source=SOURCES[source],
                    type=setting.kind.name.lower(),
                    allowed=setting.allowed,
                    documentation=entry.documentation,
                )
            )
        return TopicConfig(topic, settings)

    def _partition(self, topic: str, record: PartitionRecord, segments: int) -> PartitionSummary:
        tp = TopicPartition(topic, record.partition)
        partition = self.table.partitions.get(tp)
        return PartitionSummary(
            partition=record.partition,
            leader=record.leader,
            leader_epoch=record.leader_epoch,
            replicas=list(record.replicas),
            isr=list(record.isr),
            offline=self.lookup.why_offline(topic, record),
            log=OMITTED if partition is None else self._replica(tp, partition, segments),
        )

    def _replica(self, tp: TopicPartition, partition: Partition, segments: int) -> ReplicaSummary:
        log = partition.log
        status = self.compaction.status_of(tp)
        first_dirty = None if status is None else status.first_dirty_offset
        return ReplicaSummary(
            log_start_offset=log.log_start_offset,
            high_watermark=partition.high_watermark,
            last_stable_offset=partition.last_stable_offset,
            log_end_offset=log.log_end_offset,
            size_bytes=log.size_bytes,
            directory=log.directory,
            followers=_followers(partition),
            segments=_segments(log, first_dirty, segments),
            segments_left_out=max(0, len(log.segments) - segments),
            compaction=status,
        )

    async def _from_leaders(
        self, local: list[PartitionSummary], path: str, query: Mapping[str, str]
    ) -> list[PartitionSummary | Remote]:
        """Partitions as their leaders see them: those led elsewhere are theirs to describe."""
        leaders = {partition.leader for partition in local} - {self.lookup.node_id}
        reachable = sorted(leader for leader in leaders if leader in self.metadata.image.brokers)
        descriptions = await gather_or_cancel(
            self._described_by(leader, path, query) for leader in reachable
        )
        by_leader = dict(zip(reachable, descriptions, strict=True))
        described: list[PartitionSummary | Remote] = []
        for partition in local:
            remote, why = by_leader.get(partition.leader, ({}, None))
            better = remote.get(partition.partition)
            if better is not None and better.get("log_end_offset") is not None:
                described.append(Remote(better))
            else:
                described.append(replace(partition, unanswered=why))
        return described

    async def _described_by(
        self, leader: int, path: str, query: Mapping[str, str]
    ) -> tuple[dict[int, Mapping[str, Any]], str | None]:
        try:
            answer = await self.peer_http.get(leader, path, query)
        except KeptError as error:
            return {}, error.client_message
        return {described["partition"]: described for described in answer["partitions"]}, None


def _followers(partition: Partition) -> list[FollowerProgress]:
    """How far the other replicas are, as their leader knows; empty at a follower."""
    if not partition.is_leader:
        return []
    core: Any = partition.core
    progress = []
    for node_id, follower in sorted(core.followers.items()):
        end = follower.log_end_offset
        known = end != UNKNOWN_OFFSET
        lag = max(0, partition.log_end_offset - end) if known else None
        progress.append(FollowerProgress(node_id, end if known else None, lag))
    return progress


def _segments(log: Log, first_dirty: int | None, most: int) -> list[SegmentSummary]:
    """The newest segments, oldest first."""
    active = log.active_segment
    described = []
    for segment in list(log.segments)[-most:]:
        if segment is active:
            kind = "active"
        elif first_dirty is None:
            kind = "closed"
        else:
            kind = "clean" if segment.next_offset <= first_dirty else "dirty"
        described.append(
            SegmentSummary(segment.base_offset, segment.next_offset, segment.size_bytes, kind)
        )
    return described
