"""What the replicas here obey: topics' settings over the broker's defaults, and throttles."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kept.cluster.controller import reassignment
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.cluster.metadata.records import ResourceType
from kept.node.config.topic_config import log_config
from kept.node.runtime.time_slices import LOOP_BYTES, LOOP_COMPRESSED_BYTES, checkpoint
from kept.storage.records import CheckRules
from kept.storage.types import MAX_INT64, LogConfig

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.replicas.role_changes import RoleChanges
    from kept.replication.quota import ReplicationQuotas

Throttles = tuple[Collection[tuple[int, int]] | None, Collection[tuple[int, int]] | None]
"""The (partition, broker) pairs of a topic that are throttled as leader, and as follower; None is
all of them."""


def throttles_of(image: Image, topic: str) -> Throttles:
    """A topic's throttles."""
    return (
        reassignment.throttled(image, topic, reassignment.LEADER_REPLICAS),
        reassignment.throttled(image, topic, reassignment.FOLLOWER_REPLICAS),
    )


class ReplicaSettings:
    """Gives the replicas here their topics' settings and throttles."""

    def __init__(
        self,
        config: LiveConfig,
        identity: NodeIdentity,
        table: ReplicaTable,
        quotas: ReplicationQuotas,
        roles: RoleChanges,
    ) -> None:
        self._config = config
        self._identity = identity
        self._table = table
        self._quotas = quotas
        self._roles = roles
        self._defaults: dict[str, str] = {}
        self.version = 0
        """How often settings have changed: a log that is being made has those of before."""

    def load_defaults(self) -> None:
        """The broker's settings of now are the defaults of topics."""
        self._defaults = self._config.current.topic_defaults()

    def config_for(self, image: Image, topic: str) -> LogConfig:
        """A topic's settings over the broker's defaults."""
        return log_config(image.config(ResourceType.TOPIC, topic), self._defaults)

    def _rules(self, config: LogConfig) -> CheckRules:
        return CheckRules(
            compacted=config.compact,
            max_batch_bytes=config.max_message_bytes,
            max_inflated_bytes=self._config.current.inflated_max_bytes,
            timestamp_type=config.message_timestamp_type,
            timestamp_before_max_ms=config.message_timestamp_before_max_ms,
            timestamp_after_max_ms=config.message_timestamp_after_max_ms,
            compression_type=config.compression_type,
        )

    def throttle(self, hosted: LocalReplica, throttles: Throttles) -> None:
        """Note whether a partition is throttled here, by its topic's :func:`throttles_of`."""
        as_leader, as_follower = throttles
        mine = hosted.partition.topic_partition.partition, self._identity.node_id
        hosted.throttled_as_leader = as_leader is None or mine in as_leader
        hosted.throttled_as_follower = as_follower is None or mine in as_follower
        self._roles.throttled(hosted)

    def limit_replication(self) -> None:
        """The node's rates are in force from now on."""
        config = self._config.current
        self._quotas.leader.bytes_per_second = config.leader_replication_throttled_rate
        self._quotas.follower.bytes_per_second = config.follower_replication_throttled_rate

    def apply(self, hosted: LocalReplica, config: LogConfig) -> None:
        """A replica obeys ``config`` from now on, and so do the checks of what is written to it."""
        hosted.partition.update_config(config)
        hosted.rules = rules = self._rules(config)
        limit = LOOP_BYTES if rules.codec is None else LOOP_COMPRESSED_BYTES
        if hosted.partition.topic_partition.topic in INTERNAL_TOPICS:
            limit = 0  # what clients write goes the long way, which refuses it
        hosted.loop_rules = rules.within(limit)
        hosted.sync = config.flush_messages < MAX_INT64

    async def reconfigure(self, image: Image, topics: Iterable[str] | None) -> None:
        """Settings of ``topics`` (None: of all) are in force when this returns: 3,000 partitions
        take 30 ms, and others have their turn meanwhile.
        """
        self.version += 1
        self.load_defaults()
        position = 0
        for name in (
            [topic.name for topic in self._table.by_name.values()] if topics is None else topics
        ):
            topic = self._table.by_name.get(name.encode())
            if topic is None:
                continue
            config = self.config_for(image, name)
            throttles = throttles_of(image, name)
            for number, hosted in list(topic.partitions.items()):
                if topic.partitions.get(number) is hosted:  # its directory may have failed
                    self.apply(hosted, config)
                    self.throttle(hosted, throttles)
                await checkpoint(position)
                position += 1
