"""A deterministic asyncio event loop: virtual time, processes, jobs of threads, connections.

Coroutines of the product run on it as they are. One seed is one history: time only moves when
nothing is ready, to the moment of the next timer; how long bytes travel, into which pieces they are
cut and how long a job of a thread takes is drawn from :attr:`SimLoop.random`. The order of what is
ready is asyncio's own (first in, first out), which is a promise that code may rely on.

- A :class:`tests.sim.process.Process` is what dies together: tasks, timers, jobs, sockets and
  connections that were made in its context (:meth:`SimLoop.spawn`). After its death none of its
  code runs.
- ``run_in_executor`` runs the function on the loop's thread, at the moment at which a thread would
  have ended it; an executor works on as many functions at a time as it has threads.
- Connections are those of :mod:`tests.sim.connections`.

There are no descriptors, child processes or signals.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from heapq import heapify, heappush, heapreplace
from random import Random
from typing import Any, Final, TypeVar

from tests.sim.connections import RETRY_S, Network, SimServer, SimSocket, SimTransport
from tests.sim.process import PROCESS, Process
from tests.sim.world import Violation
from tests.support.simulated_disk import SimulatedCrash

T = TypeVar("T")

JOB_S: Final = (0.00005, 0.004)
SLOW_JOB_S: Final = (0.001, 0.06)
"""What one job of a thread takes, and what it takes on a slow disk."""
DEFAULT_THREADS: Final = 4
AWAITS_AT_THE_END: Final = 4
"""So many times a coroutine that is closed may still wait for something."""
SPINNING_TURNS: Final = 20_000
"""So many turns in which no time passes are a loop that does nothing else."""


class _NoSelector:
    """Stands where asyncio expects a selector: to wait means that virtual time passes."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> tuple[()]:
        self._loop.advance(timeout)
        return ()

    def close(self) -> None:
        pass

    def get_map(self) -> dict[int, Any]:
        return {}


class SimFuture(asyncio.Future[Any]):
    """A future whose place in a set follows from the history, not from its address."""

    __slots__ = ("number",)

    def __init__(self, number: int, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[Any]):
    """As :class:`SimFuture`."""

    __slots__ = ("number",)

    def __init__(self, number: int, loop: SimLoop, work: Any, **named: Any) -> None:
        self.number = number
        super().__init__(work, loop=loop, **named)

    def __hash__(self) -> int:
        return self.number


class SimTimer(asyncio.TimerHandle):
    """A timer; of those of one moment the first made comes first, whatever else is due later."""

    __slots__ = ("number",)

    def __init__(self, number: int, when: float, *call: Any) -> None:
        super().__init__(when, *call)
        self.number = number

    def __lt__(self, other: Any) -> bool:
        return bool((self._when, self.number) < (other._when, other.number))


