"""Partitions in tests: real logs, checked batches, becoming the leader."""

from __future__ import annotations

import uuid
from functools import partial

from kept.replication.partition import Partition
from kept.storage.disk import Disk
from kept.storage.log.log import Log
from kept.storage.records import build_batch, check, records
from kept.storage.types import LogConfig
from tests.support.logs import NOW, RULES, TP

TOPIC_ID = uuid.UUID(int=5)
config = partial(LogConfig, segment_bytes=2000)


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
