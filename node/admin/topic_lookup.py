"""Topics and partitions by name, with errors that say what there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from kept.node.runtime.time_slices import Pace
from kept.storage.errors import KeptError, UnknownTopicOrPartition
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import TopicImage
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable


@dataclass(frozen=True, slots=True)
class TopicLookup:
    """What the operations of the API look up first."""

    identity: NodeIdentity
    metadata: MetadataLog
    table: ReplicaTable

    @property
    def node_id(self) -> int:
        """This node's."""
        return self.identity.node_id

    def topic(self, name: str) -> TopicImage:
        """A topic of the cluster. Raises UnknownTopicOrPartition."""
        topic = self.metadata.image.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {name}")
        return topic

    def partition(self, topic: str, partition: int) -> TopicPartition:
        """A partition of the cluster. Raises UnknownTopicOrPartition."""
        count = len(self.topic(topic).partitions)
        if partition >= count:
            there = f"it has 0 to {count - 1}"
            raise UnknownTopicOrPartition(f"{topic} has no partition {partition}; {there}")
        return TopicPartition(topic, partition)

    def leader(self, tp: TopicPartition) -> int:
        """The node that leads a partition of the cluster; -1 where nobody does."""
        return self.metadata.image.topics[tp.topic].partitions[tp.partition].leader

    def local_partitions(self) -> list[TopicPartition]:
        """The partitions that are open on this node, in order."""
        return sorted(self.table.partitions)

    def is_here(self, tp: TopicPartition) -> bool:
        """Whether an open replica is on this node."""
        return tp in self.table.partitions

    def replica_or_none(self, tp: TopicPartition) -> LocalReplica | None:
        """This node's replica, if there is one."""
        return self.table.replicas.get(tp)

    def replica(self, tp: TopicPartition) -> LocalReplica:
        """This node's replica. Raises NotLeaderOrFollower, KafkaStorageError."""
        self.table.partition(tp)
        return self.table.replicas[tp]

    def why_offline(self, topic: str, record: PartitionRecord) -> str | None:
        """Why a partition is not served, as far as this node knows; None when it is."""
        tp = TopicPartition(topic, record.partition)
        if tp in self.table.partitions:
            return None
        if self.identity.node_id not in record.replicas:
            return None if record.leader >= 0 else f"{tp.place} has no leader"
        try:
            self.table.partition(tp)
        except KeptError as error:
            return error.client_message
        return None


NEAR: Final = 0.6
"""How alike names have to be (:class:`difflib.SequenceMatcher`), as difflib has it."""
MAX_COMPARED: Final = 5_000


async def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name that is most like ``name``, of the first :data:`MAX_COMPARED`, if one is."""
    from difflib import SequenceMatcher

    matcher, pace = SequenceMatcher(b=name, autojunk=False), Pace()
    best, nearest = NEAR, None
    for other in islice(names, MAX_COMPARED):
        await pace.checkpoint()
        matcher.set_seq1(other)
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) > best:
            ratio = matcher.ratio()
            if ratio > best:
                best, nearest = ratio, other
    return nearest
