"""What a thread frees goes back to the system at once, where the C library can be asked for it.

glibc keeps large blocks that were freed, up to 32 MiB each, in an arena of each thread: threads
that inflate batches held 1.4 to 1.8 times what was drawn for them, and most of it long after. With
a fixed threshold such blocks are mapped, and unmapped when they are freed: 0.7 to 1.0 times, and
nothing after. A new one costs page faults (2 ms for 16 MiB, which take 50 ms to inflate). Elsewhere
nothing happens: musl maps large blocks anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 2 << 20
_M_MMAP_THRESHOLD: Final = -3
"""Of glibc's ``malloc.h``."""


@cache
def return_large_blocks() -> None:
    """Have blocks of :data:`MMAP_THRESHOLD_BYTES` and more unmapped when they are freed; once."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
