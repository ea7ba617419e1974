"""Long work on the loop in short time slices, so that nothing else waits long for it.

Coroutines pause with :func:`checkpoint` or :class:`Pace`. Handlers, decisions and encoders may be
generators that yield after each item (``kept.steps``): :class:`TimeSlices` runs the first steps at
once and the rest in slices. All such tasks together get one slice per turn of the loop. What a task
holds meanwhile may be drawn on a budget (:class:`StepMemory`): it waits while that is used up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

from kept.node.runtime.logging import bugs
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
IN_PLACE_S: Final = 0.005
"""Unless they take longer than this: a few may be large."""
TURN_S: Final = 0.001
"""How much of one turn of the loop goes to all sliced works together."""
LOAD_TURN_S: Final = 0.004
"""And to the logs that coordinators read, whose clients wait for them."""


class StepMemory(Protocol):
    """What sliced work holds, as it grows."""

    def draw(self, resume: Callable[[], None]) -> bool:
        """Draw for one more item. False: nothing is left, and ``resume`` is called when something
        may be.
        """

    def forget(self, resume: Callable[[], None]) -> None:
        """Nobody waits for ``resume`` any more."""


class SlicedTask(asyncio.Future[T]):
    """The result of work that goes on in slices. To cancel it ends the work where it is."""

    def __init__(
        self, steps: Steps[T], loop: asyncio.AbstractEventLoop, memory: StepMemory | None = None
    ) -> None:
        super().__init__(loop=loop)
        self._steps = steps
        self._memory = memory
        self.resume: Callable[[], None] | None = None
        """Set while it waits for memory."""

    def has_memory(self, resume: Callable[[], None]) -> bool:
        """Whether it may go on; if not, ``resume`` is called later."""
        if self._memory is None or self.done() or self._memory.draw(resume):
            return True
        self.resume = resume
        return False

    def advance(self) -> None:
        """Do one item, or end."""
        if self.done():
            self._steps.close()
            return
        try:
            next(self._steps)
        except StopIteration as end:
            if not self.done():  # its last item may have had it cancelled
                self.set_result(end.value)
        except asyncio.CancelledError:  # of a future whose result it took
            super().cancel()
        except Exception as error:  # noqa: BLE001 - whoever awaits the result handles it
            if self.done():
                bugs.report("cancelled work failed", error)
            else:
                self.set_exception(error)

    def failure(self) -> BaseException | None:
        """Why it is done without a result; None: it has one. It may be cancelled by itself: by a
        future whose result it took.
        """
        return asyncio.CancelledError() if self.cancelled() else self.exception()

    def cancel(self, msg: Any | None = None) -> bool:
        """End the work: at its next turn, or at once if it waits for memory."""
        cancelled = super().cancel(msg)
        if self.resume is not None and self._memory is not None:
            self._memory.forget(self.resume)
            self.resume = None
            self._steps.close()
        return cancelled


class TimeSlices:
    """The sliced works of one loop, in turns of ``turn_s`` for all of them: one goes on until its
    turn is over, or it ends or waits, then the next one does. The first ``in_place`` items are done
    at once. ``clock`` gives seconds, as ``perf_counter``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] | None = None,
        in_place: int = IN_PLACE_STEPS,
        turn_s: float = TURN_S,
    ) -> None:
        self._loop = loop
        self._clock = clock or perf_counter
        self._in_place = in_place
        self._turn_s = turn_s
        self._works: deque[SlicedTask[Any]] = deque()
        self._is_scheduled = False

    def run(
        self, steps: Steps[T], new_memory: Callable[[], StepMemory] | None = None
    ) -> T | SlicedTask[T]:
        """The result of ``steps``, if a few items are all; else a future of it. Raises what the
        first items raise, but no CancelledError: the future is cancelled then, as where later ones
        do. ``new_memory`` is called when it becomes a future, which then draws.
        """
        clock = self._clock
        until = clock() + IN_PLACE_S
        try:
            for _ in range(self._in_place):
                next(steps)
                if clock() >= until:
                    break
        except StopIteration as end:
            result: T = end.value
            return result
        except asyncio.CancelledError:
            cancelled = SlicedTask(steps, self._loop)
            cancelled.cancel()
            return cancelled
        work = SlicedTask(steps, self._loop, None if new_memory is None else new_memory())
        self._enqueue(work)
        return work

    async def finish(self, steps: Steps[T]) -> T:
        """The result of ``steps``, awaited where it takes slices."""
        result = self.run(steps)
        return await result if isinstance(result, SlicedTask) else result

    def _enqueue(self, work: SlicedTask[Any]) -> None:
        self._works.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._works and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _resume(self, work: SlicedTask[Any]) -> None:
        if work.resume is not None:
            work.resume = None
            self._enqueue(work)

    def _turn(self) -> None:
        self._is_scheduled = False
        until = self._clock() + self._turn_s
        while self._works and self._advance(self._works.popleft(), until):
            pass
        self._schedule()

    def _advance(self, work: SlicedTask[Any], until: float) -> bool:
        """Go on with ``work``; whether there is time for another one."""
        clock, resume = self._clock, partial(self._resume, work)
        while work.has_memory(resume):
            work.advance()
            is_over = clock() >= until
            if work.done():
                return not is_over
            if is_over:
                self._works.append(work)
                return False
        return True
