"""The cluster at a glance: brokers, this node's directories, and totals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

import kept
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.node.runtime.time_slices import Pace

if TYPE_CHECKING:
    from kept.node.admin.readiness import NodeHealth
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.admin.views.log_directories import LogDirectories, LogDirectoryView
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity


class BrokerSummary(Struct, frozen=True):
    """A broker of the cluster, with how many partitions it leads and holds; ``internal_leads`` and
    ``internal_replicas`` of them are of internal topics.
    """

    node_id: int
    epoch: int
    rack: str | None
    fenced: bool
    leads: int
    replicas: int
    internal_leads: int
    internal_replicas: int
    endpoints: list[str]


class ClusterSummary(Struct, frozen=True):
    """The cluster as one of its nodes knows it. ``reason`` is why that node is not ready;
    ``stray_logs``, ``left_closed`` and ``offline_replicas`` are its logs that are set aside, its
    replicas for which there were too few open files, and those that an error took offline;
    ``listener`` is the one that the request came in by.
    """

    cluster_id: str
    version: str
    node_id: int
    controller_id: int
    term: int
    voters: list[int]
    metadata_index: int
    ready: bool
    reason: str | None
    actions: bool
    brokers: list[BrokerSummary]
    log_directories: list[LogDirectoryView]
    topics: int
    """All; ``internal_topics`` of them are the cluster's own."""
    partitions: int
    """Of all topics; ``internal_partitions`` of them of internal ones."""
    internal_topics: int
    internal_partitions: int
    offline_partitions: int
    under_replicated_partitions: int
    stray_logs: list[str]
    left_closed: list[str]
    offline_replicas: list[str]
    listener: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Describes the cluster."""

    config: LiveConfig
    identity: NodeIdentity
    metadata: MetadataLog
    lookup: TopicLookup
    health: NodeHealth
    log_directories: LogDirectories

    async def describe(self, listener: str) -> ClusterSummary:
        """Brokers, this node's directories, and totals, for who came in by ``listener``."""
        metadata, image = self.metadata, self.metadata.image
        directories = await self.log_directories.describe()
        leads: Counter[int] = Counter()
        replicas: Counter[int] = Counter()
        internal_leads: Counter[int] = Counter()
        internal_replicas: Counter[int] = Counter()
        offline = under_replicated = 0
        pace = Pace()
        for topic in list(image.topics.values()):
            for record in topic.partitions:
                leads[record.leader] += 1
                replicas.update(record.replicas)
                if topic.name in INTERNAL_TOPICS:
                    internal_leads[record.leader] += 1
                    internal_replicas.update(record.replicas)
                under_replicated += record.is_under_replicated
                offline += self.lookup.why_offline(topic.name, record) is not None
                await pace.checkpoint()
        internal = [image.topics[name] for name in INTERNAL_TOPICS if name in image.topics]
        reason = self.health.unready()
        return ClusterSummary(
            cluster_id=self.identity.cluster_id,
            version=kept.__version__,
            node_id=self.identity.node_id,
            controller_id=-1 if metadata.leader_id is None else metadata.leader_id,
            term=metadata.raft_node.term,
            voters=[voter.node_id for voter in metadata.raft_node.voters],
            metadata_index=image.index,
            ready=reason is None,
            reason=reason,
            actions=self.config.current.console_actions,
            brokers=[
                BrokerSummary(
                    node_id=broker_id,
                    epoch=broker.broker_epoch,
                    rack=broker.rack,
                    fenced=broker.fenced,
                    leads=leads[broker_id],
                    replicas=replicas[broker_id],
                    internal_leads=internal_leads[broker_id],
                    internal_replicas=internal_replicas[broker_id],
                    endpoints=[f"{e.name}://{e.host}:{e.port}" for e in broker.endpoints],
                )
                for broker_id, broker in sorted(image.brokers.items())
            ],
            log_directories=directories,
            topics=len(image.topics),
            partitions=sum(len(topic.partitions) for topic in image.topics.values()),
            internal_topics=len(internal),
            internal_partitions=sum(len(topic.partitions) for topic in internal),
            offline_partitions=offline,
            under_replicated_partitions=under_replicated,
            stray_logs=self.health.stray_logs(),
            left_closed=self.health.left_closed(),
            offline_replicas=self.health.offline_replicas(),
            listener=listener,
        )
