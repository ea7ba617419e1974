"""The producer state of a log that is opened or truncated, and its snapshots.

A snapshot is written where a segment begins, and made durable with the flush of the segment before
it: retention may take that segment then, and no start forgets a producer whose records are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Final

from kept.storage import layout, snapshots
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.producers import BATCHES_KEPT, ProducerBatch, ProducerState, ProducerStates
from kept.storage.records import BatchHeader, read_header, scan
from kept.storage.records.header import LENGTH_PREFIX_BYTES
from kept.storage.segment import Segment
from kept.storage.segments import Segments
from kept.storage.txn_index import AbortedTxn

TAIL_BYTES: Final = 8 << 20
"""How far back a clean start looks for the last five batches of each producer in the snapshot."""
_MARKER_ABORT: Final = 0
_LENGTH_AND_PRODUCER: Final = Struct(">8xi31xq")
"""batchLength and producerId of a header."""

logger = logging.getLogger(__name__)


def snapshot_offsets(disk: Disk, directory: str) -> list[int]:
    """End offsets of the producer snapshots that are there, ascending."""
    found = []
    for name in disk.listdir(directory):
        parsed = layout.parse_segment_file(name)
        if parsed is not None and parsed.kind == layout.SNAPSHOT and not parsed.state:
            found.append(parsed.base_offset)
    return found


def load_producers(
    disk: Disk, directory: str, segments: Segments, producers: ProducerStates, end_offset: int,
    *, scanned: list[Segment] | None = None, clean: bool = False,
) -> list[str]:  # fmt: skip
    """Bring producer state to ``end_offset``: newest good snapshot, then the batches above it.

    Transaction indexes of ``scanned`` segments are made anew on the way, and snapshots that a power
    cut took or tore. Snapshots above the end, and strays between segments, are removed. Returns the
    paths of those that may not be durable.
    """
    rebuilt = scanned or []
    for segment in rebuilt:
        segment.reset_aborted([])
    producers.clear(segments.bases[0])
    wanted = min((s.base_offset for s in rebuilt), default=end_offset)
    start = segments.bases[0]
    available = snapshot_offsets(disk, directory)
    for offset in available[::-1]:
        path = layout.segment_file(directory, offset, layout.SNAPSHOT)
        if offset > end_offset:
            disk.unlink(path)
        elif offset <= wanted and offset >= segments.bases[0]:
            entries = _read(disk, path)
            if entries is None:
                continue
            for producer_id, state in entries:
                producers.put(producer_id, state)
            start = offset
            break
    else:
        if clean and not rebuilt and not available:
            start = end_offset
    unsynced = []
    for segment in segments[segments.floor(start) :]:
        base = segment.base_offset
        path = layout.segment_file(directory, base, layout.SNAPSHOT)
        if rebuilt and base >= start:
            if base in available and _read(disk, path) is not None:
                unsynced.append(path)
            elif base > start:
                unsynced.append(write_snapshot(disk, directory, producers, base))
        _replay(segment, producers, start, any(segment is s for s in rebuilt))
    if start == end_offset and len(producers):
        _fill_last_batches(segments.active, producers)
    producers.end_offset = end_offset
    for segment in rebuilt:
        if segment is not segments.active:
            segment.save_aborted()
    _remove_stray_snapshots(disk, directory, segments, end_offset)
    return unsynced


def known_at(disk: Disk, directory: str, end_offset: int) -> list[tuple[int, ProducerState]]:
    """The producers as the snapshot of an offset has them; nobody without a good one.

    Nothing is removed here: a flush of the running log may be about to make the file durable.
    """
    path = layout.segment_file(directory, end_offset, layout.SNAPSHOT)
    try:
        return snapshots.decode(path, disk.read(path))
    except FileNotFoundError:
        return []
    except DamagedData as error:
        logger.warning("%s: not used", error)
        return []


def _read(disk: Disk, path: str) -> list[tuple[int, ProducerState]] | None:
    """What a snapshot says; a damaged one goes, as one that is gone already."""
    try:
        return snapshots.decode(path, disk.read(path))
    except FileNotFoundError:
        return None
    except DamagedData as error:
        logger.warning("%s: removed", error)
        disk.unlink(path)
        return None


def _remove_stray_snapshots(
    disk: Disk, directory: str, segments: Segments, end_offset: int
) -> None:
    bases = set(segments.bases)
    kept = [o for o in snapshot_offsets(disk, directory) if o <= end_offset]
    for offset in kept:
        if offset not in bases and not (offset == kept[-1] and offset > segments.bases[-1]):
            disk.unlink(layout.segment_file(directory, offset, layout.SNAPSHOT))


def _replay(segment: Segment, producers: ProducerStates, start: int, rebuilt: bool) -> None:
    """Take a segment's batches from ``start`` on into the producer state."""
    first = segment.locate(start)
    if first is None:
        return
    for data in segment.chunks(first[0]):
        for position, header in _of_producers(data):
            if header.last_offset >= start:
                aborted = note_producer(producers, header, data, position)
                if aborted is not None and rebuilt:
                    segment.note_aborted(aborted)


