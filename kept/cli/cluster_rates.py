"""How fast a cluster moves, from what it says every few seconds: rates of partitions, topics, nodes
and groups. Pure: who asks the cluster gives what it said, and the time.

A cluster of many partitions is not asked about all of them each time (:class:`Rotation`): each
partition's rate is that between the last two times that it was asked about.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kept.client.admin.cluster import ClusterDescription
from kept.client.admin.cluster_sample import PartitionSample
from kept.client.admin.group_lag import group_lag, partition_lag
from kept.client.admin.group_survey import partitions_of
from kept.client.admin.groups import GroupDescription, GroupListing
from kept.client.core.metadata import TopicMetadata
from kept.storage.types import TopicPartition

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", str, TopicPartition)
Row = dict[str, Any]


class _Reading(NamedTuple):
    at_s: float
    value: int
    rate: float | None


@dataclass(slots=True)
class Rates(Generic[K]):
    """Counters that were read at different times, and how fast each one grows."""

    readings: dict[K, _Reading] = field(default_factory=dict)

    def record(self, values: Mapping[K, int], at_s: float) -> None:
        """What these counters are at a time, which is never before that of an earlier call."""
        for key, value in values.items():
            before = self.readings.get(key)
            rate = None
            if before is not None:
                seconds = at_s - before.at_s
                rate = (value - before.value) / seconds if seconds > 0 else before.rate
            self.readings[key] = _Reading(at_s, value, rate)

    def value(self, key: K) -> int | None:
        """What a counter was when it was read last."""
        reading = self.readings.get(key)
        return None if reading is None else reading.value

    def rate(self, keys: Iterable[K]) -> float | None:
        """By how much these grow in a second together; None where none was read twice."""
        rates = [self.readings[key].rate for key in keys if key in self.readings]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def total(self, keys: Iterable[K]) -> int | None:
        """Their sum; None where none was read."""
        known = [self.readings[key].value for key in keys if key in self.readings]
        return sum(known) if known else None

    def retain_only(self, keys: set[K]) -> None:
        """Forget all others."""
        self.readings = {key: it for key, it in self.readings.items() if key in keys}


@dataclass(slots=True)
class Rotation(Generic[N]):
    """Which of many things come next, ``most`` at a time, in turn."""

    most: int
    last: N | None = None

    def next(self, ordered: Sequence[N]) -> list[N]:
        """The next of things in ascending order: all, where they are few enough."""
        if len(ordered) <= self.most:
            return list(ordered)
        after = [each for each in ordered if self.last is None or each > self.last]
        chosen = (after + list(ordered))[: self.most]
        self.last = chosen[-1]
        return sorted(chosen)

    def turns(self, count: int) -> int:
        """How often it is asked until each of ``count`` things has come."""
        return max(1, -(-count // self.most))


@dataclass(slots=True)
class ClusterRates:
    """What is known of nodes, topics and groups; its rows are what ``kept top --json`` prints."""

    cluster: ClusterDescription | None = None
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    listings: dict[str, GroupListing] = field(default_factory=dict)
    groups: dict[str, GroupDescription] = field(default_factory=dict)
    committed: dict[str, dict[TopicPartition, int]] = field(default_factory=dict)
    ends: Rates[TopicPartition] = field(default_factory=Rates)
    sizes: Rates[TopicPartition] = field(default_factory=Rates)
    positions: Rates[tuple[str, TopicPartition]] = field(default_factory=Rates)

    def set_topics(self, topics: Mapping[str, TopicMetadata]) -> None:
        """These topics exist."""
        self.topics = dict(topics)
        there = set(self.partitions())
        self.ends.retain_only(there)
        self.sizes.retain_only(there)

    def partitions(self, *, led: bool = False) -> list[TopicPartition]:
        """All partitions, or those that have a leader, in order."""
        return [
            TopicPartition(name, number)
            for name, topic in sorted(self.topics.items())
            for number, partition in sorted(topic.partitions.items())
            if not led or partition.leader >= 0
        ]

    def add_partitions(self, sample: PartitionSample, at_s: float) -> None:
        """What leaders said at a time."""
        self.ends.record(sample.ends, at_s)
        self.sizes.record(sample.sizes, at_s)

    def set_groups(self, listings: Iterable[GroupListing]) -> None:
        """These groups exist."""
        self.listings = {listing.group: listing for listing in listings}
        for known in (self.groups, self.committed):
            for name in known.keys() - self.listings.keys():
                del known[name]
        self.positions.retain_only(
            {key for key in self.positions.readings if key[0] in self.listings}
        )

    def add_groups(
        self,
        described: Mapping[str, GroupDescription],
        committed: Mapping[str, dict[TopicPartition, int]],
        at_s: float,
    ) -> None:
        """What coordinators said at a time."""
        self.groups.update(described)
        self.committed.update(committed)
        for name, offsets in committed.items():
            self.positions.record({(name, tp): at for tp, at in offsets.items()}, at_s)

    def node_rows(self) -> list[Row]:
        """Each node: how many replicas it has, and what moves in the partitions that it leads."""
        if self.cluster is None:
            return []
        led: dict[int, list[TopicPartition]] = {}
        replicas: dict[int, int] = {}
        for name, topic in self.topics.items():
            for number, partition in topic.partitions.items():
                led.setdefault(partition.leader, []).append(TopicPartition(name, number))
                for node in partition.replicas:
                    replicas[node] = replicas.get(node, 0) + 1
        return [
            {
                "node": member.node_id,
                "address": f"{member.host}:{member.port}",
                "state": "fenced" if member.fenced else "active",
                "controller": member.node_id == self.cluster.controller_id,
                "leaders": len(led.get(member.node_id, ())),
                "replicas": replicas.get(member.node_id, 0),
                **self._moved(led.get(member.node_id, ())),
            }
            for member in self.cluster.members
        ]

    def topic_rows(self) -> list[Row]:
        """Each topic, and what moves in it."""
        rows = []
        for name, topic in sorted(self.topics.items()):
            partitions = topic.partitions.values()
            rows.append(
                {
                    "topic": name,
                    "partitions": len(topic.partitions),
                    "under_replicated": sum(len(p.isr) < len(p.replicas) for p in partitions),
                    "offline": sum(p.leader < 0 for p in partitions),
                    **self._moved([TopicPartition(name, number) for number in topic.partitions]),
                }
            )
        return rows

    def _moved(self, partitions: Sequence[TopicPartition]) -> Row:
        return {
            "records_per_s": self.ends.rate(partitions),
            "size_bytes": self.sizes.total(partitions),
            "growth_bytes_per_s": self.sizes.rate(partitions),
        }

    def group_rows(self) -> list[Row]:
        """Each group: members, how fast its offsets move, lag."""
        rows = []
        for name, listing in sorted(self.listings.items()):
            description, committed = self.groups.get(name), self.committed.get(name, {})
            lag = group_lag(
                partition_lag(committed.get(tp), self.ends.value(tp))
                for tp in partitions_of(description, committed)
            )
            rows.append(
                {
                    "group": name,
                    "state": listing.state,
                    "members": None if description is None else len(description.members),
                    "records_per_s": self.positions.rate((name, tp) for tp in committed),
                    **lag._asdict(),
                }
            )
        return rows


def sorted_rows(rows: Sequence[Row], by: str, name: str) -> list[Row]:
    """Rows with most of ``by`` first, those that do not know it last; by ``name`` where they have
    no such field.
    """
    if not rows or by not in rows[0]:
        return sorted(rows, key=lambda row: row[name])
    return sorted(rows, key=lambda row: (row[by] is None, -(row[by] or 0), row[name]))
