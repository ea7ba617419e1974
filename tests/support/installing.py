"""A finished pass is put into place as a node does it, for a log that is no node's.

The steps and their order are those of :mod:`kept.node.replicas.manifests.install`, with the
checkpoints of the directory that the log lies in; only threads are none.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kept.compaction.cleaner.cleaner_run import Result
from kept.compaction.manifest.apply import DEFAULT_HISTORY_BYTES, CompactionState
from kept.node.replicas.local_replica import LocalDirectory
from kept.node.replicas.manifests import install as installing
from kept.storage.checkpoints import read_offsets
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.disk import Disk, parent
from kept.storage.log.log import Log
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.replicas import InlinePool


def log_directory(path: str, disk: Disk) -> LogDirectory:
    """The directory that a log lies in, whose path is given; not locked."""
    found = LogDirectory(parent(path), disk, None)
    found.checkpoints = {
        kind: read_offsets(disk, f"{found.path}/{kind.value}") for kind in Checkpoint
    }
    return found


def install(log: Log, result: Result, based_on: Generation | None, now_ms: int) -> CompactionState:
    """Put the files of a pass into place; the state after it. What is in the log is committed."""
    local = LocalDirectory(
        log_directory(log.directory, log.disk), cast("Any", InlinePool()), parent(log.directory)
    )

    async def flushed(_: int) -> None:
        log.flush()

    partition = Given(log=log, high_watermark=log.written_end_offset)
    hosted: Any = Given(directory=local, partition=partition, flushed=flushed)
    context: Any = Given(
        runtime__disk=log.disk,
        runtime__now_ms=lambda: now_ms,
        table__replicas={log.topic_partition: hosted},
        config__current__compaction_history_bytes=DEFAULT_HISTORY_BYTES,
    )

    async def steps() -> CompactionState:
        installable = await installing.place(context, hosted, result, based_on, lambda: None)
        return await installing.conclude(context, hosted, installable)

    return asyncio.run(steps())
