"""Apache Kafka's metadata records, as of 4.3: the bytes of a record's value as a dataclass.

A value is a frame (uvarint 1, uvarint api key, uvarint version) and a message in Kafka's flexible
encoding: strings and arrays carry their length + 1 as a uvarint, every message ends with tagged
fields. Of each record only what a cluster of kept needs is kept; what says the same in both is a
record of kept at once. kio has no schemas of these
records; their source is ``metadata/src/main/resources/common/metadata`` of Apache Kafka.

A record that is none of these, or newer than 4.3 writes it, raises :class:`UnsupportedVersion`:
to pass over it would be to forget a fact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from kept.cluster.metadata.records import (
    AclRecord,
    ClientQuotaRecord,
    RemoveAclRecord,
    RemoveScramCredentialRecord,
    ScramCredentialRecord,
)
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.node.runtime.message_reader import MessageReader
from kept.storage.errors import UnsupportedVersion

FRAME_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class RegisterBroker:
    """A broker's registration; ``log_dirs`` are the ids of its log directories."""

    broker_id: int
    incarnation: UUID
    broker_epoch: int
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool
    log_dirs: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class ChangeBroker:
    """A broker is fenced or not, shuts down, has other directories; None: no change."""

    broker_id: int
    broker_epoch: int
    fenced: bool | None
    in_controlled_shutdown: bool | None
    log_dirs: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class UnregisterBroker:
    """A broker left for good."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic exists."""

    name: str
    topic_id: UUID


@dataclass(frozen=True, slots=True)
class RemoveTopic:
    """A topic is gone."""

    topic_id: UUID


@dataclass(frozen=True, slots=True)
class Partition:
    """The whole state of a partition. ``elr``: eligible leaders outside the ISR (KIP-966)."""

    topic_id: UUID
    partition: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    removing: tuple[int, ...]
    adding: tuple[int, ...]
    leader: int
    recovering: bool
    leader_epoch: int
    partition_epoch: int
    elr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChangePartition:
    """What changed of a partition; None: nothing of that."""

    topic_id: UUID
    partition: int
    isr: tuple[int, ...] | None
    leader: int | None
    replicas: tuple[int, ...] | None
    removing: tuple[int, ...] | None
    adding: tuple[int, ...] | None
    recovering: bool | None
    elr: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ClearElr:
    """Eligible leaders of a topic, or of all (empty name), count no more."""

    topic: str


