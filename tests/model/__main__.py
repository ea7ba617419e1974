"""``python -m tests.model``: explore the protocol, or find what a mistake in it breaks."""

from __future__ import annotations

import argparse
import sys
import time

from tests.model import mistakes, starts
from tests.model.explore import Result, breadth_first, histories
from tests.model.protocol import Mistake, Model

PROTOCOL_SECONDS = 60
"""CPU seconds of random histories of each kind, unless told otherwise."""


def protocol(states: int, seconds: float, first_seed: int) -> bool:
    """The protocol as it stands, in breadth and at random; whether every property holds."""
    runs: list[tuple[str, Result]] = []

    def run(name: str, result: Result) -> None:
        runs.append((name, result))
        print(f"{name}: {result}", flush=True)

    def at_random(name: str, model: Model, start: starts.AtRandom, steps: int) -> None:
        began = time.process_time()
        seeds = range(first_seed, first_seed + 10**9)
        run(
            name,
            histories(model, start, seeds, steps, lambda: time.process_time() - began > seconds),
        )

    run(
        "a replica that was away",
        breadth_first(Model(half_swaps=False, delayed=False), [starts.away()], states),
    )
    run("half-done swaps", breadth_first(Model(max_epoch=2), [starts.away()], states))
    run(
        "reads at the high watermark",
        breadth_first(
            Model(max_epoch=2, reads_at_hw=True, only="S7"),
            [starts.stale_high_watermark()],
            states,
        ),
    )
    at_random("three replicas", Model(max_epoch=8), starts.AtRandom((8, 7, 3, 40)), 180)
    at_random(
        "tombstones that wait",
        Model(max_epoch=8, expire_at_once=False),
        starts.AtRandom((8, 7, 3, 40)),
        180,
    )
    at_random(
        "slow passes", Model(max_epoch=8, slow_passes=True), starts.AtRandom((8, 7, 3, 40)), 180
    )
    at_random(
        "unclean elections", Model(max_epoch=8, unclean=True), starts.AtRandom((7, 6, 7, 40)), 160
    )
    at_random(
        "damaged records, and epochs",
        Model(max_epoch=8, rots=True, parts=True),
        starts.AtRandom((8, 7, 5, 40)),
        180,
    )
    at_random("four replicas", Model(4, max_epoch=8), starts.AtRandom((7, 6, 4, 40), 4), 200)
    return not any(result.violation for _, result in runs)


def chosen(text: str) -> list[Mistake]:
    """Mistakes whose name or description contains ``text``."""
    return [m for m in Mistake if text.lower() in m.name.lower() or f"({text.upper()}" in m.value]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument(
        "--states", type=int, default=200_000, help="bound of each breadth-first run"
    )
    parser.add_argument(
        "--seconds", type=float, default=PROTOCOL_SECONDS, help="CPU of each random run"
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed of the random runs")
    parser.add_argument(
        "--mistake", help="search for what this one breaks: part of its name, or C6"
    )
    parser.add_argument(
        "--all", action="store_true", help="the protocol, then every recorded history"
    )
    options = parser.parse_args(argv)
    if options.mistake:
        which = chosen(options.mistake)
        if not which:
            names = ", ".join(m.name.lower() for m in Mistake)
            parser.error(f"no mistake is called {options.mistake!r}; there are: {names}")
        missed = 0
        for mistake in which:
            result = mistakes.search(mistake, options.states, options.seconds)
            print(f"{mistake.name.lower()}: {mistake.value}\n  {result}", flush=True)
            missed += not result.violation
        return 1 if missed else 0
    fine = protocol(options.states, options.seconds, options.seed)
    if options.all:
        for mistake in Mistake:
            violation = mistakes.replayed(mistake)
            fine = fine and bool(violation)
            print(f"{mistake.name.lower()}: {violation or 'NOT FOUND'}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
