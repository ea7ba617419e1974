"""Threads for what blocks: fsync, and single calls that must not hold the loop.

Each log directory has a :class:`FlushPool` of ``kept.fsync.threads``; flushes of one log run one
after another, and a request that comes while one runs is served by the next, together with all
others that came meanwhile. A failed fsync is never tried again, since the kernel has
marked the pages clean: the directory goes offline. One that does not return is waited for, as there
is nothing else to do with its thread, and named in the log (:func:`warn_while_it_hangs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime import logging
from kept.storage.errors import MachineError

if TYPE_CHECKING:
    from kept.node.runtime.counters import Counters
    from kept.storage.log.log import Log

CALL_THREADS: Final = 4
"""For checks of large batches, cold reads and the metadata log."""

HANGS_S: Final = 10.0
"""A write or fsync that takes longer is named in the log, and again after twice as long."""

Callback = Callable[[BaseException | None], None]


def warn_while_it_hangs(
    loop: asyncio.AbstractEventLoop, job: asyncio.Future[Any], path: str, counters: Counters
) -> None:
    """Say that a job on the disk of ``path`` does not return, and for how long; and when it did.

    ``counters.hung_writes`` counts it meanwhile.
    """
    timer: asyncio.TimerHandle

    def hangs(seconds: float) -> None:
        nonlocal timer
        logging.log.warning("a disk hangs", path=path, seconds=round(seconds), why=HANGS)
        timer = loop.call_later(seconds, hangs, 2 * seconds)
        if seconds == HANGS_S:
            counters.hung_writes += 1
            job.add_done_callback(hangs_no_more)

    def hangs_no_more(_: asyncio.Future[Any]) -> None:
        counters.hung_writes -= 1
        logging.log.warning("a disk hangs no more", path=path)

    timer = loop.call_later(HANGS_S, hangs, HANGS_S)
    job.add_done_callback(lambda _: timer.cancel())


HANGS: Final = (
    "a write or fsync has not returned: what must be durable first is not acknowledged, and this "
    "node keeps what it leads; if the disk does not come back, kill it, and others lead"
)


class FlushPool:
    """Flushes the logs of one directory. ``on_failure`` is told of the first error."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int,
        name: str,
        on_failure: Callable[[MachineError], None],
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"fsync-{name}")
        self._apart = ThreadPoolExecutor(threads, thread_name_prefix=f"logs-{name}")
        self._on_failure = on_failure
        self._counters = counters
        self._running: dict[Log, list[Callback]] = {}
        """Logs being flushed, with those who wait for that flush."""
        self._next: dict[Log, list[Callback]] = {}
        """Those who wait for the flush after it."""

    @property
    def idle(self) -> bool:
        """Whether no flush runs."""
        return not self._running

    def flush(self, log: Log, callback: Callback | None = None) -> None:
        """Make what ``log`` has written so far durable; call back on the loop."""
        waiting = [callback] if callback is not None else []
        if log in self._running:
            self._next.setdefault(log, []).extend(waiting)
            return
        ticket = log.flush_ticket()
        if ticket is None:
            for call in waiting:
                call(None)
            return
        self._running[log] = waiting
        started = self._loop.time()
        future = self._loop.run_in_executor(self._executor, ticket.run)
        warn_while_it_hangs(self._loop, future, log.directory, self._counters)

        def settled(finished: asyncio.Future[Any]) -> None:
            callbacks = self._running.pop(log)
            error = finished.exception()
            try:
                if error is None:
                    ticket.done()
            except MachineError as vanished:
                error = vanished
            if error is None:
                self._counters.fsync(self._loop.time() - started)
            elif isinstance(error, MachineError):
                self._on_failure(error)
            else:
                self._loop.call_exception_handler(
                    {"message": "flush failed", "exception": error}  # a bug of ours
                )
            for call in callbacks:
                call(error)
            later = self._next.pop(log, None)
            if later is not None and error is None:
                self._flush_again(log, later)
            elif later is not None:
                for call in later:
                    call(error)

        future.add_done_callback(settled)

    def _flush_again(self, log: Log, callbacks: list[Callback]) -> None:
        def all_of_them(error: BaseException | None) -> None:
            for callback in callbacks:
                callback(error)

        self.flush(log, all_of_them)

    async def wait_idle(self, log: Log) -> None:
        """Wait until no flush of this log runs: one would miss its directory, were it renamed."""
        while (waiting := self._running.get(log)) is not None:
            settled: asyncio.Future[None] = self._loop.create_future()
            waiting.append(partial(_settle, settled))
            await settled

    async def drain(self) -> None:
        """Wait until no flush runs."""
        while self._running:
            await asyncio.sleep(0.001)

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Any other blocking call on this directory, in its threads."""
        return self._loop.run_in_executor(self._executor, function, *args)

    def run_apart(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A long call, such as the creation of many logs, in threads of its own: flushes and leader
        epochs do not wait behind it.
        """
        return self._loop.run_in_executor(self._apart, function, *args)

    def close(self) -> None:
        """Wait for what runs; take nothing more."""
        self._executor.shutdown(wait=True)
        self._apart.shutdown(wait=True)


def _settle(settled: asyncio.Future[None], _: BaseException | None) -> None:
    if not settled.done():
        settled.set_result(None)
