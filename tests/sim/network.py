"""The virtual network: every link delays, and may lose, duplicate, reorder, or be cut one way.

Two kinds of traffic. :meth:`Network.send` is a message nobody waits for (Raft).
:meth:`Network.call` is a request with an answer (registration, heartbeats, AlterPartition, Fetch,
Produce): the caller hears exactly once, the answer or :data:`NO_ANSWER`, and never learns whether
a request without an answer was carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.sim.world import MS, World

if TYPE_CHECKING:
    from tests.sim.machine import Machine


class _NoAnswer:
    def __repr__(self) -> str:
        return "no answer"


class _Refused:
    def __repr__(self) -> str:
        return "refused"


NO_ANSWER: Final = _NoAnswer()
"""What a caller hears after its timeout."""
REFUSED: Final = _Refused()
"""What a caller hears at once: the machine is up and nobody listens (the process is dead)."""


@dataclass
class LinkFaults:
    """What every link does to a message, by chance."""

    delay_us: tuple[int, int] = (200, 2 * MS)
    slow: float = 0.0
    slow_us: tuple[int, int] = (20 * MS, 400 * MS)
    loss: float = 0.0
    duplicate: float = 0.0


@dataclass
class Network:
    """Links between machines by id; a missing machine is a stranger and hears nothing."""

    world: World
    faults: LinkFaults = field(default_factory=LinkFaults)
    machines: dict[int, Machine] = field(default_factory=dict)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    sent: int = 0
    arrivals: dict[tuple[int, int], int] = field(default_factory=dict)

    def heal(self) -> None:
        """Every link is whole and quick again; what is under way arrives as it was drawn."""
        self.cuts.clear()
        self.faults = LinkFaults()

    def cut(self, source: int, target: int) -> None:
        """Nothing passes from ``source`` to ``target`` until healed; the other way it does."""
        self.cuts.add((source, target))

    def isolate(self, group: set[int], others: set[int]) -> None:
        """Cut both ways between two groups."""
        for a in group:
            for b in others:
                self.cuts |= {(a, b), (b, a)}

    def passes(self, source: int, target: int) -> bool:
        """Both ways open now."""
        return not self.cuts & {(source, target), (target, source)}

    def _delay(self) -> int:
        faults, world = self.faults, self.world
        if world.chance(faults.slow):
            world.counts["messages delayed"] += 1
            return world.between(*faults.slow_us)
        return world.between(*faults.delay_us)

    def _carry(self, source: int, target: int, action: Callable[..., None], *args: Any) -> None:
        """Carry something over one link, or lose it, or twice. A cut counts at both ends."""
        world = self.world
        self.sent += 1
        if not self._leaves(source, target):
            return
        self._travel(source, target, action, args)
        if world.chance(self.faults.duplicate):
            world.counts["messages duplicated"] += 1
            self._travel(source, target, action, args)

    def _leaves(self, source: int, target: int) -> bool:
        """Neither cut off nor lost."""
        counts = self.world.counts
        if (source, target) in self.cuts:
            both = (target, source) in self.cuts
            counts["messages stopped by a partition" if both else "messages cut one way"] += 1
            return False
        if self.world.chance(self.faults.loss):
            counts["messages lost"] += 1
            return False
        return True

    def _travel(
        self, source: int, target: int, action: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        world, link = self.world, (source, target)
        delay = self._delay()
        arrives = world.now_us + delay
        if arrives < self.arrivals.get(link, 0):
            world.counts["messages reordered"] += 1
        self.arrivals[link] = max(arrives, self.arrivals.get(link, 0))
        world.after(delay, self._arrive, source, target, action, args)

    def _arrive(
        self, source: int, target: int, action: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if (source, target) not in self.cuts:
            action(*args)

    def send(self, source: int, target: int, message: object) -> None:
        """A message to the process on ``target``; it gets ``receive(source, message)``."""
        self._carry(source, target, self._deliver, source, target, message)

    def _deliver(self, source: int, target: int, message: object) -> None:
        machine = self.machines.get(target)
        if machine is not None:
            machine.deliver("receive", source, message)

    def call(  # noqa: PLR0917
        self,
        source: int,
        target: int,
        method: str,
        request: object,
        answered: Callable[[Any], None],
        timeout_ms: int = 2000,
    ) -> None:
        """Ask the process on ``target``: it gets ``serve_<method>(source, request, reply)``.

        ``answered`` is called once on the asking process if that still lives. Requests are neither
        duplicated nor reordered within a link's delay by TCP, but may be lost with their answer.
        """
        asker = self.machines.get(source)
        generation = asker.generation if asker is not None else 0
        heard = False

        def hear(answer: object) -> None:
            nonlocal heard
            if heard:
                return
            heard = True
            if asker is None:
                answered(answer)
            else:
                asker.run_inside(generation, answered, answer)

        def reply(answer: object) -> None:
            if not heard and (target, source) not in self.cuts:
                self.world.after(self._delay(), back, answer)

        def back(answer: object) -> None:
            if (target, source) not in self.cuts:
                hear(answer)

        def arrive() -> None:
            machine = self.machines.get(target)
            if machine is None or (source, target) in self.cuts:
                return
            if machine.app is None:
                if machine.powered:
                    self.world.after(self._delay(), back, REFUSED)
                return
            machine.deliver(f"serve_{method}", source, request, reply)

        self.sent += 1
        if self._leaves(source, target):
            self.world.after(self._delay(), arrive)
        self.world.after(timeout_ms * MS, hear, NO_ANSWER)
