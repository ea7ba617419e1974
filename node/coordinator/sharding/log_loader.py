"""Reading a partition of ``__consumer_offsets`` into a core.

Records of one slice are replayed at once, then the loop has its turn: a large partition takes as
long as it takes, but no client of this node waits for more than a slice.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final

from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.records import decode_record
from kept.storage.records import RecordColumns, headers, scan

if TYPE_CHECKING:
    from kept.replication.partition import Partition

LOAD_SLICE_BYTES: Final = 16 * 1024
"""Read between two turns of the loop: about 2 ms of replay where every record has a batch of its
own. Kafka's ``offsets.load.buffer.size`` is larger, since a thread does it there."""
MAX_INFLATED_BYTES: Final = 128 << 20
"""Inflated records of one batch: a group has thousands of members at most."""
CONTROL_TYPE_COMMIT: Final = 1


async def load(partition: Partition, core: GroupCore) -> int:
    """Replay what is committed in ``partition`` into ``core``; the number of records.

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
        count += replay(data, core)
        await asyncio.sleep(0)
    return count


def replay(data: bytes, core: GroupCore) -> int:
    """Replay whole batches; the number of records."""
    columns = scan(data, inflate_limit=MAX_INFLATED_BYTES)
    for index in range(columns.count):
        batch = columns.batches[columns.batch_index[index]]
        key, value = _fields(columns, index)
        if batch.is_control:
            (kind,) = struct.unpack_from(">h", key or b"\0\0\xff\xff", 2)
            core.end_transaction(batch.producer_id, is_commit=kind == CONTROL_TYPE_COMMIT)
        elif key is not None:
            record = decode_record(key, value)
            if record is not None:
                producer_id = batch.producer_id if batch.is_transactional else -1
                core.replay(record, columns.offsets[index], producer_id)
    return columns.count


def _fields(columns: RecordColumns, index: int) -> tuple[bytes | None, bytes | None]:
    data = columns.data
    key_start, key_length = columns.key_start[index], columns.key_length[index]
    value_start, value_length = columns.value_start[index], columns.value_length[index]
    key = None if key_length < 0 else bytes(data[key_start : key_start + key_length])
    value = None if value_length < 0 else bytes(data[value_start : value_start + value_length])
    return key, value
