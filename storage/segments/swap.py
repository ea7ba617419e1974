"""Replacing segments by cleaned ones so that reads are right at every moment and after a crash
(rule 11).

The cleaner writes ``<base>.log.cleaned`` (and, if it wants, the indexes) and fsyncs them. Then, for
one plan, ascending by group (:mod:`kept.storage.log.segment_swapper`):

1. every output becomes ``.swap``, in descending order of offset; the directory is fsynced;
2. group by group: the inputs become ``.deleted``, the outputs lose their suffix;
3. the directory is fsynced; the ``.deleted`` files go after ``file.delete.delay.ms``.

On start: ``.deleted`` files go; every ``.swap`` whose base is >= the lowest ``.cleaned`` goes, for
step 1 did not end; ``.cleaned`` go; the remaining ``.swap`` are completed. Which inputs they
replace says the plan on disk; without one (a data directory of Apache Kafka) it is what Kafka does,
from the ``.swap``'s last offset. This stands on file systems that keep the order of renames within
a directory, as journaling ones do.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.segments.segment import SCAN_BYTES, Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapGroup:
    """Segments by base offset: ``output_bases`` take the place of ``input_bases``."""

    output_bases: tuple[int, ...]
    input_bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What one pass replaces: groups in ascending order of offset."""

    groups: tuple[SwapGroup, ...]


def open_output(disk: Disk, directory: str, base_offset: int, index_interval_bytes: int) -> Segment:
    """Open the output ``<base>.log.cleaned`` with the indexes that lie beside it; without them, or
    when they are no good (rule 23), they are made and durable when this returns.

    The ``.log`` is closed again, and opens by its final name when that is first read: no output
    keeps a descriptor that nobody uses. Runs anywhere: only ``.cleaned`` files are touched, all
    others stay.
    """
    path = layout.segment_file(directory, base_offset, layout.LOG, layout.CLEANED)
    stat = disk.stat(path)
    segment = Segment(
        disk,
        directory,
        base_offset,
        size_bytes=stat.size_bytes,
        mtime_ms=stat.mtime_ms,
        index_interval_bytes=index_interval_bytes,
        state=layout.CLEANED,
    )
    segment.file = disk.open_read(path)
    try:
        segment.open_closed()
    except (FileNotFoundError, DamagedData):
        _build_indexes(disk, segment)
    segment.flushed = True
    segment.close_file()
    segment.index.path = segment.path(layout.INDEX)
    segment.time_index.path = segment.path(layout.TIME_INDEX)
    return segment


def _build_indexes(disk: Disk, segment: Segment) -> None:
    segment.reset_indexes()
    for batch in segment.walk(0, segment.size_bytes, SCAN_BYTES):
        segment.index_batch(batch)
    segment.time_index.append(segment.max_timestamp, segment.max_timestamp_offset)
    segment.index.save()
    segment.time_index.save()
    disk.fsync(disk.open_read(segment.index.path))
    disk.fsync(disk.open_read(segment.time_index.path))


def finish(disk: Disk, directory: str, plan: SwapPlan | None) -> set[int]:
    """Bring a swap that a crash interrupted to its beginning or its end; see the module.

    Returns the base offsets of segments that had been retired, and whose files went now.
    """
    states: dict[str, list[tuple[int, str]]] = {}
    for name in disk.listdir(directory):
        if name.endswith(layout.TEMPORARY):
            disk.unlink(f"{directory}/{name}")
            continue
        parsed = layout.parse_segment_file(name)
        if parsed is not None and parsed.state:
            states.setdefault(parsed.state, []).append((parsed.base_offset, name))
    if not states:
        return set()
    for _, name in states.get(layout.DELETED, []):
        disk.unlink(f"{directory}/{name}")
    cleaned = states.get(layout.CLEANED, [])
    lowest = min((base for base, _ in cleaned), default=None)
    swaps: set[int] = set()
    for base, name in states.get(layout.SWAP, []):
        if lowest is not None and base >= lowest:
            disk.unlink(f"{directory}/{name}")
        else:
            swaps.add(base)
    for _, name in cleaned:
        disk.unlink(f"{directory}/{name}")
    if swaps:
        logger.warning("%s: completing the swap of segments %s", directory, sorted(swaps))
        _complete(disk, directory, _groups(disk, directory, plan, swaps))
    disk.fsync_dir(directory)
    return {base for base, _ in states.get(layout.DELETED, [])}


def _groups(disk: Disk, directory: str, plan: SwapPlan | None, swaps: set[int]) -> list[SwapGroup]:
    if plan is not None:
        return [group for group in plan.groups if swaps & set(group.output_bases)]
    groups = []
    bases = [
        parsed.base_offset
        for parsed in map(layout.parse_segment_file, disk.listdir(directory))
        if parsed is not None and parsed.kind == layout.LOG and not parsed.state
    ]
    for base in sorted(swaps):
        end = _next_offset(disk, directory, base)
        inputs = tuple(b for b in bases if base <= b < end)
        groups.append(SwapGroup((base,), inputs))
    return groups


def _next_offset(disk: Disk, directory: str, base: int) -> int:
    path = layout.segment_file(directory, base, layout.LOG, layout.SWAP)
    try:
        stat = disk.stat(path)
    except FileNotFoundError:
        return base
    segment = Segment(disk, directory, base, size_bytes=stat.size_bytes, mtime_ms=0)
    segment.file = disk.open_read(path)
    end = base
    for batch in segment.walk(0, segment.size_bytes, SCAN_BYTES):
        end = batch[3] + 1
    return end


def _complete(disk: Disk, directory: str, groups: list[SwapGroup]) -> None:
    for group in groups:
        waiting = {
            base
            for base in group.output_bases
            if disk.exists(layout.segment_file(directory, base, layout.LOG, layout.SWAP))
        }
        placed = set(group.output_bases) - waiting
        for base in group.input_bases if waiting else ():
            if base not in placed:
                for kind in reversed(layout.SEGMENT_SUFFIXES):
                    disk.unlink(layout.segment_file(directory, base, kind))
        for base in group.output_bases:
            place(disk, directory, base)


def place(disk: Disk, directory: str, base: int) -> None:
    """Drop the ``.swap`` suffix of an output: the ``.log`` first, so that its presence tells that
    nothing with this base is an input's any more.
    """
    for kind in layout.SEGMENT_SUFFIXES:
        with suppress(FileNotFoundError):
            disk.rename(
                layout.segment_file(directory, base, kind, layout.SWAP),
                layout.segment_file(directory, base, kind),
            )
