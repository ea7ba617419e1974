"""Deadlines of a core: no clock, only numbers that the shell compares with its own."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from kept.steps import FREED_PER_STEP, Steps, clear_in_steps

Timer = TypeVar("Timer")

Key = tuple[str, ...]


class Timers(Generic[Timer]):
    """Timers by key: setting one replaces what the key had.

    A replaced or cancelled timer stays in the heap until its time has come or the heap is rebuilt,
    which happens when it is twice as large as what counts: so it is bounded by the live timers.
    """

    __slots__ = ("_heap", "_live", "_sequence")

    REBUILD_FLOOR = 64

    def __init__(self) -> None:
        self._live: dict[Key, tuple[int, int, Timer]] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._sequence = 0

    def set(self, key: Key, deadline_ms: int, timer: Timer) -> None:
        """Have ``timer`` fire at ``deadline_ms``."""
        self._sequence += 1
        self._live[key] = (deadline_ms, self._sequence, timer)
        heapq.heappush(self._heap, (deadline_ms, self._sequence, key))
        if len(self._heap) > 2 * len(self._live) + self.REBUILD_FLOOR:
            self._heap = [(d, s, k) for k, (d, s, _) in self._live.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Forget what the key had."""
        self._live.pop(key, None)

    def deadline(self, key: Key) -> int | None:
        """When a key's timer fires; None if it has none."""
        live = self._live.get(key)
        return None if live is None else live[0]

    @property
    def next_deadline_ms(self) -> int | None:
        """When the next timer fires; None if there is none."""
        while self._heap:
            deadline, sequence, key = self._heap[0]
            live = self._live.get(key)
            if live is not None and live[1] == sequence:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ms: int) -> Timer | None:
        """The earliest timer whose time has come, taken out; None if there is none."""
        deadline = self.next_deadline_ms
        if deadline is None or deadline > now_ms:
            return None
        _, _, key = heapq.heappop(self._heap)
        return self._live.pop(key)[2]

    def release(self) -> Steps[None]:
        """Forget all."""
        yield from clear_in_steps(self._live)
        while self._heap:
            del self._heap[-FREED_PER_STEP:]
            yield

    def __len__(self) -> int:
        return len(self._live)
