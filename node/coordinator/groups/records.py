"""The records of ``__consumer_offsets``, byte for byte those of Apache Kafka.

A record's key starts with an int16 that names its type; its value starts with an int16 version.

=====  ==================  ================================  ==========================
key    what                value versions read               value version written
=====  ==================  ================================  ==========================
0, 1   a committed offset  0-3, 4 (flexible, with topic id)  4; 1 if it expires by itself
2      a group             0-3, 4 (flexible)                 3
=====  ==================  ================================  ==========================

A null value is a tombstone. Keys of other types (Kafka's new consumer groups, share groups,
streams groups) are not ours to read: :func:`decode_key` returns None, and the cleaner keeps them
as they are. See docs/formats/consumer-offsets.md. Source: the ``OffsetCommit*.json`` and
``GroupMetadata*.json`` of Kafka's group-coordinator module.
"""

from __future__ import annotations

import uuid
from functools import lru_cache
from typing import Final

from msgspec import Struct

from kept.node.runtime.message_reader import MessageReader
from kept.node.runtime.message_writer import MessageWriter
from kept.storage.errors import CorruptMessage

OFFSET_COMMIT_LEGACY_KEY: Final = 0
OFFSET_COMMIT_KEY: Final = 1
GROUP_METADATA_KEY: Final = 2

OFFSET_COMMIT_VALUE_VERSIONS: Final = range(5)
GROUP_METADATA_VALUE_VERSIONS: Final = range(5)
FIRST_FLEXIBLE_VERSION: Final = 4
OFFSET_COMMIT_VALUE_VERSION: Final = 4
OFFSET_COMMIT_VALUE_VERSION_WITH_EXPIRY: Final = 1
GROUP_METADATA_VALUE_VERSION: Final = 3

NO_TOPIC_ID: Final = uuid.UUID(int=0)
_TOPIC_ID_TAG: Final = 0
KNOWN_TOPIC_IDS: Final = 10_000
"""So many ids of topics are there once for all offsets that are read, not once for each."""
MEMBER_RECORD_BYTES: Final = 256
"""A member in a record without what it brought, about."""


class OffsetCommitKey(Struct, frozen=True):
    """Whose offset: group, topic, partition."""

    group: str
    topic: str
    partition: int


class GroupMetadataKey(Struct, frozen=True):
    """Which group."""

    group: str


class OffsetCommitValue(Struct, frozen=True, gc=False):
    """A committed offset.

    ``leader_epoch`` is -1 where the client did not know it, ``expire_timestamp`` -1 where the
    retention of the node decides (always, except for commits of OffsetCommit v2-4 with a retention
    time). ``topic_id`` is zero where it is unknown (commits older than value version 4).
    """

    offset: int
    metadata: str
    commit_timestamp: int
    leader_epoch: int = -1
    expire_timestamp: int = -1
    topic_id: uuid.UUID = NO_TOPIC_ID


class MemberMetadata(Struct, frozen=True):
    """A member as its group's record holds it; timeouts in ms, -1 = that of the session."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        ids = len(self.member_id) + len(self.group_instance_id or "") + len(self.client_id)
        return MEMBER_RECORD_BYTES + ids + len(self.subscription) + len(self.assignment)


class GroupMetadataValue(Struct, frozen=True):
    """A stable or empty group. ``protocol_type`` is empty for a group that never had members."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    current_state_timestamp: int
    members: tuple[MemberMetadata, ...]


Key = OffsetCommitKey | GroupMetadataKey


class GroupRecord(Struct, frozen=True):
    """One record of the log: ``value`` None deletes what ``key`` names."""

    key: Key
    value: OffsetCommitValue | GroupMetadataValue | None

    @property
    def text_bytes(self) -> int:
        """Size of what clients chose in it, about: names, metadata, subscriptions, assignments."""
        size = len(self.key.group)
        if isinstance(self.key, OffsetCommitKey):
            size += len(self.key.topic)
        if isinstance(self.value, OffsetCommitValue):
            size += len(self.value.metadata)
        elif self.value is not None:
            size += sum(member.size_bytes for member in self.value.members)
        return size

    def encode(self) -> tuple[bytes, bytes | None]:
        """Key and value as bytes, in the versions that Kafka 4.3 writes."""
        if self.value is None:
            return encode_key(self.key), None
        if isinstance(self.value, OffsetCommitValue):
            return encode_key(self.key), encode_offset_commit(self.value)
        return encode_key(self.key), encode_group_metadata(self.value)


def is_other_topic(stored: uuid.UUID, wanted: uuid.UUID) -> bool:
    """Both ids are known, and differ."""
    return NO_TOPIC_ID not in (stored, wanted) and stored != wanted


