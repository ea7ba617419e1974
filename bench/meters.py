"""What processes cost: CPU seconds and memory, as the kernel counts them for each process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system CPU of a process, the children it has waited for, and those it has now."""
    total = _ticks(pid, (11, 12, 13, 14))
    for child in children(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += _ticks(child, (11, 12))
    return total / TICKS


def kernel_seconds(pid: int) -> float:
    """The part of a process's own CPU that was spent in the kernel."""
    return _ticks(pid, (12,)) / TICKS


def _ticks(pid: int, fields: tuple[int, ...]) -> int:
    found = _stat(pid)
    return sum(int(found[i]) for i in fields)


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started and that run now."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            found += [int(number) for number in text.split()]
    return found


def resident_bytes(pid: int) -> int:
    """RSS: pages of the process that are in memory, those that it shares counted in full."""
    return _rollup(pid, "Rss")


def peak_bytes(pid: int) -> int:
    """The largest RSS that the process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no line VmHWM:")


def proportional_bytes(pid: int) -> int:
    """PSS: a page that n processes share counts for 1/n."""
    return _rollup(pid, "Pss")


def _rollup(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line {name}:")


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name: 11 utime, 12 stime, 13, 14 of children."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
