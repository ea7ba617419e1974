"""Which partition of an internal topic keeps a name: the same as with every Kafka broker."""

from __future__ import annotations

from operator import mul
from typing import Final

_BLOCK: Final = 64
_POWERS: Final = [pow(31, _BLOCK - 1 - place, 1 << 32) for place in range(_BLOCK)]
_SHIFT: Final = pow(31, _BLOCK, 1 << 32)


def java_hash(text: str) -> int:
    """Java's ``String.hashCode()``: a signed int32 over the UTF-16 units."""
    value = 0
    units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    whole = len(units) - len(units) % _BLOCK
    for start in range(0, whole, _BLOCK):  # a long name in an eighth of the time
        value = (_SHIFT * value + sum(map(mul, units[start : start + _BLOCK], _POWERS))) % (1 << 32)
    for unit in units[whole:]:
        value = (31 * value + unit) % (1 << 32)
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, partitions: int) -> int:
    """The partition that holds a group or a transactional id.

    ``Utils.abs``: the smallest int32, whose absolute value is no int32, counts as 0.
    """
    value = java_hash(key)
    return (0 if value == -(1 << 31) else abs(value)) % partitions
