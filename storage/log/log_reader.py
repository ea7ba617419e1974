"""Finding things in a log: slices of whole batches, offsets by timestamp, the largest timestamp.

No locks: everything runs on the thread that appends, on immutable segments and on the written part
of the active one. A read inside a gap answers the batch that contains the offset, or the next one
(rule 32).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from kept.storage.disk import Disk, FileSlice
from kept.storage.records import DEFAULT_INFLATE_LIMIT, HEADER_BYTES, read_header, scan
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import Batch, Segment
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import NO_LEADER_EPOCH


class TimestampOffset(NamedTuple):
    """A record found by time; ``leader_epoch`` is -1 where the batch has none."""

    timestamp: int
    offset: int
    leader_epoch: int


MOST_ABORTED: int = 10_000
"""Aborted transactions in one read of committed records: they are listed at a stretch."""

FindRecord = Callable[[Disk, FileSlice, int, int], TimestampOffset | None]
"""Looks into one batch: (disk, the batch, timestamp, first offset)."""


def find_record(
    disk: Disk,
    batch: FileSlice,
    timestamp: int,
    from_offset: int,
    inflate_limit: int = DEFAULT_INFLATE_LIMIT,
) -> TimestampOffset | None:
    """The first record of a batch from ``from_offset`` on that is not older than ``timestamp``. In
    any thread. Raises InflatesBeyondLimit above ``inflate_limit`` bytes, CorruptMessage.
    """
    data = disk.pread(*batch)
    header = read_header(data)
    if header.record_count == 0:
        return None
    columns = scan(data, inflate_limit=inflate_limit)
    epoch = header.partition_leader_epoch
    for offset, at in zip(columns.offsets, columns.timestamps, strict=True):
        if at >= timestamp and offset >= from_offset:
            return TimestampOffset(at, offset, max(epoch, NO_LEADER_EPOCH))
    return None


def end_position(segment: Segment, end_offset: int) -> int:
    """Where the batches below ``end_offset`` end in a segment."""
    if end_offset >= segment.next_offset > segment.base_offset:
        return segment.size_bytes
    batch = segment.locate(end_offset)
    return segment.size_bytes if batch is None else batch[0]


def end_of_whole_batches(segment: Segment, start: Batch, limit: int, max_bytes: int) -> int:
    """End of as many whole batches from ``start`` as fit ``max_bytes``; ``start``'s position if
    none.

    Cut at an index entry, so up to an index interval less than would fit; exact where that is
    nothing.
    """
    position = start[0]
    wanted = position + max_bytes
    if wanted >= limit:
        return limit
    cut = segment.index.position_floor(wanted)
    if cut > position:
        return cut
    end = position
    for batch in segment.walk(position, limit):
        if batch[0] + batch[1] > wanted:
            break
        end = batch[0] + batch[1]
    return end


def read_slice(
    segments: Segments, offset: int, max_bytes: int, end_offset: int, at_least_one: bool
) -> FileSlice | None:
    """Whole batches from the one with ``offset``, all below ``end_offset``, of one segment."""
    index = segments.floor(offset)
    while index < len(segments.bases):
        if segments.bases[index] >= end_offset:
            return None
        segment = segments.loaded(segments[index])
        start = segment.locate(offset)
        if start is not None:
            limit = end_position(segment, end_offset)
            position = start[0]
            if position >= limit:
                return None
            end = end_of_whole_batches(segment, start, limit, max_bytes)
            if end == position:
                if not at_least_one:
                    return None
                end = position + start[1]
            return FileSlice(segment.file, position, end - position)
        index += 1
    return None


def find_timestamp(  # noqa: PLR0917
    disk: Disk,
    segments: Segments,
    timestamp: int,
    log_start_offset: int,
    end_offset: int,
    find: FindRecord = find_record,
) -> TimestampOffset | None:
    """The first record (by offset) from ``log_start_offset`` on, below ``end_offset``, that is not
    older than ``timestamp``, milliseconds since 1970; None where there is none. Raises DamagedData
    and MachineError.
    """
    for index in range(segments.floor(log_start_offset), len(segments)):
        segment = segments[index]
        if segment.max_timestamp < timestamp or segment.base_offset >= end_offset:
            continue
        segments.loaded(segment)
        segment.load_time_index()
        first = max(segment.time_index.floor_offset(timestamp), log_start_offset)
        start = segment.locate(first)
        if start is None:
            continue
        for batch in segment.walk(start[0], segment.size_bytes):
            if batch[2] >= end_offset:
                return None
            if batch[4] >= timestamp:
                where = FileSlice(segment.file, batch[0], batch[1])
                located = find(disk, where, timestamp, log_start_offset)
                if located is not None:
                    return located
    return None


def find_max_timestamp(
    disk: Disk, segments: Segments, log_start_offset: int, find: FindRecord = find_record
) -> TimestampOffset | None:
    """The first record with the largest timestamp of the log (ListOffsets -3)."""
    best: Segment | None = None
    for segment in segments:
        if segment.max_timestamp >= 0 and (
            best is None or segment.max_timestamp > best.max_timestamp
        ):
            best = segment
    if best is None:
        return None
    segments.loaded(best)
    start = best.locate(best.max_timestamp_offset)
    if start is None:
        return None
    where = FileSlice(best.file, start[0], start[1])
    return find(disk, where, best.max_timestamp, log_start_offset)


def aborted_transactions(segments: Segments, start: int, end: int) -> list[AbortedTxn]:
    """Aborted transactions that overlap ``start..end``, as Kafka collects them."""
    overlapping = []
    for index in range(segments.floor(start), len(segments)):
        aborted = segments[index].aborted  # in the order of their markers
        first = bisect_left(aborted, start, key=attrgetter("last_offset"))
        for number in range(first, len(aborted)):
            entry = aborted[number]
            if entry.first_offset < end:
                overlapping.append(entry)
            if entry.last_stable_offset >= end:
                return overlapping
    return overlapping


def bounded_end(segments: Segments, offset: int, end_offset: int) -> int:
    """Where a read from ``offset`` up to ``end_offset`` ends for not many more aborted transactions
    than :data:`MOST_ABORTED` to be in it: those that others had open meanwhile come on top.
    """
    aborted = segments[segments.floor(offset)].aborted
    if len(aborted) <= MOST_ABORTED:
        return end_offset
    first = bisect_left(aborted, offset, key=attrgetter("last_offset"))
    for number in range(first + MOST_ABORTED, len(aborted), MOST_ABORTED):
        begins = aborted[number].first_offset
        if begins > offset:
            return min(begins, end_offset)
    return end_offset


def aborted_in_slice(
    segments: Segments, offset: int, found: FileSlice | None, end_offset: int
) -> list[AbortedTxn]:
    """Those that overlap ``found``, which was read from ``offset`` with the same ``end_offset``.

    Not all below ``end_offset``: a consumer that is far behind would get them with each fetch.
    """
    if found is None:
        return []
    ahead = segments[segments.floor(offset) :]
    if not any(segment.aborted for segment in ahead):
        return []
    segment = next(s for s in ahead if s.file is found.file)
    position = found.position + found.size_bytes
    behind = next(segment.walk(position, segment.size_bytes, HEADER_BYTES), None)
    slice_end = segment.next_offset if behind is None else behind[2]
    return aborted_transactions(segments, offset, min(slice_end, end_offset))
