"""Running histories: one with its trace, or many over the processors; how a failure is told."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tests.sim.world import Violation

STAGES: Final = {
    "raft": ("tests.sim.raft_cluster", "RaftHistory"),
    "node": ("tests.sim.node_history", "NodeHistory"),
    "nodes": ("tests.sim.nodes_history", "NodesHistory"),
    "groups": ("tests.sim.groups_history", "GroupsHistory"),
    "transactions": ("tests.sim.transactions_history", "TransactionsHistory"),
    "security": ("tests.sim.security_history", "SecurityHistory"),
    "nodes-compaction": ("tests.sim.nodes_compaction", "NodesCompactionHistory"),
    "kills": ("tests.sim.kills_history", "KillsHistory"),
}
"""Name -> (module, class) of a history."""

AHEAD: Final = 2
"""Histories of a processor that are begun or wait, so that none is idle behind a long one."""
SHOWN_LINES: Final = 60
"""The end of a trace that is printed; all of it goes to a file."""


@dataclass(frozen=True)
class Result:
    """How one history ended. ``check`` is empty when nothing was broken."""

    stage: str
    seed: int
    check: str
    message: str
    seconds: float
    fingerprint: str
    events: int
    counts: dict[str, int] = field(default_factory=dict)


def history(stage: str, seed: int, **options: Any) -> Any:
    """A history, not yet run."""
    module, name = STAGES[stage]
    return getattr(import_module(module), name)(seed, **options)


def run_one(
    stage: str, seed: int, *, planted: str = "", tracing: bool = False, **more: Any
) -> tuple[Result, list[str]]:
    """Run a history to its end; the lines of its trace if asked for. ``more``: its options."""
    started = time.process_time()
    logging.disable(logging.CRITICAL)
    check = message = ""
    options: dict[str, Any] = {"tracing": tracing, **more}
    with ExitStack() as stack:
        if planted:
            from tests.sim.planted import PLANTED

            bug = PLANTED[planted]
            options |= {"assertions": False, **bug.options}
            stack.enter_context(bug.planted())
        made = history(stage, seed, **options)
        try:
            made.run()
        except Violation as violation:
            check, message = violation.check, str(violation)
        except Exception as error:  # noqa: BLE001 - whatever escapes is a bug of the product
            check, message = "crash", f"{error!r}\n{traceback.format_exc()}"
    world = made.world
    result = Result(
        stage,
        seed,
        check,
        message,
        time.process_time() - started,
        world.fingerprint,
        world.events,
        made.counts(),
    )
    lines = [f"{stage} seed {seed}: {made}", *world.lines]
    made.close()
    logging.disable(logging.NOTSET)
    return result, lines


def repeat_command(stage: str, seed: int, planted: str = "") -> str:
    """What to type to see it again."""
    plant = f" --planted {planted}" if planted else ""
    return f".venv/bin/python -m tests.sim --stage {stage} --seed {seed}{plant}"


def report(result: Result, *, planted: str = "", directory: Path | None = None) -> str:
    """A failure as a text: what broke, the end of its trace, the command that repeats it."""
    _, lines = run_one(result.stage, result.seed, planted=planted, tracing=True)
    shown = lines[-SHOWN_LINES:]
    out = [f"seed {result.seed} of {result.stage}: {result.message}", lines[0], ""]
    if directory is not None:
        path = directory / f"{result.stage}-{result.seed}.trace"
        path.write_text("\n".join([*lines, result.message, ""]))
        out.append(f"trace: {path} ({len(lines)} lines); its end:")
    out += [*shown, "", result.message, f"repeat: {repeat_command(result.stage, result.seed)}"]
    return "\n".join(out)


def _work(item: tuple[str, int]) -> Result:
    return run_one(*item)[0]


def run_many(stage: str, seeds: Iterator[int], jobs: int) -> Iterator[Result]:
    """Run histories, on several processors if ``jobs`` says so; results in the order of the seeds.

    A seed is drawn when a processor is about to be free for it: ``seeds`` may end by the clock.
    """
    items = ((stage, seed) for seed in seeds)
    gc.freeze()
    if jobs == 1:
        yield from map(_work, items)
        return
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        running = deque(pool.apply_async(_work, (item,)) for item in islice(items, AHEAD * jobs))
        while running:
            yield running.popleft().get()
            running.extend(pool.apply_async(_work, (item,)) for item in islice(items, 1))


def until(seconds: float, first: int) -> Iterator[int]:
    """Seeds from ``first`` on, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield first
        first += 1