def utf16_length(text: str) -> int:
    """Length as Java's ``String.length()`` counts: in UTF-16 units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def encode_key(key: Key) -> bytes:
    """A key as Kafka writes it: type 1 for offsets, 2 for groups."""
    if isinstance(key, OffsetCommitKey):
        out = MessageWriter(OFFSET_COMMIT_KEY)
        out.string(key.group)
        out.string(key.topic)
        out.number(">i", key.partition)
    else:
        out = MessageWriter(GROUP_METADATA_KEY)
        out.string(key.group)
    return out.done()


def decode_key(data: bytes | memoryview) -> Key | None:
    """A key, or None for an unknown type. Raises CorruptMessage for one that does not decode."""
    reader = MessageReader(data)
    kind = reader.int16()
    if kind in (OFFSET_COMMIT_LEGACY_KEY, OFFSET_COMMIT_KEY):
        return OffsetCommitKey(reader.string(), reader.string(), reader.int32())
    if kind == GROUP_METADATA_KEY:
        return GroupMetadataKey(reader.string())
    return None


def encode_offset_commit(value: OffsetCommitValue, version: int | None = None) -> bytes:
    """A committed offset; ``version`` defaults to what Kafka 4.3 would choose for it."""
    if version is None:
        expires = value.expire_timestamp != -1
        version = (
            OFFSET_COMMIT_VALUE_VERSION_WITH_EXPIRY if expires else OFFSET_COMMIT_VALUE_VERSION
        )
    out = MessageWriter(version, flexible=version >= FIRST_FLEXIBLE_VERSION)
    out.number(">q", value.offset)
    if version >= 3:
        out.number(">i", value.leader_epoch)
    out.string(value.metadata)
    out.number(">q", value.commit_timestamp)
    if version == 1:
        out.number(">q", value.expire_timestamp)
    known = value.topic_id != NO_TOPIC_ID
    out.tags({_TOPIC_ID_TAG: value.topic_id.bytes} if known else None)
    return out.done()


def decode_offset_commit(data: bytes | memoryview) -> OffsetCommitValue:
    """A committed offset of any version that exists. Raises CorruptMessage."""
    reader = MessageReader(data)
    version = _known(reader, OFFSET_COMMIT_VALUE_VERSIONS, "committed offset")
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.string()
    commit_timestamp = reader.int64()
    expire_timestamp = reader.int64() if version == 1 else -1
    topic_id = reader.tags().get(_TOPIC_ID_TAG, NO_TOPIC_ID.bytes)
    if len(topic_id) != 16:
        raise CorruptMessage(f"a topic id of {len(topic_id)} bytes")
    return OffsetCommitValue(
        offset,
        metadata,
        commit_timestamp,
        leader_epoch,
        expire_timestamp,
        _topic_id(bytes(topic_id)),
    )


@lru_cache(KNOWN_TOPIC_IDS)
def _topic_id(data: bytes) -> uuid.UUID:
    """The offsets of a topic share its id."""
    return uuid.UUID(bytes=data)


def encode_group_metadata(
    value: GroupMetadataValue, version: int = GROUP_METADATA_VALUE_VERSION
) -> bytes:
    """A group."""
    out = MessageWriter(version, flexible=version >= FIRST_FLEXIBLE_VERSION)
    out.string(value.protocol_type)
    out.number(">i", value.generation)
    out.string(value.protocol)
    out.string(value.leader)
    if version >= 2:
        out.number(">q", value.current_state_timestamp)
    out.count(len(value.members))
    for member in value.members:
        out.string(member.member_id)
        if version >= 3:
            out.string(member.group_instance_id)
        out.string(member.client_id)
        out.string(member.client_host)
        if version >= 1:
            out.number(">i", member.rebalance_timeout_ms)
        out.number(">i", member.session_timeout_ms)
        out.blob(member.subscription)
        out.blob(member.assignment)
        out.tags()
    out.tags()
    return out.done()


def decode_group_metadata(data: bytes | memoryview) -> GroupMetadataValue:
    """A group of any version that exists. Raises CorruptMessage."""
    reader = MessageReader(data)
    version = _known(reader, GROUP_METADATA_VALUE_VERSIONS, "group")
    protocol_type = reader.string()
    generation = reader.int32()
    protocol = reader.nullable_string()
    leader = reader.nullable_string()
    timestamp = reader.int64() if version >= 2 else -1
    members = reader.array(lambda: _decode_member(reader, version), nullable=False)
    reader.tags()
    return GroupMetadataValue(protocol_type, generation, protocol, leader, timestamp, members)


def _decode_member(reader: MessageReader, version: int) -> MemberMetadata:
    member_id = reader.string()
    instance = reader.nullable_string() if version >= 3 else None
    client_id, client_host = reader.string(), reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    subscription, assignment = reader.blob(), reader.blob()
    reader.tags()
    return MemberMetadata(
        member_id,
        instance,
        client_id,
        client_host,
        rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


def _known(reader: MessageReader, versions: range, what: str) -> int:
    version = reader.int16()
    if version not in versions:
        raise CorruptMessage(
            f"a {what} of version {version}; this node reads versions up to {versions[-1]}"
        )
    reader.flexible = version >= FIRST_FLEXIBLE_VERSION
    return version


def decode_record(key: bytes | memoryview, value: bytes | memoryview | None) -> GroupRecord | None:
    """A record of the log, or None for a type that we do not know. Raises CorruptMessage."""
    decoded = decode_key(key)
    if decoded is None:
        return None
    if value is None:
        return GroupRecord(decoded, None)
    if isinstance(decoded, OffsetCommitKey):
        return GroupRecord(decoded, decode_offset_commit(value))
    return GroupRecord(decoded, decode_group_metadata(value))
