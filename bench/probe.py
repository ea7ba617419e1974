"""A node with a probe inside: how late its loop was, and what it was doing then.

A timer of 2 ms notes how late it fires, how much processor time the loop used meanwhile and how
long the kernel let it wait for a core. A thread looks at what the loop runs while the timer is
overdue. ``probed/`` puts it into ``kept serve``: SIGUSR1 forgets what was seen, SIGUSR2 writes the
report to ``PROBE_DIR/PID``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

TICK_S = 0.002
OVERDUE_S = 0.001
"""From then on the loop is looked at."""
LOOK_S = 0.001
SWITCH_S = 0.0005
STALL_S = 0.002
"""A stall worth counting."""
WORST = 10
FRAMES = 4


class Probe:
    """Lateness of a timer and what ran meanwhile, since the last reset."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.main = loop, threading.get_ident()
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.schedstat = os.open(path, os.O_RDONLY)
        self.collecting = 0.0
        self.reset()
        loop.call_later(TICK_S, self.tick)
        gc.callbacks.append(self.collected)
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self.sample, daemon=True).start()

    def reset(self) -> None:
        """Begin anew: the stall that writing the last report was is nobody's."""
        self.gaps: list[tuple[float, float, float, float]] = []
        self.seen: list[tuple[float, str]] = []
        self.waited, self.cpu = self.waiting(), time.thread_time()
        self.expected = time.monotonic() + TICK_S

    def waiting(self) -> float:
        """Seconds that this thread was ready to run and no core was free for it."""
        return int(os.pread(self.schedstat, 64, 0).split()[1]) / 1e9

    def tick(self) -> None:
        now, waited, cpu = time.monotonic(), self.waiting(), time.thread_time()
        self.gaps.append((now - self.expected, now, waited - self.waited, cpu - self.cpu))
        self.waited, self.cpu = waited, cpu
        self.expected = now + TICK_S
        self.loop.call_later(TICK_S, self.tick)

    def sample(self) -> None:
        """In a thread: note what the loop runs while its timer is overdue."""
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if now > self.expected + OVERDUE_S:
                self.seen.append((now, _names(sys._current_frames().get(self.main))))

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """The garbage collector began or ended."""
        if phase == "start":
            self.collecting = time.monotonic()
        elif time.monotonic() - self.collecting > OVERDUE_S:
            self.seen.append((self.collecting, f"garbage collection {info['generation']}"))

    def report(self) -> dict[str, Any]:
        """Counts, and the longest stalls by the processor time that the loop used in them."""
        worst = sorted(self.gaps, key=lambda gap: min(gap[0], gap[3]), reverse=True)[:WORST]
        lateness = sorted(gap[0] for gap in self.gaps)
        own = [min(late, cpu) for late, _, _, cpu in self.gaps]
        return {
            "ticks": len(lateness),
            "late_p99_ms": _ms(lateness[len(lateness) * 99 // 100]) if lateness else 0.0,
            "no_core_total_ms": _ms(sum(gap[2] for gap in self.gaps)),
            "own_longest_ms": _ms(max(own, default=0.0)),
            "own_stalls": sum(1 for one in own if one > STALL_S),
            "worst": [
                {
                    "late_ms": _ms(late),
                    "no_core_ms": _ms(waited),
                    "cpu_ms": _ms(cpu),
                    "seen": self._seen(at - late - TICK_S, at),
                }
                for late, at, waited, cpu in worst
            ],
        }

    def _seen(self, start: float, end: float) -> list[str]:
        """What was seen between two moments, most often first."""
        found = Counter(what for at, what in self.seen if start <= at <= end)
        return [f"{count}x {what}" for what, count in found.most_common(3)]


def _names(frame: FrameType | None) -> str:
    """The innermost functions of a stack, innermost first."""
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        code = frame.f_code
        names.append(f"{Path(code.co_filename).stem}.{code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def install(directory: str) -> None:
    """Nodes that start in this process from now on have a probe; see the module."""
    from kept.node.node import Node

    real = Node.start
    if os.environ.get("PROBE_NICED"):
        from kept.node.compaction import cleaner

        made = cleaner.job_for
        cleaner.job_for = lambda *args, **more: replace(made(*args, **more), urgent=True)

    async def start(node: Node) -> None:
        await real(node)
        probe = Probe(node.parts.runtime.loop)
        path = Path(directory) / str(os.getpid())

        def write() -> None:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(probe.report()))
            partial.rename(path)

        node.parts.runtime.loop.add_signal_handler(signal.SIGUSR1, probe.reset)
        node.parts.runtime.loop.add_signal_handler(signal.SIGUSR2, write)

    Node.start = start  # type: ignore[method-assign]
