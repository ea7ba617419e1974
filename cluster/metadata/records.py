"""Metadata records: every fact about the cluster, one frozen dataclass per kind, and its bytes.

A record is ``type (uint8), version (uint8), body``; the numbers of types that Apache Kafka also has
are Kafka's. Integers are big-endian and of fixed size; a string is uint16 length and UTF-8 (65535:
null); an array is uint16 count and its elements; a UUID is 16 bytes. ``docs/formats/metadata.md``
shows every byte. One entry of the metadata log holds a *batch* of records that become true
together: uint32 count, then uint32 length and bytes of each.

Guarantees: ``decode(encode(r)) == r``; a type or version that this code does not know is refused
(:class:`UnsupportedVersion`), never skipped, because a node that ignores a fact acts on a wrong
image; bytes that are too short, too long or not UTF-8 raise :class:`CorruptMessage`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.metadata.voters import Voter
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.client_quotas import QuotaEntity
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.steps import Steps, run_to_end
from kept.storage.errors import CorruptMessage, InvariantViolation, UnsupportedVersion

NO_LEADER: Final = -1
"""Leader of a partition that has none."""

RECORDS_PER_STEP: Final = 8
"""Of work in steps: some 100 microseconds to encode, decode or apply."""

_NULL_STRING: Final = 0xFFFF
MAX_STRING_BYTES: Final = 0xFFFE
"""The longest string of a record; Kafka's limit for a setting's value is 32767."""

_HEAD = struct.Struct(">BB")
_U32 = struct.Struct(">I")
_PARTITION = struct.Struct(">16siiiiB")
_CHANGE = struct.Struct(">iqB")
_QUOTA = struct.Struct(">Bd")


class ResourceType(IntEnum):
    """What a setting belongs to; Kafka's numbers."""

    TOPIC = 2
    BROKER = 4


class Endpoint(Struct, frozen=True):
    """Where a broker is reached: the listener's name, its security protocol, host and port."""

    name: str
    protocol: str
    host: str
    port: int


class ClusterRecord(Struct, frozen=True):
    """The cluster's id; committed once, by the first leader, and never changed."""

    cluster_id: str


class FeatureRecord(Struct, frozen=True):
    """A finalized feature level; level 0 removes the feature."""

    name: str
    level: int


class BrokerRecord(Struct, frozen=True):
    """A broker's registration. Its epoch is the index of the entry that holds this record.

    ``directories`` are the ids of the log directories that the process has locked.
    """

    broker_id: int
    broker_epoch: int
    incarnation: UUID
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None
    fenced: bool = True
    directories: tuple[UUID, ...] = ()


class BrokerChangeRecord(Struct, frozen=True):
    """A registered broker is fenced, unfenced, or shuts down in order."""

    broker_id: int
    broker_epoch: int
    fenced: bool
    in_controlled_shutdown: bool = False


class UnregisterBrokerRecord(Struct, frozen=True):
    """A broker leaves for good."""

    broker_id: int
    broker_epoch: int


class TopicRecord(Struct, frozen=True):
    """A topic exists. Its settings follow, then its partitions, in the same batch."""

    name: str
    topic_id: UUID


class RemoveTopicRecord(Struct, frozen=True):
    """A topic, its partitions and its settings are gone."""

    topic_id: UUID


class PartitionRecord(Struct, frozen=True):
    """The whole state of one partition; a later record replaces an earlier one.

    ``replicas`` are in order of preference. ``leader`` is :data:`NO_LEADER` when none can lead.
    ``leader_epoch`` grows with every new leader, ``partition_epoch`` with every record.
    ``unclean`` marks a partition whose leader was elected outside the ISR and has not yet published
    its base generation. ``adding`` and ``removing`` are the replicas that a reassignment in
    progress brings and takes away; ``replicas`` holds both kinds (KIP-455).

    ``elr`` (rule 33): the eligible leader replicas, members that the controller took out of the
    ISR, or that restarted without their clean mark, since a leader was last known to live: should
    the whole ISR have lost its page cache, one of them may hold what nobody else has.
    """

    topic_id: UUID
    partition: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    unclean: bool = False
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[UUID, int]:
        """(topic id, partition)."""
        return self.topic_id, self.partition

    @property
    def leader_recovery_state(self) -> int:
        """Kafka's number for it: 0 recovered, 1 recovering from an unclean election."""
        return int(self.unclean)

    @property
    def is_under_replicated(self) -> bool:
        """The ISR is short; replicas that are just being added do not count."""
        return len(self.isr) < len(self.replicas) - len(self.adding)

    @property
    def reassigning(self) -> bool:
        """A reassignment is in progress."""
        return bool(self.adding or self.removing)

    @property
    def recovering(self) -> bool:
        """Nobody leads because the whole ISR restarted unclean: the whole ELR is waited for."""
        return self.leader == NO_LEADER and bool(self.isr) and set(self.isr) <= set(self.elr)


