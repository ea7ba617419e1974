"""The producer state of a log that is opened or truncated, and its snapshots.

A snapshot is written where a segment begins, and made durable with the flush of the segment before
it: retention may take that segment then, and no start forgets a producer whose records are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from struct import Struct
from typing import Final

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData
from kept.storage.producers import snapshots
from kept.storage.producers.producer_states import (
    BATCHES_KEPT,
    ProducerBatch,
    ProducerState,
    ProducerStates,
)
from kept.storage.records import BatchHeader, read_header, read_marker, scan
from kept.storage.records.header import LENGTH_PREFIX_BYTES
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import Segment
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import MAX_INT64

TAIL_BYTES: Final = 8 << 20
"""How far back a clean start looks for the last five batches of each producer in the snapshot."""
_PREFIX: Final = Struct(">qi31xq")
"""baseOffset, batchLength and producerId of a header."""

logger = logging.getLogger(__name__)


class ProducerStateManager:
    """The producer state of a log, ``states``, and its snapshots in the log's directory."""

    def __init__(self, disk: Disk, segments: Segments, states: ProducerStates) -> None:
        self.disk = disk
        self.segments = segments
        self.states = states

    def path(self, end_offset: int) -> str:
        """Of the snapshot of the state at ``end_offset``."""
        return layout.segment_file(self.segments.directory, end_offset, layout.SNAPSHOT)

    def snapshot_offsets(self) -> list[int]:
        """End offsets of the snapshots that are there, ascending."""
        offsets = []
        for name in self.disk.listdir(self.segments.directory):
            parsed = layout.parse_segment_file(name)
            if parsed is not None and parsed.kind == layout.SNAPSHOT and not parsed.state:
                offsets.append(parsed.base_offset)
        return offsets

    def load(
        self, end_offset: int, *, scanned: list[Segment] | None = None, clean: bool = False
    ) -> list[str]:
        """Bring the state to ``end_offset``: newest good snapshot, then the batches above it.

        Transaction indexes of ``scanned`` segments are made anew on the way, and snapshots that a
        power cut took or tore. Snapshots above the end, and strays between segments, are removed.
        Returns the paths of those that may not be durable.
        """
        segments, states = self.segments, self.states
        rebuilt = scanned or []
        for segment in rebuilt:
            segment.reset_aborted([])
        states.clear()
        wanted = min((s.base_offset for s in rebuilt), default=end_offset)
        start = segments.bases[0]
        available = self.snapshot_offsets()
        for offset in available[::-1]:
            if offset > end_offset:
                self.disk.unlink(self.path(offset))
            elif offset <= wanted and offset >= segments.bases[0]:
                entries = self._read(offset)
                if entries is None:
                    continue
                states.restore(entries)
                start = offset
                break
        else:
            if clean and not rebuilt and not available:
                start = end_offset
        unsynced = []
        for segment in segments[segments.floor(start) :]:
            base = segment.base_offset
            if rebuilt and base >= start:
                if base in available and self._read(base) is not None:
                    unsynced.append(self.path(base))
                elif base > start:
                    unsynced.append(self.write_snapshot(base))
            first = segment.locate(start)
            if first is not None:
                position, reset = first[0], any(segment is s for s in rebuilt)
                replay(segment, position, states, start=start, rebuilt=reset)
        if start == end_offset and len(states):
            _fill_last_batches(segments.active, states)
        for segment in rebuilt:
            if segment is not segments.active:
                segment.save_aborted()
        self._remove_stray_snapshots(end_offset)
        return unsynced

    def rebuild(
        self, log_start_offset: int, end_offset: int, prepared: ProducerStates | None = None
    ) -> None:
        """After a cut: make the state anew from the newest snapshot below it and the batches after
        that, or from what was ``prepared`` of them (:mod:`.cut_preparation`). Without producers
        nothing is read: a cut brings none back that were forgotten.
        """
        if self.states.is_empty:
            return
        if prepared is None:
            self.load(end_offset)
        else:
            self.states.replace(prepared)
            self.remove_snapshots_above(end_offset)
            self._remove_stray_snapshots(end_offset)
        self.states.truncate_from_start(log_start_offset)

    def _read(self, end_offset: int) -> list[tuple[int, ProducerState]] | None:
        """What a snapshot says; a damaged one goes, as one that is gone already."""
        path = self.path(end_offset)
        try:
            return snapshots.decode(path, self.disk.read(path))
        except FileNotFoundError:
            return None
        except DamagedData as error:
            logger.warning("%s: removed", error)
            self.disk.unlink(path)
            return None

    def _remove_stray_snapshots(self, end_offset: int) -> None:
        bases = self.segments.bases
        kept = [offset for offset in self.snapshot_offsets() if offset <= end_offset]
        newest = kept[-1:] if kept and kept[-1] > bases[-1] else []
        self.remove_snapshots(sorted(set(kept) - set(bases) - set(newest)))

    def write_snapshot(self, end_offset: int) -> str:
        """Write the state at ``end_offset``, not durably; returns the path."""
        path = self.path(end_offset)
        self.disk.write_file(path, snapshots.encode(self.states))
        return path

    def remove_snapshots(self, offsets: Iterable[int]) -> None:
        """Remove snapshots by end offset."""
        for offset in offsets:
            with suppress(FileNotFoundError):
                self.disk.unlink(self.path(offset))

    def remove_snapshots_above(self, offset: int) -> bool:
        """Before the records are cut that they are proof of. Whether there were any."""
        above = [o for o in self.snapshot_offsets() if o > offset]
        self.remove_snapshots(above)
        return bool(above)


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


