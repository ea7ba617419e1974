"""``python -m tests.soak --minutes N [--seed S]``: random keys and deletions under all strategies
and codecs, while nodes are killed and leaders moved; then everything is compared.

At 10 minutes and more at least a million records are sent. The seed repeats keys and events, not
their timing.
"""

from __future__ import annotations

import argparse
import random

from kept.testing import Cluster
from tests.soak.run import SETTINGS, soak

RECORDS = 1_000_000
MOST_PER_SECOND = 2500


def main() -> None:
    """One run."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--minutes", type=float, default=10.0)
    given.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = given.parse_args()
    print(f"repeat with: make soak MINUTES={options.minutes:g} SEED={options.seed}", flush=True)
    seconds = 60 * options.minutes
    per_second = min(1.3 * RECORDS / seconds, MOST_PER_SECOND)
    with Cluster(3, **SETTINGS) as cluster:
        run = soak(cluster, options.seed, seconds, per_second, RECORDS if seconds >= 600 else 0)
    print(f"seed {options.seed}: all holds after {run.sent} records")


if __name__ == "__main__":
    main()
