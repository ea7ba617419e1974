"""Which logs the jobs on a clock look at, so that idle ones cost nothing however many there are.

A log is :attr:`dirty` from its first change after :meth:`gather`
(:meth:`kept.storage.log.log.Log.mark_dirty`): something was written, rolled, cut, replaced or
configured anew. From then on each job has it among its own until that job finds nothing that could
become due without another change; what time alone makes due (rolling) waits in a queue by that
moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kept.storage.types import MAX_INT64

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalReplica
    from kept.storage.log.log import Log

YIELD_EVERY: Final = 32
"""Logs between two readings of the clock, where one costs next to nothing."""


class DirtyLogs:
    """The logs of one node that jobs have to look at."""

    def __init__(self) -> None:
        self.dirty: dict[LocalReplica, None] = {}
        self.unflushed: dict[LocalReplica, None] = {}
        """Something is to be made durable, or will be by ``flush.ms``."""
        self.uncheckpointed: dict[LocalReplica, None] = {}
        """The high watermark may have moved since it was checkpointed, or moves by itself."""
        self.written: dict[LocalReplica, None] = {}
        """Something may have been written since its file was last looked for."""
        self.left = False
        """A log left this node since then: it is to leave the checkpoint."""
        self.leaving: dict[LocalReplica, None] = {}
        """Files wait for ``file.delete.delay.ms``."""
        self._roll_ms: dict[LocalReplica, int] = {}
        self._queue: list[tuple[int, int, LocalReplica]] = []
        """By the moment of their roll; entries that are not in ``_roll_ms`` count no more."""
        self._queued = 0

    def begin(self, hosted: LocalReplica) -> None:
        """A log is here from now on."""
        hosted.partition.log.on_dirty = partial(self.dirty.setdefault, hosted)
        self.dirty[hosted] = None

    def end(self, hosted: LocalReplica) -> None:
        """It is not here any more."""
        hosted.partition.log.is_idle = False
        self.dirty.pop(hosted, None)
        self.written.pop(hosted, None)
        for jobs in (self.unflushed, self.uncheckpointed, self.leaving, self._roll_ms):
            jobs.pop(hosted, None)
        self.left = True

    def gather(self, now_ms: int) -> Iterator[None]:
        """Move the dirty logs to the jobs, in steps; the next change makes a log dirty again.

        ``now_ms``: of the clock that never jumps, for ``flush.ms``.
        """
        taken = 0
        while self.dirty:
            hosted, _ = self.dirty.popitem()
            log = hosted.partition.log
            log.is_idle = True
            if hosted not in self.unflushed:
                self.unflushed[hosted] = None
                log.durability.last_flush_ms = now_ms
            self.written[hosted] = None
            self.uncheckpointed[hosted] = self.leaving[hosted] = None
            due_ms = log.roll_due_ms
            if due_ms is not None and due_ms < self._roll_ms.get(hosted, MAX_INT64):
                self._roll_ms[hosted] = due_ms
                self._queued += 1
                heappush(self._queue, (due_ms, self._queued, hosted))
            taken += 1
            if taken % YIELD_EVERY == 0:
                yield
        if len(self._queue) > 2 * len(self._roll_ms) + YIELD_EVERY:
            self._queue = [
                entry for entry in self._queue if self._roll_ms.get(entry[2]) == entry[0]
            ]
            heapify(self._queue)

    def begin_checkpoint(self) -> None:
        """High watermarks are about to be checkpointed: one that is at the end of its log moves no
        more before that end does.
        """
        self.left = False
        for hosted in list(self.uncheckpointed):
            partition = hosted.partition
            if partition.high_watermark >= partition.log.log_end_offset:
                del self.uncheckpointed[hosted]

    def due_to_roll(self, now_ms: int) -> Iterator[LocalReplica]:
        """The logs whose active segment may be due to be rolled, for its age alone."""
        while self._queue and self._queue[0][0] < now_ms:
            due_ms, _, hosted = heappop(self._queue)
            if self._roll_ms.get(hosted) == due_ms:
                del self._roll_ms[hosted]
                self.dirty[hosted] = None  # whatever comes of it, there is a next moment
                yield hosted


def flushes_later(log: Log) -> bool:
    """Whether a log that needs no flush now may need one without another change."""
    return log.config.flush_ms < MAX_INT64 and log.written_end_offset > log.recovery_point
