"""The lag of consumer groups: one definition for the node, its metrics and the command line.

The lag of a group in a partition is the number of offsets from its committed offset to the
partition's high watermark. It is unknown where the group has committed nothing, or where the
partition has no leader that says its high watermark. A group's lag is the sum over the partitions
where it is known; how many others there are is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class GroupLag(NamedTuple):
    """``lag`` is None where that of no partition is known."""

    lag: int | None
    partitions_unknown: int


def partition_lag(committed_offset: int | None, high_watermark: int | None) -> int | None:
    """Offsets from the committed one to the high watermark, at least 0; None: unknown."""
    if committed_offset is None or high_watermark is None:
        return None
    return max(0, high_watermark - committed_offset)


def group_lag(lags: Iterable[int | None]) -> GroupLag:
    """The lag of a group, from those of its partitions."""
    known, unknown, total = 0, 0, 0
    for lag in lags:
        if lag is None:
            unknown += 1
        else:
            known, total = known + 1, total + lag
    return GroupLag(total if known else None, unknown)
