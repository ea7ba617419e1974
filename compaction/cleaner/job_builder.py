"""Jobs and their sources, made of a :class:`~kept.storage.log.log.Log` and a plan for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kept.compaction.cleaner.job import Job, Producer, Source
from kept.compaction.cleaner.log_snapshot import view
from kept.compaction.cleaner.planner import Limits, Plan
from kept.compaction.manifest.apply import CompactionState
from kept.storage import layout
from kept.storage.producers.producer_state_manager import known_at
from kept.storage.types import Generation

if TYPE_CHECKING:
    from kept.storage.log.log import Log
    from kept.storage.producers.producer_states import ProducerState


def job_for(
    log: Log, plan: Plan, generation: Generation, *, now_ms: int, hash_key: bytes, limits: Limits
) -> Job:
    """The job of a plan: also takes the log's producers and aborted transactions.

    ``hash_key`` is 16 fresh random bytes.
    """
    sources = []
    for segment in plan.segments:
        directory, base = log.directory, segment.base_offset
        sizes = [
            _size(log, layout.segment_file(directory, base, kind))
            for kind in (layout.INDEX, layout.TIME_INDEX)
        ]
        sources.append(
            Source(base, segment.end_offset, segment.size_bytes, segment.mtime_ms, *sizes)
        )
    producers = tuple(
        Producer(producer_id, last_offset, state.epoch)
        for producer_id, state, last_offset in _last_data_below(log, plan.end_offset)
    )
    tp = log.topic_partition
    return Job(
        log.directory,
        tp.topic,
        tp.partition,
        str(log.topic_id),
        generation,
        log.log_start_offset,
        plan.first_dirty,
        plan.end_offset,
        tuple(sources),
        now_ms,
        hash_key,
        log.config,
        producers=producers,
        aborted=tuple(log.aborted_transactions(log.log_start_offset, plan.end_offset)),
        previous=plan.previous,
        horizons_only=plan.horizons_only,
        rewrite=plan.rewrite,
        buffer_bytes=limits.dedupe_buffer_bytes,
        load_factor=limits.load_factor,
        max_bytes_per_second=limits.max_bytes_per_second,
        urgent=plan.overdue,
        check_keys=limits.check_keys,
    )


def _last_data_below(log: Log, end_offset: int) -> Iterator[tuple[int, ProducerState, int]]:
    """(id, state, offset of its last data below ``end_offset``) of the active producers (rule 8).

    What is above may be lost, with this leader, and is not what a pass may rely on. Who has written
    more than five batches there is looked up in the snapshot of that offset.
    """
    snapshot: dict[int, ProducerState] | None = None
    for producer_id, state in log.producers.items():
        offsets = state
        if state.batches and state.batches[0].last_offset >= end_offset:
            if snapshot is None:
                snapshot = dict(known_at(log.disk, log.directory, end_offset))
            offsets = snapshot.get(producer_id, state)
        below = [batch.last_offset for batch in offsets.batches if batch.last_offset < end_offset]
        yield producer_id, state, below[-1] if below else state.last_offset


def base_job(log: Log, generation: Generation, *, now_ms: int, limits: Limits) -> Job:
    """The job of a base generation over the whole log (rule 19); rolls its active segment."""
    if log.active_segment.size_bytes:
        log.roll(now_ms)
    snapshot = view(log, CompactionState(), log.log_end_offset)
    whole = Plan(
        log.topic_partition,
        log.log_end_offset,
        log.log_end_offset,
        "",
        snapshot.segments[:-1],
        0,
        0,
        "base generation",
    )
    job = job_for(log, whole, generation, now_ms=now_ms, hash_key=b"", limits=limits)
    return replace(job, base=True, urgent=True)


def _size(log: Log, path: str) -> int:
    try:
        return log.disk.stat(path).size_bytes
    except FileNotFoundError:
        return 0


def sources_from(log: Log, last_stable_offset: int, end_offset: int) -> list[Source]:
    """The segments of ``log`` from ``end_offset`` on, as far as they are written."""
    snapshot = view(log, CompactionState(), last_stable_offset)
    return [
        Source(s.base_offset, s.end_offset, s.size_bytes, s.mtime_ms)
        for s in snapshot.segments
        if s.base_offset >= end_offset and s.size_bytes
    ]
