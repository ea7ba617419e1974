"""A topic is deleted while one of its logs is flushed: the directory keeps its name till then. Its
files are closed though its objects may live on.
"""

from __future__ import annotations

import contextlib
import os
import time

from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)


def test_the_directory_is_not_renamed_under_the_flush(lone_node, monkeypatch) -> None:
    lone = lone_node()
    lone.create("t")
    node = lone.node
    hosted = node.parts.table.replicas[TP]
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


def test_the_files_of_a_deleted_topic_are_closed(lone_node) -> None:
    lone = lone_node()
    lone.create("t", partitions=3)
    hosted = [lone.node.parts.table.replicas[TopicPartition("t", number)] for number in range(3)]

    def open_files() -> int:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sum(link.startswith(f"{hosted[0].directory.name}/t-") for link in links)

    assert open_files() == 3
    deleted = lone.ask(20, 5, topic_names=["t"], timeout=10_000).responses[0]
    assert deleted.error_code == 0
    assert open_files() == 0 and len(hosted) == 3
