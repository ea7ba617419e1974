"""Logs in tests: batches, logs on a simulated disk, reading them back."""

from __future__ import annotations

import uuid

from kept.storage.directory import LogDirectory, NewLog
from kept.storage.disk import Disk
from kept.storage.log.log import AppendInfo, Log
from kept.storage.records import CheckRules, build_batch, check, headers, records
from kept.storage.types import MAX_INT64, Codec, LogConfig, TopicPartition

NOW = 1_700_000_000_000
TOPIC_ID = uuid.UUID("11111111-2222-3333-4444-555555555555")
TP = TopicPartition("t", 0)
RULES = CheckRules(
    max_batch_bytes=1 << 20, max_inflated_bytes=1 << 24, timestamp_after_max_ms=MAX_INT64
)


def batch(
    count: int = 1,
    *,
    timestamp: int = NOW,
    size: int = 20,
    codec: Codec = Codec.NONE,
    pid: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    mark: int = 0,
) -> bytearray:
    """A batch of ``count`` records; ``mark`` makes its bytes different from others'."""
    rows = [(timestamp + i, b"k%d" % i, b"%08d" % mark + b"v" * size, ()) for i in range(count)]
    return bytearray(
        build_batch(
            rows, codec=codec, producer_id=pid, producer_epoch=epoch, base_sequence=sequence
        )
    )


def append(
    log: Log, data: bytearray, *, leader_epoch: int = 0, now_ms: int = NOW, write: bool = True
) -> AppendInfo:
    """Check, stage and write a batch."""
    info = log.append(check(memoryview(data), RULES, now_ms), leader_epoch, now_ms)
    if write:
        log.write()
    return info


def contents(log: Log, max_bytes: int = 1 << 20) -> list[tuple[int, int, bytes]]:
    """(base offset, last offset, bytes) of every batch, read as a consumer reads."""
    found: list[tuple[int, int, bytes]] = []
    offset = log.log_start_offset
    while offset < log.written_end_offset:
        data = log.read_batches(offset, max_bytes, log.written_end_offset)
        if not data:
            break
        for position, header in headers(data):
            content = data[position : position + header.size_bytes]
            found.append((header.base_offset, header.last_offset, content))
            offset = header.next_offset
    return found


def values(log: Log) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """(offset, timestamp, key, value) of every record."""
    return [
        (r.offset, r.timestamp, r.key, r.value)
        for _, _, content in contents(log)
        for r in records(content)
    ]


def create_log(
    directory: LogDirectory,
    tp: TopicPartition,
    topic_id: uuid.UUID,
    config: LogConfig,
    *,
    now_ms: int = NOW,
) -> Log:
    """One empty log."""
    (log,) = directory.create_logs([NewLog(tp, topic_id, config)], now_ms=now_ms)
    return log


def open_log(disk: Disk, directory: str = "/d/t-0", **options) -> Log:
    """A log with small segments."""
    config = options.pop("config", None) or LogConfig(segment_bytes=2000, index_interval_bytes=200)
    options.setdefault("now_ms", NOW)
    return Log.open(directory, TP, TOPIC_ID, config, disk, **options)
