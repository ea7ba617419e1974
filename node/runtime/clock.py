"""The clock of everything that is measured: sessions, lag of replicas, back-off, lives.

It never jumps, and means nothing outside of this process; timestamps in logs are the wall clock's
(:meth:`kept.node.runtime.runtime.Runtime.now_ms`).
"""

from __future__ import annotations

import time
from typing import Final


def monotonic_ms() -> int:
    """Now, in ms since some moment before this process began."""
    return int(time.monotonic() * 1000)


def elapsed_ms() -> int:
    """The same, and it goes on while the machine sleeps, where the system can tell (Linux).

    For who lives and who may serve: a machine that was suspended stood still, and others may have
    been elected meanwhile. What followers and clients are given time for goes by
    :func:`monotonic_ms`, so that nobody lags because of everybody's sleep. (A virtual machine that
    is paused from outside has no clock that says so.)
    """
    return int(_elapsed_s() * 1000)


_BOOT_TIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def _elapsed_s() -> float:
    return time.monotonic() if _BOOT_TIME is None else time.clock_gettime(_BOOT_TIME)


def by_perf_counter(moment_ms: int) -> float:
    """A moment of :func:`elapsed_ms` by ``time.perf_counter``, if the machine does not sleep until
    then."""
    return moment_ms / 1000 - _elapsed_s() + time.perf_counter()
