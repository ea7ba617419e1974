"""Copying a segment's batches with the records that survive (rules 6 to 8), by ``_filter.pyx``.

A :class:`SegmentFilter` is given, per source segment, the offsets that survive, the batches that
stay although they are empty, and the delete horizons of batches. It decides nothing: the same input
gives the same batches on every replica.

- All records survive and the horizon stays: the batch is copied as it is.
- Otherwise base offset, last offset, leader epoch, producer fields, codec, timestamp type and the
  transactional and control bits stay; the record count shrinks; maxTimestamp is that of what stays
  (LogAppendTime keeps it).
- A new horizon goes where baseTimestamp was, with bit 0x40; the timestamp deltas are encoded again.
- A batch kept empty is a bare header: codec none, baseTimestamp -1, its old maxTimestamp, no
  horizon.

The filter also makes the offset and time index of its output and collects *canonical headers*: the
header that a batch would have uncompressed, with the CRC over its inflated records; of a batch kept
empty, with maxTimestamp -1. Their hash is a digest that does not depend on the version of a codec,
nor on how many passes took the records of a batch: a replica that skipped some has the maxTimestamp
of more of them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kept import kernels
from kept.storage.records.checksum import crc32c
from kept.storage.records.codecs import compress, decompress
from kept.storage.records.header import (
    CODEC_MASK,
    CRC_START,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    Buffer,
)

if TYPE_CHECKING:
    from kept.storage.types import Codec

__all__ = [
    "COMPRESSED",
    "DAMAGED",
    "DONE",
    "FULL",
    "SegmentFilter",
    "canonical_header",
    "compressed_batch",
]

DONE: Final = 0
COMPRESSED: Final = 1
FULL: Final = 2
DAMAGED: Final = 3
"""Why :meth:`SegmentFilter.feed` stopped: out of whole batches; at a compressed batch with
survivors, which the caller inflates; the output has reached a limit; the batch is not one."""


def canonical_header(header: Buffer, area: Buffer) -> bytes:
    """The header as if its records were not compressed: what a digest is made of."""
    head = bytearray(header[:HEADER_BYTES])
    struct.pack_into(">i", head, 8, HEADER_BYTES - LENGTH_PREFIX_BYTES + len(area))
    head[22] &= ~CODEC_MASK & 0xFF
    head[17:21] = crc32c(area, crc32c(head[CRC_START:])).to_bytes(4, "big")
    return bytes(head)


def compressed_batch(
    segment_filter: SegmentFilter, batch: Buffer, codec: Codec, inflate_limit: int
) -> bool:
    """Filter the compressed batch at which ``feed`` stopped and append it; False when full.

    Raises InvalidRecord when it does not inflate; ``segment_filter.fault`` says what else is wrong.
    """
    view = memoryview(batch)
    area: Buffer = decompress(codec, view[HEADER_BYTES:], inflate_limit)
    mark = segment_filter.mark()
    changed, head, new_area = segment_filter.rewrite(view[:HEADER_BYTES], area)
    if segment_filter.fault is not None:
        return True
    if changed:
        stored = compress(codec, new_area)
        made = bytearray(head + stored)
        struct.pack_into(">i", made, 8, len(made) - LENGTH_PREFIX_BYTES)
        made[17:21] = crc32c(memoryview(made)[CRC_START:]).to_bytes(4, "big")
        view, area = memoryview(made), new_area
    if segment_filter.add(view, canonical_header(view, area)):
        return True
    segment_filter.back(*mark)
    return False


if TYPE_CHECKING:
    from kept.storage.records._filter import SegmentFilter
else:
    SegmentFilter = kernels.load("storage.records._filter", "SegmentFilter")
