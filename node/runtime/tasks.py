"""Tasks with owners: what a part of a node starts ends with that part, and is kept until then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable
from contextlib import suppress
from random import uniform
from typing import Any, Generic, TypeVar

from kept.node.runtime.logging import log
from kept.node.runtime.time_slices import checkpoint

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


async def gather_or_cancel(works: Iterable[Awaitable[T]]) -> list[T]:
    """What each comes to, in order; many are begun in slices of time. When one fails, or the caller
    is cancelled, the others are cancelled and have ended before that is raised.
    """
    tasks: list[asyncio.Future[T]] = []
    try:
        for number, work in enumerate(works):
            tasks.append(asyncio.ensure_future(work))
            await checkpoint(number)
        await asyncio.gather(*(task for task in tasks if not task.done() or task.exception()))
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class TaskOwner:
    """The tasks of one part. Used on the node's loop."""

    __slots__ = ("_loop", "_tasks")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], *, awaited: bool = False) -> asyncio.Task[T]:
        """Run ``work``. What it raises is for whoever awaits the task (``awaited``, also if they
        are gone by then), or it is a bug and logged.
        """
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._answered if awaited else self._ended)
        return task

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.exception("task failed", error)

    async def finish(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs, for ``timeout_s`` at most; what runs still goes on then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs, and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PeriodicTask:
    """Work that is done again and again, ``wait_s()`` seconds after it was done last.

    What it raises is a bug: it is logged as ``failure``, and the next time may succeed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[], Awaitable[None]],
        wait_s: Callable[[], float],
        *,
        failure: str,
    ) -> None:
        self._loop = loop
        self._work = work
        self._wait_s = wait_s
        self._failure = failure
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Do it now, and from now on."""
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Do it no more; what is under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - a bug of ours must not end it
                log.exception(self._failure, error)
            await asyncio.sleep(self._wait_s())


class Batcher(Generic[Key]):
    """Collects keys and sends many at a time, one call after another.

    ``send`` gets the oldest ``max_batch`` keys, each once however often it was added, and returns
    those that are to be sent again after about ``backoff_s``. What it raises is a bug: it is
    logged, and all are sent again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[list[Key]], Awaitable[Collection[Key]]],
        *,
        max_batch: int,
        backoff_s: float,
    ) -> None:
        self._loop = loop
        self._send = send
        self._max_batch = max_batch
        self._backoff_s = backoff_s
        self._waiting: dict[Key, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, key: Key) -> None:
        """Send ``key`` with the next call."""
        self._waiting[key] = None
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    @property
    def idle(self) -> bool:
        """Nothing waits, and no call is under way."""
        return self._task is None

    async def close(self) -> None:
        """Send nothing more; a call under way is cancelled."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._waiting:
                batch = list(self._waiting)[: self._max_batch]
                for key in batch:
                    del self._waiting[key]
                unsent = await self._try(batch)
                if unsent:
                    self._waiting.update(dict.fromkeys(unsent))
                    await asyncio.sleep(self._backoff_s * uniform(0.5, 1.5))
        finally:
            self._task = None

    async def _try(self, batch: list[Key]) -> Collection[Key]:
        try:
            return await self._send(batch)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not end it
            log.exception("sending failed", error)
            return batch
