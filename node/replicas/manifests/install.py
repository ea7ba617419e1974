"""Putting finished outputs into place: the steps of :mod:`kept.compaction.manifest.apply`.

The same for what a pass here made and for what was built from another replica's manifest. The loop
does the renames of one group of segments at a time; all that blocks longer runs in the directory's
threads (:mod:`kept.storage.log.segment_swapper`). Before the first swap the closed segments are
made durable, those that stay as they are, too, and the recovery point is checkpointed: a start
takes gaps below it for the work of compaction, and gaps above it for that of a power cut. Then the
high watermark, which the caller has raised to the manifest's end, is checkpointed (rule 12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import manifest_store
from kept.node.replicas.checkpoint_offsets import collect_in_steps, high_watermark
from kept.node.replicas.manifests.retry import RETRY_S
from kept.node.runtime.background_steps import in_slices
from kept.storage.directory import Checkpoint
from kept.storage.errors import (
    InvariantViolation,
    KafkaStorageError,
    ResourceExhausted,
    is_device_error,
)

if TYPE_CHECKING:
    from kept.compaction.cleaner.cleaner_run import Result
    from kept.compaction.manifest.apply import CompactionState, Installable
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.manifests.context import ManifestContext
    from kept.storage.log.segment_swapper import SegmentSwapper
    from kept.storage.types import Generation, TopicPartition

FINISH_TRIES: Final = 10
"""Then a want of descriptors is a failure: who stops the node or deletes the log waits for this."""


async def place(
    context: ManifestContext,
    hosted: LocalReplica,
    result: Result,
    based_on: Generation | None,
    check: Callable[[], None],
) -> Installable:
    """Make the manifest recoverable and swap the segments.

    ``based_on`` was applied when the outputs were begun: if it is not any more they are thrown away
    (InvariantViolation). ``check`` raises while all can be taken back and is to be; then nothing
    was placed.
    """
    pool, log_ = hosted.directory.pool, hosted.partition.log
    await _make_durable(hosted, result.end_offset, check)
    changes = hosted.directory.directory.version
    offsets: dict[TopicPartition, int] = {}
    await in_slices(collect_in_steps(context.table, hosted.directory, high_watermark, offsets))
    await _checkpoint(hosted, Checkpoint.HIGH_WATERMARKS, offsets, changes)
    installable: Installable = await pool.run(
        applying.commit_files, log_.directory, context.runtime.disk, result, based_on
    )
    await _swap(context, hosted, installable, check)
    return installable


async def conclude(
    context: ManifestContext, hosted: LocalReplica, installable: Installable
) -> CompactionState:
    """Make the mark name it; a copy of the manifest that is held is not needed any more."""
    pool, directory = hosted.directory.pool, hosted.partition.log.directory
    state: CompactionState = await pool.run(
        partial(
            applying.conclude,
            directory,
            context.runtime.disk,
            installable,
            history_bytes=context.config.current.compaction_history_bytes,
        )
    )
    await pool.run(
        manifest_store.remove_applied,
        directory,
        context.runtime.disk,
        installable.manifest.generation,
    )
    return state


async def checkpoint_cleaned(context: ManifestContext, hosted: LocalReplica) -> None:
    """Write Kafka's ``cleaner-offset-checkpoint`` of the directory."""
    changes = hosted.directory.directory.version
    cleaned = {
        tp: replica.compaction.clean_to
        for tp, replica in context.table.replicas.items()
        if replica.directory is hosted.directory and replica.compaction is not None
    }
    await _checkpoint(hosted, Checkpoint.CLEANER, cleaned, changes)


async def _make_durable(hosted: LocalReplica, end_offset: int, check: Callable[[], None]) -> None:
    """All closed segments are, and a start will know. Once more where the log was cut meanwhile."""
    directory, log_ = hosted.directory, hosted.partition.log
    while True:
        check()
        cuts = log_.truncations
        await hosted.flushed(log_.active_segment.base_offset)
        tp, point = log_.topic_partition, log_.recovery_point
        state, version = directory.directory.state_recovery_point, directory.directory.version
        stated = await directory.pool.run(state, tp, point, version)
        if stated and log_.truncations == cuts:
            break
    if point < end_offset:
        raise InvariantViolation(f"{log_}: durable to {point}, the manifest ends at {end_offset}")
    known = hosted.partition.high_watermark
    if known < end_offset:
        raise InvariantViolation(
            f"{log_}: the high watermark is {known}, the manifest ends at {end_offset}"
        )


async def _checkpoint(
    hosted: LocalReplica, kind: Checkpoint, *what: dict[TopicPartition, int] | int
) -> None:
    directory = hosted.directory
    await directory.pool.run(directory.directory.write_checkpoints, kind, *what)


async def _swap(
    context: ManifestContext,
    hosted: LocalReplica,
    installable: Installable,
    check: Callable[[], None],
) -> None:
    """Prepare in a thread, place group by group here. Until the first group is placed, a plan that
    does not fit any more is withdrawn; after that all of it is placed.
    """
    directory, log_ = hosted.directory, hosted.partition.log
    replacement: SegmentSwapper | None = None
    try:
        try:
            check()
            replacement = applying.begin(log_, installable)
            await directory.pool.run(replacement.prepare)
            check()
            more = replacement.place_next(context.runtime.now_ms())
        except Exception as error:
            if is_device_error(error):
                raise
            if directory.offline is None:
                await directory.pool.run(
                    applying.withdraw,
                    log_.directory,
                    context.runtime.disk,
                    installable,
                    replacement,
                )
            raise
        while more:
            await asyncio.sleep(0)
            _check_online(hosted)
            more = replacement.place_next(context.runtime.now_ms())
        await _finish(context, hosted, replacement)
    finally:
        if replacement is not None:
            replacement.end()


async def _finish(
    context: ManifestContext, hosted: LocalReplica, replacement: SegmentSwapper
) -> None:
    """There is no way back: where it finds no descriptor it is tried again, some times."""
    directory = hosted.directory
    for left in reversed(range(FINISH_TRIES)):
        try:
            await directory.pool.run(replacement.finish)
        except ResourceExhausted as error:
            if not left:
                raise error.as_failure() from error
            context.failures.fail(directory, error)
            await asyncio.sleep(RETRY_S)
            _check_online(hosted)
        else:
            return


def _check_online(hosted: LocalReplica) -> None:
    if hosted.directory.offline is not None:
        raise KafkaStorageError(f"{hosted.partition.log}: {hosted.directory.offline}")
