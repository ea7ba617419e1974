"""A process that writes a log until it is killed; ``test_log_processes.py`` starts and judges it.

Prints a line for everything that it may rely on: ``written END``, ``synced END``, ``swapped``.
"""

from __future__ import annotations

import sys
import uuid

from kept.storage import layout
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.disk import Disk
from kept.storage.log.log import Log
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.types import MAX_INT64, LogConfig, TopicPartition

NOW = 1_700_000_000_000
TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=77)
CONFIG = LogConfig(segment_bytes=3000, index_interval_bytes=300, file_delete_delay_ms=0)
RULES = CheckRules(timestamp_after_max_ms=MAX_INT64)


def say(*words: object) -> None:
    print(*words, flush=True)


def batch(n: int) -> bytearray:
    rows = [(NOW + n, b"key", b"%08d" % n + b"x" * (n % 97), ()) for _ in range(2)]
    return bytearray(build_batch(rows, producer_id=5, producer_epoch=0, base_sequence=2 * n))


def append(log: Log, n: int, epoch: int) -> None:
    log.append(check(memoryview(batch(n)), RULES, NOW), epoch, NOW)
    log.write()
    say("written", log.written_end_offset)


def clean(log: Log, disk: Disk) -> SwapPlan:
    """Outputs that keep every second batch: two segments into one, then one into one."""
    bases = [s.base_offset for s in log.segments[:3]]
    groups = (SwapGroup((bases[0],), (bases[0], bases[1])), SwapGroup((bases[2],), (bases[2],)))
    for group in groups:
        path = layout.segment_file(log.directory, group.output_bases[0], layout.LOG, layout.CLEANED)
        file, end = disk.open_new(path), 0
        for segment in log.segments[:3]:
            if segment.base_offset in group.input_bases:
                for position, size, base, _, _ in segment.walk(0, segment.size_bytes):
                    if base % 4 == 0:
                        end += disk.writev(file, [segment.read(position, size)], end)
        disk.fsync(file)
    return SwapPlan(groups)


def open_log(path: str, disk: Disk, **options: object) -> tuple[LogDirectory, Log]:
    directory = LogDirectory.open(
        path, disk, cluster_id="c", node_id=0, new_directory_id=TOPIC_ID, now_ms=NOW
    )
    log = directory.open_log(TP, TOPIC_ID, CONFIG, now_ms=NOW, **options)  # type: ignore[arg-type]
    return directory, log


def main(path: str, batches: int) -> None:
    disk = Disk()
    directory, log = open_log(path, disk)
    say("opened", log.log_end_offset)
    first = log.log_end_offset // 2
    for n in range(first, first + batches):
        append(log, n, n // 40)
        if n % 25 == 24:
            log.flush()
            directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: log.recovery_point})
            say("synced", log.recovery_point)
    log.flush()
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: log.recovery_point})
    say("swapping")
    plan = clean(log, disk)
    # As a manifest does: gaps that come are no loss.
    directory.write_checkpoints(Checkpoint.CLEANER, {TP: log.segments[3].base_offset})
    replacement = log.begin_replacement(plan)
    replacement.prepare()
    while replacement.place_next(NOW):
        pass
    replacement.finish()
    replacement.end()
    say("swapped")
    log.delete_expired(NOW)
    log.close()
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: log.recovery_point})
    directory.close()
    say("closed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