class ConfigRecord(Struct, frozen=True):
    """A setting that was given explicitly; ``value`` None takes it back."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


class ProducerIdsRecord(Struct, frozen=True):
    """A broker was given a block of producer ids that ends below ``next_producer_id``."""

    broker_id: int
    broker_epoch: int
    next_producer_id: int


class AclRecord(Struct, frozen=True):
    """A binding holds from this entry on. ``acl_id`` is new with each binding."""

    acl_id: UUID
    binding: AclBinding


class RemoveAclRecord(Struct, frozen=True):
    """A binding holds no more."""

    acl_id: UUID


class ScramCredentialRecord(Struct, frozen=True):
    """What proves the user's password; it replaces an earlier one of that mechanism."""

    user: str
    mechanism: ScramMechanism
    credential: ScramCredential


class RemoveScramCredentialRecord(Struct, frozen=True):
    """The user has no password of that mechanism any more."""

    user: str
    mechanism: ScramMechanism


class ClientQuotaRecord(Struct, frozen=True):
    """A quota of an entity, by its ``key`` (``producer_byte_rate``); ``value`` None: no more."""

    entity: QuotaEntity
    key: str
    value: float | None


class VotersRecord(Struct, frozen=True):
    """Who votes from this entry on; the first record of its entry (``kept.cluster.raft``)."""

    voters: tuple[Voter, ...]


class NoOpRecord(Struct, frozen=True):
    """Nothing; a new Raft leader commits it to commit what came before."""


MetadataRecord = (
    ClusterRecord
    | FeatureRecord
    | BrokerRecord
    | BrokerChangeRecord
    | UnregisterBrokerRecord
    | TopicRecord
    | RemoveTopicRecord
    | PartitionRecord
    | ConfigRecord
    | ProducerIdsRecord
    | AclRecord
    | RemoveAclRecord
    | ScramCredentialRecord
    | RemoveScramCredentialRecord
    | ClientQuotaRecord
    | VotersRecord
    | NoOpRecord
)


