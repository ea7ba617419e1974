"""``python -m tests.chaos --minutes N [--seed S]``: faults at random, until the time is over;
``--once``: each fault once, to a leader; ``--grow``: from three nodes to five under load. ``--nodes
5`` (or NODES=5) for five. ``--table docs/chaos.md`` puts what was seen there.

The seed repeats the order of faults, not their timing. Docker and docker-compose are needed, and
the base image (tests/tools/base-image).
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.run import Run, cluster_of


def main() -> None:
    """Rounds on one cluster, all checked."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--minutes", type=float, default=5.0)
    given.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    nodes = int(os.environ.get("NODES", "3"))
    given.add_argument("--nodes", type=int, choices=(3, 5), default=nodes)
    given.add_argument("--once", action="store_true", help="each fault once, in order, instead")
    given.add_argument("--only", default="", help="with --once: faults with this in their name")
    given.add_argument("--grow", action="store_true", help="from three nodes to five, instead")
    given.add_argument("--table", type=Path, help="write the table into this file, at its mark")
    options = given.parse_args()
    fixed = options.once or options.grow
    print("no seed" if fixed else f"seed {options.seed}", flush=True)
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    draw = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    with cluster_of(5 if options.grow else options.nodes, grows=options.grow) as cluster:
        run = Run(cluster)
        while True:
            events = run.at_random(draw)
            if fixed:
                events = run.growth if options.grow else run.one_by_one(chosen)
            passes = run.checked(draw.randrange(1 << 30), events)
            print(f"all holds; {passes} passes of the cleaner", flush=True)
            if fixed or time.monotonic() > end:
                break
    if run.seen:
        print(run.table())
    if options.table is not None:
        write(options.table, run.table())


def write(file: Path, table: str) -> None:
    """Put the table where the last one is."""
    begin, finish = "<!-- the table of the last run -->\n", "\n<!-- its end -->"
    head, _, rest = file.read_text().partition(begin)
    _, _, tail = rest.partition(finish)
    file.write_text(f"{head}{begin}{table}{finish}{tail}")


if __name__ == "__main__":
    main()
