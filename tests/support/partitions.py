"""Partitions in tests: real logs, checked batches, becoming the leader."""

from __future__ import annotations

import uuid
from functools import partial

from kept.replication.partition import Partition
from kept.storage.disk import Disk
from kept.storage.log.log import Log
from kept.storage.records import CheckRules, build_batch, check, records
from kept.storage.types import MAX_INT64, LogConfig, TimestampType, TopicPartition

NOW = 1_700_000_000_000
TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=5)
config = partial(LogConfig, segment_bytes=2000)
RULES = CheckRules(
    compacted=False,
    max_batch_bytes=1 << 20,
    max_inflated_bytes=1 << 24,
    timestamp_type=TimestampType.CREATE_TIME,
    timestamp_before_max_ms=MAX_INT64,
    timestamp_after_max_ms=MAX_INT64,
    compression_type="producer",
)


def checked(
    count: int = 1,
    *,
    timestamp: int = NOW,
    pid: int = -1,
    sequence: int = -1,
    epoch: int | None = None,
    is_transactional: bool = False,
):
    """A batch of ``count`` records with ascending timestamps, checked."""
    rows = [(timestamp + i, b"k", b"v" * 20, ()) for i in range(count)]
    if epoch is None:
        epoch = 0 if pid >= 0 else -1
    data = build_batch(
        rows,
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=is_transactional,
    )
    return check(memoryview(bytearray(data)), RULES, NOW)


def produce(partition: Partition, count: int = 1, **fields):
    info = partition.append(checked(count, **fields), NOW)
    partition.write()
    return info


def open_log(disk: Disk, directory: str = "/d/t-0", **options) -> Log:
    given = options.pop("config", config())
    return Log.open(directory, TP, TOPIC_ID, given, disk, now_ms=NOW, **options)


def lead(partition: Partition, epoch: int = 0, replicas=(0,), isr=None, version: int = 0) -> None:
    ticket = partition.become_leader(epoch, version, isr or replicas, replicas, NOW)
    if ticket is not None:
        ticket.run()
        ticket.done()


def offsets(partition: Partition, fetched) -> list[int]:
    """The offsets of the records in a fetched slice."""
    if fetched.slice is None:
        return []
    return [record.offset for record in records(partition.log.disk.pread(*fetched.slice))]
