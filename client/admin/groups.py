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
from kept.client.core.calls import Call, Route, ToCoordinator, ToNode
from kept.client.protocol.api_keys import ApiKey
from kept.storage.errors import (
    CorruptMessage,
    KeptError,
    PeerError,
    RetriableError,
    UnsupportedVersion,
)
from kept.storage.types import TopicPartition

_BY_NAME: Final = 9
"""The newest version of OffsetCommit and OffsetFetch that names topics instead of their ids."""
_CONSUMER_GROUP_DESCRIBE: Final = 69
"""Apache Kafka's alone (KIP-848): kept has no groups of that type."""
_GROUP_ID_NOT_FOUND: Final = 69
_HEADER_BYTES: Final = 6
"""Of both formats of members: an int16 version, an int32 number of topics."""
CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
DEAD: Final = "Dead"
"""The state of a group that does not exist."""
STATES: Final = (
    "Empty",
    "PreparingRebalance",
    "CompletingRebalance",
    "Stable",
    DEAD,
    "Assigning",
    "Reconciling",
    "NotReady",
    "Unknown",
)
"""Of groups of all types, as Kafka names them."""


NOT_A_MEMBER: Final = frozenset({22, 25, 27})
"""ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS: the member has to join again."""


class NotAMember(PeerError):
    """The sender is no member of the group's present generation, so its commit was refused."""


