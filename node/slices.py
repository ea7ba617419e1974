"""Long work on the loop in short slices: nobody else waits more than a moment for it."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

ITEMS_PER_SLICE: Final = 16
"""Between two pauses; an item costs a few microseconds to sixty, so a slice stays below 1 ms."""
SLICE_S: Final = 0.0003
"""Where time is looked at: how long a slice takes, and one item more."""


class Pace:
    """Work whose items cost very different things: pauses by the clock."""

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    async def breathe(self) -> None:
        """Let others run, when it is time."""
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S


async def breathe(position: int) -> None:
    """Let others run, once every :data:`ITEMS_PER_SLICE` items."""
    if position % ITEMS_PER_SLICE == ITEMS_PER_SLICE - 1:
        await asyncio.sleep(0)
