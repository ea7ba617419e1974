"""Stage ``kills``: all nodes are killed together, again and again, over compacted topics.

Producers are idempotent and impatient: some give up what has no answer, and go on in their next
epoch with new sequences, as librdkafka does when messages time out. In each of twelve rounds all
nodes are killed, in half of them one in the middle of a disk call just before. Two come back, in
any order; once the second one starts, each producer must be acknowledged within two seconds if all
replicas had been in sync (``slow-return``), also where manifests are built as slowly as for large
logs: who had everything before a manifest was published joins the ISR before it has applied it, and
a leader below its minimum ISR publishes none that it makes before somebody is back. It may take
longer where a replica had not had everything. The third one comes before or after that, and the
next round need not wait for it. No machine loses power, and all show by their boot that none did.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kept.storage.types import TopicPartition
from tests.sim.nodes_compaction import NodesCompactionHistory
from tests.sim.nodes_faults import CALLS
from tests.sim.nodes_machine import VOTERS, Machine
from tests.sim.world import Violation

ROUNDS: Final = 12
AGAIN_S: Final = 2.0
"""From the start of the second node to an acknowledgement of every producer, at most."""
SOON_S: Final = (0.25, 0.5, 1.0)
PAUSE_S: Final = (0.1, 2.0)
WRITES_S: Final = 0.1
"""The longest pause of a producer between two batches, at least."""
THIRD_S: Final = 2.0
FIXED: Final[dict[str, Any]] = {
    "moves": False,
    "rots": False,
    "unclean": False,
    "forsakes": False,
    "devices": False,
    "durable": False,
    "raises": True,
    "trial": "",
}


class KillsHistory(NodesCompactionHistory):
    """One seed of stage ``kills``."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **FIXED | options)
        self.machines = self.machines[:VOTERS]
        self.operator.kinds = []
        self.settings["log.cleaner.backoff.ms"] = "600"

    def make_clients(self) -> list[Any]:
        """See :meth:`NodesHistory.make_clients`; slower ones, for what counts are the kills."""
        for writer in (clients := super().make_clients()):
            writer.pause_s = max(writer.pause_s, WRITES_S)
        return clients

    async def suffer(self) -> None:
        """All rounds."""
        for _ in range(ROUNDS):
            await asyncio.sleep(self.random.uniform(*PAUSE_S))
            if self.random.random() < 0.6:
                since = self.loop.time()
                await self.until(lambda s=since: self.led(s), "leaders, full ISRs")
            await self._round()

    async def _round(self) -> None:
        random, counts = self.random, self.world.counts
        if random.random() < 0.5:
            random.choice(self.machines).kill_within_disk_call(random.randint(1, CALLS))
            await asyncio.sleep(random.uniform(0, 0.05))
            self.check()
        full = all(self._in_isr(tp, VOTERS) for tp in self.partitions)
        soon = full and (not self.large or all(map(self._complete, self.partitions)))
        for machine in self.machines:
            machine.kill()
            machine.disk.crash_at(0)
        counts["times all died"] += 1
        first, second, third = random.sample(self.machines, VOTERS)
        first.start()
        await asyncio.sleep(random.choice((0.0, 0.0, 1.0)) * random.random())
        second.start()
        began = self.loop.time()
        self.watch(self._start_later(third, random.uniform(0, THIRD_S)))
        while not self.served(began):
            self.check()
            late = self.loop.time() - began
            if late > (AGAIN_S if soon else self.heal_s):
                raise Violation(
                    "slow-return",
                    f"n{first.node_id} and n{second.node_id} are back, and producers wait: "
                    f"{self.described()}",
                )
            await asyncio.sleep(0.01)
        if soon:
            counts["times two went on"] += 1
            counts["times two went on before they had applied"] += not all(
                map(self._applied, (first, second))
            )
            for limit_s in SOON_S:
                counts[f"times within {limit_s} s"] += self.loop.time() <= began + limit_s

    def _complete(self, tp: TopicPartition) -> bool:
        """All replicas hold the same manifest, and each has applied it or need not have to join."""
        found = [machine.replicas.get(tp) for machine in self.machines]
        cores = [one.partition.core.manifests for one in found if one is not None]
        return (
            len(cores) == VOTERS
            and len({core.held for core in cores}) == 1
            and not any(core.storing or core.lost for core in cores)
            and all(core.held == core.applied or core.complete for core in cores)
        )

    def _applied(self, machine: Machine) -> bool:
        """It has applied what it holds of all partitions."""
        cores = [one.partition.core.manifests for one in machine.replicas.values()]
        return all(core.held == core.applied for core in cores)

    async def _start_later(self, machine: Machine, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        machine.start()
