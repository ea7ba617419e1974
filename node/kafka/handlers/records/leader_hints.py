"""Where else a client may turn: the leader of now (KIP-951), or a replica nearby (KIP-392).

Both only hint: what is asked of a partition is decided by whoever has it. The leader is what this
node's image says; when the image still names this node, nothing better is known and nothing is
said. Endpoints are those of the listener that the request came in on (rule 42).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kept.node.kafka.codec.wire import Endpoint

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.address_book import AddressBook
    from kept.node.metadata.failure_detector import FailureDetector
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.replication.partition import Partition

PRODUCE_HINTS: Final = 10
FETCH_HINTS: Final = 16
"""The versions of the APIs from which on a response can name the current leader."""
RACK_AWARE: Final = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


@dataclass(frozen=True, slots=True)
class LeaderHints:
    """Where partitions are led, and read, as this node's image says."""

    config: LiveConfig
    metadata: MetadataLog
    addresses: AddressBook
    detector: FailureDetector
    table: ReplicaTable

    def current_leader(self, name: bytes, partition: int, by_id: bool) -> tuple[int, int] | None:
        """(leader id, leader epoch) of a partition that is led elsewhere; None: not known."""
        topic = (self.table.by_id if by_id else self.table.by_name).get(name)
        record = None if topic is None else self.metadata.image.partition(topic.name, partition)
        if record is None or record.leader in (-1, self.config.current.node_id):
            return None
        if self.detector.seems_gone(record.leader):
            return None
        return record.leader, record.leader_epoch

    def endpoints(self, listener: str, leaders: Sequence[tuple[int, int]]) -> list[Endpoint]:
        """Where the leaders that a response hints at are reached on ``listener``, each once."""
        endpoints = []
        for leader_id in sorted({leader for leader, _ in leaders}):
            where = self.addresses.broker(leader_id, listener)
            broker = self.metadata.image.brokers.get(leader_id)
            if where is not None and broker is not None and not broker.fenced:
                endpoints.append(Endpoint(leader_id, *where, broker.rack))
        return endpoints

    def preferred_replica(self, partition: Partition, offset: int, rack: str) -> int:
        """The replica in ``rack`` that a consumer should fetch ``offset`` from; -1: this one.

        Of several the one that has most, then the one with the lowest id.
        """
        brokers = self.metadata.image.brokers
        nearby = [
            replica
            for replica in partition.readable_replicas(offset)
            if (broker := brokers.get(replica)) is not None
            and broker.active
            and broker.rack == rack
        ]
        if not nearby or self.config.current.node_id in nearby:
            return -1
        followers = partition.core.followers
        return min(nearby, key=lambda replica: (-followers[replica].log_end_offset, replica))