class SimLoop(asyncio.BaseEventLoop):
    """An asyncio event loop in virtual time. ``escaped``: what no code of a process caught, and its
    traceback's owner.
    """

    _ready: Any
    _scheduled: Any
    _selector: Any
    _clock_resolution: float

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.network = Network(self)
        self.job_s = JOB_S
        self.job_times: dict[Callable[..., Any], tuple[float, float]] = {}
        """What jobs of some functions take instead."""
        self.early_share = 0.0
        """So many jobs do what they do as they begin, and say so as they end."""
        self._early = Random(f"early {seed}")
        self.turns = 0
        self.escaped: list[tuple[Process | None, str, BaseException | None]] = []
        self._now = 0.0
        self._turns_now = 0
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-9
        self._busy: defaultdict[Any, list[float]] = defaultdict(list)
        """By executor: when each of its threads is free, a heap."""
        self._made = 0
        """Tasks, futures and timers."""
        self.set_exception_handler(SimLoop._note_escaped)
        self.set_task_factory(SimLoop._make_task)

    # Time.

    def time(self) -> float:
        """Seconds since the history began."""
        return self._now

    def advance(self, timeout: float | None) -> None:
        """Move on to the next timer, if nothing is ready."""
        if self._ready:
            return
        if timeout is None:
            raise RuntimeError(
                "nothing is ready, and nothing is due: the history has come to a halt"
            )
        if self._scheduled and self._scheduled[0].when() > self._now:
            self._now = self._scheduled[0].when()
            self._turns_now = 0

    def _described(self) -> str:
        """What is called again and again."""
        called = [handle._callback for handle in self._ready]
        for handle in self._scheduled:
            if handle.when() <= self._now:
                called += [handle._callback, *handle._args[:1]]
        return ", ".join(sorted({getattr(one, "__qualname__", repr(one)) for one in called}))

    def _run_once(self) -> None:
        self.turns += 1
        self._turns_now += 1
        if self._turns_now > SPINNING_TURNS:
            raise Violation("spins", f"at {self._now} s nothing but: {self._described()}")
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def create_future(self) -> SimFuture:
        """A future."""
        self._made += 1
        return SimFuture(self._made, self)

    def _make_task(self, work: Any, **named: Any) -> SimTask:
        self._made += 1
        return SimTask(self._made, self, work, **named)

    # Processes.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """As asyncio's, but for callbacks of a process that is dead by then."""
        if context is None:
            context = contextvars.copy_context()
        process = context.get(PROCESS)
        if process is not None:
            return super().call_soon(process.run, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, but for callbacks of a process that is dead by then."""
        if context is None:
            context = contextvars.copy_context()
        process = context.get(PROCESS)
        if process is not None:
            callback, args = process.run, (callback, *args)
        self._made += 1
        timer = SimTimer(self._made, when, callback, args, self, context)
        heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def spawn(
        self, process: Process, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> asyncio.Task[T]:
        """Run a coroutine function as code of a process."""
        task: asyncio.Task[T] = process.context.run(
            lambda: self.create_task(work(), context=process.context.copy())
        )
        return task

    def keep_tasks(self, process: Process) -> None:
        """Hold what a dead process was at, so that none of it is torn down in the history."""
        process.kept += asyncio.all_tasks(self)

    def end_tasks(self) -> None:
        """The history is over: end what is not done. It runs its ``finally`` blocks, which reach
        nothing any more and may begin other tasks.
        """
        self.set_exception_handler(lambda *_: None)
        ended: set[Any] = set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while left := asyncio.all_tasks(self) - ended:
                for task in left:
                    for _ in range(AWAITS_AT_THE_END):
                        with suppress(BaseException):
                            task.get_coro().close()
                ended |= left

    def _note_escaped(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        process = PROCESS.get()
        if isinstance(error, SimulatedCrash) or (process is not None and not process.alive):
            return
        self.escaped.append((process, context["message"], error))

    # Threads.

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """The function runs, whole, when a thread of the executor would have ended it, or when it
        would have begun (``early_share``).
        """
        if getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        free = self._busy[executor]
        if not free:
            free += [0.0] * getattr(executor, "_max_workers", DEFAULT_THREADS)
            heapify(free)
        begins = max(free[0], self._now)
        ends = begins + self.random.uniform(*self.job_times.get(func, self.job_s))
        heapreplace(free, ends)
        future: asyncio.Future[Any] = self.create_future()
        if self.early_share and self._early.random() < self.early_share:
            self.call_at(begins, self._do_early, ends, future, func, args)
        else:
            self.call_at(ends, _job, future, func, args)
        return future

    def _do_early(
        self, ends: float, future: asyncio.Future[Any], func: Any, args: tuple[Any, ...]
    ) -> None:
        """A thread has done its work by now, and the loop hears of it when the job ends."""
        done = SimFuture(0, self)
        if not future.cancelled():
            _job(done, func, args)
            self.call_at(ends, _pass_on, done, future)

    # Connections.

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        sock: Any = None,
        **_: Any,
    ) -> SimServer:
        """Accept at a simulated socket that is bound."""
        assert isinstance(sock, SimSocket) and host is None and port is None
        return self.network.listen(sock, protocol_factory, contextvars.copy_context())

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> tuple[SimTransport, Any]:
        """Connect to an address. Raises ConnectionRefusedError."""
        process = PROCESS.get()
        own_host = self.network.client_host if process is None else process.host
        await asyncio.sleep(self.network.delay())
        while self.network.is_cut(own_host, host) or self.network.is_cut(host, own_host):
            await asyncio.sleep(RETRY_S)
        accept = self.network.listeners.get((host, port))
        if accept is None:
            why = os.strerror(errno.ECONNREFUSED)
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{host}:{port}: {why}")
        near, far = SimTransport.pair(self, own_host, (host, port), accept.context)
        protocol = protocol_factory()
        near.attach(protocol)
        self.call_soon(protocol.connection_made, near)
        far.accept_later(accept.factory)
        made = self.create_future()
        self.call_soon(_resolve, made)
        await made
        return near, protocol


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _pass_on(done: asyncio.Future[Any], future: asyncio.Future[Any]) -> None:
    if done.done() and not future.done():
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)


def _job(future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = function(*args)
    except SimulatedCrash:
        return  # the process is dead, and its thread with it
    except BaseException as error:  # noqa: BLE001 - whoever awaits the future handles it
        future.set_exception(error)
    else:
        future.set_result(result)
