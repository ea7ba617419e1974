"""Until when this node may act on what it leads, without looking whether it stood still.

A process that was stopped, or whose machine slept, may have been replaced as a leader meanwhile.
Whoever acts on leadership compares one number with the clock, and calls :meth:`check` when it is
later: the broker's life cycle finds out whether this process stood still, and suspends serving then
(:mod:`kept.node.metadata.broker_lifecycle`). A lone node has no other that could have been elected,
so its lease never ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

NEVER: Final = float("inf")


def _no_check() -> None:
    pass


class ServingLease:
    """``until`` is a moment of ``time.perf_counter``, in seconds."""

    __slots__ = ("check", "until")

    def __init__(self) -> None:
        self.until = NEVER
        self.check: Callable[[], None] = _no_check
        """Call it after ``until``, before leadership is acted on."""
