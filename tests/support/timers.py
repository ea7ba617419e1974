"""The clock and the timers of a loop, in a test's hand."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from tests.support.given import Given


class Timers:
    """A loop's clock and timers, which a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._cancelled: set[int] = set()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[..., None], *args: Any) -> Any:
        number = next(self._order)
        heapq.heappush(self._due, (self.now + delay, number, call, args))
        return Given(cancel=lambda: self._cancelled.add(number))

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> Any:
        return self.call_later(when - self.now, call, *args)

    @property
    def waiting(self) -> int:
        """How many timers are set."""
        return len({number for _, number, _, _ in self._due} - self._cancelled)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, number, call, args = heapq.heappop(self._due)
            if number not in self._cancelled:
                call(*args)
        self.now = end
