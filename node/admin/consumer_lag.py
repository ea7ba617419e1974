"""Consumer groups of the whole cluster and how far behind they are, as any Kafka client sees them.

Groups lie with their coordinators and high watermarks with the leaders, so this node calls the
others in Kafka's protocol (:class:`kept.node.admin.cluster_client.ClusterClient`): one ListGroups,
DescribeGroups and OffsetFetch a group, one ListOffsets a thousand partitions of a leader. A node
that does not answer leaves out what it has, and that is said (``unanswered``).

Limits: :data:`MAX_GROUPS` are looked at, the others only counted; a name says which are wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kept.client.api_keys import ApiKey
from kept.client.groups import decode_assignment
from kept.client.records import LATEST
from kept.node.admin.results import OfPartition, Unanswered
from kept.node.runtime.yielding import checkpoint
from kept.storage.errors import GroupIdNotFound, KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.metadata.metadata_log import Metadata

MAX_GROUPS: Final = 200
ENDS_TOGETHER: Final = 1000
"""Partitions of one ListOffsets: a request is made, and its answer read, at a stretch."""
CALL_S: Final = 5.0
DESCRIBE_GROUPS: Final = ApiKey.DESCRIBE_GROUPS, 5
LIST_GROUPS: Final = ApiKey.LIST_GROUPS, 4
OFFSET_FETCH: Final = ApiKey.OFFSET_FETCH, 8
LIST_OFFSETS: Final = ApiKey.LIST_OFFSETS, 6
"""Keys and versions; every kept serves them."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group in a line. ``lag`` is None where some partition's leader did not answer."""

    group: str
    state: str
    coordinator: int
    protocol: str
    members: int
    topics: list[str]
    lag: int | None


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of the cluster; ``left_out`` are those beyond :data:`MAX_GROUPS`."""

    groups: list[GroupSummary]
    left_out: int
    unanswered: list[Unanswered]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str


@dataclass(frozen=True, slots=True)
class PartitionLag(OfPartition):
    """How far a group is in a partition; None where that is not known."""

    committed_offset: int | None
    high_watermark: int | None
    lag: int | None
    member_id: str | None


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """A group by member and partition."""

    group: str
    state: str
    coordinator: int
    protocol: str
    members: list[GroupMember]
    partitions: list[PartitionLag]
    unanswered: list[Unanswered]


@dataclass(slots=True)
class _Found:
    """What the nodes have answered so far. ``ends`` are high watermarks."""

    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each group: its coordinator, its state."""
    described: dict[str, Any] = field(default_factory=dict)
    committed: dict[str, dict[TopicPartition, int]] = field(default_factory=dict)
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    unanswered: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """Describes the consumer groups of the cluster."""

    metadata: Metadata
    new_client: Callable[[], ClusterClient]

    async def groups(self, part_of_name: str = "") -> Groups:
        """The groups whose name contains ``part_of_name``."""
        found, names, left_out = await self._collect(lambda name: part_of_name in name)
        groups = []
        for name in names:
            partitions = await _partitions(found, name)
            lags = [one.lag for one in partitions]
            one = found.described.get(name)
            groups.append(
                GroupSummary(
                    group=name,
                    state=found.states[name][1],
                    coordinator=found.states[name][0],
                    protocol="" if one is None else str(one.protocol_data),
                    members=0 if one is None else len(one.members),
                    topics=sorted({one.topic for one in partitions}),
                    lag=None if None in lags else sum(lag or 0 for lag in lags),
                )
            )
        return Groups(groups, left_out, _unanswered(found))

    async def group(self, name: str) -> GroupDetail:
        """One group: members, and each partition with its committed offset and lag.

        Raises GroupIdNotFound.
        """
        found, names, _ = await self._collect(lambda one: one == name)
        if not names:
            silent = found.unanswered.items()
            why = "".join(f"; node {node} does not answer: {error}" for node, error in silent)
            raise GroupIdNotFound(f"no group {name}{why}")
        one = found.described.get(name)
        return GroupDetail(
            group=name,
            state=found.states[name][1],
            coordinator=found.states[name][0],
            protocol="" if one is None else str(one.protocol_data),
            members=[] if one is None else [_member(member) for member in one.members],
            partitions=await _partitions(found, name),
            unanswered=_unanswered(found),
        )

    async def _collect(self, matches: Callable[[str], bool]) -> tuple[_Found, list[str], int]:
        """What the nodes know, the matching groups looked at, and how many more there are."""
        client, found, image = self.new_client(), _Found(), self.metadata.image
        try:
            alive = [node for node, broker in image.brokers.items() if not broker.fenced]
            await asyncio.gather(*(_list(client, node, found) for node in alive))
            matching = sorted(name for name in found.states if matches(name))
            names = matching[:MAX_GROUPS]
            by_coordinator: dict[int, list[str]] = {}
            for name in names:
                by_coordinator.setdefault(found.states[name][0], []).append(name)
            await asyncio.gather(
                *(_describe(client, node, its, found) for node, its in by_coordinator.items())
            )
            by_leader: dict[int, list[TopicPartition]] = {}
            for tp in {tp for its in found.committed.values() for tp in its}:
                topic = image.topics.get(tp.topic)
                if topic is not None and tp.partition < len(topic.partitions):
                    by_leader.setdefault(topic.partitions[tp.partition].leader, []).append(tp)
            by_leader.pop(-1, None)
            await asyncio.gather(
                *(_ends(client, node, its, found) for node, its in by_leader.items())
            )
        finally:
            client.close()
        return found, names, len(matching) - len(names)


