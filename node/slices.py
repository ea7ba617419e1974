"""Long work on the loop in short slices: nobody else waits more than a moment for it."""

from __future__ import annotations

import asyncio
from typing import Final

ITEMS_PER_SLICE: Final = 64
"""Between two pauses; an item costs a few microseconds to twenty, so a slice stays below 2 ms."""


async def breathe(position: int) -> None:
    """Let others run, once every :data:`ITEMS_PER_SLICE` items."""
    if position % ITEMS_PER_SLICE == ITEMS_PER_SLICE - 1:
        await asyncio.sleep(0)
