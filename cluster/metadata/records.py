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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final
from uuid import UUID

from kept.cluster.metadata.voters import Voter
from kept.steps import Steps, finished
from kept.storage.errors import CorruptMessage, InvariantViolation, UnsupportedVersion

NO_LEADER: Final = -1
"""Leader of a partition that has none."""

RECORDS_PER_STEP: Final = 8
"""Of work in steps: some 100 microseconds to encode, decode or apply."""

_NULL_STRING: Final = 0xFFFF
MAX_STRING_BYTES: Final = 0xFFFE
"""The longest string of a record; Kafka's limit for a setting's value is 32767."""

_HEAD = struct.Struct(">BB")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_PARTITION = struct.Struct(">16siiiiB")
_PRODUCER_IDS = struct.Struct(">iqq")
_CHANGE = struct.Struct(">iqB")
_BROKER = struct.Struct(">iq16sB")

_FENCED: Final = 1
_SHUTTING_DOWN: Final = 2
_UNCLEAN: Final = 1


class ResourceType(IntEnum):
    """What a setting belongs to; Kafka's numbers."""

    TOPIC = 2
    BROKER = 4


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a broker is reached: the listener's name, its security protocol, host and port."""

    name: str
    protocol: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The cluster's id; committed once, by the first leader, and never changed."""

    cluster_id: str


@dataclass(frozen=True, slots=True)
class FeatureRecord:
    """A finalized feature level; level 0 removes the feature."""

    name: str
    level: int


@dataclass(frozen=True, slots=True)
class BrokerRecord:
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


@dataclass(frozen=True, slots=True)
class BrokerChangeRecord:
    """A registered broker is fenced, unfenced, or shuts down in order."""

    broker_id: int
    broker_epoch: int
    fenced: bool
    in_controlled_shutdown: bool = False


@dataclass(frozen=True, slots=True)
class UnregisterBrokerRecord:
    """A broker leaves for good."""

    broker_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic exists. Its settings follow, then its partitions, in the same batch."""

    name: str
    topic_id: UUID


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """A topic, its partitions and its settings are gone."""

    topic_id: UUID


@dataclass(frozen=True, slots=True)
class PartitionRecord:
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


@dataclass(frozen=True, slots=True)
class ConfigRecord:
    """A setting that was given explicitly; ``value`` None takes it back."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class ProducerIdsRecord:
    """A broker was given a block of producer ids that ends below ``next_producer_id``."""

    broker_id: int
    broker_epoch: int
    next_producer_id: int


@dataclass(frozen=True, slots=True)
class VotersRecord:
    """Who votes from this entry on; the first record of its entry (``kept.cluster.raft``)."""

    voters: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class NoOpRecord:
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

    def integer(self, layout: struct.Struct) -> int:
        value: int = self.unpack(layout)[0]
        return value

    def uuid(self) -> UUID:
        return UUID(bytes=bytes(self.take(16)))

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            raise CorruptMessage(f"metadata record ends {end - len(self.data)} bytes early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def string(self) -> str:
        value = self.nullable_string()
        if value is None:
            raise CorruptMessage("metadata record: null where a string must be")
        return value

    def nullable_string(self) -> str | None:
        length = self.integer(_U16)
        return None if length == _NULL_STRING else str(self.take(length), "utf-8")

    def integers(self) -> tuple[int, ...]:
        count = self.integer(_U16)
        return struct.unpack(f">{count}i", self.take(4 * count))


def _string(value: str | None) -> bytes:
    if value is None:
        return _U16.pack(_NULL_STRING)
    data = value.encode()
    if len(data) > MAX_STRING_BYTES:
        raise InvariantViolation(f"string of {len(data)} bytes in a metadata record")
    return _U16.pack(len(data)) + data


def _integers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f">H{len(values)}i", len(values), *values)


