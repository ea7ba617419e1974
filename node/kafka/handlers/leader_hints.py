"""Where else a client may turn: the leader of now (KIP-951), or a replica nearby (KIP-392).

Both only hint: what is asked of a partition is decided by whoever has it. The leader is what this
node's image says; when the image still names this node, nothing better is known and nothing is
said. Endpoints are those of the listener that the request came in on (rule 42).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kept.node.kafka.codec.endpoints import Endpoint

if TYPE_CHECKING:
    from kept.node.kafka.apis import KafkaApis
    from kept.node.kafka.connection import Connection
    from kept.replication.partition import Partition

PRODUCE_HINTS: Final = 10
FETCH_HINTS: Final = 16
"""The versions of the APIs from which on a response can name the current leader."""
NOT_LEADER_OR_FOLLOWER: Final = 6
FENCED_LEADER_EPOCH: Final = 74
RACK_AWARE: Final = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


def current_leader(
    connection: Connection, name: bytes, partition: int, by_id: bool
) -> tuple[int, int] | None:
    """(leader id, leader epoch) of a partition that is led elsewhere; None when nobody knows."""
    apis = connection.apis
    topic = (apis.table.by_id if by_id else apis.table.by_name).get(name)
    record = None if topic is None else apis.metadata.image.partition(topic.name, partition)
    if record is None or record.leader in (-1, apis.identity.node_id):
        return None
    if apis.detector.seems_gone(record.leader):
        return None
    return record.leader, record.leader_epoch


def endpoints(connection: Connection, leaders: Sequence[tuple[int, int]]) -> list[Endpoint]:
    """Where the leaders that a response hints at are reached, each once."""
    apis = connection.apis
    found = []
    for leader_id in sorted({leader for leader, _ in leaders}):
        where = apis.addresses.broker(leader_id, connection.listener.name)
        broker = apis.metadata.image.brokers.get(leader_id)
        if where is not None and broker is not None and not broker.fenced:
            found.append(Endpoint(leader_id, *where, broker.rack))
    return found


def preferred_replica(apis: KafkaApis, partition: Partition, offset: int, rack: str) -> int:
    """The replica in ``rack`` that a consumer should fetch ``offset`` from; -1: this one.

    Of several the one that has most, then the one with the lowest id.
    """
    brokers = apis.metadata.image.brokers
    nearby = [
        replica
        for replica in partition.readable_replicas(offset)
        if (broker := brokers.get(replica)) is not None and broker.active and broker.rack == rack
    ]
    if not nearby or apis.identity.node_id in nearby:
        return -1
    followers = partition.core.followers
    return min(nearby, key=lambda replica: (-followers[replica].log_end_offset, replica))
