"""A process under :class:`tests.sim.loop.SimLoop`: whose code runs, and what ends with it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.sim.connections import SimTransport

PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar(
    "process", default=None
)
"""Whose code runs; None: the test's."""


class Process:
    """A simulated process at an address. ``context`` is what its code runs in."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.clock_s = 0.0
        """What its wall clock is ahead."""
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.on_death: Callable[[Process], None] = _nothing
        self.transports: dict[SimTransport, None] = {}
        self.addresses: dict[tuple[str, int], None] = {}
        """What it has bound."""
        self.kept: list[Any] = []
        """Its tasks and callbacks once it is dead: their ``finally`` blocks run when the history is
        over."""

    def run(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback of it, if it lives."""
        if self.alive:
            callback(*args)
        else:
            self.kept.append((callback, args))

    def die(self) -> None:
        """Nothing of it runs any more. What it gave to its connections before still leaves."""
        if not self.alive:
            return
        self.alive = False
        for transport in self.transports:
            transport.break_off()
        self.on_death(self)


def _nothing(_: Process) -> None:
    pass