def _write_broker(record: BrokerRecord) -> bytes:
    head = _BROKER.pack(
        record.broker_id, record.broker_epoch, record.incarnation.bytes, int(record.fenced)
    )
    endpoints = b"".join(
        _string(e.name) + _string(e.protocol) + _string(e.host) + _I32.pack(e.port)
        for e in record.endpoints
    )
    body = head + _string(record.rack) + _U16.pack(len(record.endpoints)) + endpoints
    if _broker_version(record):
        directories = b"".join(directory.bytes for directory in record.directories)
        body += _U16.pack(len(record.directories)) + directories
    return body


def _broker_version(record: BrokerRecord) -> int:
    return int(bool(record.directories))


def _read_broker_v1(reader: _Reader) -> BrokerRecord:
    record = _read_broker(reader)
    return replace(record, directories=tuple(reader.uuid() for _ in range(reader.integer(_U16))))


def _read_broker(reader: _Reader) -> BrokerRecord:
    broker_id, broker_epoch, incarnation, flags = reader.unpack(_BROKER)
    rack = reader.nullable_string()
    endpoints = tuple(
        Endpoint(reader.string(), reader.string(), reader.string(), reader.integer(_I32))
        for _ in range(reader.integer(_U16))
    )
    return BrokerRecord(
        broker_id, broker_epoch, UUID(bytes=incarnation), endpoints, rack, bool(flags & _FENCED)
    )


def _write_change(record: BrokerChangeRecord) -> bytes:
    flags = _FENCED * record.fenced | _SHUTTING_DOWN * record.in_controlled_shutdown
    return _CHANGE.pack(record.broker_id, record.broker_epoch, flags)


def _read_change(reader: _Reader) -> BrokerChangeRecord:
    broker_id, broker_epoch, flags = reader.unpack(_CHANGE)
    return BrokerChangeRecord(
        broker_id, broker_epoch, bool(flags & _FENCED), bool(flags & _SHUTTING_DOWN)
    )


def _write_partition(record: PartitionRecord) -> bytes:
    head = _PARTITION.pack(
        record.topic_id.bytes,
        record.partition,
        record.leader,
        record.leader_epoch,
        record.partition_epoch,
        _UNCLEAN * record.unclean,
    )
    body = head + _integers(record.replicas) + _integers(record.isr)
    if _partition_version(record):
        for members in (record.adding, record.removing, record.elr):
            body += _integers(members)
    return body


def _partition_version(record: PartitionRecord) -> int:
    """The oldest version that holds it all, so that most records stay what 0.1.0 reads."""
    return int(bool(record.adding or record.removing or record.elr))


def _read_partition_v1(reader: _Reader) -> PartitionRecord:
    record = _read_partition(reader)
    return replace(
        record, adding=reader.integers(), removing=reader.integers(), elr=reader.integers()
    )


def _read_partition(reader: _Reader) -> PartitionRecord:
    topic_id, partition, leader, leader_epoch, partition_epoch, flags = reader.unpack(_PARTITION)
    return PartitionRecord(
        topic_id=UUID(bytes=topic_id),
        partition=partition,
        leader=leader,
        leader_epoch=leader_epoch,
        partition_epoch=partition_epoch,
        unclean=bool(flags & _UNCLEAN),
        replicas=reader.integers(),
        isr=reader.integers(),
    )


def _write_config(record: ConfigRecord) -> bytes:
    return (
        bytes((record.resource_type,))
        + _string(record.resource_name)
        + _string(record.name)
        + _string(record.value)
    )


def _read_config(reader: _Reader) -> ConfigRecord:
    return ConfigRecord(
        reader.take(1)[0], reader.string(), reader.string(), reader.nullable_string()
    )


def _write_voters(record: VotersRecord) -> bytes:
    return _U16.pack(len(record.voters)) + b"".join(
        _I32.pack(v.node_id) + v.directory_id.bytes + _string(v.host) + _I32.pack(v.port)
        for v in record.voters
    )


