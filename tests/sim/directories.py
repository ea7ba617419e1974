"""The log directories of a simulated node, one or several (JBOD): the twin of ``log.dirs`` in
``node/hosting``, and the fault that is theirs.

A new log goes to the directory with the fewest; one that fails goes offline with its logs, the
others serve on, and with the last one the process ends. Somebody puts a device in order and starts
the process anew: it finds what was written, or what was durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING
from uuid import UUID

from kept.replication.isr import AlterIsrItem
from kept.storage.directory import FoundLog, LogDirectory
from kept.storage.types import TopicPartition
from tests.sim.machine import Machine
from tests.sim.world import MS

if TYPE_CHECKING:
    from kept.cluster.metadata.records import PartitionRecord
    from tests.sim.cluster import ClusterHistory


def paths(count: int) -> list[str]:
    """Where they are."""
    return ["/data", *(f"/data-{number}" for number in range(2, count + 1))]


class Directories:
    """Those of one process; all are opened at its start, or it ends."""

    def __init__(self, machine: Machine, count: int) -> None:
        self.all = [
            LogDirectory.open(
                path, machine.disk, cluster_id="sim", node_id=machine.node_id,
                new_directory_id=UUID(int=1000 * number + machine.node_id), now_ms=machine.wall_ms,
            )
            for number, path in enumerate(paths(count), 1)
        ]  # fmt: skip
        self._homes: dict[TopicPartition, LogDirectory] = {}

    @property
    def ids(self) -> tuple[UUID, ...]:
        return tuple(one.directory_id for one in self.all)

    @property
    def online(self) -> list[LogDirectory]:
        return [one for one in self.all if one.offline is None]

    def scan(self) -> Iterator[tuple[LogDirectory, FoundLog]]:
        """Those offline are listed, too: what is in one of them is not made anew in another."""
        for directory in self.all:
            for entry in directory.scan():
                yield directory, entry

    def place(self, tp: TopicPartition) -> tuple[LogDirectory, bool]:
        """Where a log is, or where it is to be made; and whether it is there."""
        for directory, entry in self.scan():
            if entry.topic_partition == tp and not entry.is_delete:
                self._homes[tp] = directory
                return directory, True
        homes = list(self._homes.values())
        self._homes[tp] = min(self.online, key=homes.count)
        return self._homes[tp], False

    def home(self, tp: TopicPartition) -> LogDirectory:
        """Where a log that was placed is."""
        return self._homes[tp]

    def forget(self, tp: TopicPartition) -> None:
        """It is not here any more."""
        del self._homes[tp]

    def of(self, path: str) -> LogDirectory | None:
        """The directory that a file is in."""
        return next((d for d in self.all if path == d.path or path.startswith(f"{d.path}/")), None)

    def close(self, broker_epoch: int) -> None:
        """Stop in order."""
        for directory in self.all:
            directory.close(clean=True, broker_epoch=broker_epoch)


def resignation(tp: TopicPartition, record: PartitionRecord, node_id: int) -> AlterIsrItem | None:
    """What a node asks the controller that lost its replica (``node/isr_changes``)."""
    if node_id not in record.isr or len(record.isr) < 2:
        return None
    others = tuple((member, -1) for member in record.isr if member != node_id)
    return AlterIsrItem(
        record.topic_id, tp.partition, record.leader_epoch, record.partition_epoch, others,
        not record.unclean,
    )  # fmt: skip


class BrokenDirectories:
    """Devices that fail, one after another, and are put in order after a while."""

    def __init__(self, history: ClusterHistory, random: Random) -> None:
        self.world = history.world
        self.history = history
        self.random = random
        self.healed = False

    def start(self) -> None:
        """The first fails after a while."""
        self.world.after(self.random.randint(200, 4000) * MS, self._strike)

    def _strike(self) -> None:
        if self.healed:
            return
        machine = self.random.choice(self.history.machines)
        path = self.random.choice(paths(self.history.log_dirs))
        if machine.alive and not machine.disk.broken:
            self.break_one(machine, path)
            self.world.after(self.random.randint(100, 6000) * MS, self.mend, machine)
        self.start()

    def break_one(self, machine: Machine, path: str) -> None:
        """The device of a log directory is gone."""
        self.world.note(machine.name, f"the device of {path} fails")
        self.world.counts["devices that failed"] += 1
        machine.disk.broken.add(path)

    def mend(self, machine: Machine) -> None:
        """It is there again, or has room; the process is started anew, to find its logs there."""
        process = getattr(machine.app, "directories", None)
        if machine.disk.broken or (process is not None and process.online != process.all):
            machine.disk.broken.clear()
            if self.random.random() < 0.5:
                machine.power_loss()
            else:
                machine.kill("its device is in order again")

    def heal(self) -> None:
        """All are in order from now on."""
        self.healed = True
        for machine in self.history.machines:
            self.mend(machine)
