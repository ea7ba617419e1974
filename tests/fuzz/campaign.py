"""Attempts one after another, by the seed, with checks between them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz.oracle import Broken, Escaped, Kept, Steady
from tests.fuzz.site import Site
from tests.fuzz.targets import TARGETS

ATTEMPT_S: Final = 60
"""None takes longer: nearly all of them are over in milliseconds."""
CHECKED_EACH: Final = 200
"""Rounds of attempts between two checks of what is held."""
STEADY_CONNECTIONS: Final = 2


class Failure(Exception):
    """What an attempt broke, and how to repeat it."""


class Report:
    """What was tried."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.grown_bytes = 0


def rounds(count: int | None, minutes: float = 0) -> Iterator[int]:
    """Numbers of rounds: so many, or for so long."""
    end = time.monotonic() + 60 * minutes
    number = 0
    while number < count if count is not None else time.monotonic() < end:
        yield number
        number += 1


def attack(seed: int, targets: Iterable[str], numbers: Iterable[int]) -> Report:
    """In each round one attempt at each target, side by side. Raises :class:`Failure`."""
    targets, report = tuple(targets), Report()
    with tempfile.TemporaryDirectory() as directory:
        site = Site(Path(directory))
        try:
            with Escaped(site.loop) as escaped:
                site.run(_attack(site, escaped, seed, targets, numbers, report))
        finally:
            site.close()
    return report


async def _attack(  # noqa: PLR0917
    site: Site,
    escaped: Escaped,
    seed: int,
    targets: tuple[str, ...],
    numbers: Iterable[int],
    report: Report,
) -> None:
    steady, kept = Steady(site, escaped), Kept(site)
    number = 0
    try:
        await steady.open()
        for number in numbers:
            await asyncio.gather(*(_attempt(site, seed, target, number) for target in targets))
            report.attempts.update(targets)
            escaped.check()
            await steady.use()
            if number % CHECKED_EACH == CHECKED_EACH - 1:
                await site.create_topics()
                await kept.check(STEADY_CONNECTIONS)
        await kept.check(STEADY_CONNECTIONS)
        await steady.use()
        escaped.check()
    except Broken as error:
        chosen = "" if targets == tuple(TARGETS) else f" --target {' --target '.join(targets)}"
        again = f"python -m tests.fuzz --seed {seed}{chosen} --attempt {number}"
        raise Failure(f"{error}\n{again}") from error
    finally:
        report.slowest_s, report.grown_bytes = steady.slowest_s, kept.grown_bytes
        steady.close()


async def _attempt(site: Site, seed: int, target: str, number: int) -> None:
    random = Random(f"{seed} {target} {number}")
    try:
        async with asyncio.timeout(ATTEMPT_S):
            await TARGETS[target](site, random)
    except TimeoutError as error:
        raise Broken(f"{target} did not end within {ATTEMPT_S} s") from error
    except Exception as error:
        raise Broken(f"{target} raised {error!r}") from error
