"""Consumer groups: operations without I/O (see :mod:`kept.client.admin.topics`).

Also the formats that members of a consumer group exchange: ``ConsumerProtocolSubscription`` and
``ConsumerProtocolAssignment``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kept.client.admin.cluster import describe_members
from kept.client.admin.topics import Operation, first_error
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Call, ToCoordinator, ToNode
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import CorruptMessage, KeptError
from kept.storage.types import TopicPartition

_BY_NAME: Final = 9
"""The newest version of OffsetCommit and OffsetFetch that names topics instead of their ids."""


class GroupListing(NamedTuple):
    """A group as ListGroups tells it."""

    group: str
    protocol_type: str
    state: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as DescribeGroups tells it; ``partitions`` is empty for other protocol types."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as DescribeGroups tells it."""

    group: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]


def list_groups(silent: list[int] | None, silent_ms: int) -> Operation[list[GroupListing]]:
    """All groups of the cluster; every node that lives is asked. Given ``silent``, one that does
    not answer within ``silent_ms`` is put there and done without.
    """
    _, members = yield from describe_members()
    nodes = [member.node_id for member in members if not member.fenced]
    calls = [_list_call(node_id) for node_id in nodes]
    if silent is not None:
        for call in calls:
            call.optional, call.timeout_ms = True, silent_ms
    responses = yield calls
    listings = {}
    for node_id, response in zip(nodes, responses, strict=True):
        if isinstance(response, KeptError):
            assert silent is not None
            silent.append(node_id)
            continue
        listings.update({listing.group: listing for listing in _listings(response)})
    return [listings[name] for name in sorted(listings)]


def groups_of_node(node_id: int) -> Operation[list[GroupListing]]:
    """The groups that a node coordinates."""
    (response,) = yield [_list_call(node_id)]
    return _listings(response)


def _list_call(node_id: int) -> Call:
    return Call(
        ApiKey.LIST_GROUPS,
        {"states_filter": (), "types_filter": ()},
        ToNode(node_id),
        check=lambda r: failure(int(r.error_code), "ListGroups"),
    )


def _listings(response: Any) -> list[GroupListing]:
    return [
        GroupListing(str(g.group_id), g.protocol_type, getattr(g, "group_state", ""))
        for g in response.groups
    ]


def describe_group(group: str) -> Operation[GroupDescription]:
    """One group; its state is ``Dead`` when it does not exist."""
    what = f"DescribeGroups of {group}"
    values = {"groups": (group,), "include_authorized_operations": False}
    (response,) = yield [
        Call(
            ApiKey.DESCRIBE_GROUPS,
            values,
            ToCoordinator(group),
            what=what,
            check=lambda r: _unless_missing(r.groups[0], what),
        )
    ]
    described = response.groups[0]
    consumer = described.protocol_type == "consumer"
    members = tuple(
        GroupMember(
            m.member_id,
            getattr(m, "group_instance_id", None),
            m.client_id,
            m.client_host,
            tuple(decode_assignment(m.member_assignment)) if consumer else (),
        )
        for m in described.members
    )
    state = "Dead" if int(described.error_code) else described.group_state
    return GroupDescription(group, state, described.protocol_type, described.protocol_data, members)


def _unless_missing(one: Any, what: str) -> KeptError | None:
    """Newer brokers answer GROUP_ID_NOT_FOUND where older ones describe a dead group."""
    return None if int(one.error_code) == 69 else failure(int(one.error_code), what)


def delete_group(group: str) -> Operation[None]:
    """Delete a group without members, and its offsets."""
    what = f"DeleteGroups of {group}"
    yield [
        Call(
            ApiKey.DELETE_GROUPS,
            {"groups_names": (group,)},
            ToCoordinator(group),
            what=what,
            check=lambda r: first_error(r.results, lambda _: what),
            repeatable=False,
        )
    ]


def fetch_offsets(
    group: str, partitions: Iterable[TopicPartition] | None = None
) -> Operation[dict[TopicPartition, int]]:
    """Committed offsets, of these partitions or of all that have one."""
    requested = None if partitions is None else _by_topic((tp, tp.partition) for tp in partitions)
    topics = (
        None
        if requested is None
        else [
            {"name": t, "topic_id": None, "partition_indexes": tuple(ps)}
            for t, ps in requested.items()
        ]
    )
    what = f"OffsetFetch of {group}"
    values = {
        "group_id": group,
        "topics": topics,
        "groups": [{"group_id": group, "topics": topics}],
        "require_stable": False,
    }
    (response,) = yield [
        Call(
            ApiKey.OFFSET_FETCH,
            values,
            ToCoordinator(group),
            what=what,
            max_version=_BY_NAME,
            check=lambda r: first_error([_group_of(r)], lambda _: what),
        )
    ]
    return {
        TopicPartition(str(t.name), int(p.partition_index)): int(p.committed_offset)
        for t in _group_of(response).topics
        for p in t.partitions
        if int(p.committed_offset) >= 0
    }


def _group_of(response: Any) -> Any:
    """The one group of an OffsetFetch response: from version 8 they are in a list."""
    return response.groups[0] if hasattr(response, "groups") else response


