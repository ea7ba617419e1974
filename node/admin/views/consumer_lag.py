"""Consumer groups of the whole cluster and how far behind they are, as any Kafka client sees them.

Groups lie with their coordinators and high watermarks with the leaders, so this node calls the
others in Kafka's protocol (:class:`kept.node.admin.cluster_client.ClusterClient`): ListGroups of
each, DescribeGroups and OffsetFetch of each group, one ListOffsets for a thousand partitions of a
leader. What a node that does not respond would have added is missing; ``unanswered`` names it.

Whoever asks is shown the groups that he may describe, and of these the topics that he may describe,
as OffsetFetch shows them: rows, sums and counts are about what he sees.

Limits: :data:`MAX_GROUPS` are described, the others only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct

from kept.client.admin.group_lag import group_lag, partition_lag
from kept.client.admin.groups import describe_group, fetch_offsets, groups_of_node
from kept.client.consume.positions import LATEST
from kept.cluster.security.acls import AclResourceType
from kept.node.admin.records.partition_offsets import CALL_MS, offsets_from_leaders
from kept.node.admin.results import PartitionResult, Unanswered
from kept.node.runtime.tasks import gather_or_cancel
from kept.node.runtime.time_slices import checkpoint
from kept.node.security.visibility import describable
from kept.storage.errors import GroupIdNotFound, KeptError
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.client.admin.groups import GroupDescription
    from kept.client.admin.topics import Operation
    from kept.cluster.metadata.image import Image
    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.security.session import Session

MAX_GROUPS: Final = 200

_T = TypeVar("_T")


class GroupSummary(Struct, frozen=True):
    """A group in a line. ``lag`` and ``partitions_unknown`` as
    :mod:`kept.client.admin.group_lag` defines them.
    """

    group: str
    state: str
    coordinator: int
    protocol: str
    members: int
    topics: list[str]
    lag: int | None
    partitions_unknown: int


class Groups(Struct, frozen=True):
    """Groups of the cluster; ``left_out`` are those beyond :data:`MAX_GROUPS`, of those that
    may be described.
    """

    groups: list[GroupSummary]
    left_out: int
    unanswered: list[Unanswered]


class GroupMember(Struct, frozen=True):
    """A member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str


class PartitionLag(PartitionResult, frozen=True):
    """How far a group is in a partition; None where that is not known."""

    committed_offset: int | None
    high_watermark: int | None
    lag: int | None
    member_id: str | None


class GroupDetail(Struct, frozen=True):
    """A group by member and partition."""

    group: str
    state: str
    coordinator: int
    protocol: str
    members: list[GroupMember]
    lag: int | None
    partitions_unknown: int
    partitions: list[PartitionLag]
    unanswered: list[Unanswered]


class GroupOfTopic(Struct, frozen=True):
    """A group as far as one topic goes: ``lag`` and what follows are of that topic alone."""

    group: str
    state: str
    coordinator: int
    members: int
    lag: int | None
    partitions_unknown: int
    partitions: list[PartitionLag]


class GroupsOfTopic(Struct, frozen=True):
    """The groups that read a topic; ``left_out`` groups of the cluster were not looked at."""

    topic: str
    groups: list[GroupOfTopic]
    left_out: int
    unanswered: list[Unanswered]


