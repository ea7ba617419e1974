"""One classic group: its members, its state, and the questions that the protocol asks of it.

A port of Kafka's ``ClassicGroup`` and ``ClassicGroupMember``; members are kept in the order in
which they came. Nothing here decides: :mod:`.join_group` does, and moves the group with these
methods.

::

    Empty ----> PreparingRebalance ----> CompletingRebalance ----> Stable
      ^           |   ^        ^                 |                    |
      +-----------+   |        +-----------------+                    |
                      +-----------------------------------------------+
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from kept.node.coordinator.groups.memory_limit import (
    GROUP_BYTES,
    MEMBER_BYTES,
    PENDING_BYTES,
    PROTOCOL_BYTES,
    GroupMemory,
)
from kept.node.coordinator.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    MemberMetadata,
)
from kept.storage.errors import InvariantViolation

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
CLASSIC_GROUP_TYPE: Final = "classic"

Protocols = tuple[tuple[str, bytes], ...]
"""What a member offers, best first: (protocol name, metadata)."""


class GroupState(enum.Enum):
    """State of a group; the value is the name that clients see."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"


EMPTY: Final = GroupState.EMPTY
PREPARING_REBALANCE: Final = GroupState.PREPARING_REBALANCE
COMPLETING_REBALANCE: Final = GroupState.COMPLETING_REBALANCE
STABLE: Final = GroupState.STABLE
MAX_SUBSCRIPTIONS: Final = 20_000
"""Topics that are read of the different subscriptions of a group's members, at a stretch; of more
it is not known what they subscribe to. 16 MiB of short names would hold the loop for a second."""
VERSION_BYTES: Final = 2
"""Of a subscription: its version comes first."""
DEAD_STATE: Final = "Dead"
"""What DescribeGroups calls the state of a group that does not exist."""

VALID_PREVIOUS_STATES: Final = {
    EMPTY: {PREPARING_REBALANCE},
    PREPARING_REBALANCE: {STABLE, COMPLETING_REBALANCE, EMPTY},
    COMPLETING_REBALANCE: {PREPARING_REBALANCE},
    STABLE: {COMPLETING_REBALANCE},
}


class GroupError(Exception):
    """A request that the group refuses, with the code that says why."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class Member:
    """One member. ``awaiting_join`` and ``awaiting_sync`` hold the request that waits, if one does.

    ``is_new``: it does not know its id yet, so it cannot send heartbeats; its session timeout runs
    even while it waits.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    assignment: bytes = b""
    awaiting_join: int | None = None
    awaiting_sync: int | None = None
    is_new: bool = False

    @property
    def is_static(self) -> bool:
        """It has an instance id (KIP-345)."""
        return self.group_instance_id is not None

    @property
    def has_satisfied_heartbeat(self) -> bool:
        """It waits for us, so silence is no failure."""
        if self.is_new:
            return False
        return self.awaiting_join is not None or self.awaiting_sync is not None

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        ids = len(self.member_id) + len(self.group_instance_id or "") + len(self.client_id)
        fixed = MEMBER_BYTES + len(self.protocol_type) + len(self.assignment)
        return fixed + ids + protocols_bytes(self.protocols)

    def metadata(self, protocol: str | None) -> bytes:
        """Its metadata for a protocol that it supports."""
        for name, data in self.protocols:
            if name == protocol:
                return data
        raise InvariantViolation(f"member {self.member_id} does not support protocol {protocol}")

    def vote(self, candidates: set[str]) -> str:
        """The candidate that it likes best."""
        for name, _ in self.protocols:
            if name in candidates:
                return name
        raise InvariantViolation(f"member {self.member_id} supports none of {sorted(candidates)}")


