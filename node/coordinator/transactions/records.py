"""The records of ``__transaction_state``, byte for byte those of Apache Kafka.

A key is int16 0 and the transactional id; a value is int16 version (0, or 1: flexible) and the
whole state of the id. A null value is a tombstone. Keys of other types are not ours to read:
:func:`decode_record` returns None, and the cleaner keeps them as they are.

Ours: a value of version 1 carries the last epoch in tagged field 9000, which Kafka skips, so that
a retry of InitProducerId survives a failover (KAFKA-20357). See docs/formats/transaction-state.md.
Source: ``TransactionLogKey.json`` and ``TransactionLogValue.json``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from itertools import groupby
from typing import Final

from msgspec import Struct

from kept.node.runtime.message_reader import MessageReader
from kept.node.runtime.message_writer import MessageWriter
from kept.storage.errors import CorruptMessage
from kept.storage.types import NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition

KEY_VERSION: Final = 0
VALUE_VERSIONS: Final = range(2)
FIRST_FLEXIBLE_VERSION: Final = 1
NO_PRODUCER_EPOCH: Final = -1

_PREVIOUS_PRODUCER_ID_TAG: Final = 0
_NEXT_PRODUCER_ID_TAG: Final = 1
_CLIENT_VERSION_TAG: Final = 2
_LAST_EPOCH_TAG: Final = 9000


class TransactionState(IntEnum):
    """Kafka's names and numbers. Kafka declares Dead (6) and PrepareEpochFence (7), too, and never
    writes them.
    """

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def kafka_name(self) -> str:
        """As ListTransactions spells it: ``PrepareCommit``."""
        return self.name.title().replace("_", "")

    @property
    def is_prepared(self) -> bool:
        """The end is decided, and its markers are being written."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


_STATES: Final = frozenset(map(int, TransactionState))


class TransactionMetadata(Struct, frozen=True, gc=False):
    """All that is kept of a transactional id.

    ``previous_producer_id`` is that before the last transition; ``next_producer_id`` the one that
    takes over when a transaction completes whose epoch was the last; ``last_epoch`` the epoch
    before, from which a retry of InitProducerId is known. ``client_version`` is 2 where the last
    transaction had a producer whose epoch grows with each (KIP-890), else 0. ``start_ms`` and
    ``last_update_ms`` are of the wall clock, ``start_ms`` -1 where none has begun.
    """

    producer_id: int
    epoch: int
    timeout_ms: int
    state: TransactionState
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = NO_TIMESTAMP
    last_update_ms: int = NO_TIMESTAMP
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    last_epoch: int = NO_PRODUCER_EPOCH
    client_version: int = 0


class TransactionRecord(Struct, frozen=True):
    """One record of the log: ``metadata`` None forgets the id. ``version`` is what its value is
    written in: 1 where the cluster's ``transaction.version`` is at least 1, else 0.
    """

    transactional_id: str
    metadata: TransactionMetadata | None
    version: int = FIRST_FLEXIBLE_VERSION

    def encode(self) -> tuple[bytes, bytes | None]:
        """Key and value as bytes."""
        key = MessageWriter(KEY_VERSION)
        key.string(self.transactional_id)
        if self.metadata is None:
            return key.done(), None
        return key.done(), encode_metadata(self.metadata, self.version)


def partitions_by_topic(partitions: Iterable[TopicPartition]) -> list[tuple[str, list[int]]]:
    """(topic, partitions) of some partitions, in order."""
    by_topic = groupby(sorted(partitions), key=lambda p: p.topic)
    return [(topic, [p.partition for p in of_topic]) for topic, of_topic in by_topic]


def encode_metadata(value: TransactionMetadata, version: int) -> bytes:
    """A value of version 0 or 1."""
    out = MessageWriter(version, flexible=version >= FIRST_FLEXIBLE_VERSION)
    out.number(">qhib", value.producer_id, value.epoch, value.timeout_ms, value.state)
    if value.state is TransactionState.EMPTY:
        out.count(None)
    else:
        topics = partitions_by_topic(value.partitions)
        out.count(len(topics))
        for topic, numbers in topics:
            out.string(topic)
            out.count(len(numbers))
            for number in numbers:
                out.number(">i", number)
            out.tags()
    out.number(">qq", value.last_update_ms, value.start_ms)
    tags = (
        (_PREVIOUS_PRODUCER_ID_TAG, ">q", value.previous_producer_id, NO_PRODUCER_ID),
        (_NEXT_PRODUCER_ID_TAG, ">q", value.next_producer_id, NO_PRODUCER_ID),
        (_CLIENT_VERSION_TAG, ">h", value.client_version, 0),
        (_LAST_EPOCH_TAG, ">h", value.last_epoch, NO_PRODUCER_EPOCH),
    )
    out.tags({tag: struct.pack(layout, n) for tag, layout, n, default in tags if n != default})
    return out.done()


def decode_metadata(data: bytes | memoryview) -> TransactionMetadata:
    """A value of any version that exists.

    Raises CorruptMessage, also for a newer version or state: a transaction that is forgotten would
    hold back readers for ever.
    """
    reader = MessageReader(data)
    version = reader.int16()
    if version not in VALUE_VERSIONS:
        raise CorruptMessage(
            f"a transaction of version {version}; this node reads versions up to "
            f"{VALUE_VERSIONS[-1]}"
        )
    reader.flexible = version >= FIRST_FLEXIBLE_VERSION
    producer_id, epoch, timeout_ms = reader.int64(), reader.int16(), reader.int32()
    number = reader.int8()
    if number not in _STATES:
        raise CorruptMessage(
            f"a transaction of status {number}; this node knows statuses 0 to "
            f"{max(TransactionState).value}"
        )
    topics = reader.array(lambda: _decode_topic(reader))
    last_update_ms, start_ms = reader.int64(), reader.int64()
    tags = reader.tags()
    return TransactionMetadata(
        producer_id,
        epoch,
        timeout_ms,
        TransactionState(number),
        frozenset(TopicPartition(topic, n) for topic, numbers in topics for n in numbers),
        start_ms,
        last_update_ms,
        _tag(tags, _PREVIOUS_PRODUCER_ID_TAG, ">q", NO_PRODUCER_ID),
        _tag(tags, _NEXT_PRODUCER_ID_TAG, ">q", NO_PRODUCER_ID),
        _tag(tags, _LAST_EPOCH_TAG, ">h", NO_PRODUCER_EPOCH),
        _tag(tags, _CLIENT_VERSION_TAG, ">h", 0),
    )


def _decode_topic(reader: MessageReader) -> tuple[str, tuple[int, ...]]:
    topic = reader.string(), reader.array(reader.int32, nullable=False)
    reader.tags()
    return topic


def _tag(tags: dict[int, bytes], tag: int, layout: str, default: int) -> int:
    data = tags.get(tag)
    if data is None:
        return default
    if len(data) != struct.calcsize(layout):
        raise CorruptMessage(f"tagged field {tag} of a transaction has {len(data)} bytes")
    return int(struct.unpack(layout, data)[0])


def decode_record(
    key: bytes | memoryview, value: bytes | memoryview | None
) -> TransactionRecord | None:
    """A record of the log, or None for a key of a type that we do not know. Raises CorruptMessage.

    Its ``version`` is that of the value.
    """
    reader = MessageReader(key)
    if reader.int16() != KEY_VERSION:
        return None
    transactional_id = reader.string()
    if value is None:
        return TransactionRecord(transactional_id, None)
    version = MessageReader(value).int16()
    return TransactionRecord(transactional_id, decode_metadata(value), version)