@dataclass(slots=True)
class _Requests:
    """Requests to the nodes, and what they have answered so far. ``ends`` are high watermarks."""

    client: ClusterClient
    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each group: its coordinator, its state."""
    described: dict[str, GroupDescription] = field(default_factory=dict)
    committed: dict[str, dict[TopicPartition, int]] = field(default_factory=dict)
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """Of each node that did not answer."""
    topics: set[str] = field(default_factory=set)
    """Those that are shown."""

    async def list_groups(self, broker: int) -> None:
        for listing in await self._run(broker, groups_of_node(broker)) or ():
            self.states[listing.group] = broker, listing.state

    async def describe(self, broker: int, names: list[str]) -> None:
        """One group a request: a response is read at a stretch."""
        for name in names:
            group = await self._run(broker, describe_group(name))
            if group is not None:
                self.described[name] = group
            committed = await self._run(broker, fetch_offsets(name))
            if committed is None:
                return
            self.committed[name] = committed

    async def list_ends(self, image: Image, tps: Iterable[TopicPartition]) -> None:
        found = await offsets_from_leaders(self.client, image, dict.fromkeys(tps, LATEST))
        self.ends.update(found.offsets)
        self.errors.update(found.errors)

    def assigned_topics(self) -> set[str]:
        """Topics that members are assigned partitions of."""
        groups = self.described.values()
        return {tp.topic for group in groups for m in group.members for tp in m.partitions}

    async def _run(self, broker: int, operation: Operation[_T]) -> _T | None:
        """What a node responds; None where it does not, and why is in ``errors``."""
        try:
            return await self.client.run(
                operation, patience_s=CALL_MS / 1000, node=broker, retry=False
            )
        except KeptError as error:
            self.errors[broker] = error.client_message
            return None

    def unanswered(self) -> list[Unanswered]:
        return [Unanswered(node, why) for node, why in sorted(self.errors.items())]


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """Describes the consumer groups of the cluster."""

    metadata: MetadataLog
    new_client: Callable[[], ClusterClient]

    async def groups(self, session: Session, part_of_name: str = "") -> Groups:
        """The groups whose name contains ``part_of_name``."""
        requests, names, left_out = await self._collect(session, lambda name: part_of_name in name)
        groups = []
        for name in names:
            partitions = await _partitions(requests, name)
            lag = group_lag(partition.lag for partition in partitions)
            group = requests.described.get(name)
            groups.append(
                GroupSummary(
                    group=name,
                    state=requests.states[name][1],
                    coordinator=requests.states[name][0],
                    protocol="" if group is None else group.protocol,
                    members=0 if group is None else len(group.members),
                    topics=sorted({partition.topic for partition in partitions}),
                    lag=lag.lag,
                    partitions_unknown=lag.partitions_unknown,
                )
            )
        return Groups(groups, left_out, requests.unanswered())

    async def group(self, session: Session, name: str) -> GroupDetail:
        """One group: members, and each partition with its committed offset and lag.

        Raises GroupIdNotFound.
        """
        requests, names, _ = await self._collect(session, lambda other: other == name)
        if not names:
            unreachable = requests.errors.items()
            why = "".join(f"; node {node} does not answer: {error}" for node, error in unreachable)
            raise GroupIdNotFound(f"no group {name}{why}")
        group = requests.described.get(name)
        partitions = await _partitions(requests, name)
        lag = group_lag(partition.lag for partition in partitions)
        return GroupDetail(
            group=name,
            state=requests.states[name][1],
            coordinator=requests.states[name][0],
            protocol="" if group is None else group.protocol,
            members=[
                GroupMember(m.member_id, m.instance_id, m.client_id, m.host)
                for m in (() if group is None else group.members)
            ],
            lag=lag.lag,
            partitions_unknown=lag.partitions_unknown,
            partitions=partitions,
            unanswered=requests.unanswered(),
        )

    async def groups_of_topic(self, session: Session, topic: str) -> GroupsOfTopic:
        """The groups that have committed offsets in a topic, or are assigned partitions of it."""
        requests, names, left_out = await self._collect(session, lambda _: True, topic)
        groups = []
        for name in names:
            partitions = await _partitions(requests, name)
            if not partitions:
                continue
            lag, group = group_lag(row.lag for row in partitions), requests.described.get(name)
            groups.append(
                GroupOfTopic(
                    group=name,
                    state=requests.states[name][1],
                    coordinator=requests.states[name][0],
                    members=0 if group is None else len(group.members),
                    lag=lag.lag,
                    partitions_unknown=lag.partitions_unknown,
                    partitions=partitions,
                )
            )
        return GroupsOfTopic(topic, groups, left_out, requests.unanswered())

    async def _collect(
        self, session: Session, matches: Callable[[str], bool], only_topic: str | None = None
    ) -> tuple[_Requests, list[str], int]:
        """What the nodes know, the matching groups looked at, and how many more there are; the ends
        of all partitions that they read, or of those of one topic. As far as ``session`` may
        describe them.
        """
        client, image = self.new_client(), self.metadata.image
        requests = _Requests(client)
        try:
            alive = [node for node, broker in image.brokers.items() if not broker.fenced]
            await gather_or_cancel(requests.list_groups(node) for node in alive)
            matching = sorted(name for name in requests.states if matches(name))
            matching = await describable(session, AclResourceType.GROUP, matching)
            names = matching[:MAX_GROUPS]
            by_coordinator: dict[int, list[str]] = {}
            for name in names:
                by_coordinator.setdefault(requests.states[name][0], []).append(name)
            await gather_or_cancel(
                requests.describe(node, its) for node, its in by_coordinator.items()
            )
            tps = {tp for its in requests.committed.values() for tp in its}
            topics = {tp.topic for tp in tps} | requests.assigned_topics()
            if only_topic is not None:
                topics &= {only_topic}
            requests.topics.update(await describable(session, AclResourceType.TOPIC, topics))
            await requests.list_ends(image, (tp for tp in tps if tp.topic in requests.topics))
        finally:
            client.close()
        return requests, names, len(matching) - len(names)


async def _partitions(requests: _Requests, name: str) -> list[PartitionLag]:
    """The partitions that a group has committed in or is assigned, of the topics shown."""
    group = requests.described.get(name)
    owners: dict[TopicPartition, str] = {}
    for member in () if group is None else group.members:
        owners.update(dict.fromkeys(member.partitions, member.member_id))
    committed = requests.committed.get(name, {})
    rows = []
    for number, tp in enumerate(sorted({*committed, *owners})):
        await checkpoint(number)
        if tp.topic not in requests.topics:
            continue
        at, end = committed.get(tp), requests.ends.get(tp)
        rows.append(PartitionLag(*tp, at, end, partition_lag(at, end), owners.get(tp)))
    return rows
