"""Control batches that end a transaction in one partition: its markers.

One batch of 78 bytes with one record and no codec, flagged transactional and control. Its key is
int16 version 0, int16 type (0 abort, 1 commit); its value int16 version 0, int32 coordinator epoch.
Newer versions are read as far as they are known, as Apache Kafka does.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from kept.storage.records.build import seal
from kept.storage.records.header import (
    CONTROL_BIT,
    MAGIC,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
)
from kept.storage.types import NO_LEADER_EPOCH, NO_SEQUENCE, TimestampType

ABORT: Final = 0
COMMIT: Final = 1
_RECORD: Final = Struct(">5bhhbhib")
"""A whole record: length, attributes, two deltas, the key behind its length, the value, headers."""
_TYPE: Final = slice(2, 4)
_COORDINATOR_EPOCH: Final = slice(2, 6)


class EndTxnMarker(NamedTuple):
    """What a marker says. ``coordinator_epoch``: leader epoch of the coordinator that sent it."""

    is_commit: bool
    coordinator_epoch: int


def build_control_batch(
    marker: EndTxnMarker,
    producer_id: int,
    producer_epoch: int,
    timestamp: int,
    *,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
) -> bytearray:
    """The batch of ``marker`` as a leader writes it; ``timestamp`` in ms."""
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    if timestamp_type is TimestampType.LOG_APPEND_TIME:
        attributes |= TIMESTAMP_TYPE_BIT
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=0,
        partition_leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=0,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=NO_SEQUENCE,
        record_count=1,
    )
    kind = COMMIT if marker.is_commit else ABORT
    # Lengths are zig-zag: 16 bytes of a record, 4 of its key, 6 of its value.
    record = _RECORD.pack(32, 0, 0, 0, 8, 0, kind, 12, 0, marker.coordinator_epoch, 0)
    return seal(header, record)


def read_marker(
    key: bytes | memoryview | None, value: bytes | memoryview | None
) -> EndTxnMarker | None:
    """What a control record says; None for one that ends no transaction."""
    if key is None or len(key) < _TYPE.stop:
        return None
    kind = int.from_bytes(key[_TYPE], "big", signed=True)
    if kind not in (ABORT, COMMIT):
        return None
    epoch = NO_LEADER_EPOCH
    if value is not None and len(value) >= _COORDINATOR_EPOCH.stop:
        epoch = int.from_bytes(value[_COORDINATOR_EPOCH], "big", signed=True)
    return EndTxnMarker(kind == COMMIT, epoch)