def replay(
    segment: Segment,
    position: int,
    producers: ProducerStates,
    *,
    start: int = 0,
    end: int = MAX_INT64,
    rebuilt: bool = False,
) -> None:
    """Take a segment's batches from byte ``position`` on into the producer state, those with all of
    their records at or above offset ``start`` and below ``end``. Raises DamagedData, MachineError.
    """
    for data, at, header in _of_producers(segment, position, end):
        if header.last_offset >= end:
            return
        if header.last_offset >= start:
            try:
                aborted = note_producer(producers, header, data, at)
            except CorruptMessage as error:
                raise _damaged(segment, header.base_offset, error) from error
            if aborted is not None and rebuilt:
                segment.note_aborted(aborted)


def _of_producers(
    segment: Segment, position: int, end_offset: int = MAX_INT64
) -> Iterator[tuple[bytes, int, BatchHeader]]:
    """The batches with a producer id from byte ``position`` on that begin below ``end_offset``;
    most have none. Each as (bytes, position in them, header). Raises DamagedData.
    """
    for data in segment.chunks(position):
        at, end = 0, len(data)
        while at < end:
            base, length, producer_id = _PREFIX.unpack_from(data, at)
            if base >= end_offset:
                return
            if producer_id >= 0:
                try:
                    header = read_header(data, at)
                except CorruptMessage as error:
                    raise _damaged(segment, -1, error) from error
                yield data, at, header
            at += length + LENGTH_PREFIX_BYTES


def _damaged(segment: Segment, offset: int, error: CorruptMessage) -> DamagedData:
    return DamagedData(segment.path(layout.LOG), -1, offset, str(error))


def note_producer(
    producers: ProducerStates, header: BatchHeader, data: bytes | memoryview, position: int
) -> AbortedTxn | None:
    """A batch with a producer id is in the log; the aborted transaction if it ended one."""
    if not header.is_control:
        if header.base_sequence >= 0:
            producers.update(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.last_offset_delta,
                header.last_offset,
                header.max_timestamp,
                header.is_transactional,
            )
        return None
    if not header.record_count:
        return None
    columns = scan(memoryview(data)[position : position + header.size_bytes])
    marker = read_marker(columns.key(0), columns.value(0))
    if marker is None:
        return None
    completed = producers.update_marker(
        header.producer_id,
        header.producer_epoch,
        header.base_offset,
        header.max_timestamp,
        marker.coordinator_epoch,
        not marker.is_commit,
    )
    if completed is None or not completed.aborted:
        return None
    stable = producers.first_unstable_offset
    return AbortedTxn(
        completed.producer_id,
        completed.first_offset,
        completed.last_offset,
        completed.last_offset + 1 if stable is None else stable,
    )


def _fill_last_batches(active: Segment, producers: ProducerStates) -> None:
    """A snapshot keeps one batch a producer: the active segment's tail has the other four."""
    recent: dict[int, list[tuple[int, ProducerBatch]]] = {}
    start = active.index.position_floor(max(0, active.size_bytes - TAIL_BYTES))
    for _, _, header in _of_producers(active, start):
        if header.base_sequence >= 0:
            batch = ProducerBatch(
                header.last_sequence,
                header.last_offset,
                header.last_offset_delta,
                header.max_timestamp,
            )
            recent.setdefault(header.producer_id, []).append((header.producer_epoch, batch))
    for producer_id, batches in recent.items():
        state: ProducerState | None = producers.get(producer_id)
        if state is not None and state.batches:
            last = state.batches[-1].last_offset
            mine = [b for epoch, b in batches if epoch == state.epoch and b.last_offset < last]
            state.batches[:0] = mine[-(BATCHES_KEPT - 1) :]
