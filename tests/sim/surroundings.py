"""What a real node finds around itself in a simulated history: clocks, randomness, sockets, a disk.

What has a state of its own the node takes from its :class:`kept.node.runtime.runtime.Runtime`: the
loop (timers, tasks, threads, connections), the disk, the sockets of listeners; a history gives it a
:class:`SimRuntime`. Clocks, random bytes and limits are functions of Python's own modules, and
:func:`simulated` puts others in their place: those of :data:`REPLACED`, also under the names that
modules of kept imported. Nothing but one history may run meanwhile in this process.

There is nothing else that a simulated process may use: a call of what :data:`UNSIMULATED` lists
ends its history (``unsimulated``), and ``test_surroundings.py`` looks at all uses in the modules
that histories run, called or not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pkgutil import resolve_name
from typing import Any, Final
from unittest import mock

from kept.node.runtime.logging import Logger
from kept.node.runtime.runtime import Runtime
from tests.sim.connections import SimSocket
from tests.sim.loop import SimLoop
from tests.sim.process import PROCESS, Process
from tests.sim.world import Violation
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

EPOCH_S: Final = 1_700_000_000
"""The wall clock at the beginning of a history."""
FILES: Final = 1 << 20
"""The limit of open files, which is another one on each machine."""
REPLACED: Final = {
    "time.time": "the virtual wall clock, as far ahead as the process has it",
    "time.monotonic": "virtual time",
    "time.perf_counter": "virtual time",
    "time.clock_gettime": "virtual time, whichever clock is asked for",
    "os.urandom": "drawn from the seed; so is uuid.uuid4, which is made of it",
    "random._urandom": "drawn from the seed: secrets and random.SystemRandom read it",
    "resource.getrlimit": "the same on every machine",
}
"""Every function of Python's that is another one in a history. Those of module ``random`` itself
are the real ones, of a generator that begins with the seed."""
UNSIMULATED: Final = (
    "time.time_ns",
    "time.monotonic_ns",
    "time.perf_counter_ns",
    "time.clock_gettime_ns",
    "time.process_time",
    "time.process_time_ns",
    "time.thread_time",
    "time.thread_time_ns",
    "time.sleep",
    "builtins.open",
    "os.open",
    "os.statvfs",
    "os.pipe",
    "os.fork",
    "os.posix_spawn",
    "socket.getaddrinfo",
    "socket.socketpair",
    "socket.create_connection",
    "subprocess.Popen.__init__",
    "threading.Thread.start",
    "resource.setrlimit",
)
"""What no code of a simulated process may call: it would reach the machine that the test is on."""


class ProcessDisk(SimulatedDisk):
    """The disk as one process has it: the process dies with the call that crashes, and no later
    call of it changes anything.
    """

    def __init__(self, before: SimulatedDisk, seed: int, process: Process) -> None:
        super().__init__(before.root, seed, before.boots)
        self.broken, self.capacity_bytes = before.broken, before.capacity_bytes
        self._process = process
        self.now_ms = EPOCH_S * 1000

    def _step(self, operation: str, path: str) -> bool:
        if not self._process.alive:
            raise SimulatedCrash(f"{operation} {path} of a dead process")
        crashes = super()._step(operation, path)
        if crashes:
            self._process.die()
        return crashes


class SimRuntime(Runtime):
    """The surroundings of a node that runs in a simulated process."""

    def __init__(self, disk: ProcessDisk, process: Process) -> None:
        super().__init__(disk)
        self._process = process

    def stream_socket(self, family: int) -> Any:
        """See :meth:`Runtime.stream_socket`."""
        assert isinstance(self.loop, SimLoop)
        return SimSocket(self.loop.network, self._process)


Line = Callable[[Process | None, str, str, dict[str, Any]], None]
"""(process, level, event, fields) of a line of the node's log."""


@contextmanager
def simulated(loop: SimLoop, seed: int, on_line: Line) -> Iterator[None]:
    """While it is open, the product finds the simulated surroundings in place of its own."""
    fakes = _fakes(loop, seed)
    real = {name: resolve_name(name.replace(".", ":", 1)) for name in fakes}
    before = random.getstate()
    random.seed(seed)

    def write(_: Logger, level: str, event: str, fields: dict[str, Any]) -> None:
        on_line(PROCESS.get(), level, event, fields)

    with ExitStack() as stack:
        stack.callback(random.setstate, before)
        stack.callback(_replace, {id(fakes[name]): (fakes[name], real[name]) for name in fakes})
        for name, fake in fakes.items():
            _patch(stack, name, fake)
        for name in UNSIMULATED:
            _patch(stack, name, _forbidden(loop, name))
        stack.enter_context(mock.patch.object(Logger, "_write", write))
        _replace({id(real[name]): (real[name], fakes[name]) for name in fakes})
        yield


def _fakes(loop: SimLoop, seed: int) -> dict[str, Callable[..., Any]]:
    """What stands in the place of each of :data:`REPLACED`."""

    def wall_s() -> float:
        process = PROCESS.get()
        return EPOCH_S + loop.time() + (0.0 if process is None else process.clock_s)

    def time_of(_: int) -> float:
        return loop.time()

    def limit(_: int) -> tuple[int, int]:
        return FILES, FILES

    made: dict[str, Callable[..., Any]] = {
        "time.time": wall_s,
        "time.monotonic": loop.time,
        "time.perf_counter": loop.time,
        "time.clock_gettime": time_of,
        "os.urandom": random.Random(f"bytes {seed}").randbytes,
        "random._urandom": random.Random(f"secrets {seed}").randbytes,
        "resource.getrlimit": limit,
    }
    assert made.keys() == REPLACED.keys()
    return made


def _forbidden(loop: SimLoop, name: str) -> Callable[..., Any]:
    """A function that ends the history of the process that calls it; others may."""
    original = resolve_name(name.replace(".", ":", 1))

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        process = PROCESS.get()
        if process is not None and process.alive and not _imports():
            violation = Violation("unsimulated", f"{process.name} calls {name}")
            loop.escaped.append((process, name, violation))
            raise violation
        return original(*args, **kwargs)

    return call


def _imports() -> bool:
    """Whether a module is being imported: its file is read, and is the same in every history."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _patch(stack: ExitStack, name: str, value: Any) -> None:
    module, _, path = name.partition(".")
    holder, _, attribute = path.rpartition(".")
    target = resolve_name(f"{module}:{holder}" if holder else module)
    stack.enter_context(mock.patch.object(target, attribute, value))


def _replace(pairs: dict[int, tuple[Any, Any]]) -> None:
    """Replace what modules of kept have under names of their own."""
    for name, module in list(sys.modules.items()):
        if name == "kept" or name.startswith("kept."):
            for attribute, value in list(vars(module).items()):
                found = pairs.get(id(value))
                if found is not None and found[0] is value:
                    setattr(module, attribute, found[1])
