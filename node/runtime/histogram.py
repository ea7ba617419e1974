"""Counts of observations by size: what Prometheus calls a histogram."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation, or so many of the same value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them; the last is +Inf."""
        rows, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            rows.append((bound, float(so_far)))
        return rows
