"""Reading a partition of an internal topic into a core.

Records of one slice are replayed at once, then the loop has its turn: a large partition takes as
long as it takes, but no client of this node waits for more than a slice. Nor where many partitions
are read at once, as after a start: they take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kept.storage.records import BatchHeader, headers, scan

if TYPE_CHECKING:
    from kept.replication.partition import Partition

LOAD_SLICE_BYTES: Final = 16 * 1024
"""Read between two turns of the loop: about 2 ms of replay where every record has a batch of its
own. Kafka's ``offsets.load.buffer.size`` is larger, since a thread does it there."""
MAX_INFLATED_BYTES: Final = 128 << 20
"""Inflated records of one batch: a group has thousands of members at most."""

Replay = Callable[[BatchHeader, int, memoryview | None, memoryview | None], None]
"""Given each record: its batch, offset, key, value; those of control batches, too."""


async def load(partition: Partition, replay: Replay, turns: asyncio.Lock) -> int:
    """Replay what is committed in ``partition``; the number of records. ``turns``: of all those
    that are read meanwhile; it is held for a slice and a turn of the loop.

    Raises DamagedData, CorruptMessage (records of a newer Kafka, or damaged ones),
    KafkaStorageError.
    """
    offset, count = partition.log_start_offset, 0
    while offset < partition.high_watermark:
        async with turns:
            data = partition.read_batches(offset, LOAD_SLICE_BYTES)
            if not data:
                break
            for _, header in headers(data):
                offset = max(offset, header.next_offset)
            count += replay_batches(data, replay)
            await asyncio.sleep(0)
    return count


def replay_batches(data: bytes, replay: Replay) -> int:
    """Replay whole batches; the number of records."""
    columns = scan(data, inflate_limit=MAX_INFLATED_BYTES)
    for index in range(columns.count):
        batch = columns.batches[columns.batch_index[index]]
        replay(batch, columns.offsets[index], columns.key(index), columns.value(index))
    return columns.count