def _member(member: Any) -> GroupMember:
    return GroupMember(
        member.member_id, member.group_instance_id, member.client_id, member.client_host
    )


async def _partitions(found: _Found, name: str) -> list[PartitionLag]:
    one = found.described.get(name)
    owners: dict[TopicPartition, str] = {}
    if one is not None and one.protocol_type == "consumer":
        for member in one.members:
            for tp in decode_assignment(member.member_assignment):
                owners[tp] = member.member_id
    committed = found.committed.get(name, {})
    rows = []
    for number, tp in enumerate(sorted({*committed, *owners})):
        await checkpoint(number)
        at, end = committed.get(tp), found.ends.get(tp)
        lag = None if end is None else max(0, end - (0 if at is None else at))
        rows.append(PartitionLag(*tp, at, end, lag, owners.get(tp)))
    return rows


def _unanswered(found: _Found) -> list[Unanswered]:
    return [Unanswered(node, why) for node, why in sorted(found.unanswered.items())]


# Requests to the nodes.


async def _list(gateway: ClusterClient, broker: int, found: _Found) -> None:
    values = {"states_filter": ()}
    answer = await _call(gateway, broker, LIST_GROUPS, values, found)
    for one in () if answer is None else answer.groups:
        found.states[str(one.group_id)] = broker, str(one.group_state)


async def _describe(gateway: ClusterClient, broker: int, names: list[str], found: _Found) -> None:
    """One group a request: an answer is read at a stretch."""
    for name in names:
        values: dict[str, Any] = {"groups": [name], "include_authorized_operations": False}
        answer = await _call(gateway, broker, DESCRIBE_GROUPS, values, found)
        for one in () if answer is None else answer.groups:
            if not int(one.error_code):
                found.described[str(one.group_id)] = one
        asked = [{"group_id": name, "topics": None}]
        answer = await _call(
            gateway, broker, OFFSET_FETCH, {"groups": asked, "require_stable": False}, found
        )
        if answer is None:
            return
        _note_committed(answer, found)


def _note_committed(answer: Any, found: _Found) -> None:
    for one in answer.groups:
        found.committed[str(one.group_id)] = {
            TopicPartition(str(topic.name), int(partition.partition_index)): int(
                partition.committed_offset
            )
            for topic in one.topics
            for partition in topic.partitions
            if int(partition.committed_offset) >= 0
        }


async def _ends(
    gateway: ClusterClient, leader: int, tps: Iterable[TopicPartition], found: _Found
) -> None:
    left = iter(tps)
    while some := tuple(islice(left, ENDS_TOGETHER)):
        await _some_ends(gateway, leader, some, found)


async def _some_ends(
    gateway: ClusterClient, leader: int, tps: Iterable[TopicPartition], found: _Found
) -> None:
    topics: dict[str, list[dict[str, int]]] = {}
    for tp in tps:
        topics.setdefault(tp.topic, []).append(
            {"partition_index": tp.partition, "timestamp": LATEST}
        )
    values = {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [{"name": name, "partitions": several} for name, several in topics.items()],
    }
    answer = await _call(gateway, leader, LIST_OFFSETS, values, found)
    for topic in () if answer is None else answer.topics:
        for one in topic.partitions:
            if not int(one.error_code):
                found.ends[TopicPartition(str(topic.name), int(one.partition_index))] = int(
                    one.offset
                )


async def _call(
    gateway: ClusterClient, broker: int, api: tuple[int, int], values: dict[str, Any], found: _Found
) -> Any:
    """The answer of a node; None where there is none, and why is noted."""
    try:
        return await gateway.call(broker, *api, values, CALL_S)
    except KeptError as error:
        found.unanswered[broker] = str(error)
        return None
