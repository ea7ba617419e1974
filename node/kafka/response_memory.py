"""What one response holds while it is made in slices, drawn on a budget of its own.

A response of many items is made in slices between others, so thousands may be under way at a time,
and a list of everything is large whatever its request was. What its request and its values hold is
estimated, what is encoded is counted. Whoever finds the budget used up waits; one of those that
hold a part of it may pass the limit at a time, until it is made, so nobody waits for ever.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final

from kept.node.runtime.memory_budget import MemoryBudget

ITEM_BYTES: Final = 512
"""About what one item of a response holds before it is encoded: a partition, a group, a setting."""
DRAW_BYTES: Final = 64 * 1024
"""What is drawn at a time, at least."""


class ResponseMemory:
    """Of one response; ``held_bytes`` are what its decoded request holds. Nothing is drawn before
    it is sliced, and nothing at all without a ``budget``: nodes must not wait for clients.
    """

    __slots__ = ("_budget", "_drawn_bytes", "_known_bytes", "_output")

    def __init__(self, budget: MemoryBudget | None, held_bytes: int = 0) -> None:
        self._budget = budget
        self._drawn_bytes = 0
        self._known_bytes = held_bytes
        self._output: io.BytesIO | None = None

    def drawn(self, output: io.BytesIO | None = None) -> ResponseMemory:
        """This, from now on drawn for what is encoded into ``output``, where one is given."""
        self._output = output
        return self

    def draw(self, resume: Callable[[], None]) -> bool:
        """Draw for one more item; see :class:`~kept.node.runtime.time_slices.StepMemory`."""
        budget = self._budget
        if budget is None:
            return True
        item = ITEM_BYTES if self._output is None else 0
        encoded = 0 if self._output is None else self._output.tell()
        more = self._known_bytes + item + encoded - self._drawn_bytes
        if more > 0:
            more = max(more, DRAW_BYTES)
            if not budget.acquire(more, self if self._drawn_bytes else None):
                budget.wait(resume)
                return False
            self._drawn_bytes += more
        self._known_bytes += item
        return True

    def forget(self, resume: Callable[[], None]) -> None:
        """Nobody waits for ``resume`` any more."""
        if self._budget is not None:
            self._budget.forget(resume)

    def give_back(self) -> None:
        """It is made, or given up."""
        drawn, self._drawn_bytes = self._drawn_bytes, 0
        self._output = None
        if self._budget is not None and drawn:
            self._budget.release(drawn, self)
