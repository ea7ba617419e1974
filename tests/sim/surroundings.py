"""What a real node finds around itself in a simulated history: clocks, randomness, sockets, a disk.

:func:`simulated` puts the virtual clock and seeded randomness in the place of Python's, also under
the names that modules of kept imported. Nothing but one history may run meanwhile in this process.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from kept.node.runtime.logging import Logger
from kept.node.runtime.runtime import Runtime
from kept.testing.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.sim.connections import SimSocket
from tests.sim.loop import SimLoop
from tests.sim.process import PROCESS, Process

EPOCH_S: Final = 1_700_000_000
"""The wall clock at the beginning of a history."""
CLOCKS: Final = ("time", "monotonic", "perf_counter", "clock_gettime")


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
    """See the module."""
    drawn = random.Random(f"bytes {seed}")
    fakes: dict[str, Callable[..., Any]] = {
        "time": lambda: (
            EPOCH_S + loop.time() + (0.0 if (p := PROCESS.get()) is None else p.clock_s)
        ),
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "clock_gettime": lambda _: loop.time(),
    }
    real = {name: getattr(time, name) for name in CLOCKS}
    before = random.getstate()
    random.seed(seed)

    def write(_: Logger, level: str, event: str, fields: dict[str, Any]) -> None:
        on_line(PROCESS.get(), level, event, fields)

    with ExitStack() as stack:
        stack.callback(random.setstate, before)
        stack.callback(_replace, {id(fakes[name]): (fakes[name], real[name]) for name in CLOCKS})
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(time, name, fake))
        stack.enter_context(mock.patch.object(os, "urandom", drawn.randbytes))
        stack.enter_context(mock.patch.object(Logger, "_write", write))
        _replace({id(real[name]): (real[name], fakes[name]) for name in CLOCKS})
        yield


def _replace(pairs: dict[int, tuple[Any, Any]]) -> None:
    """Replace what modules of kept have under names of their own."""
    for name, module in list(sys.modules.items()):
        if name == "kept" or name.startswith("kept."):
            for attribute, value in list(vars(module).items()):
                found = pairs.get(id(value))
                if found is not None and found[0] is value:
                    setattr(module, attribute, found[1])
