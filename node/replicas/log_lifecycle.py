"""Logs that come to this node's disks and leave them while it serves, in a queue of their own.

Roles of logs that are open change at once, with the entry of the metadata log that says so; what
must wait for the disk (creating, opening and renaming logs) waits here, so that a failover never
waits for the creation of thousands of partitions.

The queue holds partitions, not instructions. When the turn of a partition comes, what is on the
disk is made what the image *of then* says: first the log that is not wanted any more is renamed,
then the one that is wanted is created. So changes of one partition keep their order whatever came
between: a topic that is deleted while it waits is never made, one that is created anew under its
name gets a new log, and a log takes the role that the newest image gives it.

Logs that were left closed for want of open files come back to it when others have gone, and every
:data:`RETRY_S`, as many as there are open files for by then; so do those that a bug of ours, or a
want of descriptors, kept from being renamed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from kept.node.runtime.logging import log
from kept.storage.directory import ClosedLog
from kept.storage.errors import MachineError, ResourceExhausted
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.replicas.local_replica import LocalDirectory, LocalReplica
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.runtime.runtime import Runtime
    from kept.storage.log.log import Log

PARTITIONS_A_TURN: Final = 256
"""Partitions whose logs are changed before those that came meanwhile are looked at."""
RETRY_S: Final = 30.0
"""Before logs that were left closed, or not renamed, are tried again, and again."""


class _Leaving:
    """A log that is not wanted any more. ``hosted``: the replica that it was, if it was one."""

    __slots__ = ("directory", "hosted", "log")

    def __init__(
        self, directory: LocalDirectory, log_: Log | ClosedLog, hosted: LocalReplica | None
    ) -> None:
        self.directory = directory
        self.log = log_
        self.hosted = hosted


class ReplicaOpener(Protocol):
    """Who opens logs when their turn has come."""

    @property
    def left_closed(self) -> Collection[TopicPartition]:
        """Logs that there were too few open files for."""

    def may_open(self) -> list[TopicPartition]:
        """Those of :attr:`left_closed` that there are open files for now."""

    async def open_wanted(self, partitions: Iterable[TopicPartition]) -> None:
        """Create or open those that the image wants here and that are not open."""


class LogLifecycle:
    """Makes the logs on this node's disks those that the image wants, partition by partition. All
    calls are made on the node's loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        failures: LogDirFailureChannel,
        opener: ReplicaOpener,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._failures = failures
        self._opener = opener
        self._due: dict[TopicPartition, set[int]] = {}
        """Partitions in the order of their turns, with the entries that wait for each."""
        self._begun: frozenset[TopicPartition] = frozenset()
        """Those whose turn it is."""
        self._leaving: dict[TopicPartition, _Leaving] = {}
        self._entries: Counter[int] = Counter()
        """How many partitions each entry waits for, those whose turn it is included."""
        self._led_from: dict[TopicPartition, int] = {}
        """The entry that made this node the leader of a log that is not open."""
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._retry_timer: asyncio.TimerHandle | None = None
        self.removed = 0
        """Replicas that were to go."""

    @property
    def is_idle(self) -> bool:
        """No log is made or deleted."""
        return self._task is None

    @property
    def waiting(self) -> int:
        """How many partitions wait for their turn."""
        return len(self._due)

    # What is to change.

    def create(self, tp: TopicPartition, index: int, *, leads: bool = False) -> None:
        """Entry ``index`` wants a log that is not here. ``leads``: it made this node the leader of
        a partition that another one led.
        """
        if leads:
            self._led_from.setdefault(tp, index)
        self._want(tp, index)

    def remove(self, tp: TopicPartition, hosted: LocalReplica, index: int) -> None:
        """Entry ``index`` wants a log no more; nobody serves it since this call."""
        self.removed += 1
        self._leaving[tp] = _Leaving(hosted.directory, hosted.partition.log, hosted)
        self._want(tp, index)

    def forget(self, tp: TopicPartition, index: int) -> None:
        """Entry ``index`` wants no log where none is open: one that is being made goes again."""
        if tp in self._due or tp in self._begun:
            self._want(tp, index)

    def remove_unwanted(
        self, directory: LocalDirectory, log_: Log | ClosedLog, index: int | None = None
    ) -> None:
        """A log was not wanted any more when it was made; or it was left closed, and entry
        ``index`` wants it no more.
        """
        self._leaving[log_.topic_partition] = _Leaving(directory, log_, None)
        self._want(log_.topic_partition, index)

    def retry_later(self) -> None:
        """A log was left closed for want of open files, or not renamed."""
        if self._retry_timer is None and not self._closed:
            self._retry_timer = self._runtime.loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        for tp in (*self._leaving, *self._opener.may_open()):
            self._want(tp, None)
        if self._opener.left_closed:
            self.retry_later()

    def _want(self, tp: TopicPartition, index: int | None) -> None:
        if self._closed:
            return
        entries = self._due.setdefault(tp, set())
        if index is not None and index not in entries:
            entries.add(index)
            self._entries[index] += 1
        if self._task is None:
            self._task = self._runtime.loop.create_task(self._run())

    # Waiting for it.

    async def done(self, index: int) -> None:
        """Wait until the disks are as entry ``index`` wanted them, or a later one."""
        while index in self._entries and not self._closed:
            await self._moved.wait()

    async def done_up_to(self, index: int) -> None:
        """The same for all entries up to ``index``."""
        while any(entry <= index for entry in self._entries) and not self._closed:
            await self._moved.wait()

    def led_up_to(self, index: int) -> int:
        """Up to which entry, ``index`` at most, this node leads what it was made the leader of:
        a broker that stops hands over before it goes, to logs that are open.
        """
        return min([index, *(entry - 1 for entry in self._led_from.values())])

    async def stop(self) -> None:
        """Change nothing more; what has begun is over when this returns."""
        self._closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._notify()

    # Changing it.

    async def _run(self) -> None:
        try:
            while self._due and not self._closed:
                turn = list(islice(self._due, PARTITIONS_A_TURN))
                waiting = {tp: self._due.pop(tp) for tp in turn}
                self._begun = frozenset(turn)
                try:
                    await self._change(turn)
                # A bug of ours: the next partitions are still changed.
                except Exception as error:  # noqa: BLE001
                    log.exception("logs not changed", error, first=str(turn[0]), count=len(turn))
                self._begun = frozenset()
                for tp, entries in waiting.items():
                    if tp not in self._due and tp not in self._leaving:
                        self._led_from.pop(tp, None)
                    self._entries.subtract(entries)
                self._entries = +self._entries
                self._notify()
        finally:
            self._task = None

    def _notify(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _change(self, turn: list[TopicPartition]) -> None:
        leaving = {tp: self._leaving.pop(tp) for tp in turn if tp in self._leaving}
        if leaving:
            await self._mark_deleted(leaving)
            for tp in islice(self._opener.may_open(), len(leaving)):
                self._want(tp, None)
        # Where the old log still has the name, none is made.
        await self._opener.open_wanted([tp for tp in turn if tp not in self._leaving])

    async def _mark_deleted(self, leaving: dict[TopicPartition, _Leaving]) -> None:
        """Rename logs; what a bug of ours keeps from it, or a want of descriptors, stays in
        :attr:`_leaving`.
        """
        quiet: dict[LocalDirectory, dict[TopicPartition, _Leaving]] = {}
        for tp, replica in leaving.items():
            try:
                if replica.hosted is not None:
                    await replica.hosted.manifests.close()
                if not isinstance(replica.log, ClosedLog):
                    await replica.directory.pool.wait_idle(replica.log)
            except Exception as error:  # noqa: BLE001
                self._not_renamed({tp: replica}, error)
            else:
                quiet.setdefault(replica.directory, {})[tp] = replica
        for directory, replicas in quiet.items():
            logs = [(replica.log, uuid.uuid4()) for replica in replicas.values()]
            try:
                await directory.pool.run_apart(
                    directory.directory.mark_all_deleted, logs, self._runtime.now_ms()
                )
            except MachineError as error:
                self._failures.fail(directory, error)
                if isinstance(error, ResourceExhausted):
                    self._try_again(replicas)
            except Exception as error:  # noqa: BLE001
                self._not_renamed(replicas, error)
            else:
                for deleted, _ in logs:  # its objects may stay until garbage is collected
                    if not isinstance(deleted, ClosedLog):
                        for segment in deleted.segments:
                            segment.close_file(deleted=True)
                removals = [
                    (replica.log.topic_id, replica.log.topic_partition.partition)
                    for replica in replicas.values()
                ]
                self._metadata.raft_node.history.forget_removed(removals)

    def _not_renamed(self, replicas: dict[TopicPartition, _Leaving], error: Exception) -> None:
        """A bug of ours: try these again later, and go on with the others."""
        first = next(iter(replicas))
        log.exception("logs not renamed", error, first=str(first), count=len(replicas))
        self._try_again(replicas)

    def _try_again(self, replicas: dict[TopicPartition, _Leaving]) -> None:
        self._leaving.update(replicas)
        self.retry_later()
