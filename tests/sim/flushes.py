"""Fsyncs of a simulated node's logs: the twin of ``node/pool``.

A flush takes time, those of one log run one after another, and whoever asks while one runs is
served by the next, together with all others that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kept.replication.partition import Partition
from tests.sim.machine import Machine

Done = Callable[[], None]


def nothing() -> None:
    """Whoever waits for a log of a directory that failed has been told, or asks again."""


class Waiting(NamedTuple):
    """What is to be done when the log is durable, and when it cannot be."""

    then: Done
    failed: Done


class Flushes:
    """See the module. ``attempt`` does something on the disk; False: its directory failed."""

    def __init__(self, machine: Machine, attempt: Callable[[Done], bool]) -> None:
        self.machine = machine
        self.attempt = attempt
        self.running: dict[Partition, list[Waiting]] = {}
        self.later: dict[Partition, list[Waiting]] = {}

    def flush(
        self, partition: Partition, end_offset: int, then: Done, failed: Done = nothing
    ) -> None:
        """Go on when everything below ``end_offset`` is durable, or was cut meanwhile."""
        if end_offset <= partition.log.recovery_point:
            then()
        else:
            self._start(partition, [Waiting(then, failed)])

    def _start(self, partition: Partition, waiting: list[Waiting]) -> None:
        if partition in self.running:
            self.later.setdefault(partition, []).extend(waiting)
            return
        ticket = partition.flush_ticket()
        if ticket is None:
            for one in waiting:
                one.then()
            return
        self.running[partition] = waiting

        def run() -> None:
            if self.attempt(ticket.run):
                self.machine.after_us(50, done)
                return
            for one in self.running.pop(partition) + self.later.pop(partition, []):
                one.failed()

        def done() -> None:
            ticket.done()
            for one in self.running.pop(partition):
                one.then()
            later = self.later.pop(partition, None)
            if later is not None:
                self._start(partition, later)

        self.machine.after_us(self.machine.world.between(*self.machine.disk_us), run)