class GroupListing(NamedTuple):
    """A group as ListGroups tells it. ``type`` is :data:`CLASSIC`, :data:`CONSUMER`, or another of
    Kafka's such as ``share``; ``coordinator`` is the node that said it.
    """

    group: str
    protocol_type: str
    state: str
    type: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as DescribeGroups tells it; ``partitions`` is empty for other protocol types, and
    where the member's assignment is not readable.
    """

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
        listings.update({listing.group: listing for listing in _listings(node_id, response)})
    return [listings[name] for name in sorted(listings)]


def groups_of_node(node_id: int) -> Operation[list[GroupListing]]:
    """The groups that a node coordinates."""
    (response,) = yield [_list_call(node_id)]
    return _listings(node_id, response)


def _list_call(node_id: int) -> Call:
    return Call(
        ApiKey.LIST_GROUPS,
        {"states_filter": (), "types_filter": ()},
        ToNode(node_id),
        check=lambda r: failure(int(r.error_code), "ListGroups"),
    )


def _listings(node_id: int, response: Any) -> list[GroupListing]:
    return [
        GroupListing(
            str(g.group_id),
            g.protocol_type,
            getattr(g, "group_state", ""),
            getattr(g, "group_type", CLASSIC).lower(),
            node_id,
        )
        for g in response.groups
    ]


def describe_group(group: str) -> Operation[GroupDescription]:
    """One group; its state is ``Dead`` when it does not exist."""
    what = f"DescribeGroups of {group}"
    call = describe_groups_call((group,), ToCoordinator(group))
    call.what, call.check = what, lambda r: _unless_missing(r.groups[0], what, group)
    (response,) = yield [call]
    (described,) = descriptions(response)
    if described.state != DEAD:
        return described
    newer = consumer_groups_call((group,), ToCoordinator(group))
    newer.check = lambda r: _unless_missing(r.groups[0], what, group)
    try:
        (response,) = yield [newer]
    except UnsupportedVersion:
        return described
    return descriptions(response)[0]


def describe_groups_call(groups: Sequence[str], route: Route) -> Call:
    """DescribeGroups: groups of the classic protocol; errors come with their group."""
    values = {"groups": tuple(groups), "include_authorized_operations": False}
    return Call(ApiKey.DESCRIBE_GROUPS, values, route, what="DescribeGroups")


def consumer_groups_call(groups: Sequence[str], route: Route) -> Call:
    """ConsumerGroupDescribe: groups of the newer protocol; errors come with their group."""
    values = {"group_ids": tuple(groups), "include_authorized_operations": False}
    return Call(_CONSUMER_GROUP_DESCRIBE, values, route, what="ConsumerGroupDescribe")


def descriptions(response: Any) -> list[GroupDescription]:
    """The groups of an answer to either of these calls; of one with an error its state is
    ``Dead``.
    """
    return [_description(described) for described in response.groups]


def _description(described: Any) -> GroupDescription:
    group, is_dead = str(described.group_id), bool(int(described.error_code))
    state = DEAD if is_dead else described.group_state
    if hasattr(described, "assignor_name"):
        members = tuple(
            _member(
                m,
                [
                    TopicPartition(str(t.topic_name), int(p))
                    for t in m.assignment.topic_partitions
                    for p in t.partitions
                ],
            )
            for m in described.members
        )
        return GroupDescription(group, state, "consumer", described.assignor_name, members)
    is_consumer = described.protocol_type == "consumer"
    members = tuple(
        _member(m, _assigned(m.member_assignment) if is_consumer else ()) for m in described.members
    )
    return GroupDescription(group, state, described.protocol_type, described.protocol_data, members)


def _assigned(assignment: bytes) -> list[TopicPartition]:
    """The partitions of an assignment. None where it cannot be decoded: what one member wrote must
    not hide the other members.
    """
    try:
        return decode_assignment(assignment)
    except CorruptMessage:
        return []


def _member(member: Any, partitions: Iterable[TopicPartition]) -> GroupMember:
    instance_id = getattr(member, "group_instance_id", getattr(member, "instance_id", None))
    return GroupMember(
        member.member_id, instance_id, member.client_id, member.client_host, tuple(partitions)
    )


def _unless_missing(one: Any, what: str, group: str) -> KeptError | None:
    """Newer brokers answer GROUP_ID_NOT_FOUND where older ones describe a dead group."""
    code = int(one.error_code)
    return None if code == _GROUP_ID_NOT_FOUND else failure(code, what, key=group)


def delete_group(group: str) -> Operation[None]:
    """Delete a group without members, and its offsets."""
    what = f"DeleteGroups of {group}"
    yield [
        Call(
            ApiKey.DELETE_GROUPS,
            {"groups_names": (group,)},
            ToCoordinator(group),
            what=what,
            check=lambda r: first_error(r.results, lambda _: what, key=group),
            repeatable=False,
        )
    ]


def fetch_offsets(
    group: str, partitions: Iterable[TopicPartition] | None = None
) -> Operation[dict[TopicPartition, int]]:
    """Committed offsets, of these partitions or of all that have one."""
    (response,) = yield [offsets_call(group, partitions, ToCoordinator(group))]
    return offsets_of(response)


def offsets_call(group: str, partitions: Iterable[TopicPartition] | None, route: Route) -> Call:
    """OffsetFetch of one group; its error is the call's."""
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
    return Call(
        ApiKey.OFFSET_FETCH,
        values,
        route,
        what=what,
        max_version=_BY_NAME,
        check=lambda r: first_error([_group_of(r)], lambda _: what, key=group),
    )


def offsets_of(response: Any) -> dict[TopicPartition, int]:
    """Committed offsets in an answer to OffsetFetch of one group."""
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
    call = _commit_call(group, offsets, member_id, generation)
    call.check = lambda r: next(iter(_commit_errors(group, r).values()), None)
    yield [call]


def commit_each(
    group: str, offsets: Mapping[TopicPartition, int], timeout_ms: int
) -> Operation[dict[TopicPartition, KeptError]]:
    """Commit offsets of a group without members; the errors of those that were not committed."""

    def check(response: Any) -> KeptError | None:
        errors = list(_commit_errors(group, response).values())
        is_vain = len(errors) == len(offsets)
        return errors[0] if is_vain and isinstance(errors[0], RetriableError) else None

    call = _commit_call(group, offsets, "", -1)
    call.check, call.timeout_ms = check, timeout_ms
    (response,) = yield [call]
    return _commit_errors(group, response)


