"""Work in steps: a generator that yields after each item, so that whoever drives it may pause."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields after each item, none of which takes longer than a fraction of a slice."""


FREED_PER_STEP: Final = 16


def clear_in_steps(table: dict[Any, Any]) -> Steps[None]:
    """Empty a table: one of half a million items would take a quarter of a second at a stretch."""
    while table:
        for _ in range(min(len(table), FREED_PER_STEP)):
            table.popitem()
        yield


def run_to_end(steps: Steps[T]) -> T:
    """Do all of the work without a pause, for what is small; its result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
