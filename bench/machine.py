"""The machine of a run, and how much others used it meanwhile."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

REPEATS = 7
WORK_BYTES = 4 << 20
WORK_TURNS = 60_000


@dataclass(frozen=True, slots=True)
class Noise:
    """A fixed piece of work just now, in a process that shares the machine with others.

    ``cpu_ms`` is the processor time it took: with the same work it only grows when others use the
    caches, the memory or the core's other half. ``stretch`` is wall time by processor time: 1 when
    a core was free.
    """

    section: str
    load_average: float
    cpu_ms: float
    stretch: float


def describe() -> dict[str, object]:
    """Processor, memory, kernel and versions."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _field("/proc/cpuinfo", "model name"),
        "memory_gb": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 1e6, 1),
        "virtual": " hypervisor" in _field("/proc/cpuinfo", "flags"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "java": _java(),
        "date": time.strftime("%Y-%m-%d"),
    }


def noise(section: str) -> dict[str, object]:
    """What a fixed piece of work takes now: the median of a few."""
    data = bytes(range(256)) * (WORK_BYTES // 256)
    cpus, stretches = [], []
    for _ in range(REPEATS):
        cpu, wall = time.thread_time(), time.perf_counter()
        zlib.crc32(data)
        total = 0
        for number in range(WORK_TURNS):
            total += number & 7
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        cpus.append(cpu)
        stretches.append(wall / cpu)
    return asdict(
        Noise(
            section,
            round(os.getloadavg()[0], 2),
            round(statistics.median(cpus) * 1e3, 3),
            round(statistics.median(stretches), 2),
        )
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _java() -> str:
    try:
        done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    lines = done.stderr.splitlines()
    return lines[0] if lines else ""