class _Reader:
    """A cursor over one record's body."""

    __slots__ = ("data", "position")

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def read(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            raise CorruptMessage(f"metadata record ends {end - len(self.data)} bytes early")
        start, self.position = self.position, end
        return self.data[start:end]


class _Type(NamedTuple):
    """How one value is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[_Reader], Any]


def _number(layout: str) -> _Type:
    packed = struct.Struct(layout)
    return _Type(packed.pack, lambda reader: reader.unpack(packed)[0])


_U8, _U16, _I32, _I64 = map(_number, (">B", ">H", ">i", ">q"))
_UUID: Final = _Type(lambda value: value.bytes, lambda reader: UUID(bytes=bytes(reader.read(16))))


def _write_string(value: str | None) -> bytes:
    if value is None:
        return _U16.write(_NULL_STRING)
    data = value.encode()
    if len(data) > MAX_STRING_BYTES:
        raise InvariantViolation(f"string of {len(data)} bytes in a metadata record")
    return _U16.write(len(data)) + data


def _read_nullable(reader: _Reader) -> str | None:
    length = _U16.read(reader)
    return None if length == _NULL_STRING else str(reader.read(length), "utf-8")


def _read_string(reader: _Reader) -> str:
    value = _read_nullable(reader)
    if value is None:
        raise CorruptMessage("metadata record: null where a string must be")
    return value


def _write_bytes(value: bytes) -> bytes:
    return _U16.write(len(value)) + value


def _read_ids(reader: _Reader) -> tuple[int, ...]:
    count = _U16.read(reader)
    return struct.unpack(f">{count}i", reader.read(4 * count))


_STRING: Final = _Type(_write_string, _read_string)
_NULLABLE: Final = _Type(_write_string, _read_nullable)
_BYTES: Final = _Type(_write_bytes, lambda reader: bytes(reader.read(_U16.read(reader))))
_FENCED: Final = _Type(lambda fenced: bytes((fenced,)), lambda reader: bool(reader.read(1)[0] & 1))
_IDS: Final = _Type(lambda ids: struct.pack(f">H{len(ids)}i", len(ids), *ids), _read_ids)


def _enum(numbers: type[IntEnum]) -> _Type:
    """A uint8 that has a name; one without comes from a newer version."""

    def read(reader: _Reader) -> IntEnum:
        number = _U8.read(reader)
        try:
            return numbers(number)
        except ValueError as error:
            raise UnsupportedVersion(f"metadata record: {error}, written by a newer kept") from None

    return _Type(_U8.write, read)


def _array(item: _Type) -> _Type:
    return _Type(
        lambda items: _U16.write(len(items)) + b"".join(map(item.write, items)),
        lambda reader: tuple([item.read(reader) for _ in range(_U16.read(reader))]),
    )


def _pair(first: _Type, second: _Type) -> _Type:
    return _Type(
        lambda pair: first.write(pair[0]) + second.write(pair[1]),
        lambda reader: (first.read(reader), second.read(reader)),
    )


def _fields(cls: type, **types: _Type) -> _Type:
    """A dataclass: its fields in the order of the bytes."""

    def write(value: Any) -> bytes:
        return b"".join([kind.write(getattr(value, name)) for name, kind in types.items()])

    def read(reader: _Reader) -> Any:
        return cls(**{name: kind.read(reader) for name, kind in types.items()})

    return _Type(write, read)


def _write_change(record: BrokerChangeRecord) -> bytes:
    flags = record.fenced | record.in_controlled_shutdown << 1
    return _CHANGE.pack(record.broker_id, record.broker_epoch, flags)


def _read_change(reader: _Reader) -> BrokerChangeRecord:
    broker_id, broker_epoch, flags = reader.unpack(_CHANGE)
    return BrokerChangeRecord(broker_id, broker_epoch, bool(flags & 1), bool(flags & 2))


def _write_quota(record: ClientQuotaRecord) -> bytes:
    value = 0.0 if record.value is None else record.value
    head = _ENTITY.write(record.entity) + _STRING.write(record.key)
    return head + _QUOTA.pack(record.value is None, value)


def _read_quota(reader: _Reader) -> ClientQuotaRecord:
    entity, key = _ENTITY.read(reader), _STRING.read(reader)
    removed, value = reader.unpack(_QUOTA)
    return ClientQuotaRecord(entity, key, None if removed & 1 else value)


def _write_partition(record: PartitionRecord) -> bytes:
    head = _PARTITION.pack(
        record.topic_id.bytes,
        record.partition,
        record.leader,
        record.leader_epoch,
        record.partition_epoch,
        record.unclean,
    )
    return head + _IDS.write(record.replicas) + _IDS.write(record.isr)


def _read_partition(reader: _Reader) -> PartitionRecord:
    topic_id, partition, leader, leader_epoch, partition_epoch, flags = reader.unpack(_PARTITION)
    return PartitionRecord(
        UUID(bytes=topic_id),
        partition,
        _read_ids(reader),
        _read_ids(reader),
        leader,
        leader_epoch,
        partition_epoch,
        bool(flags & 1),
    )


class _Kind(NamedTuple):
    """A type of record: its number, its class, its body; and what version 1 adds to the body.

    A record is written in the oldest version that holds it all, so that most stay what 0.1.0 reads.
    """

    number: int
    cls: type
    body: _Type
    added: Mapping[str, _Type] = {}


_ENDPOINT: Final = _fields(Endpoint, name=_STRING, protocol=_STRING, host=_STRING, port=_I32)
_VOTER: Final = _fields(Voter, node_id=_I32, directory_id=_UUID, host=_STRING, port=_I32)
_BINDING: Final = _fields(
    AclBinding,
    resource_type=_enum(AclResourceType),
    name=_STRING,
    pattern=_enum(PatternType),
    principal=_STRING,
    host=_STRING,
    operation=_enum(AclOperation),
    permission=_enum(AclPermission),
)
_USER: Final = {"user": _STRING, "mechanism": _enum(ScramMechanism)}
_CREDENTIAL: Final = _fields(
    ScramCredential, salt=_BYTES, stored_key=_BYTES, server_key=_BYTES, iterations=_I32
)
_ENTITY: Final = _array(_pair(_STRING, _NULLABLE))
_BROKER: Final = {"broker_id": _I32, "broker_epoch": _I64}
_BROKER_BODY: Final = _fields(
    BrokerRecord,
    **_BROKER,
    incarnation=_UUID,
    fenced=_FENCED,
    rack=_NULLABLE,
    endpoints=_array(_ENDPOINT),
)
_KINDS: Final = (
    _Kind(1, UnregisterBrokerRecord, _fields(UnregisterBrokerRecord, **_BROKER)),
    _Kind(2, TopicRecord, _fields(TopicRecord, topic_id=_UUID, name=_STRING)),
    _Kind(
        3,
        PartitionRecord,
        _Type(_write_partition, _read_partition),
        {"adding": _IDS, "removing": _IDS, "elr": _IDS},
    ),
    _Kind(
        4,
        ConfigRecord,
        _fields(
            ConfigRecord, resource_type=_U8, resource_name=_STRING, name=_STRING, value=_NULLABLE
        ),
    ),
    _Kind(9, RemoveTopicRecord, _fields(RemoveTopicRecord, topic_id=_UUID)),
    _Kind(
        11, ScramCredentialRecord, _fields(ScramCredentialRecord, **_USER, credential=_CREDENTIAL)
    ),
    _Kind(12, FeatureRecord, _fields(FeatureRecord, name=_STRING, level=_U16)),
    _Kind(14, ClientQuotaRecord, _Type(_write_quota, _read_quota)),
    _Kind(15, ProducerIdsRecord, _fields(ProducerIdsRecord, **_BROKER, next_producer_id=_I64)),
    _Kind(17, BrokerChangeRecord, _Type(_write_change, _read_change)),
    _Kind(18, AclRecord, _fields(AclRecord, acl_id=_UUID, binding=_BINDING)),
    _Kind(19, RemoveAclRecord, _fields(RemoveAclRecord, acl_id=_UUID)),
    _Kind(20, NoOpRecord, _fields(NoOpRecord)),
    _Kind(22, RemoveScramCredentialRecord, _fields(RemoveScramCredentialRecord, **_USER)),
    _Kind(27, BrokerRecord, _BROKER_BODY, {"directories": _array(_UUID)}),
    _Kind(64, ClusterRecord, _fields(ClusterRecord, cluster_id=_STRING)),
    _Kind(65, VotersRecord, _fields(VotersRecord, voters=_array(_VOTER))),
)
_BY_CLASS: Final = {kind.cls: kind for kind in _KINDS}
_BY_NUMBER: Final = {kind.number: kind for kind in _KINDS}


def encode(record: MetadataRecord) -> bytes:
    """The bytes of one record."""
    number, _, body, added = _BY_CLASS[type(record)]
    data = body.write(record)
    for name in added:
        if getattr(record, name):
            extra = b"".join(kind.write(getattr(record, name)) for name, kind in added.items())
            return _HEAD.pack(number, 1) + data + extra
    return _HEAD.pack(number, 0) + data


def decode(data: bytes | memoryview) -> MetadataRecord:
    """One record from exactly its bytes.

    Raises UnsupportedVersion for a type or version that is not known here, CorruptMessage for bytes
    that are not a record.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise CorruptMessage(f"metadata record of {len(view)} bytes")
    number, version = _HEAD.unpack_from(view)
    known = _BY_NUMBER.get(number)
    if known is None or version > bool(known.added):
        raise UnsupportedVersion(
            f"metadata record of type {number} version {version} was written by a newer kept"
        )
    reader = _Reader(view, _HEAD.size)
    try:
        record: MetadataRecord = known.body.read(reader)
        if version:
            more = {name: kind.read(reader) for name, kind in known.added.items()}
            record = replace(record, **more)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptMessage(f"metadata record of type {number}: {error}") from error
    if reader.position != len(view):
        extra = len(view) - reader.position
        raise CorruptMessage(f"metadata record of type {number}: {extra} bytes too many")
    return record


def encode_batch(records: Iterable[MetadataRecord]) -> bytes:
    """The bytes of records that become true together: one entry of the metadata log."""
    return run_to_end(encode_batch_in_steps(records))


def encode_batch_in_steps(records: Iterable[MetadataRecord]) -> Steps[bytes]:
    """:func:`encode_batch` for many records: yields after every few."""
    framed = [b""]
    count = 0
    for record in records:
        part = encode(record)
        framed += (_U32.pack(len(part)), part)
        count += 1
        if count % RECORDS_PER_STEP == 0:
            yield
    framed[0] = _U32.pack(count)
    return b"".join(framed)


def decode_batch(data: bytes | memoryview) -> list[MetadataRecord]:
    """The records of one entry. Raises as :func:`decode` does."""
    return run_to_end(decode_batch_in_steps(data))


def decode_batch_in_steps(data: bytes | memoryview) -> Steps[list[MetadataRecord]]:
    """:func:`decode_batch` for many records: yields after every few. Raises CorruptMessage."""
    view = memoryview(data)
    if len(view) < 4:
        raise CorruptMessage(f"metadata batch of {len(view)} bytes")
    (count,) = _U32.unpack_from(view)
    records: list[MetadataRecord] = []
    position = 4
    for _ in range(count):
        if position + 4 > len(view):
            raise CorruptMessage("metadata batch ends inside a record's length")
        (length,) = _U32.unpack_from(view, position)
        position += 4
        if position + length > len(view):
            raise CorruptMessage("metadata batch ends inside a record")
        records.append(decode(view[position : position + length]))
        position += length
        if len(records) % RECORDS_PER_STEP == 0:
            yield
    if position != len(view):
        raise CorruptMessage(f"metadata batch: {len(view) - position} bytes too many")
    return records
