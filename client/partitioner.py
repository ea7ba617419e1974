"""Which partition a key belongs to, as Apache Kafka's Java client decides it.

Every part of kept that chooses a partition uses this: one key in two partitions ruins a compacted
topic. librdkafka's default differs (CRC32; ``partitioner=murmur2_random`` agrees with this one).

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner.partitionForKey``.
"""

from __future__ import annotations

from kept.storage.records.batch_builder import murmur2

__all__ = ["murmur2", "partition_for", "partition_for_key"]


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
