"""Events and effects of a :class:`~.core.GroupCore`.

Events go into :meth:`.core.GroupCore.step`, effects come out, in the order in which the shell must
carry them out. ``request`` is the number that the shell gave the request.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from kio.schema.errors import ErrorCode
from msgspec import Struct

from kept.node.coordinator.common.events import (
    AppendEvent,
    AppendRecords,
    EndMarker,
    Response,
    TransactionalProducer,
)
from kept.node.coordinator.groups.group import Protocols
from kept.node.coordinator.groups.records import NO_TOPIC_ID

NO_ERROR: Final = ErrorCode.none
UNKNOWN_MEMBER_ID: Final = ""
"""The member id of somebody who has none yet."""
UNKNOWN_GENERATION: Final = -1

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""How long a JoinGroup of a member without id may wait: it cannot send heartbeats meanwhile, and
its client may be gone. Kafka's ``CLASSIC_GROUP_NEW_MEMBER_JOIN_TIMEOUT_MS``."""
MAX_PENDING_MEMBERS: Final = 10_000
"""Ids given out to clients that have not come back with them, per group: a limit of ours, since
each costs memory for as long as the session that its client asked for."""
MEMBER_NAME_LENGTH: Final = 1000
"""So many characters of the client's name go into a member id, which a STRING must hold."""


class GroupSettings(Struct, frozen=True):
    """The node's settings for groups; names, units and defaults are Kafka's, but for ours of
    memory: ``kept.group.max.bytes`` and ``kept.groups.max.bytes``.
    """

    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_initial_rebalance_delay_ms: int = 3_000
    group_max_size: int = 2**31 - 1
    group_max_bytes: int = 16 << 20
    groups_max_bytes: int = 512 << 20
    offset_metadata_max_bytes: int = 4_096
    offsets_retention_minutes: int = 10_080
    offsets_retention_check_interval_ms: int = 600_000

    @property
    def offsets_retention_ms(self) -> int:
        """How long the offsets of an empty group are kept."""
        return self.offsets_retention_minutes * 60_000


# Events of clients.


class Join(Struct, frozen=True):
    """A JoinGroup. ``uuid`` is fresh random text, for the id of a member that has none.

    ``requires_known_member_id`` from v4 on (KIP-394), ``supports_skipping_assignment`` from v9 on.
    """

    request: int
    group: str
    member: str
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    uuid: str
    group_instance_id: str | None = None
    requires_known_member_id: bool = True
    supports_skipping_assignment: bool = True


class JoinAbandoned(Struct, frozen=True):
    """The connection of a pending JoinGroup is closed: its response reaches nobody."""

    group: str
    request: int


class Sync(Struct, frozen=True):
    """A SyncGroup; the leader's brings the assignment of every member."""

    request: int
    group: str
    member: str
    generation: int
    assignments: tuple[tuple[str, bytes], ...] = ()
    group_instance_id: str | None = None
    protocol_type: str | None = None
    protocol: str | None = None


class Heartbeat(Struct, frozen=True):
    """A Heartbeat."""

    request: int
    group: str
    member: str
    generation: int
    group_instance_id: str | None = None


class Leave(Struct, frozen=True):
    """A LeaveGroup of (member id, instance id): either may be missing."""

    request: int
    group: str
    members: tuple[tuple[str, str | None], ...]


class CommitPartition(Struct, frozen=True):
    """One partition's offset to commit."""

    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str | None = None


class CommitTopic(Struct, frozen=True):
    """One topic's offsets to commit; the topic exists."""

    name: str
    topic_id: uuid.UUID
    partitions: tuple[CommitPartition, ...]


class CommitOffsets(Struct, frozen=True):
    """An OffsetCommit or, with ``producer``, a TxnOffsetCommit in its transaction. ``generation``
    -1 is a simple commit, by nobody's leave.

    ``knows_missing_groups``: from v9 of OffsetCommit on a missing group is GROUP_ID_NOT_FOUND.
    """

    request: int
    group: str
    topics: tuple[CommitTopic, ...]
    member: str = UNKNOWN_MEMBER_ID
    generation: int = UNKNOWN_GENERATION
    group_instance_id: str | None = None
    retention_ms: int = -1
    knows_missing_groups: bool = True
    producer: TransactionalProducer | None = None


class WriteTxnMarker(Struct, frozen=True):
    """A WriteTxnMarkers for this partition: what the transaction has committed counts, or not."""

    request: int
    marker: EndMarker


class OffsetFetchTopic(Struct, frozen=True):
    """One topic whose offsets are requested; zero id: whatever topic has the name."""

    name: str
    partitions: tuple[int, ...]
    topic_id: uuid.UUID = NO_TOPIC_ID


class FetchOffsets(Struct, frozen=True):
    """An OffsetFetch of one group; ``topics`` None: all."""

    request: int
    group: str
    topics: tuple[OffsetFetchTopic, ...] | None
    require_stable: bool = False


