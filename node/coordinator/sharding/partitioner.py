"""Which partition of an internal topic keeps a name: the same as with every Kafka broker."""

from __future__ import annotations

import struct


def java_hash(text: str) -> int:
    """Java's ``String.hashCode()``: a signed int32 over the UTF-16 units."""
    value = 0
    units = text.encode("utf-16-le", "surrogatepass")
    for (unit,) in struct.iter_unpack("<H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, partitions: int) -> int:
    """The partition that holds a group or a transactional id.

    ``Utils.abs``: the smallest int32, whose absolute value is no int32, counts as 0.
    """
    value = java_hash(key)
    return (0 if value == -(1 << 31) else abs(value)) % partitions
