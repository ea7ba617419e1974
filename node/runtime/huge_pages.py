"""The heap in huge pages, where Linux makes them when it is asked (``MADV_COLLAPSE``, 6.1).

A request to a quiet node finds the processor's caches cold. Much of what it costs then is to look
up where a page of the heap is, in a virtual machine in two tables for every step of one; the 512
pages of a huge one are looked up at once. Elsewhere nothing happens, nor where the operator of the
machine wants no huge pages.
"""

from __future__ import annotations

import re
from typing import Final

HUGE_BYTES: Final = 2 << 20
FULL: Final = 0.75
"""Huge pages are made of mappings of which at least so much is in memory: not of a thread's stack,
nor of what else was reserved and is hardly used."""
ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/enabled"
_MADV_COLLAPSE: Final = 25
"""Of Linux' ``mman.h``."""
_MAPPINGS: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?\n"
    r"Size: .*\nKernelPageSize: .*\nMMUPageSize: .*\nRss: +(\d+) kB$",
    re.MULTILINE,
)
"""Of ``smaps``: from where, to where, how much is in memory."""


def collapse_heap() -> int:
    """Move what is in the heap into huge pages, and return how many there are. That takes some 3 ms
    for each, in any thread. Who meets a page that moves waits for it: 6 ms at most were seen.
    """
    try:
        import ctypes

        madvise = ctypes.CDLL(None).madvise
    except (ImportError, OSError, AttributeError):  # a Python built without it, or no such call
        return 0
    if _are_forbidden():
        return 0
    count = 0
    for start, end, resident_bytes in _mappings():
        if resident_bytes < FULL * (end - start):
            continue
        for at in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            failed = madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), _MADV_COLLAPSE)
            count += not failed
    return count


def _are_forbidden() -> bool:
    """Whether this machine is to have none: ``MADV_COLLAPSE`` does not ask."""
    try:
        with open(ENABLED, encoding="ascii") as file:
            return "[never]" in file.read()
    except OSError:
        return True


def _mappings() -> list[tuple[int, int, int]]:
    """(start, end, bytes in memory) of what is private to this process and of no file."""
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            found = _MAPPINGS.findall(file.read())
    except OSError:
        return []
    return [(int(start, 16), int(end, 16), int(kb) * 1024) for start, end, kb in found]
