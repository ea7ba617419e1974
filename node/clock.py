"""The clock of everything that is measured: sessions, lag of replicas, back-off, lives.

It never jumps, and means nothing outside of this process; timestamps in logs are the wall clock's
(:meth:`kept.node.server.Node.now_ms`).
"""

from __future__ import annotations

import time


def monotonic_ms() -> int:
    """Now, in ms since some moment before this process began."""
    return int(time.monotonic() * 1000)
