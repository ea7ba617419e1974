"""Checks of batches in threads: of what is large, or inflates to much.

The header does not say how large a batch is: 8 KiB may inflate to 250 MB. So the loop inflates
:data:`~kept.node.runtime.time_slices.LOOP_BYTES` of a batch, ``LOOP_TOTAL_BYTES`` of a request;
what is told to be larger, or is found to be, goes on in the pool, and so does the rest of its
request.

A thread inflates into what is drawn for it beforehand on the budget, in steps: a batch that
says no size and does not fit is tried again with more, up to ``kept.inflated.max.bytes``. A batch
that waits for its turn holds none of it, so that none waits for another for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.malloc import return_large_blocks
from kept.storage.errors import InflatesBeyondLimit, KeptError
from kept.storage.records import check

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.runtime.memory_budget import BudgetShare
    from kept.node.runtime.runtime import Runtime

FIRST_DRAW_BYTES: Final = 8 * 1024 * 1024
"""What a batch that says no size is first inflated into in a thread."""
DRAW_FACTOR: Final = 8
"""So much more it gets when that was too little."""
COPIES_READ: Final = 2
"""Records that are read are held twice for a moment: inflated, and as they are given out. Who only
checks them holds them once (:mod:`kept.storage.records.codecs`).
"""
COPIES_COMPRESSED: Final = 4
"""Where they are compressed anew, that is held besides, in pieces and joined; it may be as large.
"""

Job = tuple[memoryview, "LocalReplica"]
Done = Callable[[list[Any], "BaseException | None"], None]


@dataclass(frozen=True, slots=True)
class CheckResources:
    """Threads, and the memory that they inflate into."""

    runtime: Runtime
    config: LiveConfig
    inflating: BudgetShare


class BatchChecks:
    """The batches of one request, checked in their order in a thread.

    ``jobs`` are batches and where they go, or why there is nothing to check. ``outcomes`` are
    checked batches, or why they are refused: those of the first jobs may be there already. The
    next batch needs ``needed_bytes``, as far as it is known.
    """

    __slots__ = ("_bound", "_done", "_jobs", "_now_ms", "_resources", "outcomes")

    def __init__(
        self,
        resources: CheckResources,
        jobs: list[Job | KeptError],
        now_ms: int,
        outcomes: list[Any],
        needed_bytes: int = 0,
    ) -> None:
        self._resources = resources
        self._jobs = jobs
        self._now_ms = now_ms
        self._bound = max(FIRST_DRAW_BYTES, needed_bytes)
        self._done: Done | None = None
        self.outcomes = outcomes

    def start(self, done: Done) -> None:
        """Check the rest, then call back on the loop: with all outcomes, or with an error that is a
        bug of ours, or no memory.
        """
        self._done = done
        self._draw()

    def _draw(self) -> None:
        """Wait for room to inflate the next ones into."""
        limit: int = self._resources.config.current.inflated_max_bytes
        self._bound = min(self._bound, limit)
        jobs = self._jobs[len(self.outcomes) :]
        again = any(not isinstance(job, KeptError) and _compresses(job[1]) for job in jobs)
        size = self._bound * (COPIES_COMPRESSED if again else 1)
        self._resources.inflating.draw(size, partial(self._submit, size))

    def _submit(self, drawn_bytes: int) -> None:
        future = self._resources.runtime.in_thread(
            self._check_some, len(self.outcomes), self._bound
        )
        future.add_done_callback(partial(self._checked, drawn_bytes))

    def _check_some(self, start: int, bound: int) -> tuple[list[Any], int]:
        """In a thread: outcomes from ``start`` on, and the bytes that the next one needs; 0: none
        is left.
        """
        return_large_blocks()
        outcomes: list[Any] = []
        for job in self._jobs[start:]:
            if isinstance(job, KeptError):
                outcomes.append(job)
                continue
            batch, hosted = job
            try:
                outcomes.append(check(batch, hosted.rules.within(bound), self._now_ms))
            except InflatesBeyondLimit as error:
                if bound < hosted.rules.max_inflated_bytes:
                    return outcomes, _next_bound(error, bound)
                outcomes.append(error.without_frames())
            except KeptError as error:
                outcomes.append(error.without_frames())
        return outcomes, 0

    def _checked(self, drawn_bytes: int, finished: Any) -> None:
        self._resources.inflating.release(drawn_bytes)
        done = self._done
        assert done is not None
        error = finished.exception()
        if error is not None:
            done(self.outcomes, error)
            return
        outcomes, needed = finished.result()
        self.outcomes += outcomes
        if needed:
            self._bound = needed
            self._draw()
        else:
            done(self.outcomes, None)


async def inflated(
    runtime: Runtime, budget: BudgetShare, read: Callable[..., list[Any]], *, limit: int
) -> list[Any]:
    """What ``read(inflate_limit=...)`` gives in a thread, within what is drawn for it on
    ``budget``.

    Raises what ``read`` does: InflatesBeyondLimit above ``limit`` bytes.
    """
    bound = min(FIRST_DRAW_BYTES, limit)
    while True:
        size = COPIES_READ * bound
        granted = runtime.loop.create_future()
        budget.draw(size, partial(_grant, budget, granted, size))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                budget.release(size)
            raise
        work = runtime.in_thread(partial(_read, read, bound))
        # Who waits may be cancelled; the thread goes on, and has it until it is done.
        work.add_done_callback(partial(_give, budget, size))
        try:
            return list(await asyncio.shield(work))
        except InflatesBeyondLimit as error:
            if bound >= limit:
                raise
            bound = min(limit, _next_bound(error, bound))


def _compresses(hosted: LocalReplica) -> bool:
    """Whether a batch may be compressed anew for a log."""
    return hosted.rules.codec is not None


def _read(read: Callable[..., list[Any]], bound: int) -> list[Any]:
    """In a thread."""
    return_large_blocks()
    return read(inflate_limit=bound)


def _next_bound(error: InflatesBeyondLimit, bound: int) -> int:
    """What to inflate into after ``bound`` bytes were too few."""
    told = error.told_bytes or 0
    return told if told > bound else DRAW_FACTOR * bound


def _grant(budget: BudgetShare, granted: asyncio.Future[None], size: int) -> None:
    if granted.done():  # nobody waits any more
        budget.release(size)
    else:
        granted.set_result(None)


def _give(budget: BudgetShare, size: int, finished: asyncio.Future[Any]) -> None:
    budget.release(size)
    if not finished.cancelled():
        finished.exception()  # whoever waited has it, or is gone
