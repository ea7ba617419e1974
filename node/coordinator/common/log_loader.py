"""Reading a partition of an internal topic into a core.

A record is a step: a large partition takes as long as it takes, but no client of this node waits
for more than a slice of time. Nor where many partitions are read at once, as after a start: their
steps share the slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kept.storage.records import BatchHeader, headers, scan

if TYPE_CHECKING:
    from kept.replication.partition import Partition
    from kept.steps import Steps

LOAD_SLICE_BYTES: Final = 16 * 1024
"""Read and checked in one step, with the first of its records. Kafka's
``offsets.load.buffer.size`` is larger, since a thread does it there."""
MAX_INFLATED_BYTES: Final = 128 << 20
"""Inflated records of one batch: a group has thousands of members at most."""

Replay = Callable[[BatchHeader, int, memoryview | None, memoryview | None], None]
"""Given each record: its batch, offset, key, value; those of control batches, too."""


def load(partition: Partition, replay: Replay) -> Steps[int]:
    """Replay what is committed in ``partition``; the number of records.

    Raises DamagedData, CorruptMessage (records of a newer Kafka, or damaged ones),
    KafkaStorageError.
    """
    offset, count = partition.log_start_offset, 0
    while offset < partition.high_watermark:
        data = partition.read_batches(offset, LOAD_SLICE_BYTES)
        if not data:
            break
        for _, header in headers(data):
            offset = max(offset, header.next_offset)
        count += yield from replay_batches(data, replay)
    return count


def replay_batches(data: bytes, replay: Replay) -> Steps[int]:
    """Replay whole batches, a record a step; the number of records."""
    columns = scan(data, inflate_limit=MAX_INFLATED_BYTES)
    for index in range(columns.count):
        batch = columns.batches[columns.batch_index[index]]
        replay(batch, columns.offsets[index], columns.key(index), columns.value(index))
        yield
    return columns.count
