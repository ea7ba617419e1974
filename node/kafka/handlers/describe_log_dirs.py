"""DescribeLogDirs: what is where on this node's disks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kept.client.protocol import Values
from kept.node.runtime.error_codes import KAFKA_STORAGE_ERROR
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.apis import KafkaApis
    from kept.node.runtime.yielding import Steps

UNKNOWN_BYTES: Final = -1


async def describe_log_dirs(ctx: RequestContext, request: Any) -> Values:
    """DescribeLogDirs v1-5: each directory with the sizes of the partitions asked for.

    An offline directory is answered with KAFKA_STORAGE_ERROR and no partitions.
    """
    apis = ctx.apis
    wanted = _wanted(request.topics)
    by_directory = await apis.runtime.slices.finish(_partitions(apis, wanted))
    paths = [os.path.abspath(directory.name) for directory in apis.table.directories]
    spaces = await apis.runtime.in_thread(lambda: [_space(path) for path in paths])
    results = []
    for directory, path, (total, usable) in zip(apis.table.directories, paths, spaces, strict=True):
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


def _wanted(topics: Sequence[Any] | None) -> Mapping[str, set[int]] | None:
    """Topic -> partitions; None = everything."""
    if topics is None:
        return None
    wanted: dict[str, set[int]] = defaultdict(set)
    for topic in topics:
        wanted[topic.topic].update(topic.partitions)
    return wanted


def _partitions(
    apis: KafkaApis, wanted: Mapping[str, set[int]] | None
) -> Steps[dict[str, list[Values]]]:
    """Directory -> topics as the response has them."""
    found: dict[str, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
    for tp in sorted(apis.table.partitions):
        yield
        if tp not in apis.table.partitions:
            continue  # deleted meanwhile
        if wanted is None or tp.partition in wanted.get(tp.topic, ()):
            directory, described = _describe(apis, tp)
            found[directory][tp.topic].append(described)
    return {
        directory: [
            {"name": topic, "partitions": partitions} for topic, partitions in topics.items()
        ]
        for directory, topics in found.items()
    }


def _describe(apis: KafkaApis, tp: TopicPartition) -> tuple[str, Values]:
    partition = apis.table.partitions[tp]
    log = partition.log
    described = {
        "partition_index": tp.partition,
        "partition_size": log.size_bytes,
        "offset_lag": max(partition.high_watermark - log.log_end_offset, 0),
        "is_future_key": False,
    }
    return os.path.dirname(os.path.abspath(log.directory)), described


def _space(path: str) -> tuple[int, int]:
    """(bytes of the file system, bytes still free for us); -1 where it cannot be asked."""
    try:
        space = os.statvfs(path)
    except OSError:
        return UNKNOWN_BYTES, UNKNOWN_BYTES
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
