"""A machine: a disk that outlives its process, two clocks, and a process that dies and returns.

Kinds of death: ``kill`` keeps the page cache (``kill -9``), ``power_loss`` keeps of it what the
disk had, torn where it hurts. Either may strike in the middle of a disk call
(:meth:`Machine.die_at_next_disk_calls`). A stalled process (SIGSTOP) holds its events and gets
them late, all at once. Wall clocks drift and jump; the monotonic clock only runs at its own rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kept.storage.errors import InvariantViolation, KafkaStorageError, MachineError
from tests.sim.network import Network
from tests.sim.world import MS, Violation, World, check_disk_error
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

DEATHS = {"kill": "processes killed", "power": "power losses", "exit": "processes ended"}


class App(Protocol):
    """What runs on a machine: made by ``boot``, told by ``receive`` and ``serve_...``."""

    def receive(self, sender: int, message: object) -> None: ...


class Exited(Exception):
    """The process ends itself, in order."""


class Machine:
    """One machine, and the process that runs on it. ``boot(machine)`` makes the process's app; it
    may raise.

    ``disk_us``: what one piece of work on the disk takes.
    """

    disk_us: tuple[int, int] = (50, 4 * MS)

    def __init__(
        self, world: World, network: Network, node_id: int, boot: Callable[[Machine], App]
    ) -> None:
        self.world = world
        self.network = network
        self.node_id = node_id
        self.name = f"n{node_id}"
        self.boot = boot
        self.disk = SimulatedDisk(seed=world.between(0, 1 << 30))
        self.app: App | None = None
        self.generation = 0
        self.powered = True
        self.retired = False
        """It is not started any more."""
        self.stalled = False
        self.rate = 1.0
        self.wall_offset_ms = 0
        self.deaths: list[tuple[int, str]] = []
        self.on_death: list[Callable[[Machine, str], None]] = []
        self._held: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        self._death_kind = "kill"
        network.machines[node_id] = self

    # Clocks.

    @property
    def monotonic_ms(self) -> int:
        """Milliseconds since the machine was made, by its own quartz."""
        return int(self.world.now_us * self.rate) // MS

    @property
    def wall_ms(self) -> int:
        """What the clock on the wall says: off by a constant that jumps."""
        return 1_700_000_000_000 + self.world.now_ms + self.wall_offset_ms

    # Life.

    @property
    def alive(self) -> bool:
        return self.app is not None

    def start(self) -> None:
        """Start the process if there is none; it may fail at once."""
        if self.app is not None or self.retired:
            return
        self.generation += 1
        self.powered = True
        self.stalled = False
        self._held.clear()
        self.world.note(self.name, "starts", f"(process {self.generation})")
        self._guarded(self._boot)

    def _boot(self) -> None:
        self.disk.now_ms = self.wall_ms
        app = self.boot(self)
        self.app = app
        started = getattr(app, "started", None)
        if started is not None:
            started()

    def kill(self, why: str = "kill -9") -> None:
        """The process is gone, the page cache is not."""
        self._end("kill", why)

    def power_loss(self) -> None:
        """The machine is dark: what was not synced is gone, or torn, or there."""
        if not self.powered:
            return
        self._end("power", "power loss")
        self.powered = False

    def exit(self, why: str) -> None:
        """The process ended in order."""
        self._end("exit", why)

    def _end(self, kind: str, why: str) -> None:
        was_alive = self.app is not None
        if not was_alive and kind != "power":
            return
        self.app = None
        self.generation += 1
        self.stalled = False
        self._held.clear()
        self.world.note(self.name, f"dies: {why}")
        old = self.disk
        counts = self.world.counts
        counts[DEATHS[kind]] += 1
        if kind == "power":
            counts["power losses with writes not synced"] += any(
                inode.pending for _, inode in old.files()
            )
            self.disk = old.after_power_loss(self.world.between(0, 1 << 30))
        else:
            self.disk = SimulatedDisk(old.root, self.world.between(0, 1 << 30), old.boots)
        self.disk.capacity_bytes = old.capacity_bytes
        self.disk.broken = old.broken
        self.deaths.append((self.world.now_us, kind))
        if was_alive or kind == "power":
            for callback in self.on_death:
                callback(self, kind)

    def die_at_next_disk_calls(self, calls: int, kind: str) -> None:
        """Die within the ``calls``-th changing disk call from now, a write half done."""
        if self.app is not None:
            self._death_kind = kind
            self.disk.crash_at(self.disk.calls + calls)

    def stall(self) -> None:
        """SIGSTOP."""
        if self.app is not None and not self.stalled:
            self.world.note(self.name, "stalls")
            self.stalled = True

    def resume(self) -> None:
        """SIGCONT: what was held is delivered now, in order."""
        if not self.stalled:
            return
        self.world.note(self.name, f"resumes with {len(self._held)} events held")
        self.stalled = False
        self.world.counts["stalls with events held"] += bool(self._held)
        held, self._held = self._held, []
        delay = 0
        for generation, action, args in held:
            delay += self.world.between(0, 100)
            self.world.after(delay, self.run_inside, generation, action, *args)

    # Events of the process.

    def after_ms(self, delay_ms: float, action: Callable[..., None], *args: Any) -> None:
        """A timer of this process, by its own clock."""
        delay = int(delay_ms * MS / self.rate)
        self.world.after(delay, self.run_inside, self.generation, action, *args)

    def after_us(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        """Something of this process takes that long (a disk call in a thread)."""
        self.world.after(delay_us, self.run_inside, self.generation, action, *args)

    def run_inside(self, generation: int, action: Callable[..., None], *args: Any) -> None:
        """Run it in the process of that generation; later if it is stalled, never if it is gone."""
        if generation != self.generation or self.app is None:
            return
        if self.stalled:
            self._held.append((generation, action, args))
            return
        self._guarded(action, *args)

    def deliver(self, method: str, *args: Any) -> None:
        """Something from outside for the app of the current process."""
        if self.app is None:
            return
        if self.stalled:
            self._held.append((self.generation, self.deliver, (method, *args)))
            return
        self._guarded(getattr(self.app, method), *args)

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        try:
            self.disk.now_ms = self.wall_ms
            action(*args)
        except SimulatedCrash as crash:
            what = "writes torn" if str(crash).startswith("write") else "deaths within a disk call"
            self.world.counts[f"{what} by {self._death_kind}"] += 1
            self.generation += self.app is None  # died while starting
            self.app = self.app or _Dying()
            if self._death_kind == "power":
                self.world.note(self.name, f"loses power in {crash}")
                self.power_loss()
            else:
                self.kill(f"kill -9 in {crash}")
        except (MachineError, KafkaStorageError) as error:
            check_disk_error(error)
            self.world.counts["disk errors"] += 1
            self.app = self.app or _Dying()
            self.exit(f"disk error: {error}")
        except Exited as error:
            self.app = self.app or _Dying()
            self.exit(f"exits: {error}")
        except InvariantViolation as error:
            raise Violation("invariants", f"{self.name}: {error}") from error


class _Dying:
    """Stands for a process that dies while it starts."""

    def receive(self, sender: int, message: object) -> None: ...
