"""What the checkpoints of a log directory say of its logs, as it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalDirectory
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.replication.partition import Partition
    from kept.storage.types import TopicPartition


def high_watermark(partition: Partition) -> int:
    """What the high-watermark checkpoint says of a partition."""
    return partition.high_watermark


def recovery_point(partition: Partition) -> int:
    """What the recovery-point checkpoint says of a partition."""
    return partition.log.recovery_point


def log_start(partition: Partition) -> int | None:
    """What the log-start checkpoint says: only starts inside the first segment need words."""
    log_ = partition.log
    start = log_.log_start_offset
    return start if start > log_.segments[0].base_offset else None


def collect_in_steps(
    table: ReplicaTable,
    directory: LocalDirectory,
    value: Callable[[Partition], int | None],
    offsets: dict[TopicPartition, int],
) -> Iterator[None]:
    """Put into ``offsets`` what a checkpoint of a directory holds; a step is one log."""
    for tp, hosted in list(table.replicas.items()):
        if hosted.directory is directory:
            offset = value(hosted.partition)
            if offset is not None:
                offsets[tp] = offset
            yield


def collect(
    table: ReplicaTable, directory: LocalDirectory, value: Callable[[Partition], int | None]
) -> dict[TopicPartition, int]:
    """The same at once."""
    offsets: dict[TopicPartition, int] = {}
    for _ in collect_in_steps(table, directory, value, offsets):
        pass
    return offsets