@dataclass(slots=True)
class Group:
    """One group.

    ``protocol_type`` is None for a simple group: offsets without members. ``is_durable`` is false
    until the first record about the group is committed: until then lists do not show it.
    ``subscribed_topics`` is None where it cannot be known (another protocol type, or metadata that
    does not parse). ``members_bytes`` is what members, and ids that were given out, hold in memory.
    """

    group_id: str
    state: GroupState = EMPTY
    previous_state: GroupState | None = None
    state_timestamp: int | None = None
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    static_members: dict[str, str] = field(default_factory=dict)
    pending_join: dict[str, None] = field(default_factory=dict)
    pending_sync: set[str] = field(default_factory=set)
    new_member_added: bool = False
    subscribed_topics: frozenset[str] | None = None
    is_durable: bool = False
    members_bytes: int = 0
    _memory: GroupMemory | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_record(cls, group_id: str, value: GroupMetadataValue) -> Group:
        """The group that a record describes, with nobody waiting."""
        timestamp = value.current_state_timestamp
        group = cls(
            group_id,
            state=STABLE if value.members else EMPTY,
            state_timestamp=None if timestamp == -1 else timestamp,
            generation=value.generation,
            protocol_type=value.protocol_type or None,
            protocol=value.protocol,
            leader=value.leader,
            is_durable=True,
        )
        for m in value.members:
            session = m.session_timeout_ms
            rebalance = session if m.rebalance_timeout_ms == -1 else m.rebalance_timeout_ms
            offered = ((value.protocol or "", m.subscription),)
            member = Member(
                m.member_id,
                m.group_instance_id,
                m.client_id,
                m.client_host,
                rebalance,
                session,
                value.protocol_type,
                offered,
                m.assignment,
            )
            group.members[m.member_id] = member
            group.members_bytes += member.size_bytes
            if m.group_instance_id is not None:
                group.static_members[m.group_instance_id] = m.member_id
        group.subscribed_topics = group.compute_subscribed_topics()
        return group

    def to_record(self, assignment: dict[str, bytes] | None = None) -> GroupRecord:
        """The group as its record, with the given assignments or those that its members have."""
        members = tuple(
            MemberMetadata(
                m.member_id,
                m.group_instance_id,
                m.client_id,
                m.client_host,
                m.rebalance_timeout_ms,
                m.session_timeout_ms,
                m.metadata(self.protocol),
                m.assignment if assignment is None else assignment.get(m.member_id, b""),
            )
            for m in self.members.values()
        )
        value = GroupMetadataValue(
            self.protocol_type or "",
            self.generation,
            self.protocol,
            self.leader,
            -1 if self.state_timestamp is None else self.state_timestamp,
            members,
        )
        return GroupRecord(GroupMetadataKey(self.group_id), value)

    def empty_record(self) -> GroupRecord:
        """What says only that the group exists."""
        timestamp = -1 if self.state_timestamp is None else self.state_timestamp
        value = GroupMetadataValue("", 0, None, None, timestamp, ())
        return GroupRecord(GroupMetadataKey(self.group_id), value)

    # Questions.

    @property
    def is_consumer_protocol(self) -> bool:
        """Its members are consumers, so that their metadata can be read."""
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    @property
    def awaiting_join_count(self) -> int:
        """Members whose JoinGroup waits for the others."""
        return sum(1 for m in self.members.values() if m.awaiting_join is not None)

    @property
    def has_all_members_joined(self) -> bool:
        """Nobody is missing, and nobody was sent away to come back with an id."""
        return not self.pending_join and all(
            m.awaiting_join is not None for m in self.members.values()
        )

    @property
    def rebalance_timeout_ms(self) -> int:
        """How long the slowest member may take to rejoin."""
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    def is_leader(self, member_id: str) -> bool:
        """Whether that member computes the assignment."""
        return self.leader == member_id

    def supports_protocols(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether somebody with these protocols can be a member beside the present ones."""
        offered = set(names)
        if self.state is EMPTY:
            return bool(protocol_type) and bool(offered)
        if protocol_type != self.protocol_type:
            return False
        return bool(offered & self.candidate_protocols() if self.members else offered)

    def candidate_protocols(self) -> set[str]:
        """Protocols that every member supports."""
        candidates: set[str] | None = None
        for member in self.members.values():
            names = {name for name, _ in member.protocols}
            candidates = names if candidates is None else candidates & names
        return candidates or set()

    def select_protocol(self) -> str:
        """The candidate that most members like best; the first voted one of equals."""
        candidates = self.candidate_protocols()
        votes: dict[str, int] = {}
        for member in self.members.values():
            name = member.vote(candidates)
            votes[name] = votes.get(name, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def validate_member(self, member_id: str, group_instance_id: str | None) -> None:
        """Raise GroupError unless that is a member; a static one that was replaced is fenced."""
        if group_instance_id is not None:
            current = self.static_members.get(group_instance_id)
            if current is None:
                raise GroupError(ErrorCode.unknown_member_id)
            if current != member_id:
                raise GroupError(ErrorCode.fenced_instance_id)
        if member_id not in self.members:
            raise GroupError(ErrorCode.unknown_member_id)

    def is_subscribed_to(self, topic: str) -> bool:
        """A member reads that topic, or (consumers whose metadata is unreadable) may read it."""
        if self.subscribed_topics is None:
            return self.is_consumer_protocol
        return topic in self.subscribed_topics

    def compute_subscribed_topics(self) -> frozenset[str] | None:
        """Topics that the members subscribe to by the selected protocol; None if unknown."""
        if not self.is_consumer_protocol:
            return None
        if not self.members:
            return frozenset()
        if self.protocol is None:
            return None
        topics: set[str] = set()
        left = MAX_SUBSCRIPTIONS
        known: tuple[bytes, ...] = ()
        for member in self.members.values():
            metadata = member.metadata(self.protocol)
            if metadata.startswith(known, VERSION_BYTES):
                continue  # as of nearly all members
            read = _read_subscription(metadata, left)
            if read is None:
                return None
            topics |= read.topics
            left -= read.size
            known = (metadata[VERSION_BYTES : read.end], *known)
        return frozenset(topics)

    # Memory.

    def count_in(self, memory: GroupMemory) -> None:
        """It exists: what it holds counts there from now on."""
        self._memory = memory
        memory.used_bytes += GROUP_BYTES + len(self.group_id) + self.members_bytes

    def count_out(self) -> None:
        """It exists no more."""
        if self._memory is not None:
            self._memory.used_bytes -= GROUP_BYTES + len(self.group_id) + self.members_bytes
            self._memory = None

    def _count(self, more_bytes: int) -> None:
        self.members_bytes += more_bytes
        if self._memory is not None:
            self._memory.used_bytes += more_bytes

    # Moves.

    def transition_to(self, state: GroupState, wall_ms: int) -> None:
        """Change the state."""
        if self.state not in VALID_PREVIOUS_STATES[state]:
            raise InvariantViolation(f"group {self.group_id}: {self.state} cannot become {state}")
        self.previous_state, self.state, self.state_timestamp = self.state, state, wall_ms

    def add(self, member: Member) -> None:
        """Let a member in. The first one is the leader and decides the protocol type."""
        if member.group_instance_id is not None:
            if member.group_instance_id in self.static_members:
                raise InvariantViolation(f"{member.group_instance_id} is a member already")
            self.static_members[member.group_instance_id] = member.member_id
        if not self.members:
            self.protocol_type = member.protocol_type
        if self.leader is None:
            self.leader = member.member_id
        self._forget_pending(member.member_id)
        self.members[member.member_id] = member
        self._count(member.size_bytes)

    def expect(self, member_id: str) -> None:
        """Remember an id that is given out until somebody comes with it."""
        self.pending_join[member_id] = None
        self._count(PENDING_BYTES + len(member_id))

    def _forget_pending(self, member_id: str) -> None:
        if member_id in self.pending_join:
            del self.pending_join[member_id]
            self._count(-PENDING_BYTES - len(member_id))

    def offer(self, member: Member, protocols: Protocols) -> None:
        """A member has other protocols, or other metadata in them."""
        self._count(protocols_bytes(protocols) - protocols_bytes(member.protocols))
        member.protocols = protocols

    def assign(self, member: Member, assignment: bytes) -> None:
        """Give a member its part."""
        self._count(len(assignment) - len(member.assignment))
        member.assignment = assignment

    def remove(self, member_id: str) -> None:
        """Take a member, or one who was to come, out; the eldest left becomes the leader."""
        removed = self.members.pop(member_id, None)
        if removed is not None:
            self._count(-removed.size_bytes)
            if removed.group_instance_id is not None:
                self.static_members.pop(removed.group_instance_id, None)
        if self.is_leader(member_id):
            self.leader = next(iter(self.members), None)
        self._forget_pending(member_id)
        self.pending_sync.discard(member_id)

    def replace_static_member(self, instance: str, old_id: str, new_id: str) -> Member:
        """Give a static member a new id; whoever holds the old one is fenced from now on.

        The member keeps its place; its waiting requests are the caller's to answer beforehand.
        """
        member = self.members[old_id]
        member.member_id, member.is_new = new_id, False
        self._count(len(new_id) - len(old_id))
        self.members = {new_id if k == old_id else k: m for k, m in self.members.items()}
        if self.is_leader(old_id):
            self.leader = new_id
        self.static_members[instance] = new_id
        self.pending_sync.discard(old_id)
        return member

    def elect_joined_leader(self) -> bool:
        """Make sure that the leader is one who has joined; False if nobody has."""
        if self.leader is None:
            return False
        if self.members[self.leader].awaiting_join is None:
            joined = (m for m in self.members.values() if m.awaiting_join is not None)
            new = next(joined, None)
            if new is None:
                return False
            self.leader = new.member_id
        return True

    def init_next_generation(self, wall_ms: int) -> None:
        """Begin a generation with those who are here; nobody: the group is empty."""
        self.generation = (self.generation + 1) & 0x7FFFFFFF
        self.protocol = self.select_protocol() if self.members else None
        self.subscribed_topics = self.compute_subscribed_topics()
        self.transition_to(COMPLETING_REBALANCE if self.members else EMPTY, wall_ms)
        self.pending_sync.clear()

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the fields contradict each other."""
        for member_id, member in self.members.items():
            _require(member.member_id == member_id, self, "a member under another id")
            _require(member_id not in self.pending_join, self, "a member that is yet to come")
            _require(
                member.awaiting_sync is None or self.state is COMPLETING_REBALANCE,
                self,
                "a member awaits its assignment in another state",
            )
            _require(
                member.awaiting_join is None or self.state in (PREPARING_REBALANCE, STABLE),
                self,
                "a member awaits the others in another state",
            )
        static = {m.group_instance_id: i for i, m in self.members.items() if m.is_static}
        _require(static == self.static_members, self, "static members are mapped wrongly")
        _require(self.leader is None or self.leader in self.members, self, "an absent leader")
        _require(not self.members or self.leader is not None, self, "members without a leader")
        _require(self.pending_sync <= self.members.keys(), self, "strangers are to sync")
        _require(
            not self.pending_sync or self.state in (COMPLETING_REBALANCE, STABLE),
            self,
            "pending syncs",
        )
        held = sum(m.size_bytes for m in self.members.values())
        held += sum(PENDING_BYTES + len(member_id) for member_id in self.pending_join)
        _require(held == self.members_bytes, self, "its memory is counted wrongly")
        if self.state is EMPTY:
            _require(not self.members, self, "an empty group with members")
        if self.state in (COMPLETING_REBALANCE, STABLE):
            _require(bool(self.members), self, "no members")
            _require(self.protocol in self.candidate_protocols(), self, "an impossible protocol")


def protocols_bytes(protocols: Protocols) -> int:
    """What protocols take, with their names and metadata."""
    return sum(PROTOCOL_BYTES + len(name) + len(data) for name, data in protocols)


def _require(condition: bool, group: Group, what: str) -> None:
    if not condition:
        raise InvariantViolation(f"group {group.group_id} ({group.state.value}): {what}")


class _Subscription(NamedTuple):
    """``size`` topics, some perhaps named twice, and where their names end."""

    topics: set[str]
    size: int
    end: int


def _read_subscription(metadata: bytes, most: int) -> _Subscription | None:
    """The topics of a consumer's subscription (``ConsumerProtocolSubscription`` v0 and later).

    int16 version, int32 count, strings; what follows is not read. None if it does not parse, or has
    more than ``most`` topics.
    """
    try:
        version, count = struct.unpack_from(">hi", metadata, 0)
        if version < 0 or not 0 <= count <= most:
            return None
        position, topics = 6, set()
        for _ in range(count):
            (size,) = struct.unpack_from(">h", metadata, position)
            end = position + 2 + size
            if size < 0 or end > len(metadata):
                return None
            topics.add(metadata[position + 2 : end].decode())
            position = end
    except (struct.error, UnicodeDecodeError):
        return None
    return _Subscription(topics, count, position)
