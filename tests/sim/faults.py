"""Which faults a history has, and when: drawn from its seed.

Every history draws its own subset of the kinds of fault (swarm testing: a history of partitions
alone finds what one with everything hides) and its own pace. Whatever dies comes back after a
drawn time, so there is progress between the faults; :meth:`Nemesis.heal` ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sim.machine import Machine
from tests.sim.network import LinkFaults, Network
from tests.sim.world import MS, World

KINDS = (
    "kill",
    "power",
    "torn",
    "all_kill",
    "all_power",
    "term",
    "partition",
    "one_way",
    "isolate_leader",
    "flaky",
    "stall",
    "jump",
    "disk_full",
    "slow_disk",
)
"""``torn``: death in the middle of a disk call. ``all_...``: every machine at once."""


@dataclass(frozen=True)
class Profile:
    """What a history may suffer. ``pace_ms``: mean time between faults."""

    kinds: frozenset[str]
    pace_ms: int
    skewed: bool
    restart_ms: tuple[int, int]

    @classmethod
    def draw(cls, world: World, allowed: Sequence[str] = KINDS) -> Profile:
        """A subset of the kinds, by chance: one kind alone, a few, or nearly all."""
        share = world.random.choice((0.15, 0.35, 0.6, 0.9))
        kinds = [kind for kind in KINDS if kind in allowed and world.chance(share)]
        if not kinds:
            kinds = [world.random.choice([kind for kind in KINDS if kind in allowed])]
        restart = world.random.choice(((5, 50), (50, 800), (300, 6000)))
        return cls(
            frozenset(kinds), world.random.choice((150, 500, 1500)), world.chance(0.5), restart
        )


class Nemesis:
    """Does the faults of a profile to machines and network until :meth:`heal`."""

    def __init__(
        self,
        world: World,
        network: Network,
        machines: Sequence[Machine],
        profile: Profile,
        leader: Callable[[], Machine | None] | None = None,
    ) -> None:
        self.world = world
        self.network = network
        self.machines = list(machines)
        self.profile = profile
        self.leader = leader or (lambda: None)
        self.healed = False
        self.done: dict[str, int] = {}
        self.may_die: Callable[[str, Machine], bool] = lambda kind, machine: True
        for machine in machines:
            machine.on_death.append(lambda dead, _kind: self._back(dead))
        if profile.skewed:
            world.counts["clocks that drift"] += len(self.machines)
            for machine in machines:
                machine.rate = world.random.uniform(0.93, 1.07)
                machine.wall_offset_ms = world.between(-120_000, 120_000)

    def start(self) -> None:
        """The first fault is due after a while."""
        if self.profile.kinds:
            self._next()

    def _next(self) -> None:
        pace = self.profile.pace_ms
        self.world.after(self.world.between(pace // 4, 2 * pace) * MS, self._strike)

    def _strike(self) -> None:
        if self.healed:
            return
        kind = self.world.random.choice(sorted(self.profile.kinds))
        self.done[kind] = self.done.get(kind, 0) + 1
        getattr(self, f"_{kind}")()
        self._next()

    def _pick(self) -> Machine:
        """Any machine, the leader's more often than others."""
        leader = self.leader()
        if leader is not None and self.world.chance(0.35):
            return leader
        return self.world.random.choice(self.machines)

    def _back(self, machine: Machine) -> None:
        """Whatever ended a process, somebody starts it again, also after healing."""
        low, high = (20, 200) if self.healed else self.profile.restart_ms
        self.world.after(self.world.between(low, high) * MS, machine.start)

    # Deaths.

    def _kill(self) -> None:
        machine = self._pick()
        if self.may_die("kill", machine):
            machine.kill()

    def _power(self) -> None:
        machine = self._pick()
        if self.may_die("power", machine):
            machine.power_loss()

    def _torn(self) -> None:
        machine = self._pick()
        kind = self.world.random.choice(("kill", "power"))
        if self.may_die(kind, machine):
            machine.die_at_next_disk_calls(self.world.between(1, 12), kind)

    def _all_kill(self) -> None:
        if self.world.chance(0.4):
            for machine in self.machines:
                machine.kill()

    def _all_power(self) -> None:
        if self.world.chance(0.4):
            for machine in self.machines:
                if self.may_die("power", machine):
                    machine.power_loss()

    def _term(self) -> None:
        """TERM: it hands over, closes its logs and leaves its mark."""
        machine = self._pick()
        self.world.note(machine.name, "is told to end")
        machine.deliver("shut_down")

    # The network.

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        longest = self.world.random.choice((300, 1500, 6000))
        self.world.after(self.world.between(50, longest) * MS, undo)

    def _partition(self) -> None:
        ids = [machine.node_id for machine in self.machines]
        self.world.random.shuffle(ids)
        at = self.world.between(1, max(1, len(ids) - 1))
        self.world.note("network", f"parts {sorted(ids[:at])} from {sorted(ids[at:])}")
        self.network.isolate(set(ids[:at]), set(ids[at:]))
        self._for_a_while(self.network.cuts.clear)

    def _one_way(self) -> None:
        source = self._pick().node_id
        for machine in self.machines:
            if machine.node_id != source and self.world.chance(0.6):
                pair = (source, machine.node_id)
                if self.world.chance(0.5):
                    pair = (pair[1], pair[0])
                self.world.note("network", f"cuts n{pair[0]} -> n{pair[1]}, one way")
                self.network.cut(*pair)
        self._for_a_while(self.network.cuts.clear)

    def _isolate_leader(self) -> None:
        machine = self.leader() or self._pick()
        others = {m.node_id for m in self.machines} - {machine.node_id}
        self.world.note("network", f"isolates {machine.name}")
        self.network.isolate({machine.node_id}, others)
        self._for_a_while(self.network.cuts.clear)

    def _flaky(self) -> None:
        world = self.world
        self.network.faults = LinkFaults(
            delay_us=(200, world.random.choice((2, 10, 60)) * MS),
            slow=world.random.choice((0.0, 0.02, 0.2)),
            loss=world.random.choice((0.0, 0.02, 0.1, 0.3)),
            duplicate=world.random.choice((0.0, 0.02, 0.2)),
        )
        world.note("network", "is flaky:", self.network.faults)
        self._for_a_while(lambda: setattr(self.network, "faults", LinkFaults()))

    # Time and disks.

    def _stall(self) -> None:
        machine = self._pick()
        machine.stall()
        self._for_a_while(machine.resume)

    def _jump(self) -> None:
        machine = self._pick()
        machine.wall_offset_ms += self.world.between(-3600_000, 3600_000)
        self.world.counts["clocks set"] += 1
        self.world.note(machine.name, f"its clock jumps to {machine.wall_ms}")

    def _disk_full(self) -> None:
        machine = self._pick()
        machine.disk.capacity_bytes = machine.disk.used_bytes() + self.world.between(0, 2000)
        self.world.note(machine.name, "its disk is nearly full")

        def room() -> None:
            machine.disk.capacity_bytes = None

        self._for_a_while(room)

    def _slow_disk(self) -> None:
        machine = self._pick()
        machine.disk_us = (20 * MS, 300 * MS)
        self.world.counts["slow disks"] += 1
        self.world.note(machine.name, "its disk is slow")
        self._for_a_while(lambda: setattr(machine, "disk_us", Machine.disk_us))

    def heal(self) -> None:
        """No fault any more: everything runs, every link is whole. Clocks stay as they are."""
        self.healed = True
        self.world.note("nemesis", "heals everything")
        self.network.heal()
        for machine in self.machines:
            machine.disk.capacity_bytes = None
            machine.disk.crash_at(-1)
            machine.disk_us = Machine.disk_us
            machine.resume()
            machine.start()
