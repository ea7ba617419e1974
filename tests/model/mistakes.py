"""Each mistake in the protocol, and a history that shows what it breaks.

The histories are recorded in ``histories/<mistake>.txt``: the state that they begin in, the
property that breaks, and a step a line, as :class:`~tests.model.protocol.Action` prints them.
:func:`search` finds such a history anew; ``python -m tests.model.mistakes`` records all of them.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.model import starts
from tests.model.explore import Result, breadth_first, histories
from tests.model.properties import check, check_liveness
from tests.model.protocol import Mistake, Model, State, Violation

HISTORIES = Path(__file__).parent / "histories"

UNCLEAN = {
    Mistake.UNCLEAN_KEEPS_HELD,
    Mistake.UNCLEAN_WITHOUT_BASE,
    Mistake.UNCLEAN_FORGOTTEN,
    Mistake.UNCLEAN_KEEPS_CLEAN_TO,
    Mistake.MISSING_IGNORED,
    Mistake.KEEPS_APPLIED,
}
"""Shown by histories with unclean elections."""

ROTS = {Mistake.CUT_UNASKED, Mistake.MEMBERS_CUT, Mistake.LACKING_ENTERS}
"""Shown by histories in which records are found damaged."""

PARTS = {Mistake.COMPLETE_AFTER_CUT, Mistake.COMPLETE_REMEMBERED, Mistake.APPLIED_REMEMBERED}
"""Shown by histories in which logs part once more, and are cut."""

STARTS = {
    "stale high watermark": starts.stale_high_watermark(),
    "returning": starts.returning(),
    "away": starts.away(),
    "away, three changes of the ISR": starts.away(budget=(0, 1, 0, 3)),
    "away, and has everything, a crash": starts.away(3, (0, 1, 1, 3)),
    "away, a crash": starts.away(budget=(0, 1, 1, 2)),
    "away, two passes": starts.away(budget=(0, 2, 0, 2)),
    "returning, two changes of the ISR": starts.returning(budget=(0, 1, 0, 2)),
    "diverged": starts.diverged(),
    "away, and has nothing": starts.away(0),
    "away, two passes and a record": starts.away(budget=(1, 2, 0, 2)),
    "diverged, a disk is wiped": starts.diverged((0, 1, 1, 3)),
}


@dataclass(frozen=True)
class Setting:
    """How a mistake is looked for: where from, and with what of :class:`Model`'s options."""

    start: str
    """A name of :data:`STARTS`, or ``random <budget> <seed>``."""
    options: tuple[tuple[str, Any], ...] = ()

    def state(self) -> State:
        if self.start in STARTS:
            return STARTS[self.start]
        _, *numbers = self.start.split()
        appends, passes, crashes, isr_changes, seed = map(int, numbers)
        return starts.AtRandom((appends, passes, crashes, isr_changes))(random.Random(seed))

    def model(self, mistake: Mistake | None) -> Model:
        return Model(mistake=mistake, **dict(self.options))


def options_of(mistake: Mistake) -> dict[str, Any]:
    options: dict[str, Any] = {"unclean": True} if mistake in UNCLEAN else {}
    if mistake is Mistake.LATE_PASS:
        options["slow_passes"] = True
    if mistake in ROTS:
        options["rots"] = True
    if mistake in PARTS:
        options["parts"] = True
    if mistake is Mistake.OWN_CLOCK:
        options["expire_at_once"] = False
    return options


def find(mistake: Mistake, states: int, seconds: float) -> tuple[Setting, Result]:
    """A random history, shrunk; else a shortest one from a named start."""
    options = options_of(mistake)
    breadth: dict[str, Any] = {"half_swaps": False, "delayed": False, "max_epoch": 2}
    if mistake is Mistake.HW_NOT_RAISED:
        breadth |= {"reads_at_hw": True, "only": "S7"}
    else:
        budget = (7, 6, 7, 40) if mistake in UNCLEAN else (8, 7, 3, 40)
        chosen = {**options, "max_epoch": 8}
        began = time.process_time()
        result = histories(
            Model(mistake=mistake, **chosen),
            starts.AtRandom(budget),
            range(10**9),
            160,
            lambda: time.process_time() - began > seconds,
        )
        if result.violation:
            name = f"random {' '.join(map(str, budget))} {result.histories - 1}"
            return Setting(name, tuple(chosen.items())), result
    for name, start in STARTS.items():
        setting = Setting(name, tuple({**options, **breadth}.items()))
        result = breadth_first(setting.model(mistake), [start], states)
        if result.violation:
            break
    return setting, result


def search(mistake: Mistake, states: int, seconds: float) -> Result:
    return find(mistake, states, seconds)[1]


def path_of(mistake: Mistake) -> Path:
    return HISTORIES / f"{mistake.name.lower()}.txt"


def record(mistake: Mistake, setting: Setting, result: Result) -> None:
    lines = [
        f"# {mistake.value}",
        f"start: {setting.start}",
        "options: " + " ".join(f"{name}={value}" for name, value in setting.options),
        f"breaks: {result.violation.split()[0]}",
        *map(str, result.trace),
    ]
    path_of(mistake).write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class History:
    setting: Setting
    breaks: str
    steps: tuple[str, ...]


def recorded(mistake: Mistake) -> History:
    _, start, options, breaks, *steps = path_of(mistake).read_text().splitlines()
    values: dict[str, Any] = {"True": True, "False": False}
    pairs = (pair.split("=") for pair in options.removeprefix("options:").split())
    chosen = tuple(
        (name, int(value) if value.isdecimal() else values.get(value, value))
        for name, value in pairs
    )
    setting = Setting(start.removeprefix("start: "), chosen)
    return History(setting, breaks.removeprefix("breaks: "), tuple(steps))


def replayed(mistake: Mistake, *, corrected: bool = False) -> str:
    """The violation that the recorded history of ``mistake`` leads to, or "".

    ``corrected``: by the protocol as it stands. The history ends where a step of it is not possible
    there.
    """
    history = recorded(mistake)
    model = history.setting.model(None if corrected else mistake)
    state = history.setting.state()
    try:
        for step in history.steps:
            action = next((a for a in model.actions(state) if str(a) == step), None)
            after = model.step(state, action) if action is not None else None
            if after is None:
                if corrected:
                    break
                raise LookupError(f"{path_of(mistake).name}: {step!r} is not possible")
            state = after
            check(model, state)
        for down in (None, *range(model.replicas)):
            check_liveness(model, state, down)
    except Violation as violation:
        return str(violation)
    return ""


def main(names: list[str]) -> None:
    """Record anew the histories of the mistakes named, or of all."""
    HISTORIES.mkdir(exist_ok=True)
    for mistake in Mistake:
        if names and mistake.name.lower() not in names:
            continue
        setting, result = find(mistake, 100_000, 45)
        print(f"{mistake.name.lower()} ({setting.start}): {result}", flush=True)
        if result.violation:
            record(mistake, setting, result)


if __name__ == "__main__":
    main(sys.argv[1:])
