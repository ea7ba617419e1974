"""Work of the node itself on the loop, a step at a time: requests have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter
from typing import Final

SLICE_S: Final = 0.0005
"""How long such work holds the loop before requests have their turn."""
PAUSE_S: Final = 0.002
"""How long they have it at least, whatever work is due."""


def advance(steps: Iterator[None]) -> bool:
    """Run one slice; returns whether all steps are done."""
    end = perf_counter() + SLICE_S
    return all(perf_counter() < end for _ in steps)


async def in_slices(steps: Iterator[None]) -> None:
    """Run all steps, with the loop free between two slices."""
    while not advance(steps):
        await asyncio.sleep(PAUSE_S)