def _commit_call(
    group: str, offsets: Mapping[TopicPartition, int], member_id: str, generation: int
) -> Call:
    topics = _by_topic(
        (tp, {"partition_index": tp.partition, "committed_offset": o, "committed_metadata": ""})
        for tp, o in offsets.items()
    )
    values = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "generation_id": generation,
        "member_id": member_id,
        "retention_time": -1,
        "topics": [{"name": t, "topic_id": None, "partitions": ps} for t, ps in topics.items()],
    }
    return Call(
        ApiKey.OFFSET_COMMIT,
        values,
        ToCoordinator(group),
        what=f"OffsetCommit of {group}",
        max_version=_BY_NAME,
    )


def _commit_errors(group: str, response: Any) -> dict[TopicPartition, KeptError]:
    errors: dict[TopicPartition, KeptError] = {}
    for topic in response.topics:
        for p in topic.partitions:
            tp = TopicPartition(str(topic.name), int(p.partition_index))
            what = f"OffsetCommit of {group}: {tp.place}"
            error = failure(int(p.error_code), what, key=group)
            if error is not None:
                left = int(p.error_code) in NOT_A_MEMBER
                errors[tp] = NotAMember(str(error)) if left else error
    return errors


def delete_offsets(
    group: str, partitions: Iterable[TopicPartition]
) -> Operation[dict[TopicPartition, KeptError]]:
    """Delete committed offsets of topics that no member reads; the errors of those that stay."""
    topics = _by_topic((tp, {"partition_index": tp.partition}) for tp in partitions)
    what = f"OffsetDelete of {group}"
    values = {
        "group_id": group,
        "topics": [{"name": topic, "partitions": each} for topic, each in topics.items()],
    }
    (response,) = yield [
        Call(
            ApiKey.OFFSET_DELETE,
            values,
            ToCoordinator(group),
            what=what,
            check=lambda r: failure(int(r.error_code), what, key=group),
            repeatable=False,
        )
    ]
    given = {
        TopicPartition(str(topic.name), int(p.partition_index)): int(p.error_code)
        for topic in response.topics
        for p in topic.partitions
    }
    errors = {tp: failure(code, f"{what}: {tp.place}", key=group) for tp, code in given.items()}
    return {tp: error for tp, error in errors.items() if error is not None}


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
    """The topics of a ConsumerProtocolSubscription of any version. Raises CorruptMessage."""
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
    """The partitions of a ConsumerProtocolAssignment of any version; none for no bytes.

    Raises CorruptMessage.
    """
    if not data:
        return []
    return [
        TopicPartition(topic, p)
        for topic, numbers in _read_topics(data, with_partitions=True)
        for p in numbers
    ]


def _read_topics(data: bytes, *, with_partitions: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The list of topics that both formats begin with; later fields of newer versions are left.

    Raises CorruptMessage. Members of a group write these bytes as they like, and brokers do not
    look into them: every size is checked against the bytes that are left before it is used.
    """
    try:
        _, count = struct.unpack_from(">hi", data)
        smallest = 6 if with_partitions else 2
        """Bytes of a topic: the size of its name, and the number of its partitions."""
        position, out = _HEADER_BYTES, []
        _check_fits(count, smallest, len(data) - position, "topics")
        for _ in range(count):
            (size,) = struct.unpack_from(">h", data, position)
            position += 2
            _check_fits(size, 1, len(data) - position, "bytes of a name")
            name = bytes(data[position : position + size]).decode()
            position += size
            numbers: tuple[int, ...] = ()
            if with_partitions:
                (n,) = struct.unpack_from(">i", data, position)
                position += 4
                _check_fits(n, 4, len(data) - position, "partitions")
                numbers = struct.unpack_from(f">{n}i", data, position)
                position += 4 * n
            out.append((name, numbers))
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptMessage(f"group metadata that is not readable: {error}") from error
    return out


def _check_fits(count: int, each_bytes: int, left: int, what: str) -> None:
    if not 0 <= count * each_bytes <= left:
        raise CorruptMessage(
            f"group metadata that is not readable: {count} {what} where {left} bytes are left"
        )
