"""DescribeLogDirs: what is where on this node's disks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol.messages import Values
from kept.node.runtime.error_codes import KAFKA_STORAGE_ERROR
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.steps import Steps

UNKNOWN_BYTES: Final = -1


@dataclass(frozen=True, slots=True)
class LogDirsHandler:
    """What is where on the disks."""

    runtime: Runtime
    table: ReplicaTable

    def describe_log_dirs(
        self, _ctx: RequestContext, request: Any
    ) -> Steps[Coroutine[Any, Any, Values]]:
        """DescribeLogDirs v1-5: each directory with the sizes of the partitions asked for.

        An offline directory is answered with KAFKA_STORAGE_ERROR and no partitions.
        """
        by_directory = yield from self._partitions(_wanted(request.topics))
        return self._with_space(by_directory)

    async def _with_space(self, by_directory: Mapping[str, list[Values]]) -> Values:
        paths = [os.path.abspath(directory.name) for directory in self.table.directories]
        spaces = await self.runtime.in_thread(lambda: [_space(path) for path in paths])
        results = []
        for directory, path, (total, usable) in zip(
            self.table.directories, paths, spaces, strict=True
        ):
            offline = directory.offline is not None
            results.append(
                {
                    "error_code": KAFKA_STORAGE_ERROR if offline else 0,
                    "log_dir": path,
                    "topics": [] if offline else by_directory.get(path, []),
                    "total_bytes": UNKNOWN_BYTES if offline else total,
                    "usable_bytes": UNKNOWN_BYTES if offline else usable,
                    "is_cordoned": False,
                }
            )
        return {"error_code": 0, "results": results}

    def _partitions(self, wanted: Mapping[str, set[int]] | None) -> Steps[dict[str, list[Values]]]:
        """Directory -> topics as the response has them."""
        by_directory: dict[str, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
        for tp in sorted(self.table.partitions):
            yield
            if tp not in self.table.partitions:
                continue  # deleted meanwhile
            if wanted is None or tp.partition in wanted.get(tp.topic, ()):
                directory, described = self._describe(tp)
                by_directory[directory][tp.topic].append(described)
        return {
            directory: [
                {"name": topic, "partitions": partitions} for topic, partitions in topics.items()
            ]
            for directory, topics in by_directory.items()
        }

    def _describe(self, tp: TopicPartition) -> tuple[str, Values]:
        partition = self.table.partitions[tp]
        log = partition.log
        described = {
            "partition_index": tp.partition,
            "partition_size": log.size_bytes,
            "offset_lag": max(partition.high_watermark - log.log_end_offset, 0),
            "is_future_key": False,
        }
        return os.path.dirname(os.path.abspath(log.directory)), described


def _wanted(topics: Sequence[Any] | None) -> Mapping[str, set[int]] | None:
    """Topic -> partitions; None = everything."""
    if topics is None:
        return None
    wanted: dict[str, set[int]] = defaultdict(set)
    for topic in topics:
        wanted[topic.topic].update(topic.partitions)
    return wanted


def _space(path: str) -> tuple[int, int]:
    """(bytes of the file system, bytes still free for us); -1 where it cannot be asked."""
    try:
        space = os.statvfs(path)
    except OSError:
        return UNKNOWN_BYTES, UNKNOWN_BYTES
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
