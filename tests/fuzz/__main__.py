"""``python -m tests.fuzz``: attack a node in this process; see the package."""

from __future__ import annotations

import argparse
import secrets
import sys
import traceback

from tests.fuzz.campaign import Failure, attack, rounds
from tests.fuzz.targets import TARGETS


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, help="default: another one each time; it is printed")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--attempt", type=int, help="this one alone")
    return parser.parse_args()


def main() -> int:
    """1 when something broke."""
    asked = arguments()
    seed = secrets.randbelow(1 << 32) if asked.seed is None else asked.seed
    targets = asked.target or list(TARGETS)
    print(f"seed {seed}", flush=True)
    numbers = rounds(None, asked.minutes) if asked.attempt is None else iter((asked.attempt,))
    try:
        report = attack(seed, targets, numbers)
    except Failure as failure:
        traceback.print_exception(failure.__cause__)
        print(failure, file=sys.stderr)
        return 1
    tried = ", ".join(f"{count} {target}" for target, count in report.attempts.items())
    print(f"attempts: {tried}")
    print(f"slowest round of the steady connections: {report.slowest_s * 1000:.0f} ms")
    print(f"resident memory grew by {report.grown_bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
