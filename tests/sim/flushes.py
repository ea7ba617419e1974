"""Fsyncs of a simulated node's logs: the twin of ``node/pool``.

A flush takes time, those of one log run one after another, and whoever asks while one runs is
served by the next, together with all others that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from kept.replication.partition import Partition
from tests.sim.machine import Machine

Done = Callable[[], None]


class Flushes:
    """See the module. Errors end the process (:meth:`Machine._guarded`), as of a last directory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: dict[Partition, list[Done]] = {}
        self.later: dict[Partition, list[Done]] = {}

    def flush(self, partition: Partition, end_offset: int, then: Done) -> None:
        """Go on when everything below ``end_offset`` is durable, or was cut meanwhile."""
        if end_offset <= partition.log.recovery_point:
            then()
        else:
            self._start(partition, [then])

    def _start(self, partition: Partition, waiting: list[Done]) -> None:
        if partition in self.running:
            self.later.setdefault(partition, []).extend(waiting)
            return
        ticket = partition.flush_ticket()
        if ticket is None:
            for one in waiting:
                one()
            return
        self.running[partition] = waiting

        def run() -> None:
            ticket.run()
            self.machine.after_us(50, done)

        def done() -> None:
            ticket.done()
            for one in self.running.pop(partition):
                one()
            later = self.later.pop(partition, None)
            if later is not None:
                self._start(partition, later)

        self.machine.after_us(self.machine.world.between(*self.machine.disk_us), run)
