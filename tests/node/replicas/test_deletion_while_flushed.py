"""A topic is deleted while one of its logs is flushed: the directory keeps its name till then."""

from __future__ import annotations

import os
import time

from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)


def test_the_directory_is_not_renamed_under_the_flush(lone_node, monkeypatch) -> None:
    lone = lone_node()
    lone.create("t")
    node = lone.node
    hosted = node.parts.table.hosted[TP]
    partition, disk = hosted.partition, node.parts.runtime.disk
    now_ms = node.parts.runtime.now_ms()
    batch = memoryview(bytearray(build_batch([(now_ms, b"k", b"v", ())])))
    outcomes: list[BaseException | None] = []
    real = disk.fsync_dir

    def slow(path: str) -> None:
        """Lets the deletion go first, if it would."""
        until = time.monotonic() + 1
        while path.endswith("/t-0") and os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.005)
        real(path)

    async def flush() -> None:
        partition.append(check(batch, CheckRules(), now_ms), now_ms)
        partition.write()
        partition.log.roll(now_ms)
        monkeypatch.setattr(disk, "fsync_dir", slow)
        hosted.directory.pool.flush(partition.log, outcomes.append)

    lone.run(flush())
    deleted = lone.ask(20, 5, topic_names=["t"], timeout=10_000).responses[0]
    assert deleted.error_code == 0
    assert outcomes == [None]
    assert hosted.directory.offline is None and not node.parts.shutdown.requested.is_set()
    assert not os.path.exists(os.path.join(hosted.directory.name, "t-0"))
