"""Random histories: one seed is one history.

They differ in temperament: how restless the controller is, which replica sleeps, how often there is
a pass. ``SEEDS`` in the environment runs more of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.replication.manifests import logs
from tests.replication.manifests.checks import check, check_liveness
from tests.replication.manifests.logs import Violation
from tests.replication.manifests.world import World

WEIGHTS = {
    "produce": 0.5,
    "fetch": 5.0,
    "pull": 6.0,
    "hear_pull": 6.0,
    "hear_again": 0.2,
    "hear_answer": 6.0,
    "lose": 0.1,
    "store": 6.0,
    "work": 3.0,
    "start_pass": 2.0,
    "end_pass": 2.0,
    "tick": 0.5,
    "lag": 0.15,
    "decide": 3.0,
    "learn": 2.0,
    "elect": 0.12,
    "elect_unclean": 1.5,
    "crash": 0.1,
    "restart": 0.6,
    "wipe": 0.1,
    "fence": 0.4,
    "retry": 0.3,
}
SLEEPY = ("fetch", "pull", "learn", "work", "restart", "store")
STEPS = 300
LONGEST_LOG = 14


class History:
    """One history; ``trace`` is what happened."""

    def __init__(self, world: World, seed: int, weights: dict[str, float] | None = None) -> None:
        self.world, self.random = world, random.Random(seed)
        self.trace: list[tuple[Any, ...]] = []
        rnd = self.random
        self.weights = {**WEIGHTS, **(weights or {})}
        for name, factors in (
            ("elect", (0.2, 1, 2)),
            ("crash", (0.2, 1, 2)),
            ("start_pass", (0.5, 1, 3)),
            ("work", (0.3, 1)),
            ("decide", (0.1, 1)),
            ("learn", (0.3, 1)),
            ("pull", (0.1, 0.4, 1)),
            ("fetch", (0.3, 1)),
            ("hear_answer", (0.2, 1)),
            ("produce", (0.3, 1)),
        ):
            self.weights[name] *= rnd.choice(factors)
        self.lazy = rnd.choice(world.replicas)
        self.laziness = rnd.choice((0.05, 0.3, 1))
        self.names = list(self.weights)
        self.odds = list(self.weights.values())

    def run(self, steps: int = STEPS) -> None:
        """Raises Violation; the state is then as it was when it showed."""
        world, rnd = self.world, self.random
        done = 0
        for name in rnd.choices(self.names, self.odds, k=steps * 6):
            node = rnd.choice(world.replicas)
            if name in SLEEPY and node == self.lazy and rnd.random() > self.laziness:
                continue
            if self.do(name, node):
                check(world)
                done += 1
                if done == steps:
                    break
        self.trace.append(("liveness",))
        check_liveness(world)
        check_liveness(world, (rnd.choice(world.replicas),))

    def do(self, name: str, node: int) -> bool:
        """One step, if it can happen."""
        world, rnd = self.world, self.random
        end = world.machines[node].log_end_offset
        arguments: tuple[Any, ...] = (node,)
        step: Callable[[], bool] = lambda: getattr(world, name)(node)  # noqa: E731
        match name:
            case "produce":
                if end >= LONGEST_LOG:
                    return False
                key, live = rnd.randrange(logs.KEYS), rnd.random() < 0.55
                arguments = (node, key, live)
                step = lambda: world.produce(node, key, live=live)  # noqa: E731
            case "start_pass":
                to, expire = rnd.randint(1, end + 1), rnd.random() < 0.6
                arguments = (node, to, expire)
                step = lambda: world.start_pass(node, to, expire=expire)  # noqa: E731
            case "work":
                to = rnd.randint(1, end + 1) if rnd.random() < 0.6 else 1 << 30
                arguments = (node, to)
                step = lambda: world.work(node, to)  # noqa: E731
            case "decay":
                offset = rnd.randrange(end + 1)
                arguments = (node, offset)
                step = lambda: world.decay(node, offset)  # noqa: E731
            case "hear_again":
                step = lambda: world.hear_pull(node, again=True)  # noqa: E731
            case "tick" | "lag":
                step = lambda: world.tick(1000 if name == "tick" else 31_000)  # noqa: E731
        self.trace.append((name, *arguments))
        if not step():
            self.trace.pop()
            return False
        return True


def prepare(world: World, kind: int, rnd: random.Random) -> None:
    """Where a history begins: nothing; one replica away early; a log that has diverged."""
    for node in world.replicas:
        world.learn(node)
    if kind == 0:
        return
    away = len(world.replicas) - 1
    if kind == 1:  # it has the first few records, of which one is deleted while it is away
        script = [(0, True), (0, False), (1, True)]
    else:
        script = [(rnd.randrange(logs.KEYS), rnd.random() < 0.6) for _ in range(rnd.randint(3, 6))]
    stops = rnd.randrange(len(script) + 1)
    for index, (key, live) in enumerate(script):
        if index == stops:
            _leave(world, away)
        world.produce(0, key, live=live)
        _fetch_all(world)
    if stops >= len(script):
        _leave(world, away)
        _fetch_all(world)
    if rnd.random() < 0.8:
        world.restart(away)


def _leave(world: World, away: int) -> None:
    world.crash(away)
    world.fence(away)
    for node in world.replicas:
        world.learn(node)


def _fetch_all(world: World) -> None:
    for _ in range(3):
        for node in world.replicas:
            world.fetch(node)


def play(
    seed: int,
    *,
    replicas: int = 3,
    unclean: bool = False,
    steps: int = STEPS,
    failing: bool = False,
    tearing: bool = False,
    decaying: bool = False,
    policies: bool = False,
    **broken: Any,
) -> World:
    """A whole history. Raises Violation, with the seed and what happened last."""
    rnd = random.Random(seed)
    weights = {"crash": 0.5, "wipe": 0.1} if unclean else {"elect_unclean": 0.0}
    if failing:
        weights |= {"fail_store": 2.0, "fail_apply": 1.0, "retry": 1.0}
    if tearing:
        weights |= {"tear": 2.0, "crash": 0.3, "rot": 0.3}
    if decaying:
        weights |= {"decay": 0.5}
    if policies:
        weights |= {"alter": 0.05}
    world = World(replicas, unclean=unclean, **broken)
    world.compacts = world.compacted = not policies or rnd.random() < 0.8
    history = History(world, seed, weights)
    prepare(world, rnd.choice((0, 1, 1, 2)), rnd)
    try:
        check(world)
        history.run(steps)
    except Violation as violation:
        violation.add_note(f"seed {seed}, {replicas} replicas, after {history.trace[-25:]}")
        raise
    return world
