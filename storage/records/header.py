"""Header of a record batch, version 2: 61 bytes, big-endian.

======  =====  ======================  ========================================================
byte    size   field                   meaning
======  =====  ======================  ========================================================
0       8      baseOffset              offset of the first record; set by the leader
8       4      batchLength             bytes after this field (size of the batch - 12)
12      4      partitionLeaderEpoch    set by the leader
16      1      magic                   2
17      4      crc                     CRC-32C of everything from byte 21 to the end
21      2      attributes              bits 0-2 codec, 3 timestamp type, 4 transactional, 5 control,
                                       6 delete horizon set (KIP-534)
23      4      lastOffsetDelta         last offset - baseOffset; survives compaction
27      8      baseTimestamp           of the first record, or the delete horizon
35      8      maxTimestamp            largest of the records, or the append time
43      8      producerId              -1: none
51      2      producerEpoch           -1: none
53      4      baseSequence            -1: none
57      4      recordCount             0 after compaction emptied the batch
======  =====  ======================  ========================================================

``baseOffset`` and ``partitionLeaderEpoch`` lie outside the CRC, so a leader patches them in place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kept.storage.errors import CorruptMessage
from kept.storage.types import MAX_INT32, NO_SEQUENCE, NO_TIMESTAMP, Codec, TimestampType

Buffer = bytes | bytearray | memoryview
"""What every function here reads: contiguous bytes, not copied."""

ReplicaBatch = tuple[int, int, int, int, int, int, int]
"""What a follower notes of a batch: (position, size in bytes, base offset, last offset, max
timestamp, leader epoch, producer id)."""

HEADER_BYTES: Final = 61
LENGTH_PREFIX_BYTES: Final = 12
"""Bytes up to and including batchLength, which counts what follows it."""
MIN_RECORD_BYTES: Final = 7
"""Smallest record: length, attributes, two deltas, key and value lengths, header count."""
MAGIC: Final = 2
MAGIC_POSITION: Final = 16
CRC_START: Final = 21
"""First byte that the CRC covers."""

CODEC_MASK: Final = 0x07
TIMESTAMP_TYPE_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH: Final = struct.Struct(">i")
_PREFIX: Final = struct.Struct(">qii")


def size_at(chunk: bytes, at: int) -> int:
    """Size of the batch that begins there, in bytes; 0 when too little of it is there to tell."""
    if len(chunk) - at < LENGTH_PREFIX_BYTES:
        return 0
    return LENGTH_PREFIX_BYTES + int(_LENGTH.unpack_from(chunk, at + 8)[0])


def holds_batch(chunk: bytes, at: int) -> bool:
    """Whether a whole batch may be there, by its length alone."""
    size = size_at(chunk, at)
    return size >= HEADER_BYTES and len(chunk) - at >= size


@dataclass(slots=True)
class BatchHeader:
    """The fields of one batch header as they are on disk; see the module for their meaning."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole batch."""
        return self.batch_length + LENGTH_PREFIX_BYTES

    @property
    def last_offset(self) -> int:
        """Offset of the last record that the batch had when it was produced."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> Codec:
        """Compression of the records. Raises CorruptMessage for one that does not exist."""
        return codec_of(self.attributes)

    @property
    def timestamp_type(self) -> TimestampType:
        """Who set the timestamps."""
        return TimestampType(self.attributes >> 3 & 1)

    @property
    def is_transactional(self) -> bool:
        """The batch is part of a transaction."""
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """The batch holds a transaction marker, not data."""
        return bool(self.attributes & CONTROL_BIT)

    @property
    def has_delete_horizon(self) -> bool:
        """``base_timestamp`` holds the delete horizon."""
        return bool(self.attributes & DELETE_HORIZON_BIT)

    @property
    def delete_horizon_ms(self) -> int:
        """When tombstones of this batch may go, or -1 while unset."""
        return self.base_timestamp if self.has_delete_horizon else NO_TIMESTAMP

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record; wraps from 2^31 - 1 to 0. -1 without a producer."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & MAX_INT32


def codec_of(attributes: int) -> Codec:
    """Codec in a batch's attributes. Raises CorruptMessage for bits 5-7, which name none."""
    bits = attributes & CODEC_MASK
    if bits > Codec.ZSTD:
        raise CorruptMessage(f"attributes name compression type {bits}, which does not exist")
    return Codec(bits)


def read_header(buf: Buffer, position: int = 0) -> BatchHeader:
    """The header at ``position``. The records need not be there.

    Raises CorruptMessage when fewer than 61 bytes are left, the magic is not 2, or a length or
    count is impossible.
    """
    if position < 0 or len(buf) - position < HEADER_BYTES:
        raise CorruptMessage(
            f"{max(len(buf) - position, 0)} bytes are too few for a batch header of {HEADER_BYTES}"
        )
    header = BatchHeader(*HEADER.unpack_from(buf, position))
    if header.magic != MAGIC:
        raise CorruptMessage(f"magic is {header.magic}, not {MAGIC}")
    if header.batch_length < HEADER_BYTES - LENGTH_PREFIX_BYTES:
        raise CorruptMessage(f"batch length {header.batch_length} is less than a header's")
    if header.record_count < 0 or header.last_offset_delta < 0:
        raise CorruptMessage(
            f"negative record count {header.record_count} or "
            f"last offset delta {header.last_offset_delta}"
        )
    return header


def headers(
    buf: Buffer, position: int = 0, end: int | None = None
) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each whole batch in ``buf[position:end]``. Raises CorruptMessage."""
    if end is None:
        end = len(buf)
    while end - position >= HEADER_BYTES:
        header = read_header(buf, position)
        after = position + header.size_bytes
        if after > end:
            return
        yield position, header
        position = after


def patch(buf: bytearray | memoryview, position: int, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and leader epoch into the batch at ``position``, outside its CRC."""
    (length,) = _LENGTH.unpack_from(buf, position + 8)
    _PREFIX.pack_into(buf, position, base_offset, length, leader_epoch)
