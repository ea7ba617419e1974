"""Which partition a key belongs to, as Apache Kafka's Java client decides it.

Every part of kept that chooses a partition uses this: one key in two partitions ruins a compacted
topic. librdkafka's default differs (CRC32; ``partitioner=murmur2_random`` agrees with this one).

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner.partitionForKey``.
"""

from __future__ import annotations

import struct
from typing import Final

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Java's murmur2 as an unsigned 32-bit number."""
    length = len(data)
    whole = length & ~3
    h = (_SEED ^ length) & _MASK
    for (k,) in struct.iter_unpack("<I", memoryview(data)[:whole]):
        k = (k * _M) & _MASK  # noqa: PLW2901
        k ^= k >> 24  # noqa: PLW2901
        h = ((h * _M) & _MASK) ^ ((k * _M) & _MASK)
    rest = length - whole
    if rest >= 3:
        h ^= data[whole + 2] << 16
    if rest >= 2:
        h ^= data[whole + 1] << 8
    if rest >= 1:
        h = ((h ^ data[whole]) * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


def partition_for_key(key: bytes, partitions: int) -> int:
    """The partition of a key, of 0..``partitions``. An empty key is a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partition_for(key: bytes | None, partitions: int, sticky: int) -> int:
    """The partition of a record. Records without a key share ``sticky``, any number that the caller
    changes from batch to batch, so that they fill batches and spread over the partitions.
    """
    if key is None:
        return sticky % partitions
    return partition_for_key(key, partitions)
