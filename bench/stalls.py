"""What holds a node's loop while it cleans: the longest gaps, and who ran in them.

Starts a node with a probe inside (a timer that notes how late it is and how long the kernel let it
wait for a core, and a stop watch around the steps of the cleaner and of the timers, on the loop and
in threads), fills a compacted topic, and
sends 500 produce requests a second without a pass and during one.

    python bench/stalls.py [--gb 0.5] [--runs 3] [--partitions N] [--set K=V ...]

``--partitions`` adds a topic with so many partitions, for the timers that walk all of them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

TICK_S = 0.002
WORTH_S = 0.0003
"""Steps shorter than this are only summed up."""
WATCHED = (
    ("kept.node.cleaner", "Cleaner.plan_for"),
    ("kept.node.cleaner", "Cleaner.request"),
    ("kept.node.cleaner", "Cleaner._note"),
    ("kept.node.cleaner", "job_for"),
    ("kept.node.cleaner", "discard"),
    ("kept.node.cleaner", "jobs.encode"),
    ("kept.node.timers", "advance"),
    ("kept.node.hosting", "Hosting.apply"),
    ("kept.node.hosting", "Hosting.reconfigure"),
    ("kept.storage.log", "Log.roll"),
    ("kept.storage.log", "Log.begin_replacement"),
    ("kept.storage.replacement", "Replacement.place_next"),
    ("kept.storage.replacement", "Replacement.prepare"),
    ("kept.storage.replacement", "Replacement.finish"),
    ("kept.storage.directory", "LogDirectory.write_checkpoints"),
    ("kept.compaction.apply", "publish"),
    ("kept.compaction.apply", "begin"),
    ("kept.compaction.apply", "conclude"),
    ("kept.storage.flush", "FlushTicket.run"),
    ("os", "posix_spawn"),
)


class Probe:
    """Lateness of a timer, and steps with their times, since the last reset."""

    def __init__(self, loop):
        self.loop, self.main = loop, threading.get_ident()
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.schedstat = os.open(path, os.O_RDONLY)
        self.reset()
        self.waited = self.waiting()
        self.expected = loop.time() + TICK_S
        loop.call_later(TICK_S, self.tick)
        gc.callbacks.append(self.collected)

    def reset(self):
        self.gaps, self.steps = [], []

    def waiting(self):
        """Seconds that this thread was ready to run and no core was free for it."""
        return int(os.pread(self.schedstat, 64, 0).split()[1]) / 1e9

    def tick(self):
        now, waited = self.loop.time(), self.waiting()
        late = now - self.expected
        self.gaps.append((late, now, waited - self.waited))
        self.waited = waited
        self.expected = now + TICK_S
        self.loop.call_later(TICK_S, self.tick)

    def collected(self, phase, info):
        """The garbage collector began or ended."""
        if phase == "start":
            self.collecting = self.loop.time()
            return
        took = self.loop.time() - self.collecting
        if took > WORTH_S:
            self.steps.append((f"gc {info['generation']}", self.collecting, took, took))

    def wrap(self, module_name, path):
        owner = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        real = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
        plain = getattr(real, "__func__", real)

        @functools.wraps(plain)
        def timed(*args, **more):
            started, cpu = self.loop.time(), time.thread_time()
            try:
                return plain(*args, **more)
            finally:
                took = self.loop.time() - started
                if took > WORTH_S:
                    where = "" if threading.get_ident() == self.main else " (thread)"
                    spent = time.thread_time() - cpu
                    self.steps.append((f"{path}{where}", started, took, spent))

        setattr(owner, name, timed)

    def report(self):
        """The ten longest gaps, each with the steps that ran in it."""
        worst = sorted(self.gaps, reverse=True)[:10]
        named = []
        for late, at, waited in worst:
            inside = [
                f"{what} {1000 * took:.1f} ms, cpu {1000 * cpu:.1f}"
                for what, started, took, cpu in self.steps
                if started < at and started + took > at - late - TICK_S
            ]
            named.append({"late_ms": _ms(late), "no_core_ms": _ms(waited), "steps": inside})
        lateness = sorted(late for late, _, _ in self.gaps)
        p99 = lateness[len(lateness) * 99 // 100] if lateness else 0.0
        total = sum(waited for _, _, waited in self.gaps)
        return {
            "ticks": len(lateness), "late_p99_ms": _ms(p99), "no_core_total_ms": _ms(total),
            "worst": named,
        }  # fmt: skip


def _ms(seconds):
    return round(1000 * seconds, 2)


def serve(out, arguments):
    """Run ``kept serve`` with the probe: SIGUSR1 forgets, SIGUSR2 writes the report."""
    from kept.__main__ import main
    from kept.node.server import Node

    real = Node.start
    if os.environ.get("STALLS_NICED"):
        from kept.node import cleaner

        made = cleaner.job_for
        cleaner.job_for = lambda *args, **more: replace(made(*args, **more), urgent=True)

    async def start(node):
        await real(node)
        probe = Probe(node.loop)
        for module, path in WATCHED:
            probe.wrap(module, path)

        def write():
            Path(f"{out}.tmp").write_text(json.dumps(probe.report()))
            os.rename(f"{out}.tmp", out)

        node.loop.add_signal_handler(signal.SIGUSR1, probe.reset)
        node.loop.add_signal_handler(signal.SIGUSR2, write)

    Node.start = start
    sys.argv = ["kept", "serve", *arguments]
    main()


def ask(process, out):
    """The report of the probe since the last time."""
    Path(out).unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 10
    while not os.path.exists(out):
        if time.monotonic() > deadline:
            raise RuntimeError("the probe does not answer")
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    return json.loads(Path(out).read_text())


def run(options):
    """One node: (p99 without, p99 during, reports)."""
    import brokers
    import cleaning
    import frames

    from kept.client.blocking import Client
    from kept.storage.types import Codec

    with tempfile.TemporaryDirectory(prefix="stalls-", dir=options.dir) as folder:
        load = f"{folder}/load"
        subprocess.run(["gcc", "-O2", "-o", load, Path(__file__).with_name("load.c")], check=True)
        port, out = brokers.free_port(), f"{folder}/report"
        command = [sys.executable, __file__, "--serve", out, "--port", str(port)]
        command += ["--data-dir", f"{folder}/data"]
        for text in options.set:
            command += ["--set", text]
        environment = {**os.environ, **({"STALLS_NICED": "1"} if options.niced else {})}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            brokers.wait_ready(port, process, 60)
            broker = brokers.Broker(
                "kept", "127.0.0.1", port, process.pid, 0.0, Path(folder) / "data" / "log"
            )
            with Client(broker.bootstrap) as client:
                client.create_topic("paced", partitions=1)
                if options.partitions:
                    client.create_topic("many", partitions=options.partitions)
            cleaning.fill(broker, "aside", options.gb * 1e9)
            time.sleep(2)
            frame = Path(folder) / "frame"
            batch = frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000))
            frame.write_bytes(frames.produce("paced", batch))
            pace = [load, "pace", broker.host, str(port), str(frame), "500"]
            subprocess.check_output([*pace, "1000"])
            ask(process, out)
            quiet = json.loads(subprocess.check_output([*pace, "2500"]))
            without = ask(process, out)
            cleaning.release(broker, "aside")
            during = json.loads(subprocess.check_output([*pace, str(options.requests)]))
            inside = ask(process, out)
            cleaning.await_pass(broker, "aside")
            return quiet, during, without, inside
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main():
    """Measure and print."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=0)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--set", action="append", default=[], metavar="K=V")
    parser.add_argument("--niced", action="store_true", help="workers are niced and not idle")
    parser.add_argument("--quiet", action="store_true", help="figures only")
    options = parser.parse_args()
    ratios = []
    for _ in range(options.runs):
        quiet, during, without, inside = run(options)
        ratios.append(during["p99_ms"] / quiet["p99_ms"])
        print(json.dumps({"quiet": quiet, "during": during, "ratio": round(ratios[-1], 2)}))
        if not options.quiet:
            for name, report in (("without a pass", without), ("during", inside)):
                print(name, {k: v for k, v in report.items() if k != "worst"})
                for gap in report["worst"]:
                    print("   ", gap)
    print(f"p99 during / without: median {statistics.median(ratios):.2f} of {len(ratios)} runs")


if __name__ == "__main__":
    main()
