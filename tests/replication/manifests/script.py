"""Scripted histories in words: one step a line or between semicolons, ``#`` begins a comment.

``put L a``, ``del L a``: produce at L. ``fetch R [n]``: n records. ``pull R``: a whole exchange,
and the store; ``ask R``, ``heard R``, ``answer R``: its parts. ``pass L end [keep]``: compute, make
durable, offer; tombstones go unless ``keep``; ``compute`` only begins. ``part R n``: apply up to
offset n; ``swap R``: to the end. ``decay R n``: the record at n is damaged. ``late``: 31 s pass.
Everything else is a step of the world: ``learn``, ``elect``, ``elect_unclean``, ``hear_zombie``,
``decide``, ``crash``, ``restart``, ``wipe``, ``fence``, ``store``.

A step that cannot happen is left out: that is what the rule it is about says.
"""

from __future__ import annotations

from tests.replication.manifests.checks import check
from tests.replication.manifests.world import World

KEYS = "ab"


def run(world: World, script: str) -> None:
    """Play it; every property is checked after every step. Raises Violation."""
    for line in script.splitlines():
        for step in line.partition("#")[0].split(";"):
            words = step.split()
            if words:
                _step(world, words[0], words[1:])
                check(world)


def _step(world: World, name: str, words: list[str]) -> None:
    node = int(words[0]) if words else 0
    match name:
        case "put" | "del":
            world.produce(node, KEYS.index(words[1]), live=name == "put")
        case "fetch":
            for _ in range(int(words[1]) if len(words) > 1 else 1):
                world.fetch(node)
                check(world)
        case "ask":
            world.pull(node)
        case "heard":
            world.hear_pull(node)
        case "answer":
            world.hear_answer(node)
        case "pull":
            for step in (world.pull, world.hear_pull, world.hear_answer, world.store):
                step(node)
                check(world)
        case "pass":
            world.start_pass(node, int(words[1]), expire=words[-1] != "keep")
            world.end_pass(node)
            world.store(node)
        case "compute":
            world.start_pass(node, int(words[1]), expire=words[-1] != "keep")
        case "part":
            world.work(node, int(words[1]))
        case "swap":
            while world.work(node, 1 << 60):
                check(world)
        case "decay":
            world.decay(node, int(words[1]))
        case "late":
            world.tick(31_000)
        case "learn" if not words:
            for each in world.replicas:
                world.learn(each)
        case _:
            getattr(world, name)(node)
