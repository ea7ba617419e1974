"""What a client knows of a cluster: its nodes, topics, leaders and coordinators."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kept.storage.types import decimal_number

_NO_ID: Final = uuid.UUID(int=0)
METADATA_MAX_AGE_S: Final = 300.0
"""After so long the partitions of a topic are counted again, as by Java's metadata.max.age.ms."""


class Endpoint(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """One partition as Metadata tells it; leader -1 means none."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    error_code: int = 0
    offline_replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic as Metadata tells it. ``topic_id`` is None from brokers that have no topic ids."""

    name: str
    topic_id: uuid.UUID | None
    internal: bool
    partitions: dict[int, PartitionMetadata]
    error_code: int = 0


@dataclass(slots=True)
class ClusterMetadata:
    """The newest answers of Metadata and FindCoordinator."""

    nodes: dict[int, Endpoint] = field(default_factory=dict)
    racks: dict[int, str | None] = field(default_factory=dict)
    controller_id: int = -1
    cluster_id: str | None = None
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    coordinators: dict[tuple[int, str], int] = field(default_factory=dict)
    batch_limits: dict[str, int] = field(default_factory=dict)
    """How many bytes a batch may have at most, by topic, as refusals have told since its last
    Metadata.
    """

    def leader(self, topic: str, partition: int) -> Endpoint | None:
        """Where the partition's leader listens, None when it is not known."""
        view = self.topics.get(topic)
        if view is None or partition not in view.partitions:
            return None
        return self.nodes.get(view.partitions[partition].leader)

    def topic_id(self, name: str) -> uuid.UUID | None:
        """The id of a topic, None where it has none or is not known."""
        view = self.topics.get(name)
        return None if view is None or view.topic_id == _NO_ID else view.topic_id

    def topic_name(self, topic_id: uuid.UUID | None) -> str | None:
        """The name of the topic with that id."""
        for view in self.topics.values():
            if view.topic_id == topic_id:
                return view.name
        return None

    def update(self, response: Any, asked: tuple[str, ...] | None) -> None:
        """Take over a Metadata response; ``asked`` None means that it lists all topics."""
        nodes = {int(b.node_id): Endpoint(b.host, int(b.port)) for b in response.brokers}
        if nodes:
            self.nodes = nodes
            self.racks = {int(b.node_id): getattr(b, "rack", None) for b in response.brokers}
        self.controller_id = int(getattr(response, "controller_id", -1))
        self.cluster_id = getattr(response, "cluster_id", None) or self.cluster_id
        seen = {}
        for topic in response.topics:
            if topic.name is not None:
                seen[str(topic.name)] = topic_view(topic)
        for name in (*self.topics, *self.batch_limits) if asked is None else asked:
            self.forget_topic(name)
        self.topics.update(seen)

    def forget_topic(self, name: str) -> None:
        """Drop what is known of a topic, so that it is asked for again."""
        self.topics.pop(name, None)
        self.batch_limits.pop(name, None)


def topic_view(topic: Any) -> TopicMetadata:
    """A topic of a Metadata response."""
    partitions = {
        int(p.partition_index): PartitionMetadata(
            int(p.partition_index),
            int(p.leader_id),
            int(getattr(p, "leader_epoch", -1)),
            tuple(map(int, p.replica_nodes)),
            tuple(map(int, p.isr_nodes)),
            int(p.error_code),
            tuple(map(int, getattr(p, "offline_replicas", ()))),
        )
        for p in topic.partitions
    }
    return TopicMetadata(
        str(topic.name),
        getattr(topic, "topic_id", None),
        bool(getattr(topic, "is_internal", False)),
        partitions,
        int(topic.error_code),
    )


def parse_bootstrap(text: str) -> tuple[Endpoint, ...]:
    """``host[:port][,…]`` as endpoints, port 9092 if absent; ValueError says what is wrong."""
    endpoints = []
    for part in text.split(","):
        address = part.strip()
        if not address:
            continue
        host, colon, port = address.rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):
            host, port = address, "9092"
        host, number = host.strip("[]"), decimal_number(port)
        if not host or "/" in host or number is None or not 0 < number < 65536:
            raise ValueError(f"{address!r} is not host:port")
        endpoints.append(Endpoint(host, number))
    if not endpoints:
        raise ValueError("no bootstrap address given, such as localhost:9092")
    return tuple(endpoints)