def _of_producers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of the batches with a producer id, of whole batches; most have none."""
    position, end = 0, len(data)
    while position < end:
        length, producer_id = _LENGTH_AND_PRODUCER.unpack_from(data, position)
        if producer_id >= 0:
            yield position, read_header(data, position)
        position += length + LENGTH_PREFIX_BYTES


def note_producer(
    producers: ProducerStates, header: BatchHeader, data: bytes | memoryview, position: int
) -> AbortedTxn | None:
    """A batch with a producer id is in the log; the aborted transaction if it ended one."""
    if not header.is_control:
        if header.base_sequence >= 0:
            producers.update(
                header.producer_id, header.producer_epoch, header.base_sequence,
                header.last_offset_delta, header.last_offset, header.max_timestamp,
                header.is_transactional,
            )  # fmt: skip
        return None
    if not header.record_count:
        return None
    columns = scan(memoryview(data)[position : position + header.size_bytes])
    key, value = columns.key(0), columns.value(0)
    if key is None or len(key) < 4 or key[1] != 0 or key[3] > 1:
        return None
    coordinator_epoch = int.from_bytes(value[2:6], "big", signed=True) if value else -1
    completed = producers.update_marker(
        header.producer_id, header.producer_epoch, header.base_offset, header.max_timestamp,
        coordinator_epoch, key[3] == _MARKER_ABORT,
    )  # fmt: skip
    if completed is None or not completed.aborted:
        return None
    stable = producers.first_unstable_offset
    return AbortedTxn(
        completed.producer_id, completed.first_offset, completed.last_offset,
        completed.last_offset + 1 if stable is None else stable,
    )  # fmt: skip


def _fill_last_batches(active: Segment, producers: ProducerStates) -> None:
    """A snapshot keeps one batch a producer: the active segment's tail has the other four."""
    recent: dict[int, list[tuple[int, ProducerBatch]]] = {}
    start = active.index.position_floor(max(0, active.size_bytes - TAIL_BYTES))
    for data in active.chunks(start):
        for _, header in _of_producers(data):
            if header.base_sequence >= 0:
                batch = ProducerBatch(
                    header.last_sequence, header.last_offset, header.last_offset_delta,
                    header.max_timestamp,
                )  # fmt: skip
                recent.setdefault(header.producer_id, []).append((header.producer_epoch, batch))
    for producer_id, batches in recent.items():
        state: ProducerState | None = producers.get(producer_id)
        if state is not None and state.batches:
            last = state.batches[-1].last_offset
            mine = [b for epoch, b in batches if epoch == state.epoch and b.last_offset < last]
            state.batches[:0] = mine[-(BATCHES_KEPT - 1) :]


def write_snapshot(disk: Disk, directory: str, producers: ProducerStates, end_offset: int) -> str:
    """Write the producer state at ``end_offset``, not durably; returns the path."""
    path = layout.segment_file(directory, end_offset, layout.SNAPSHOT)
    disk.write_file(path, snapshots.encode(producers))
    return path


def remove_snapshots(disk: Disk, directory: str, offsets: list[int]) -> None:
    """Remove snapshots by end offset."""
    for offset in offsets:
        with suppress(FileNotFoundError):
            disk.unlink(layout.segment_file(directory, offset, layout.SNAPSHOT))
