"""What may happen to a cluster of containers, and how long writing may stop for it.

A fault is begun and ended by itself; between, the load must go on unless ``stops`` says that nobody
can acknowledge. The time without acknowledgements is compared with the goal, and reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.chaos import machine, network
from tests.deploy.containers import Compose
from tests.failover.load import Load

SESSION_S: Final = 9.0
"""broker.session.timeout.ms"""
AT_ONCE_S: Final = 1.0
"""Goal where a process ends: that is noticed by its connections."""
UNHEARD_S: Final = SESSION_S + 1.0
"""Goal where a node is not heard of any more: the session must run out first."""
LAG_S: Final = 30.0 + 1.0
"""Goal where only a follower misses its leader: replica.lag.time.max.ms must run out first."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to one node: ``begin`` it, ``end`` it."""

    name: str
    goal_s: float | None
    begin: Callable[[Compose, int], None]
    end: Callable[[Compose, int], None]
    lasts_s: float = 0.0
    """At least; it lasts until the load has gone on, too."""
    stops: bool = False
    node: int | None = None
    """It can happen to this node only."""


def _peers(cluster: Compose, node: int) -> list[int]:
    return [other for other in range(len(cluster)) if other != node]


def _ready_again(cluster: Compose, _node: int) -> None:
    cluster.await_ready()


def _heal(cluster: Compose, node: int) -> None:
    network.heal(cluster, node)
    cluster.await_ready()


def _resume(cluster: Compose, node: int) -> None:
    cluster.resume(node)
    cluster.await_ready()


def _kill_all(cluster: Compose, _node: int) -> None:
    for node in range(len(cluster)):
        cluster.kill(node)


def _start_all(cluster: Compose, node: int) -> None:
    for other in [*_peers(cluster, node), node]:
        cluster.launch(other)
    cluster.await_ready()


FAULTS: Final = (
    Fault("killed", AT_ONCE_S, Compose.kill, Compose.start),
    Fault("stopped in order", AT_ONCE_S, Compose.stop, Compose.start),
    Fault("replaced by a new container", AT_ONCE_S, Compose.replace, _ready_again),
    Fault("paused", UNHEARD_S, Compose.pause, _resume, SESSION_S + 5),
    Fault(
        "cut off from the others",
        UNHEARD_S,
        lambda cluster, node: network.cut(cluster, node, _peers(cluster, node)),
        _heal,
        SESSION_S + 5,
    ),
    Fault(
        "does not hear the others",
        UNHEARD_S,
        lambda cluster, node: network.cut(cluster, node, _peers(cluster, node), speaks=True),
        _heal,
        SESSION_S + 5,
    ),
    Fault(
        "not heard by the others",
        UNHEARD_S,
        lambda cluster, node: network.cut(cluster, node, _peers(cluster, node), hears=True),
        _heal,
        SESSION_S + 5,
    ),
    Fault(
        "cut off from one other",
        LAG_S,
        lambda cluster, node: network.cut(cluster, node, _peers(cluster, node)[:1]),
        _heal,
        SESSION_S + 5,
    ),
    Fault(
        "out of room on its disk",
        AT_ONCE_S,
        machine.fill,
        machine.empty,
        5.0,
        node=machine.SMALL_NODE,
    ),
    Fault("slow on its disk", AT_ONCE_S, machine.slow, machine.quick, 10.0),
    Fault(
        "six hours ahead by its clock",
        AT_ONCE_S,
        machine.set_forward,
        machine.set_back,
        10.0,
        node=machine.CLOCK_NODE,
    ),
    Fault("killed with all others", None, _kill_all, _start_all, stops=True),
)

BRIEF: Final = tuple(
    fault
    for fault in FAULTS
    if fault.name in ("killed", "cut off from the others", "killed with all others")
)
"""What every run of the tests has time for."""


def happen(fault: Fault, cluster: Compose, node: int, load: Load) -> tuple[float, float]:
    """Let a fault happen to a node under load; from when to when it lasted.

    That is until the load goes on, at least; where nobody can acknowledge, until it does again.
    """
    begun = time.monotonic()
    fault.begin(cluster, node)
    if not fault.stops:
        load.goes_on(cluster)
    time.sleep(max(0.0, fault.lasts_s - (time.monotonic() - begun)))  # how long it lasts
    over = time.monotonic()
    fault.end(cluster, node)
    load.goes_on(cluster)
    return begun, time.monotonic() if fault.stops else over
