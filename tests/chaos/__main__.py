"""``python -m tests.chaos --minutes N [--seed S]``: faults at random, until the time is over;
``--once``: each fault once, to a leader.

The seed repeats the order of faults, not their timing. Docker and docker-compose are needed, and
the base image (tests/tools/base-image).
"""

from __future__ import annotations

import argparse
import random
import time

from tests.chaos.faults import FAULTS
from tests.chaos.run import FILES, Run
from tests.deploy.containers import Compose


def main() -> None:
    """Rounds on one cluster, all checked."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--minutes", type=float, default=5.0)
    given.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    given.add_argument("--once", action="store_true", help="each fault once, in order, instead")
    options = given.parse_args()
    print("each fault once" if options.once else f"seed {options.seed}", flush=True)
    draw = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    with Compose(files=FILES) as cluster:
        run = Run(cluster)
        while True:
            events = run.one_by_one(FAULTS) if options.once else run.at_random(draw)
            passes = run.checked(draw.randrange(1 << 30), events)
            print(f"all holds; {passes} passes of the cleaner", flush=True)
            if options.once or time.monotonic() > end:
                break
    print(run.table())


if __name__ == "__main__":
    main()
