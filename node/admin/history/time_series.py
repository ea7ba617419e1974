"""Time series of numbers sampled in even intervals: the last so many, a column of an array each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

NO_SAMPLE: Final = "no sample was taken"
"""What the log says of a sample that failed."""


class TimeSeries:
    """Samples by their number, the oldest first; ``first`` is the number of the first.

    ``codes`` are the type codes of the columns (:mod:`array`); what was not sampled in between is
    ``unknown`` in all of them.
    """

    __slots__ = ("_unknown", "columns", "first")

    def __init__(self, number: int, codes: str, unknown: int) -> None:
        self.first = number
        self.columns: list[array[Any]] = [array(code) for code in codes]
        self._unknown = unknown

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def next(self) -> int:
        """The number after the last sample."""
        return self.first + len(self)

    def add(self, number: int, values: Sequence[float], most: int) -> None:
        """A sample, numbered above those before; the oldest go beyond ``most``."""
        missed = number - self.next
        if missed > most:
            self.first, missed = number - most, most
            for column in self.columns:
                del column[:]
        for column, value in zip(self.columns, values, strict=True):
            column.extend([self._unknown] * missed)
            column.append(value)
        excess = len(self) - most
        if excess > 0:
            for column in self.columns:
                del column[:excess]
            self.first += excess

    def items(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """(number, values) of what was sampled."""
        for number, values in enumerate(zip(*self.columns, strict=True), self.first):
            if values[0] != self._unknown:
                yield number, values
