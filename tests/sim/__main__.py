"""``python -m tests.sim``: run histories; see docs/simulation.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.sim.coverage import ENOUGH, missing
from tests.sim.planted import PLANTED
from tests.sim.runner import STAGES, Result, repeat_command, report, run_many, run_one, until


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--stage", action="append", choices=sorted(STAGES), default=None)
    parser.add_argument("--seed", type=int, help="run this one history, with its trace")
    parser.add_argument("--seeds", type=int, default=100, help="how many histories of each stage")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--minutes", type=float, default=0, help="for so long, instead of --seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--planted", default="", help="with this planted bug; no --seed: find one")
    parser.add_argument("--traces", type=Path, default=Path(), help="where traces go")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    return parser.parse_args()


def main() -> int:
    """1 when a history broke a rule."""
    asked = arguments()
    stages = asked.stage or list(STAGES)
    if asked.planted and asked.seed is None:
        return pin(asked)
    if asked.seed is not None:
        result, lines = run_one(stages[0], asked.seed, planted=asked.planted, tracing=True)
        path = asked.traces / f"{stages[0]}-{asked.seed}.trace"
        path.write_text("\n".join([*lines, result.message, ""]))
        print(lines[0])
        print(f"trace: {path} ({len(lines)} lines), fingerprint {result.fingerprint}")
        print(f"{result.events} events in {result.seconds:.2f} s; {result.counts}")
        if result.check:
            print("\n".join(lines[-40:]))
        print(result.message or "no rule broken")
        return bool(result.check)
    return max(run_stage(stage, asked, len(stages)) for stage in stages)


def run_stage(stage: str, asked: argparse.Namespace, stages: int) -> int:
    """Many histories of one stage."""
    started = time.monotonic()
    if asked.minutes:
        seeds = until(60 * asked.minutes / stages, asked.first)
    else:
        seeds = iter(range(asked.first, asked.first + asked.seeds))
    failures: list[Result] = []
    totals: Counter[str] = Counter()
    count = 0
    for result in run_many(stage, seeds, asked.jobs):
        count += 1
        totals.update(result.counts)
        totals["events"] += result.events
        if result.check:
            failures.append(result)
            print(f"[{result.check}] {result.message.splitlines()[0][:200]}")
            print(f"  repeat: {repeat_command(stage, result.seed)}", flush=True)
            if not asked.keep_going:
                break
    took = time.monotonic() - started
    never = missing(stage, totals) if count >= ENOUGH[stage] else []
    what = ", ".join(f"{totals[name]:,} {name}" for name in sorted(totals))
    print(
        f"{stage}: {count} histories in {took:.0f} s ({60 * count / max(took, 0.001):.0f} a minute "
        f"on {asked.jobs}), {len(failures)} failed; {what}"
    )
    if never:
        print(f"[coverage] {stage}: in {count} histories there was nothing of: {', '.join(never)}")
    if failures and not asked.keep_going:
        print(report(failures[0], directory=asked.traces))
    return bool(failures or never)


def pin(asked: argparse.Namespace) -> int:
    """Find the first seed that shows a planted bug, and is clean without it."""
    bug = PLANTED[asked.planted]
    for seed in range(asked.first, asked.first + asked.seeds):
        result, _ = run_one(bug.stage, seed, planted=bug.name)
        if result.check in bug.checks and not run_one(bug.stage, seed)[0].check:
            print(f"{bug.name}: seed {seed} of {bug.stage}: [{result.check}]")
            return 0
    print(f"{bug.name}: none of {asked.seeds} seeds shows one of {', '.join(bug.checks)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
