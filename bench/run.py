"""``make bench``: kept and Apache Kafka side by side, in one run, on one machine.

Prints one table and writes ``results/bench.json`` and ``results/bench.png``. CPU is the broker
processes' own (user and system), as CPU seconds per GB of requests or microseconds per request; the
load comes from ``load.c``, whose CPU is not in the figures. ``--quick`` moves a tenth of the data;
``--broker kept`` leaves Kafka out (which needs Java 17 and Maven); ``--only NAME...`` picks
sections.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import brokers
import failover
import replicated
import single
import trios
from report import plot, table
from rig import Bench

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NAMES = ("kept", "kafka")

Opener = Callable[[], AbstractContextManager[Any]]
ONE: dict[str, Opener] = {
    "kept": lambda: brokers.kept(log_cleaner_backoff_ms="200"),
    "kafka": lambda: brokers.kafka(log_cleaner_backoff_ms="200"),
}
THREE: dict[str, Opener] = {
    "kept": lambda: trios.kept(**replicated.SETTINGS),
    "kafka": lambda: trios.kafka(**replicated.SETTINGS),
}
PLAIN_THREE: dict[str, Opener] = {"kept": trios.kept, "kafka": trios.kafka}

Section = tuple[dict[str, Opener], Callable[[Bench, Any], None]]
SECTIONS: dict[str, Section] = {
    **{name: (ONE, measure) for name, measure in single.SECTIONS.items()},
    "cluster": (THREE, replicated.cluster),
    "failover": (PLAIN_THREE, failover.failover),
}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--broker", choices=NAMES, help="one broker alone")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections alone"
    )
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), 0.1 if options.quick else 1.0)
        for section in options.only:
            print(section, flush=True)
            openers, measure = SECTIONS[section]
            for name, opener in openers.items():
                if options.broker in (None, name):
                    with opener() as broker:
                        measure(bench, broker)
    text = table(bench.rows)
    print("\n" + text)
    machine = {"cpus": len(brokers.os.sched_getaffinity(0)), "python": platform.python_version()}
    result = {"machine": machine, "scale": bench.scale, "rows": bench.rows}
    (RESULTS / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "bench.txt").write_text(text + "\n")
    plot(bench.rows, RESULTS / "bench.png")


if __name__ == "__main__":
    sys.exit(main())
