"""Ways through the states: all of them in breadth, or histories at random, and shrinking."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.model.properties import check, check_liveness
from tests.model.protocol import Action, Model, State, Violation


@dataclass
class Result:
    """``violation`` is empty where every property held in all ``states``."""

    states: int = 0
    histories: int = 0
    complete: bool = False
    """No state is left that was not visited."""
    violation: str = ""
    start: State | None = None
    trace: tuple[Action, ...] = ()

    def __str__(self) -> str:
        seen = f"{self.histories} histories, " if self.histories else ""
        seen += f"{self.states} states"
        if not self.violation:
            return f"holds in {seen}{' (all)' if self.complete else ''}"
        steps = "; ".join(map(str, self.trace))
        return f"{self.violation}\n  after {len(self.trace)} steps ({seen}): {steps}"


def breadth_first(model: Model, starts: list[State], max_states: int) -> Result:
    """Visit states in order of their distance; the first violation is a shortest one."""
    result = Result()
    came_from: list[tuple[int, Action | None]] = [(-1 - i, None) for i in range(len(starts))]
    seen = {hash(state) for state in starts}
    frontier = list(enumerate(starts))

    def trace(index: int, last: Action) -> None:
        actions = [last]
        while came_from[index][0] >= 0:
            index, action = came_from[index]
            assert action is not None
            actions.append(action)
        result.start = starts[-1 - came_from[index][0]]
        result.trace = tuple(reversed(actions))

    while frontier:
        following: list[tuple[int, State]] = []
        for index, state in frontier:
            for action in model.actions(state):
                try:
                    after = model.step(state, action)
                    if after is None or hash(after) in seen:
                        continue
                    seen.add(hash(after))
                    came_from.append((index, action))
                    check(model, after)
                except Violation as violation:
                    result.states, result.violation = len(seen), str(violation)
                    trace(index, action)
                    return result
                following.append((len(came_from) - 1, after))
            if len(seen) >= max_states:
                result.states = len(seen)
                return result
        frontier = following
    result.states, result.complete = len(seen), True
    return result


WEIGHTS = {
    "crash": 0.25,
    "elect": 0.6,
    "elect_unclean": 1.5,
    "wipe": 0.15,
    "fetch": 4,
    "pull": 3,
    "apply": 3,
    "half_swap": 0.25,
    "publish": 4,
    "acknowledge": 4,
    "propose": 0.7,
    "accept": 3,
    "learn_isr": 3,
    "learn": 2,
    "reject": 3,
    "restart": 0.6,
    "append": 0.9,
    "mark": 1,
    "clear_unclean": 2,
    "compute": 1,
    "hand_in": 2,
    "pass": 1.2,
    "rot": 0.4,
    "part": 0.4,
    "cut": 2,
}
SHARED = ("pass", "half_swap", "append", "compute", "rot", "part")
"""Kinds with many actions at a time: the weight is that of all together."""

Start = Callable[[random.Random], State]


def history(model: Model, start: Start, seed: int, steps: int) -> Result:
    """One random history; its seed gives it again. Ends with the liveness properties."""
    rng = random.Random(seed)
    state = first = start(rng)
    weights = dict(WEIGHTS)
    # Histories differ in temperament: how restless the controller is, and which replica is slow.
    weights["elect"] *= rng.choice((0.2, 1, 2))
    weights["crash"] *= rng.choice((0.2, 1, 2))
    weights["pass"] *= rng.choice((0.5, 1, 3))
    slow, slowness = rng.randrange(model.replicas), rng.choice((0.05, 0.3, 1))
    done: list[Action] = []
    try:
        for _ in range(steps):
            actions = model.actions(state)
            if not actions:
                break
            kinds = [action.kind for action in actions]
            odds = []
            for action in actions:
                share = kinds.count(action.kind) if action.kind in SHARED else 1
                sluggish = action.replica == slow and action.kind in (
                    "fetch",
                    "pull",
                    "learn",
                    "apply",
                    "restart",
                )
                odds.append(weights[action.kind] / share * (slowness if sluggish else 1))
            (action,) = rng.choices(actions, odds)
            done.append(action)
            after = model.step(state, action)
            if after is None:
                done.pop()
                continue
            state = after
            check(model, state)
        for down in (None, *range(model.replicas)):
            check_liveness(model, state, down)
    except Violation as violation:
        return Result(len(done), 1, False, str(violation), first, tuple(done))
    return Result(len(done), 1)


def histories(
    model: Model, start: Start, seeds: range, steps: int, stop: Callable[[], bool] = lambda: False
) -> Result:
    """Random histories until one breaks a property, which is shrunk; or ``stop`` says so."""
    total = Result()
    for seed in seeds:
        result = history(model, start, seed, steps)
        total.states += result.states
        total.histories += 1
        if result.violation:
            total.violation, total.start = f"{result.violation} (seed {seed})", result.start
            assert result.start is not None
            total.trace = shrunk(model, result.start, result.trace, result.violation)
            break
        if stop():
            break
    return total


def replay(
    model: Model, state: State, trace: tuple[Action, ...], *, liveness: bool = True
) -> str | None:
    """The violation that the trace leads to, "" for none; None where a step is not possible."""
    try:
        for action in trace:
            after = model.step(state, action) if action in model.actions(state) else None
            if after is None:
                return None
            state = after
            check(model, state)
        for down in (None, *range(model.replicas)) if liveness else ():
            check_liveness(model, state, down)
    except Violation as violation:
        return str(violation)
    return ""


def shrunk(
    model: Model, start: State, trace: tuple[Action, ...], violation: str
) -> tuple[Action, ...]:
    """The trace without the steps that its property does not need."""
    name = violation.split(maxsplit=1)[0]
    first = replay(model, start, trace, liveness=False)
    liveness = not (first and first.split()[0] == name)
    smaller = True
    while smaller:
        smaller = False
        for size in (8, 4, 2, 1):
            i = 0
            while i < len(trace):
                shorter = trace[:i] + trace[i + size :]
                found = replay(model, start, shorter, liveness=liveness)
                if found and found.split()[0] == name:
                    trace, smaller = shorter, True
                else:
                    i += 1
    return trace
