"""What happens to the machines of the stages ``nodes``: faults while they last, and a last trial.

Each history draws its own kinds of fault and their pace. Whatever is broken is mended after a
while; :meth:`Faults.heal` ends all. The trial comes when all is well again, and producers produce:

- ``limp``: a follower lives and does not reach its leader, while both reach the controller: it
  must leave the ISR, and nobody may wait for it;
- ``device``: the log directory fails to which a leader writes: others must lead;
- ``return``: all are killed at once, and two of three come back: they must be enough, soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tests.sim.connections import DELAY_S
from tests.sim.nodes_machine import VOTERS, Machine
from tests.sim.world import Violation

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from tests.sim.nodes_history import NodesHistory

RUN_S: Final = 10.0
CALLS: Final = 200
STOP_S: Final = 40.0
"""A clean stop takes no longer: half of it is for handing over leaderships."""
TRIAL_S: Final = 20.0
AGAIN_S: Final = 5.0
"""From the start of the second node to an acknowledgement of every producer, at most."""
KINDS: Final = ("kill", "disk call", "all", "cut", "isolate", "stop")
MORE_KINDS: Final = ("one way", "slow links", "clock", "device", "full", "term")
TRIALS: Final = ("limp", "device", "return", "")


class Faults:
    """The faults of one history. ``power``: machines may lose power."""

    def __init__(self, history: NodesHistory, *, power: bool) -> None:
        random = history.random
        self.history = history
        self.power = power
        self.kinds = [kind for kind in KINDS if random.random() < 0.6] or ["kill"]
        self.pace_s = random.choice((0.3, 1.0, 2.0))
        self.trial = ""
        self.others: dict[str, Callable[[Machine], object]] = {}
        """Kinds that a stage adds."""
        self.healed = False
        self._random = random
        self._network = history.loop.network

    def draw_more(self, log_dirs: int, trials: Sequence[str]) -> None:
        """The kinds that few histories have, and one of the trials of the stage."""
        extra = self.history.world.extra
        more = [kind for kind in MORE_KINDS if extra.random() < 0.2]
        self.kinds += [kind for kind in more if kind != "device" or log_dirs > 1]
        trials = [one for one in trials if one != "device" or log_dirs > 1]
        self.trial = extra.choice(trials)

    def __repr__(self) -> str:
        power = "power losses, " if self.power else ""
        return f"{power}{', '.join(self.kinds)} every {self.pace_s} s, trial: {self.trial or '-'}"

    def _note(self, machine: Machine, what: str, counted: str) -> None:
        self.history.note("faults", f"n{machine.node_id} {what}")
        self.history.world.counts[counted] += 1

    async def suffer(self) -> None:
        """Faults for a while."""
        random, history = self._random, self.history
        end = history.loop.time() + history.suffer_s
        while history.loop.time() < end:
            await asyncio.sleep(random.uniform(0.05, 2 * self.pace_s))
            history.check()
            if random.random() < 0.5:
                self._mend()
            else:
                self._break(random.choice(self.kinds), random.choice(history.machines))

    def heal(self) -> None:
        """No fault any more. Clocks stay as they are."""
        self.healed = True
        self._network.cuts.clear()
        self._network.delay_s = DELAY_S
        self.history.note("all", "heals")
        for machine in self.history.machines:
            machine.disk.crash_at(0)
            if machine.process is not None and machine.process.stopped:
                machine.process.resume(self.history.loop)
            if machine.troubled:
                self._repair(machine)
            machine.start()

    def _mend(self) -> None:
        random, network, history = self._random, self._network, self.history
        for machine in history.machines:
            if not machine.alive and random.random() < 0.7:
                history.world.counts["processes started again"] += 1
                machine.start()
            elif machine.process is not None and machine.process.stopped:
                machine.process.resume(history.loop)
                history.note("links", f"{machine.node_id} goes on")
            elif machine.troubled and not machine.watched and random.random() < 0.7:
                self._repair(machine)
        if (network.cuts or network.delay_s != DELAY_S) and random.random() < 0.7:
            network.cuts.clear()
            network.delay_s = DELAY_S
            history.note("links", "are whole")

    def _repair(self, machine: Machine) -> None:
        """A device is in order, or has room; the process finds its logs there."""
        self._note(machine, "has devices in order", "devices put in order")
        machine.kill(power=self.power and self._random.random() < 0.5)
        machine.repair()

    def _break(self, kind: str, machine: Machine) -> None:
        random = self._random
        power = self.power and random.random() < 0.6
        others = [m for m in self.history.machines if m is not machine]
        if kind in self.others:
            self.others[kind](machine)
        elif kind == "cut":
            self.cut(machine, random.choice(others), "links cut")
        elif kind == "isolate":
            self.isolate(machine)
        elif kind == "all":
            if random.random() < 0.5:
                self.history.world.counts["times all died"] += 1
                for one in self.history.machines:
                    one.kill(power=power)
        elif machine.alive:
            self._break_process(kind, machine, power=power)

    def isolate(self, machine: Machine) -> None:
        """Cut a machine off from all others; clients still reach it."""
        for other in self.history.machines:
            if other is not machine:
                self.cut(machine, other, "links of isolated nodes")
        self._note(machine, "is cut off from all", "nodes isolated")

    def strike(self, machine: Machine) -> None:
        """A machine dies, and what it had sent to others does not arrive."""
        self.isolate(machine)
        machine.kill(power=self.power and self._random.random() < 0.5)

    def cut(self, one: Machine, other: Machine, counted: str) -> None:
        """Two machines do not reach each other."""
        self._network.cuts |= {(one.host, other.host), (other.host, one.host)}
        self._note(one, f"and n{other.node_id} are cut off", counted)

    def _break_process(self, kind: str, machine: Machine, *, power: bool) -> None:
        random, extra = self._random, self.history.world.extra
        assert machine.process is not None
        if kind == "kill":
            machine.kill(power=power)
            self._note(machine, "is killed", "processes killed between two disk calls")
        elif kind == "disk call":
            machine.kill_within_disk_call(random.randint(1, CALLS), power=power)
            self._note(machine, "is to die", "processes to die within a disk call")
        elif kind == "stop":
            machine.process.stopped = True
            self._note(machine, "is stopped", "processes stopped")
        elif kind == "one way":
            for other in self.history.machines:
                if other is not machine and extra.random() < 0.6:
                    pair = machine.host, other.host
                    self._network.cuts.add(pair if extra.random() < 0.5 else pair[::-1])
            self._note(machine, "is cut off one way", "links cut one way")
        elif kind == "slow links":
            self._network.delay_s = (0.0005, extra.choice((0.02, 0.1, 0.4)))
            self._note(machine, "and all have slow links", "slow links")
        elif kind == "clock":
            machine.set_clock(extra.uniform(-3600, 3600))
            self._note(machine, "has another time", "clocks set")
        elif kind == "device":
            machine.break_device(extra.choice(machine.log_dirs))
            self._note(machine, "has a device that failed", "devices that failed")
        elif kind == "full":
            machine.fill(extra.randint(0, 4000))
            self._note(machine, "has a disk that is nearly full", "full disks")
        elif kind == "term" and machine.ready and not machine.process.told_to_end:
            self._note(machine, "is told to end", "processes told to end")
            self.history.watch(self._terminate(machine))

    async def _terminate(self, machine: Machine) -> None:
        """A clean stop, which may be overtaken by a death."""
        history, process, node = self.history, machine.process, machine.node
        assert process is not None and node is not None
        process.told_to_end = True
        stopping = history.loop.spawn(process, node.stop)
        deadline = history.loop.time() + STOP_S
        while process.alive and not stopping.done():
            await asyncio.sleep(0.05)
            if history.loop.time() > deadline and not process.stopped:
                raise Violation("stopped", f"n{machine.node_id}: a stop takes {STOP_S} s")
        if process.alive:
            stopping.result()
            history.world.counts["processes that ended cleanly"] += 1
            process.die()
        if self.healed:
            machine.start()

    # The last trial.

    async def try_last(self) -> None:
        """What must still hold once all is healed: one fault more, and its judgement."""
        history = self.history
        state = history.checks.register(history.partitions[0]).state
        controller = next((m for m in history.machines if m.controls), None)
        if state is None or state.leader < 0 or controller is None or not self.trial:
            return
        operator = history.operator  # from here on those that are cut off may be all that vote
        operator.kinds = [kind for kind in operator.kinds if kind != "voters"]
        await history.until(lambda: not operator.busy, "the operator's last change of voters")
        controller = next((m for m in history.machines if m.controls), controller)
        since = history.loop.time()
        if self.trial == "limp":
            await self._limp(state, controller)
        elif self.trial == "device":
            await self._lose_device(history.machines[state.leader])
        else:
            await self._return(controller)
        self.heal()
        await history.until(lambda: history.led(since), "all well after the last trial")

    async def _limp(self, state: PartitionRecord, controller: Machine) -> None:
        others = [b for b in state.isr if b not in (state.leader, controller.node_id)]
        if not others or state.leader == controller.node_id:
            return
        leader, slow = self.history.machines[state.leader], self.history.machines[others[0]]
        self.cut(leader, slow, "followers that limp")
        await self._served_soon(TRIAL_S, "liveness", f"n{slow.node_id} limps")

    async def _lose_device(self, leader: Machine) -> None:
        held = leader.replicas.get(self.history.partitions[0])
        if held is not None:
            leader.break_device(held.directory.directory.path)
            self._note(leader, "loses a device", "leaders whose device failed")
            await self._served_soon(TRIAL_S, "liveness", f"a device of n{leader.node_id} failed")

    async def _return(self, controller: Machine) -> None:
        """All are only killed, and their machines show that they have not lost power since."""
        machines = self.history.machines
        if any(one.disk.boots is None for one in machines):
            return
        voters = {voter.node_id for voter in controller.voters}
        for machine in machines:
            machine.kill()
        away = self._random.choice(machines[:VOTERS])
        if voters != set(range(VOTERS)):  # one of them may be all that can be missed, or none
            spare = [one for one in machines if 2 * len(voters - {one.node_id}) > len(voters)]
            away = self._random.choice(spare)
        for machine in machines:
            if machine is not away:
                machine.start()
        self._note(away, "stays away", "times two went on")
        await self._served_soon(self.history.again_s, "slow-return", f"n{away.node_id} is away")

    async def _served_soon(self, seconds: float, check: str, what: str) -> None:
        history = self.history
        since = history.loop.time() + 0.5
        while not history.served(since):
            history.check()
            if history.loop.time() > since + seconds:
                raise Violation(check, f"{what}, others wait: {history.described()}")
            await asyncio.sleep(0.05)
