"""How much memory work gives back, and how much of that at a stretch."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from kept.steps import Steps


@contextmanager
def traced() -> Iterator[None]:
    """What is allocated in here is seen by :func:`freed_by_steps`."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def freed_by_steps(steps: Steps[None]) -> tuple[int, int]:
    """(bytes that all steps free, the most that one of them frees)."""
    drops = []
    before, _ = tracemalloc.get_traced_memory()
    for _ in steps:
        after, _ = tracemalloc.get_traced_memory()
        drops.append(before - after)
        before = after
    after, _ = tracemalloc.get_traced_memory()
    drops.append(before - after)
    return sum(drops), max(drops)