def commit_offsets(
    group: str, offsets: Mapping[TopicPartition, int], member_id: str = "", generation: int = -1
) -> Operation[None]:
    """Commit offsets: as a member, or as an outsider when the group has no members."""
    topics = _by_topic(
        (tp, {"partition_index": tp.partition, "committed_offset": o, "committed_metadata": ""})
        for tp, o in offsets.items()
    )
    what = f"OffsetCommit of {group}"
    values = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "generation_id": generation,
        "member_id": member_id,
        "retention_time": -1,
        "topics": [{"name": t, "topic_id": None, "partitions": ps} for t, ps in topics.items()],
    }
    yield [
        Call(
            ApiKey.OFFSET_COMMIT,
            values,
            ToCoordinator(group),
            what=what,
            max_version=_BY_NAME,
            check=lambda r: _commit_error(r, what),
        )
    ]


def _commit_error(response: Any, what: str) -> KeptError | None:
    for topic in response.topics:
        for p in topic.partitions:
            error = failure(int(p.error_code), f"{what}: {topic.name}-{p.partition_index}")
            if error is not None:
                return error
    return None


def _by_topic(items: Iterable[tuple[TopicPartition, Any]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for tp, value in items:
        out.setdefault(tp.topic, []).append(value)
    return out


# Membership.


def join_call(
    group: str, member_id: str, topics: Sequence[str], session_ms: int, rebalance_ms: int
) -> Call:
    """JoinGroup with the range assignor. Its response is judged by the caller."""
    protocol = {"name": "range", "metadata": encode_subscription(topics)}
    values = {
        "group_id": group,
        "session_timeout": session_ms,
        "rebalance_timeout": rebalance_ms,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [protocol],
        "reason": None,
    }
    timeout_ms = session_ms + rebalance_ms + 10_000
    return Call(
        ApiKey.JOIN_GROUP, values, ToCoordinator(group), f"JoinGroup of {group}", timeout_ms
    )


def sync_call(
    group: str, member_id: str, generation: int, assignments: Mapping[str, bytes]
) -> Call:
    """SyncGroup; the leader gives everybody's assignment, the others an empty mapping."""
    values = {
        "group_id": group,
        "generation_id": generation,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": m, "assignment": a} for m, a in assignments.items()],
    }
    return Call(ApiKey.SYNC_GROUP, values, ToCoordinator(group), f"SyncGroup of {group}", 60_000)


def heartbeat_call(group: str, member_id: str, generation: int) -> Call:
    """Heartbeat."""
    values = {"group_id": group, "generation_id": generation, "member_id": member_id}
    return Call(ApiKey.HEARTBEAT, values, ToCoordinator(group), f"Heartbeat of {group}", 10_000)


def leave_call(group: str, member_id: str) -> Call:
    """LeaveGroup."""
    values = {
        "group_id": group,
        "member_id": member_id,
        "members": [{"member_id": member_id, "reason": None}],
    }
    return Call(ApiKey.LEAVE_GROUP, values, ToCoordinator(group), f"LeaveGroup of {group}", 5_000)


def range_assignment(
    subscriptions: Mapping[str, Sequence[str]], partition_count: Callable[[str], int]
) -> dict[str, list[TopicPartition]]:
    """Kafka's RangeAssignor: per topic, consecutive partitions to its members in order of their
    ids; the first ones get one more when it does not come out even.
    """
    out: dict[str, list[TopicPartition]] = {member: [] for member in subscriptions}
    for topic in sorted({t for topics in subscriptions.values() for t in topics}):
        members = sorted(m for m, topics in subscriptions.items() if topic in topics)
        each, more = divmod(partition_count(topic), len(members))
        start = 0
        for i, member in enumerate(members):
            size = each + (i < more)
            out[member] += [TopicPartition(topic, p) for p in range(start, start + size)]
            start += size
    return out


def encode_subscription(topics: Sequence[str]) -> bytes:
    """ConsumerProtocolSubscription version 0."""
    names = [t.encode() for t in topics]
    body = b"".join(struct.pack(">h", len(n)) + n for n in names)
    return struct.pack(">hi", 0, len(names)) + body + struct.pack(">i", -1)


def decode_subscription(data: bytes) -> list[str]:
    """The topics of a ConsumerProtocolSubscription of any version."""
    return [name for name, _ in _read_topics(data, with_partitions=False)]


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """ConsumerProtocolAssignment version 0."""
    topics = _by_topic((tp, tp.partition) for tp in partitions)
    out = [struct.pack(">hi", 0, len(topics))]
    for topic, numbers in topics.items():
        name = topic.encode()
        out.append(struct.pack(">h", len(name)) + name)
        out.append(struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    out.append(struct.pack(">i", -1))
    return b"".join(out)


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """The partitions of a ConsumerProtocolAssignment of any version; none for no bytes."""
    if not data:
        return []
    return [
        TopicPartition(topic, p)
        for topic, numbers in _read_topics(data, with_partitions=True)
        for p in numbers
    ]


def _read_topics(data: bytes, *, with_partitions: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The list of topics that both formats begin with; later fields of newer versions are left."""
    try:
        _, count = struct.unpack_from(">hi", data)
        position, out = 6, []
        for _ in range(count):
            (size,) = struct.unpack_from(">h", data, position)
            name = bytes(data[position + 2 : position + 2 + size]).decode()
            position += 2 + size
            numbers: tuple[int, ...] = ()
            if with_partitions:
                (n,) = struct.unpack_from(">i", data, position)
                numbers = struct.unpack_from(f">{n}i", data, position + 4)
                position += 4 + 4 * n
            out.append((name, numbers))
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptMessage(f"group metadata that is not readable: {error}") from error
    return out