@dataclass(frozen=True, slots=True)
class Config:
    """A setting; ``value`` None takes it back."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Feature:
    """A finalized feature level."""

    name: str
    level: int


@dataclass(frozen=True, slots=True)
class ProducerIds:
    """Producer ids below this one were given away."""

    next_producer_id: int


@dataclass(frozen=True, slots=True)
class Token:
    """A delegation token was made, or is gone."""

    token_id: str
    removed: bool


@dataclass(frozen=True, slots=True)
class Transaction:
    """``begin``, ``end`` or ``abort`` of records that become true together (KIP-868)."""

    what: str


Security = (
    AclRecord
    | RemoveAclRecord
    | ScramCredentialRecord
    | RemoveScramCredentialRecord
    | ClientQuotaRecord
)
"""What says the same in Kafka and here."""
KafkaRecord = (
    RegisterBroker
    | ChangeBroker
    | UnregisterBroker
    | Topic
    | RemoveTopic
    | Partition
    | ChangePartition
    | ClearElr
    | Config
    | Feature
    | ProducerIds
    | Token
    | Transaction
    | Security
)


def _reader(data: bytes) -> MessageReader:
    return MessageReader(data, flexible=True)


def _tags(reader: MessageReader) -> dict[int, MessageReader]:
    """The tagged fields, each as a reader of its own."""
    return {tag: _reader(data) for tag, data in reader.tags().items()}


def _register_broker(r: MessageReader, version: int) -> RegisterBroker:
    broker_id = r.int32()
    if version >= 2:
        r.boolean()  # migrating from ZooKeeper: none in 4.x
    incarnation, epoch = r.uuid(), r.int64()
    r.array(lambda: (r.string(), r.string(), r.uint16(), r.int16(), r.tags()))
    r.array(lambda: (r.string(), r.int16(), r.int16(), r.tags()))
    rack, fenced = r.nullable_string(), r.boolean()
    shutting_down = r.boolean() if version >= 1 else False
    dirs = _uuids(_tags(r).get(0))
    return RegisterBroker(broker_id, incarnation, epoch, rack, fenced, shutting_down, dirs)


def _uuids(reader: MessageReader | None) -> tuple[UUID, ...]:
    return () if reader is None else reader.array(reader.uuid)


def _change_broker(r: MessageReader, _version: int) -> ChangeBroker:
    broker_id, epoch, tags = r.int32(), r.int64(), _tags(r)
    fenced = tags[0].int8() if 0 in tags else 0
    shutting_down = tags[1].int8() if 1 in tags else 0
    return ChangeBroker(
        broker_id,
        epoch,
        None if fenced == 0 else fenced > 0,
        True if shutting_down else None,
        _uuids(tags.get(2)),
    )


def _fence(fenced: bool) -> Callable[[MessageReader, int], ChangeBroker]:
    return lambda r, _version: ChangeBroker(r.int32(), r.int64(), fenced, None, ())


def _partition(r: MessageReader, version: int) -> Partition:
    number, topic_id = r.int32(), r.uuid()
    replicas, isr, removing, adding = (r.array(r.int32) for _ in range(4))
    leader, leader_epoch, partition_epoch = r.int32(), r.int32(), r.int32()
    if version >= 1:
        r.array(r.uuid)  # which directory each replica is in: looked up on its disk
    tags = _tags(r)
    recovering = 0 in tags and tags[0].int8() != 0
    elr = _ids(tags.get(1)) or ()
    return Partition(
        topic_id,
        number,
        replicas,
        isr,
        removing,
        adding,
        leader,
        recovering,
        leader_epoch,
        partition_epoch,
        elr,
    )


def _ids(reader: MessageReader | None) -> tuple[int, ...] | None:
    return None if reader is None else reader.array(reader.int32)


def _change_partition(r: MessageReader, _version: int) -> ChangePartition:
    number, topic_id, tags = r.int32(), r.uuid(), _tags(r)
    return ChangePartition(
        topic_id,
        number,
        isr=_ids(tags.get(0)),
        leader=tags[1].int32() if 1 in tags else None,
        replicas=_ids(tags.get(2)),
        removing=_ids(tags.get(3)),
        adding=_ids(tags.get(4)),
        recovering=tags[5].int8() != 0 if 5 in tags else None,
        elr=_ids(tags.get(6)),
    )


def _token(r: MessageReader, _version: int) -> Token:
    r.string(), r.string(), r.array(r.string), r.raw(24)
    return Token(r.string(), False)


def _quota(r: MessageReader, _version: int) -> ClientQuotaRecord:
    entity = r.array(lambda: (r.string(), r.nullable_string(), r.tags())[:2])
    key, value, removed = r.string(), r.float64(), r.boolean()
    return ClientQuotaRecord(tuple(sorted(entity)), key, None if removed else value)


def _acl(r: MessageReader, _version: int) -> AclRecord:
    acl_id, resource_type, name = r.uuid(), AclResourceType(r.int8()), r.string()
    pattern, principal, host = PatternType(r.int8()), r.string(), r.string()
    operation, permission = AclOperation(r.int8()), AclPermission(r.int8())
    binding = AclBinding(resource_type, name, pattern, principal, host, operation, permission)
    return AclRecord(acl_id, binding)


def _credential(r: MessageReader, _version: int) -> ScramCredentialRecord:
    user, mechanism = r.string(), ScramMechanism(r.int8())
    credential = ScramCredential(r.blob(), r.blob(), r.blob(), r.int32())
    return ScramCredentialRecord(user, mechanism, credential)


def _transaction(what: str) -> Callable[[MessageReader, int], Transaction]:
    return lambda _reader, _version: Transaction(what)


def _nothing(_reader: MessageReader, _version: int) -> None:
    return None


_READERS: Final[dict[int, tuple[int, Callable[[MessageReader, int], Any]]]] = {
    0: (4, _register_broker),
    1: (0, lambda r, _: UnregisterBroker(r.int32())),
    2: (0, lambda r, _: Topic(r.string(), r.uuid())),
    3: (2, _partition),
    4: (0, lambda r, _: Config(r.int8(), r.string(), r.string(), r.nullable_string())),
    5: (2, _change_partition),
    7: (0, _fence(True)),
    8: (0, _fence(False)),
    9: (0, lambda r, _: RemoveTopic(r.uuid())),
    10: (0, _token),
    11: (0, _credential),
    12: (0, lambda r, _: Feature(r.string(), r.int16())),
    14: (0, _quota),
    15: (0, lambda r, _: ProducerIds((r.int32(), r.int64(), r.int64())[2])),
    17: (3, _change_broker),
    18: (0, _acl),
    19: (0, lambda r, _: RemoveAclRecord(r.uuid())),
    20: (0, _nothing),  # NoOp
    21: (0, _nothing),  # ZkMigration
    22: (0, lambda r, _: RemoveScramCredentialRecord(r.string(), ScramMechanism(r.int8()))),
    23: (0, _transaction("begin")),
    24: (0, _transaction("end")),
    25: (0, _transaction("abort")),
    26: (0, lambda r, _: Token(r.string(), True)),
    27: (0, _nothing),  # RegisterController
    28: (0, lambda r, _: ClearElr(r.string())),
}
"""Api key -> newest version of Apache Kafka 4.3, how the message is read."""


def decode(value: bytes) -> KafkaRecord | None:
    """The record of a value; None for one that says nothing that is needed.

    Raises UnsupportedVersion for what 4.3 does not write, CorruptMessage.
    """
    reader = _reader(value)
    frame, key, version = reader.uvarint(), reader.uvarint(), reader.uvarint()
    newest, read = _READERS.get(key, (-1, _nothing))
    if frame != FRAME_VERSION or version > newest:
        raise UnsupportedVersion(
            f"a metadata record of type {key}, version {version}, which Apache Kafka 4.3 does not "
            "write: only data directories of 4.3 and older 4.x are adopted"
        )
    try:
        record: KafkaRecord | None = read(reader, version)
    except ValueError as error:  # a number without a name
        raise UnsupportedVersion(f"a metadata record of type {key}: {error}") from None
    return record


def decode_voters(value: bytes) -> tuple[int, ...]:
    """The ids in a VotersRecord (a control record, without frame)."""
    reader = _reader(value)
    reader.int16()
    voters = reader.array(lambda: _voter(reader))
    return tuple(sorted(voters))


def _voter(r: MessageReader) -> int:
    node_id = r.int32()
    r.uuid()
    r.array(lambda: (r.string(), r.string(), r.uint16(), r.tags()))
    r.int16(), r.int16(), r.tags()
    r.tags()
    return node_id
