"""A dry run: what a pass would do now, and the life of one key. It runs the survey that the cleaner
runs, so the two cannot disagree; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kept.compaction.cleaner import removal_log
from kept.compaction.cleaner.job import INFLATE_LIMIT, Job, Source
from kept.compaction.cleaner.scan_stats import Progress, no_progress, whole_batches
from kept.compaction.cleaner.survey import Survey, survey
from kept.compaction.manifest.manifest import Manifest
from kept.compaction.strategy import resolve
from kept.storage.disk import Disk
from kept.storage.records import records


@dataclass(frozen=True, slots=True)
class SegmentOutlook:
    """One segment: records now and after, bytes that would go (estimated from the records)."""

    base_offset: int
    end_offset: int
    records: int
    kept: int
    size_bytes: int
    bytes_dropped: int
    tombstones: int
    tombstones_go_at_ms: int | None


@dataclass(frozen=True, slots=True)
class TombstoneOutlook:
    """Tombstones that stay until ``removable_at_ms``; the first pass after that removes them."""

    removable_at_ms: int
    tombstones: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a pass would do. ``removed``: records by reason; ``bytes_dropped`` is an estimate."""

    first_dirty: int
    clean_to: int
    end_offset: int
    records: int
    removed: dict[str, int]
    size_bytes: int
    bytes_dropped: int
    tombstones_kept: int
    scans: int
    keys: int
    map_bytes: int
    segments_before: int
    segments_after: int
    segments: tuple[SegmentOutlook, ...]
    tombstones: tuple[TombstoneOutlook, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One record of a key: ``fate`` is ``survives``, a reason of removal, or ``not cleanable
    yet``. A tombstone that stays for now may go at ``removable_at_ms``.
    """

    offset: int
    timestamp: int
    is_tombstone: bool
    value_bytes: int
    fate: str
    removable_at_ms: int | None = None


def tombstones(manifest: Manifest) -> tuple[TombstoneOutlook, ...]:
    """When each tombstone that a manifest keeps may go, the first ones first."""
    by_time: dict[int, list[int]] = {}
    for segment in manifest.segments:
        for ms, offsets in segment.removable().items():
            low, high = segment.base_offset + offsets.min(), segment.base_offset + offsets.max()
            known = by_time.setdefault(ms, [0, low, high])
            known[0] += len(offsets)
            known[2] = high
    return tuple(TombstoneOutlook(ms, *by_time[ms]) for ms in sorted(by_time))


def removable_at_ms(manifest: Manifest, offset: int) -> int | None:
    """When the tombstone at an offset may go; None where the manifest knows of none."""
    for segment in manifest.segments:
        if segment.base_offset <= offset < segment.end_offset:
            for ms, offsets in segment.removable().items():
                if offset - segment.base_offset in offsets:
                    return ms
    return None


def explain(
    job: Job, disk: Disk, progress: Progress = no_progress, previous: Manifest | None = None
) -> tuple[Explanation, Survey]:
    """Survey the job and say what it found."""
    surveyed = survey(job, disk, progress, previous)
    removed = removal_log.removals(surveyed).counts()
    segments = tuple(_outlooks(surveyed))
    return Explanation(
        first_dirty=job.first_dirty,
        clean_to=surveyed.manifest.clean_to,
        end_offset=job.end_offset,
        records=sum(segment.records for segment in segments),
        removed=removed,
        size_bytes=sum(segment.size_bytes for segment in segments),
        bytes_dropped=sum(segment.bytes_dropped for segment in segments),
        tombstones_kept=sum(segment.tombstones for segment in segments),
        scans=surveyed.scans,
        keys=surveyed.keys,
        map_bytes=surveyed.map_bytes,
        segments_before=len(job.sources),
        segments_after=len(surveyed.groups),
        segments=segments,
        tombstones=tombstones(surveyed.manifest),
    ), surveyed


def _outlooks(found: Survey) -> Iterator[SegmentOutlook]:
    outputs, at = found.manifest.segments, 0
    for facts in found.facts:
        source = facts.source
        while outputs[at].end_offset <= source.base_offset:  # both ascend
            at += 1
        alive = found.survivors[source.base_offset]
        share = 1 - len(alive) / facts.records if facts.records else 0.0
        yield SegmentOutlook(
            source.base_offset,
            source.end_offset,
            facts.records,
            len(alive),
            source.size_bytes,
            int(source.size_bytes * share),
            len(facts.tombstones & alive),
            outputs[at].next_horizon_ms(found.manifest.now_ms),
        )


def life_of_key(
    job: Job, disk: Disk, key: bytes, found: Survey, above: Sequence[Source] = ()
) -> list[KeyRecord]:
    """All records of a key in order, with what the pass would do to each.

    ``key`` is the strategy's; ``above`` are further segments that the pass does not look at.
    """
    strategy = resolve(job.config)
    removals = removal_log.removals(found)
    life = []
    for source in (*job.sources, *above):
        file = disk.open_read(source.path(job.directory))
        for data in whole_batches(disk, file, source.size_bytes, job.chunk_bytes):
            for record in records(data, inflate_limit=INFLATE_LIMIT):
                if record.key is None or strategy.key(record) != key:
                    continue
                fate = "not cleanable yet"
                if record.offset < job.end_offset:
                    reason = removals.reason(record.offset)
                    fate = "survives" if reason is None else reason.value
                size = len(record.value or b"")
                goes = None
                if record.value is None:
                    goes = removable_at_ms(found.manifest, record.offset)
                life.append(
                    KeyRecord(
                        record.offset, record.timestamp, record.value is None, size, fate, goes
                    )
                )
    return life
