"""Long work on the loop in short time slices, so that nothing else waits long for it.

Coroutines pause with :func:`checkpoint` or :class:`Pace`. Handlers, decisions and encoders may be
generators that yield after each item (``kept.steps``): :class:`TimeSlices` runs the first steps at
once and the rest in slices. All such tasks together get one slice per turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, TypeVar

from kept.steps import Steps

T = TypeVar("T")

LOOP_BYTES: Final = 1024 * 1024
"""Records of one batch that the loop walks, inflated: up to 3 ms. Kafka's largest batch, by its
defaults, and what librdkafka makes of one are below."""
LOOP_COMPRESSED_BYTES: Final = 256 * 1024
"""The same where the topic has a ``compression.type``: gzip takes 8 ms for it."""
LOOP_TOTAL_BYTES: Final = 4 * LOOP_BYTES
"""And of one request."""
ITEMS_PER_SLICE: Final = 16
"""Between two pauses; an item costs a few microseconds to sixty, so a slice stays below 1 ms."""
SLICE_S: Final = 0.0003
"""Where time is looked at: how long a slice takes, and one item more."""


class Pace:
    """Work whose items cost very different things: pauses by the clock."""

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    async def checkpoint(self) -> None:
        """Let others run, when it is time."""
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S


async def checkpoint(position: int) -> None:
    """Let others run, once every :data:`ITEMS_PER_SLICE` items."""
    if position % ITEMS_PER_SLICE == ITEMS_PER_SLICE - 1:
        await asyncio.sleep(0)


IN_PLACE_STEPS: Final = 32
"""So many items are worked off at once: those of nearly every request."""
TURN_S: Final = 0.001
"""How much of one turn of the loop goes to all sliced works together."""


class SlicedTask(asyncio.Future[T]):
    """The result of work that goes on in slices. To cancel it ends the work where it is."""

    def __init__(self, steps: Steps[T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._steps = steps

    def advance(self) -> None:
        """Do one item, or end."""
        if self.done():
            self._steps.close()
            return
        try:
            next(self._steps)
        except StopIteration as end:
            self.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - whoever awaits the result handles it
            self.set_exception(error)


class TimeSlices:
    """The sliced works of one loop, one turn each in order. ``clock`` gives seconds, as
    ``perf_counter``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] | None = None,
        in_place: int = IN_PLACE_STEPS,
    ) -> None:
        self._loop = loop
        self._clock = clock or perf_counter
        self._in_place = in_place
        self._works: deque[SlicedTask[Any]] = deque()

    def run(self, steps: Steps[T]) -> T | SlicedTask[T]:
        """The result of ``steps``, if a few items are all; else a future of it. Raises what the
        first items raise.
        """
        try:
            for _ in range(self._in_place):
                next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        work = SlicedTask(steps, self._loop)
        self._works.append(work)
        if len(self._works) == 1:
            self._loop.call_soon(self._turn)
        return work

    async def finish(self, steps: Steps[T]) -> T:
        """The result of ``steps``, awaited where it takes slices."""
        result = self.run(steps)
        return await result if isinstance(result, SlicedTask) else result

    def _turn(self) -> None:
        works, clock = self._works, self._clock
        work, until = works.popleft(), clock() + TURN_S
        while True:
            work.advance()
            if work.done() or clock() >= until:
                break
        if not work.done():
            works.append(work)
        if works:
            self._loop.call_soon(self._turn)