def _read_voters(reader: _Reader) -> VotersRecord:
    return VotersRecord(
        tuple(
            Voter(reader.integer(_I32), reader.uuid(), reader.string(), reader.integer(_I32))
            for _ in range(reader.integer(_U16))
        )
    )


_WRITERS: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    UnregisterBrokerRecord: (1, lambda r: _I32.pack(r.broker_id) + _I64.pack(r.broker_epoch)),
    TopicRecord: (2, lambda r: r.topic_id.bytes + _string(r.name)),
    PartitionRecord: (3, _write_partition),
    ConfigRecord: (4, _write_config),
    RemoveTopicRecord: (9, lambda r: r.topic_id.bytes),
    FeatureRecord: (12, lambda r: _string(r.name) + _U16.pack(r.level)),
    ProducerIdsRecord: (
        15,
        lambda r: _PRODUCER_IDS.pack(r.broker_id, r.broker_epoch, r.next_producer_id),
    ),
    BrokerChangeRecord: (17, _write_change),
    NoOpRecord: (20, lambda _: b""),
    BrokerRecord: (27, _write_broker),
    ClusterRecord: (64, lambda r: _string(r.cluster_id)),
    VotersRecord: (65, _write_voters),
}
"""Class -> type, the body's writer."""

_VERSIONS: Final[dict[type, Callable[[Any], int]]] = {
    PartitionRecord: _partition_version,
    BrokerRecord: _broker_version,
}
"""Class -> the version that a record is written in; 0 for what is not listed."""

_READERS: Final[dict[int, tuple[Callable[[_Reader], Any], ...]]] = {
    1: (lambda r: UnregisterBrokerRecord(r.integer(_I32), r.integer(_I64)),),
    2: (lambda r: TopicRecord(topic_id=r.uuid(), name=r.string()),),
    3: (_read_partition, _read_partition_v1),
    4: (_read_config,),
    9: (lambda r: RemoveTopicRecord(r.uuid()),),
    12: (lambda r: FeatureRecord(r.string(), r.integer(_U16)),),
    15: (lambda r: ProducerIdsRecord(*r.unpack(_PRODUCER_IDS)),),
    17: (_read_change,),
    20: (lambda _: NoOpRecord(),),
    27: (_read_broker, _read_broker_v1),
    64: (lambda r: ClusterRecord(r.string()),),
    65: (_read_voters,),
}
"""Type -> the body's reader of each version, from version 0."""


def encode(record: MetadataRecord) -> bytes:
    """The bytes of one record."""
    kind, write = _WRITERS[type(record)]
    version = _VERSIONS.get(type(record))
    return _HEAD.pack(kind, version(record) if version else 0) + write(record)


def decode(data: bytes | memoryview) -> MetadataRecord:
    """One record from exactly its bytes.

    Raises UnsupportedVersion for a type or version that is not known here, CorruptMessage for bytes
    that are not a record.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise CorruptMessage(f"metadata record of {len(view)} bytes")
    kind, version = _HEAD.unpack_from(view)
    known = _READERS.get(kind)
    if known is None or version >= len(known):
        raise UnsupportedVersion(
            f"metadata record of type {kind} version {version} was written by a newer kept"
        )
    reader = _Reader(view, _HEAD.size)
    try:
        record: MetadataRecord = known[version](reader)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptMessage(f"metadata record of type {kind}: {error}") from error
    if reader.position != len(view):
        extra = len(view) - reader.position
        raise CorruptMessage(f"metadata record of type {kind}: {extra} bytes too many")
    return record


def encode_batch(records: Iterable[MetadataRecord]) -> bytes:
    """The bytes of records that become true together: one entry of the metadata log."""
    return finished(encode_batch_in_steps(records))


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
    return finished(decode_batch_in_steps(data))


def decode_batch_in_steps(data: bytes | memoryview) -> Steps[list[MetadataRecord]]:
    """:func:`decode_batch` for many records: yields after every few."""
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
