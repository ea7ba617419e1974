"""Whether clients should come to this node: for ``/readyz``, gRPC's health service and metrics.

A node is not ready while it starts or stops. It becomes ready once every replica that it held when
it started has been in its ISR since, or has no leader alive to catch up with; a rolling restart can
wait for that before it goes on to the next node. From then on it is unready only when it is
fenced, a log directory is offline, or replicas were left closed: those that lag now and then are no
reason to send clients away.

Nor are those that an error took offline, or did not let open: they are told of and not waited for.
An error that a record causes meets each leader in turn, and with the last one unready nobody would
be served of all the other partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Image
    from kept.cluster.metadata.records import PartitionRecord
    from kept.node.config.live_config import LiveConfig
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.replica_manager import ReplicaManager
    from kept.node.replicas.replica_table import ReplicaTable


class _Awaited(NamedTuple):
    """A replica that has not been seen in its ISR."""

    topic_id: UUID
    partition: int


NO_REPLICAS: Final[frozenset[TopicPartition]] = frozenset()


def _ignore() -> None:
    """Nobody watches."""


class Readiness:
    """What has been seen since the node started. Pure: it reads images."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.started = False
        """The node accepts clients; neither starting nor stopping."""
        self.on_change: Callable[[], None] = _ignore
        """The node calls it whenever the answer may be another one now."""
        self._awaited: set[_Awaited] | None = None

    def changed(self) -> None:
        """The answer may be another one now."""
        self.on_change()

    @property
    def caught_up(self) -> bool:
        """Whether all replicas of the start have been in their ISR."""
        return self._awaited is not None and not self._awaited

    def unready(
        self,
        image: Image,
        broker_epoch: int,
        offline_directories: Mapping[str, str],
        left_closed: int = 0,
        failed: Container[TopicPartition] = NO_REPLICAS,
    ) -> str | None:
        """Why clients should not come now; None when they may.

        ``broker_epoch`` is that of this start: what the image says of an earlier one does not
        count. ``offline_directories``: name -> reason. ``left_closed``: replicas for which there
        are too few open files. ``failed``: those that an error took offline; not waited for.
        """
        for name, reason in offline_directories.items():
            return f"log directory {name} is offline: {reason}"
        if left_closed:
            were = "replica was" if left_closed == 1 else "replicas were"
            return (
                f"{left_closed} {were} left closed for want of open files: raise LimitNOFILE "
                "(ulimit -n) and start this node again, or remove others"
            )
        broker = image.brokers.get(self.node_id)
        if broker is None or broker.broker_epoch != broker_epoch:
            return "not registered with the controller yet"
        if broker.fenced:
            return "fenced by the controller"
        if not self.caught_up:
            self._update(image, failed)
        if self._awaited:
            partition = min(self._awaited)
            topic = image.topics_by_id[partition.topic_id]
            where = TopicPartition(topic.name, partition.partition).place
            if len(self._awaited) == 1:
                return f"1 replica is not in its ISR yet: {where}"
            return f"{len(self._awaited)} replicas are not in their ISR yet, such as {where}"
        return None

    def _update(self, image: Image, failed: Container[TopicPartition]) -> None:
        """Strike out the replicas that are in their ISR in ``image``, or ``failed``."""
        if self._awaited is None:
            held = (
                _Awaited(topic.topic_id, record.partition)
                for topic in image.topics.values()
                for record in topic.partitions
                if self.node_id in record.replicas
            )
            self._awaited = self._behind(image, held, failed)
        else:
            self._awaited = self._behind(image, self._awaited, failed)

    def _behind(
        self, image: Image, awaited: Iterable[_Awaited], failed: Container[TopicPartition]
    ) -> set[_Awaited]:
        return {partition for partition in awaited if self._is_behind(image, *partition, failed)}

    def _is_behind(
        self, image: Image, topic_id: UUID, partition: int, failed: Container[TopicPartition]
    ) -> bool:
        topic = image.topics_by_id.get(topic_id)
        if topic is None or TopicPartition(topic.name, partition) in failed:
            return False
        record = image.partition(topic_id, partition)
        if record is None or self.node_id not in record.replicas or self.node_id in record.isr:
            return False
        return _has_leader(image, record)


def _has_leader(image: Image, record: PartitionRecord) -> bool:
    leader = image.brokers.get(record.leader)
    return leader is not None and not leader.fenced


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The health of one node, as it is now."""

    readiness: Readiness
    config: LiveConfig
    identity: NodeIdentity
    metadata: MetadataLog
    table: ReplicaTable
    replicas: ReplicaManager

    @property
    def started(self) -> bool:
        """Whether it accepts clients: it neither starts nor stops."""
        return self.readiness.started

    def unready(self) -> str | None:
        """Why clients should not come here now; None when they may."""
        if not self.started:
            return "starting or stopping"
        if not self.config.current.is_broker:
            return None if self.metadata.leader_id is not None else "no controller is elected"
        offline = {d.name: d.offline for d in self.table.directories if d.offline is not None}
        return self.readiness.unready(
            self.metadata.image,
            self.identity.broker_epoch,
            offline,
            len(self.replicas.left_closed),
            self.table.failed,
        )

    def stray_logs(self) -> list[str]:
        """Directories of logs set aside here, which the metadata does not know."""
        return [str(path) for path in self.replicas.strays.paths]

    def left_closed(self) -> list[str]:
        """Partitions whose replicas here were left closed for want of open files."""
        return [tp.place for tp in sorted(self.replicas.left_closed)]

    def offline_replicas(self) -> list[str]:
        """Partitions whose replicas here an error took offline, or did not let open, until the node
        is started again, though their disk works.
        """
        return [tp.place for tp in sorted(self.table.failed) if self._is_here(tp)]

    def _is_here(self, tp: TopicPartition) -> bool:
        record = self.metadata.image.partition(tp.topic, tp.partition)
        return record is not None and self.identity.node_id in record.replicas
