"""One seed, one history: the queue of events, virtual time, the trace, and what a failure is.

Nothing in a history depends on anything but the seed: time is an integer of microseconds that only
moves when the next event is taken, events of one moment are taken in the order they were made, and
every draw comes from :attr:`World.random`.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import Any

from kept.storage.errors import MachineError

MS = 1000
SECOND = 1_000_000
TRACE_LINES = 400_000


class Violation(AssertionError):
    """A rule was broken. ``check`` names the checker, for the planted bugs."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"[{check}] {message}")
        self.check = check


def check_disk_error(error: Exception) -> None:
    """Raise Violation for an error that no simulated disk has: nobody removes files there."""
    if isinstance(error, MachineError) and error.cause.errno == errno.ENOENT:
        raise Violation("vanished", str(error)) from error


class World:
    """The queue of events under one seed."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.extra = Random(f"extra {seed}")
        """For faults that only some histories have: the draws of all others stay as they are."""
        self.now_us = 0
        self.events = 0
        self.tracing = tracing
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """What really happened in this history, by name: ``coverage.py`` says what must."""
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0
        self._digest = blake2b(digest_size=8)

    @property
    def now_ms(self) -> int:
        return self.now_us // MS

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        """Run ``action(*args)`` that much later."""
        self._made += 1
        heappush(self._queue, (self.now_us + max(0, delay_us), self._made, action, args))

    def run(self, until_us: int, *, done: Callable[[], bool] | None = None) -> bool:
        """Take events until that time, or until ``done()``; True when done."""
        queue = self._queue
        while queue and queue[0][0] <= until_us:
            self.now_us, _, action, args = heappop(queue)
            self.events += 1
            action(*args)
            if done is not None and done():
                return True
        self.now_us = max(self.now_us, until_us)
        return False

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return self.random.randint(low, high)

    def note(self, who: object, what: str, *details: object) -> None:
        """A line of the trace; details are formatted only when somebody reads it."""
        if self.tracing and len(self.lines) < TRACE_LINES:
            text = what if not details else f"{what} {' '.join(map(brief, details))}"
            seconds, rest = divmod(self.now_us, SECOND)
            self.lines.append(f"{seconds:4d}.{rest:06d}  {who!s:<8}{text}")

    def mark(self, *what: object) -> None:
        """Feed the history's fingerprint: two runs of a seed must end with the same."""
        self._digest.update(repr((self.now_us, what)).encode())

    @property
    def fingerprint(self) -> str:
        return f"{self._digest.hexdigest()}-{self.events}"


def brief(value: object) -> str:
    """A message, on one line, without what nobody reads."""
    if isinstance(value, str):
        return value
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if isinstance(value, tuple | list) and len(value) > 3:
            return f"<{len(value)}: {brief(value[0])}..{brief(value[-1])}>"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(brief, value))})"
        return repr(value)
    shown = (f"{name}={brief(getattr(value, name))}" for name in fields)
    return f"{type(value).__name__}({' '.join(shown)})"