class DeleteOffsets(Struct, frozen=True):
    """An OffsetDelete of (topic, partitions)."""

    request: int
    group: str
    topics: tuple[tuple[str, tuple[int, ...]], ...]


class DeleteGroups(Struct, frozen=True):
    """A DeleteGroups."""

    request: int
    groups: tuple[str, ...]


# Events of the node.


class TopicsDeleted(Struct, frozen=True):
    """Topics (name, id) are gone, and with them their offsets."""

    topics: tuple[tuple[str, uuid.UUID], ...]


class SweepOn(Struct, frozen=True):
    """There is time for a slice of what :class:`MoreToSweep` asked for."""


Event = (
    Join
    | JoinAbandoned
    | Sync
    | Heartbeat
    | Leave
    | CommitOffsets
    | WriteTxnMarker
    | FetchOffsets
    | DeleteOffsets
    | DeleteGroups
    | TopicsDeleted
    | SweepOn
    | AppendEvent
)


# Effects.


class NoteGroup(Struct, frozen=True):
    """Something for the node's log: a group, what happened, why. ``routine``: it happens whenever a
    member comes or goes.
    """

    group: str
    text: str
    routine: bool = False


class OutOfMemory(Struct, frozen=True):
    """A request of a group was refused because of ``setting``."""

    group: str
    setting: str


class MoreToSweep(Struct, frozen=True):
    """Offsets are to be deleted: step :class:`SweepOn`, in a turn of the loop of its own. Each step
    says so again where there is more.
    """


Effect = AppendRecords | Response | NoteGroup | OutOfMemory | MoreToSweep


# Results.


class JoinedMember(Struct, frozen=True):
    """A member as the leader sees it."""

    member: str
    group_instance_id: str | None
    metadata: bytes


class JoinResult(Struct, frozen=True):
    """Response to :class:`Join`; ``members`` is for the leader only."""

    error: ErrorCode = NO_ERROR
    member: str = UNKNOWN_MEMBER_ID
    generation: int = UNKNOWN_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


class SyncResult(Struct, frozen=True):
    """Response to :class:`Sync`."""

    error: ErrorCode = NO_ERROR
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class HeartbeatResult(Struct, frozen=True):
    """Response to :class:`Heartbeat`."""

    error: ErrorCode = NO_ERROR


class LeaveResult(Struct, frozen=True):
    """Response to :class:`Leave`: (member id, instance id, error) as requested."""

    error: ErrorCode = NO_ERROR
    members: tuple[tuple[str, str | None, ErrorCode], ...] = ()


class CommitResult(Struct, frozen=True):
    """Response to :class:`CommitOffsets`: (topic, id, (partition, error)...).

    ``error`` concerns all partitions and leaves ``topics`` empty.
    """

    error: ErrorCode = NO_ERROR
    topics: tuple[tuple[str, uuid.UUID, tuple[tuple[int, ErrorCode], ...]], ...] = ()


class WriteTxnMarkerResult(Struct, frozen=True):
    """Response to :class:`WriteTxnMarker`."""

    error: ErrorCode = NO_ERROR


class FetchedOffset(Struct, frozen=True):
    """One partition's committed offset; -1 where there is none."""

    partition: int
    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    error: ErrorCode = NO_ERROR


class FetchResult(Struct, frozen=True):
    """Response to :class:`FetchOffsets`: (topic, id as requested, offsets)."""

    error: ErrorCode = NO_ERROR
    topics: tuple[tuple[str, uuid.UUID, tuple[FetchedOffset, ...]], ...] = ()


class DeleteOffsetsResult(Struct, frozen=True):
    """Response to :class:`DeleteOffsets`: (topic, (partition, error)...)."""

    error: ErrorCode = NO_ERROR
    topics: tuple[tuple[str, tuple[tuple[int, ErrorCode], ...]], ...] = ()


class DeleteGroupsResult(Struct, frozen=True):
    """Response to :class:`DeleteGroups`: (group, error)."""

    groups: tuple[tuple[str, ErrorCode], ...] = ()


def failed(result: Any, error: ErrorCode) -> Any:
    """What becomes of a result whose records were not committed because of ``error``."""
    if isinstance(result, DeleteGroupsResult):
        refused = ErrorCode.non_empty_group
        return DeleteGroupsResult(
            tuple((group, code if code is refused else error) for group, code in result.groups)
        )
    return type(result)(error)


class ListedGroup(Struct, frozen=True):
    """A group in a list."""

    group: str
    protocol_type: str
    state: str
    group_type: str


class DescribedMember(Struct, frozen=True):
    """A member in a description; ``metadata`` is empty unless the group is stable."""

    member: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class DescribedGroup(Struct, frozen=True):
    """A group in full; state Dead if there is none of that name."""

    group: str
    state: str
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[DescribedMember, ...] = ()
