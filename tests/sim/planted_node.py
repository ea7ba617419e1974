"""Planted bugs in the order in which the shell of real nodes does things (stages ``node`` and
``nodes``).

Each core does what it did; what is broken is who waits for whom. That a new leader waits until its
epoch is durable (rule 24) is not shown by a lone node: it accepts nobody before that.
"""

from __future__ import annotations

import time
from typing import Any

from kept.node.kafka.handlers.records.delayed_produce import write_staged
from tests.sim.planted import plant
from tests.sim.planted_replicas import RESTS_S

EXECUTORS = "kept.node.runtime.executors"
PRODUCE = "kept.node.kafka.handlers.records.produce"


def answered_by_the_running_flush(original: Any) -> Any:
    """Who asks for a flush while one runs is content with that one, which began before."""

    def flush(self: Any, log: Any, callback: Any = None) -> None:
        running = self._running.get(log)
        if running is None:
            original(self, log, callback)
        elif callback is not None:
            running.append(callback)

    return flush


def answered_before_the_flush(_: Any) -> Any:
    """Whoever wants an fsync is told at once; it runs behind."""

    def flush(self: Any, end_offset: int, callback: Any) -> None:
        self.directory.pool.flush(self.partition.log)
        callback(None)

    return flush


def answered_before_the_write(_: Any) -> Any:
    """Answers leave with this turn of the loop, and batches are written with the next."""

    def write(connection: Any, failed: Any = None) -> None:
        connection.close_run()
        unwritten, connection.unwritten = connection.unwritten, []
        for produced in unwritten:
            produced.acks = 1
            produced.written(failed or {})
        connection.context.runtime.loop.call_soon(write_staged, connection, {})

    return write


def unsynced(_: Any) -> Any:
    def sync(self: Any) -> None:
        return None

    return sync


plant(
    "node-shares-a-running-flush",
    "node",
    1,
    "lost",
    "a flush that began before an append does not make it durable",
    (f"{EXECUTORS}.FlushPool.flush", answered_by_the_running_flush),
)
plant(
    "node-ack-before-flush",
    "node",
    1,
    "lost",
    "with flush.messages=1 an acknowledgement waits for the fsync",
    ("kept.node.replicas.local_replica.LocalReplica.flush", answered_before_the_flush),
)
plant(
    "node-ack-before-write",
    "node",
    3,
    "lost",
    "a batch is written before it is acknowledged",
    (f"{PRODUCE}.write", answered_before_the_write),
)
plant(
    "node-metadata-unsynced",
    "node",
    1,
    "lost stopped",
    "the metadata log is fsynced before a decision is acknowledged (34)",
    ("kept.cluster.metadata.wal.WriteAheadLog._sync", unsynced),
)


def by_the_machines_clock(_: Any) -> Any:
    """Something is measured by a clock that nobody replaces."""

    def monotonic_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    return monotonic_ms


plant(
    "node-real-clock",
    "node",
    1,
    "unsimulated",
    "nothing in a history is taken from the machine that it runs on (one seed is one history)",
    ("kept.node.replicas.maintenance.monotonic_ms", by_the_machines_clock),
)


# Several nodes (stage ``nodes``).


def acknowledged_by_the_leader_alone(_: Any) -> Any:
    """Whoever waits for the high watermark is told at once."""

    def when_committed(self: Any, end_offset: int, callback: Any) -> None:
        callback(None)

    return when_committed


def told_that_all_is_well(_: Any) -> Any:
    """Who still waits when the leader leads no more hears what a commit would have said."""

    def said(self: Any, error: Any) -> None:
        return None

    return said


plant(
    "nodes-ack-before-replicas",
    "nodes",
    5,
    "acknowledged lost order",
    "acks=all waits until the high watermark passes",
    ("kept.replication.partition.Partition.when_committed", acknowledged_by_the_leader_alone),
    suffer_s=2.0,
)
plant(
    "nodes-ack-after-leadership",
    "nodes",
    4,
    "acknowledged lost order",
    "a callback of a leadership that is over acknowledges nothing",
    ("kept.replication.replica.Replica._commit_error", told_that_all_is_well),
)


def lost_while_busy(original: Any) -> Any:
    """What is added while a call is under way is not sent after it."""

    def add(self: Any, key: Any) -> None:
        if self._task is None or key in self._waiting:
            original(self, key)

    return add


plant(
    "nodes-wake-up-lost",
    "nodes",
    3,
    "liveness",
    "what comes while a task works is worked on after it",
    ("kept.node.runtime.tasks.Batcher.add", lost_while_busy),
    heal_s=RESTS_S,
)


def at_once(original: Any) -> Any:
    """A leader appends as soon as it is elected."""

    def serve(self: Any) -> None:
        original(self)
        self._appendable = self._leading

    return serve


def entered_in_memory(_: Any) -> Any:
    """The log, which would save the epoch that it is in before anything is appended, does not."""

    def enter_epoch(self: Any, leader_epoch: int) -> None:
        self.leader_epochs.enter(leader_epoch, self.log_end_offset)
        self._epoch = leader_epoch

    return enter_epoch


plant(
    "nodes-append-before-epoch",
    "nodes",
    3,
    "epoch-durable",
    "the epoch of a leader is durable before it appends (24)",
    ("kept.replication.replica.Replica._serve", at_once),
    ("kept.storage.log.log.Log._enter_epoch", entered_in_memory),
    slow=True,
)
