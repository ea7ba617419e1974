"""Opening the files of a log: what a crash left is brought to a prefix of what was written (rule
22).

With the clean mark of its directory a log is opened from the sizes and last index entries of its
files. Without it, segments are scanned batch by batch (framing and CRC) from the one that holds the
recovery point; the log is cut at the first bad batch, later segments go, indexes are made anew.
Indexes are never trusted over the log (rule 23). Then the epoch cache is cut at the log end and the
log start, and producer state is rebuilt from the newest good snapshot and the batches above it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

from kept.storage import layout, snapshots, swap
from kept.storage.disk import Disk
from kept.storage.epochs import LeaderEpochCache
from kept.storage.errors import CorruptMessage, DamagedData
from kept.storage.producers import BATCHES_KEPT, ProducerBatch, ProducerState, ProducerStates
from kept.storage.records import BatchHeader, check_replica, headers, read_header, scan
from kept.storage.segment import SCAN_BYTES, Segment
from kept.storage.segments import Segments
from kept.storage.swap import SwapPlan
from kept.storage.txn_index import AbortedTxn
from kept.storage.types import MAX_INT32, LogConfig

TAIL_BYTES: Final = 8 << 20
"""How far back a clean start looks for the last five batches of each producer in the snapshot."""
_HEADER_BYTES: Final = 61
_LENGTH_END: Final = 12
_MARKER_ABORT: Final = 0
_LENGTH_AND_PRODUCER: Final = Struct(">8xi31xq")
"""batchLength and producerId of a header."""

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """The parts of an open log."""

    segments: Segments
    epochs: LeaderEpochCache
    producers: ProducerStates
    log_start_offset: int
    recovery_point: int


class _Opening:
    """One run of the recovery of a log."""

    def __init__(self, disk: Disk, directory: str, config: LogConfig, now_ms: int) -> None:
        self.disk = disk
        self.directory = directory
        self.config = config
        self.now_ms = now_ms
        self.epoch = -1
        self.epoch_starts: list[tuple[int, int]] = []

    def find_segments(self) -> list[Segment]:
        """The segments whose ``.log`` is there; index files without one are removed."""
        found: dict[int, Segment] = {}
        others: list[tuple[int, str]] = []
        for name in self.disk.listdir(self.directory):
            parsed = layout.parse_segment_file(name)
            if parsed is None or parsed.state:
                continue
            if parsed.kind == layout.LOG:
                stat = self.disk.stat(f"{self.directory}/{name}")
                found[parsed.base_offset] = Segment(
                    self.disk, self.directory, parsed.base_offset, size_bytes=stat.size_bytes,
                    mtime_ms=stat.mtime_ms, index_interval_bytes=self.config.index_interval_bytes,
                )  # fmt: skip
            elif parsed.kind != layout.SNAPSHOT:
                others.append((parsed.base_offset, name))
        for base_offset, name in others:
            if base_offset not in found:
                logger.warning("%s/%s: removed, it has no .log", self.directory, name)
                self.disk.unlink(f"{self.directory}/{name}")
        return [found[base] for base in sorted(found)]

    def open_clean(self, segment: Segment, next_base: int | None) -> bool:
        """Open a segment that is known to be whole; False when its tail is not."""
        try:
            segment.open_closed()
        except (FileNotFoundError, DamagedData) as error:
            try:
                segment.rebuild_indexes(str(error))
            except DamagedData as damage:
                logger.warning("%s", damage)
                return False
        if next_base is not None:
            segment.next_offset = next_base
            return True
        try:
            self._open_tail(segment)
        except DamagedData as damage:
            logger.warning("%s", damage)
            return False
        return True

    def _open_tail(self, segment: Segment) -> None:
        segment.load_index()
        segment.load_time_index()
        start = segment.index.positions[-1] if segment.index.positions else 0
        segment.next_offset = segment.base_offset
        for batch in segment.walk(start, segment.size_bytes):
            segment.next_offset = batch[3] + 1
        segment.bytes_since_index = segment.size_bytes - start

    def scan(self, segment: Segment, next_base: int | None) -> int | None:
        """Check every batch of a segment, rebuild its indexes; where it must be cut, or None."""
        segment.reset_indexes()
        position, limit = 0, segment.size_bytes
        why = ""
        chunk, start = b"", 0
        while position < limit:
            at = position - start
            if not _holds_batch(chunk, at):
                wanted = max(SCAN_BYTES, _size_at(chunk, at))
                chunk, start, at = self.disk.pread(segment.file, position, wanted), position, 0
            try:
                header = check_replica(chunk, at)
            except CorruptMessage as error:
                if _size_at(chunk, at) > len(chunk) - at and start + len(chunk) < limit:
                    chunk, start = self.disk.pread(
                        segment.file, position, _size_at(chunk, at)
                    ), position  # fmt: skip
                    if _holds_batch(chunk, 0):
                        continue
                why = str(error)
                break
            last = header.last_offset
            if (
                header.base_offset < segment.next_offset
                or last - segment.base_offset > MAX_INT32
                or (next_base is not None and last >= next_base)
            ):
                why = f"offsets {header.base_offset}..{last} do not follow"
                break
            if header.partition_leader_epoch > self.epoch:
                self.epoch = header.partition_leader_epoch
                self.epoch_starts.append((self.epoch, header.base_offset))
            segment.note(
                (position, header.size_bytes, header.base_offset, last, header.max_timestamp)
            )
            position += header.size_bytes
        if position == limit:
            return None
        logger.warning("%s", DamagedData(segment.file.path, position, segment.next_offset, why))
        return position

    def cut(self, segment: Segment, position: int, following: list[Segment]) -> None:
        """Cut a segment. What follows it goes first: a crash in between must not leave a gap."""
        self.drop(following)
        logger.warning(
            "%s: cut from %d to %d bytes", segment.file.path, segment.size_bytes, position
        )
        self.disk.truncate(segment.file, position)
        self.disk.fsync(segment.file)
        segment.size_bytes = position

    def drop(self, segments: list[Segment]) -> None:
        """Remove segments at the end of the log, the last one first."""
        for segment in reversed(segments):
            logger.warning("%s: removed, it follows a cut", segment.path(layout.LOG))
            for kind in layout.SEGMENT_SUFFIXES:
                self.disk.unlink(segment.path(kind))
        if segments:
            self.disk.fsync_dir(self.directory)

    def open_segments(
        self, clean: bool, recovery_point: int, compacted_to: int | None
    ) -> tuple[list[Segment], list[Segment]]:
        """(segments of the log, those among them that were scanned)."""
        segments = self.find_segments()
        scanned: list[Segment] = []
        for i, segment in enumerate(segments):
            next_base = segments[i + 1].base_offset if i + 1 < len(segments) else None
            flushed = next_base is not None and next_base <= recovery_point
            if (clean or flushed) and self.open_clean(segment, next_base):
                segment.flushed = True
                continue
            bad_position = self.scan(segment, next_base)
            scanned.append(segment)
            if bad_position is None and next_base is not None:
                if not self.has_gap(segment, next_base, compacted_to):
                    segment.close_indexes()
                    segment.next_offset = next_base
                    continue
                bad_position = segment.size_bytes
            if bad_position is not None:
                self.cut(segment, bad_position, segments[i + 1 :])
                return segments[: i + 1], scanned
        return segments, scanned

    def was_compacted(self) -> bool:
        """A cleaner left its manifest, whatever the policy says today."""
        names = self.disk.listdir(self.directory)
        return any(name.startswith(layout.MANIFEST_PREFIX) for name in names)

    def has_gap(self, segment: Segment, next_base: int, compacted_to: int | None) -> bool:
        """A segment that was not flushed ends below the next one: a power cut took its tail.

        Segments are rolled at the log end, so only compaction leaves such gaps: below
        ``compacted_to``, or anywhere where a log is compacted and nobody knows how far.
        """
        if segment.next_offset >= next_base:
            return False
        if compacted_to is None:
            if self.config.compact or self.was_compacted():
                return False
        elif next_base <= compacted_to:
            return False
        why = f"it ends at {segment.next_offset}, the next segment starts at {next_base}"
        logger.warning(
            "%s", DamagedData(segment.file.path, segment.size_bytes, segment.next_offset, why)
        )
        return True


def _size_at(chunk: bytes, at: int) -> int:
    if len(chunk) - at < _LENGTH_END:
        return 0
    return int.from_bytes(chunk[at + 8 : at + _LENGTH_END], "big", signed=True) + _LENGTH_END


def _holds_batch(chunk: bytes, at: int) -> bool:
    size = _size_at(chunk, at)
    return size >= _HEADER_BYTES and len(chunk) - at >= size


def recover(
    disk: Disk, directory: str, config: LogConfig, *, now_ms: int, log_start_offset: int,
    recovery_point: int, clean: bool, unfinished_swap: SwapPlan | None, expiration_ms: int,
    compacted_to: int | None = None, first_epoch: int | None = None, unsynced: bool = False,
) -> Recovered:  # fmt: skip
    """Open the files of a log that exists or not; see the module. A log without segments gets one,
    and ``first_epoch``; what is new in its directory, ``unsynced`` names too, is synced together.
    """
    swap.finish(disk, directory, unfinished_swap)
    opening = _Opening(disk, directory, config, now_ms)
    found, scanned = opening.open_segments(clean, recovery_point, compacted_to)
    segments = Segments(disk, directory, found)
    if found and found[-1].next_offset < log_start_offset:
        logger.warning(
            "%s: ends at %d, below its start %d: emptied",
            directory, found[-1].next_offset, log_start_offset,
        )  # fmt: skip
        segments.remove(found)
        opening.drop(found)
        scanned = []
    born = not len(segments)
    if born:
        segments.create(log_start_offset, config.index_interval_bytes, now_ms)
    log_start_offset = max(log_start_offset, segments.bases[0])
    end_offset = segments.active.next_offset
    if end_offset < recovery_point:
        logger.error(
            "%s: ends at %d, though everything below %d was durable: records are lost",
            directory, end_offset, recovery_point,
        )  # fmt: skip
    epochs = _load_epochs(disk, directory, segments)
    _say_lost_start(directory, epochs, log_start_offset)
    _complete_epochs(epochs, segments, log_start_offset)
    for epoch, start in opening.epoch_starts:
        if epoch > (-1 if epochs.latest is None else epochs.latest):
            epochs.assign(epoch, start)
    epochs.truncate_from_end(end_offset)
    epochs.truncate_from_start(log_start_offset)
    if born and first_epoch is not None and epochs.latest is None:
        epochs.assign(first_epoch, end_offset)
    if (born or unsynced) and not epochs.dirty:
        disk.fsync_dir(directory)
    # An epoch whose records are lost must not come back when others have taken their place.
    epochs.save()
    producers = ProducerStates(expiration_ms)
    load_producers(disk, directory, segments, producers, end_offset, scanned=scanned, clean=clean)
    if clean and not scanned:
        recovery_point = end_offset
    return Recovered(segments, epochs, producers, log_start_offset, min(recovery_point, end_offset))


def _say_lost_start(directory: str, epochs: LeaderEpochCache, log_start_offset: int) -> None:
    """The first leader epoch begins at the log start, unless segments vanished before it."""
    if epochs.entries and epochs.entries[0][1] < log_start_offset:
        logger.error(
            "%s: begins at %d, its leader epochs at %d: records may be lost",
            directory, log_start_offset, epochs.entries[0][1],
        )  # fmt: skip


def _load_epochs(disk: Disk, directory: str, segments: Segments) -> LeaderEpochCache:
    """The checkpoint; where it is damaged or empty, what the batches say."""
    path = f"{directory}/{layout.LEADER_EPOCHS}"
    try:
        epochs = LeaderEpochCache.load(disk, path)
    except DamagedData as error:
        logger.warning("%s: leader epochs are read from the log", error)
        epochs = LeaderEpochCache(disk, path, [])
    if epochs.latest is None:
        latest = -1
        for segment in segments:
            for data in _chunks(segment, 0):
                for _, header in headers(data):
                    if header.partition_leader_epoch > latest:
                        latest = header.partition_leader_epoch
                        epochs.assign(latest, header.base_offset)
    return epochs


def _complete_epochs(
    epochs: LeaderEpochCache, segments: Segments, log_start_offset: int
) -> None:  # fmt: skip
    """A crash may take the log start back, but not the epochs that were forgotten with it: without
    them a replica that diverged there could not be told (rule 26). The batches know.
    """
    entries = epochs.entries
    if not entries or entries[0][1] <= log_start_offset:
        return
    first = entries[0][1]
    found: list[tuple[int, int]] = []
    for header in _headers_between(segments, log_start_offset, first):
        if not found or header.partition_leader_epoch > found[-1][0]:
            start = max(header.base_offset, log_start_offset)
            found.append((header.partition_leader_epoch, start))
    epochs.prepend(found)


def _headers_between(segments: Segments, start: int, end: int) -> Iterator[BatchHeader]:
    """Of the batches that reach above ``start`` and begin below ``end``."""
    for segment in segments[segments.floor(start) :]:
        for data in _chunks(segment, 0):
            for _, header in headers(data):
                if header.base_offset >= end:
                    return
                if header.next_offset > start:
                    yield header


# Producer state.


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
) -> None:  # fmt: skip
    """Bring producer state to ``end_offset``: newest good snapshot, then the batches above it.

    Transaction indexes of ``scanned`` segments are made anew on the way. Snapshots above the end,
    and strays between segments, are removed.
    """
    rebuilt = scanned or []
    for segment in rebuilt:
        segment.reset_aborted([])
    producers.clear(segments.bases[0])
    wanted = min((s.base_offset for s in rebuilt), default=end_offset)
    start = segments.bases[0]
    available = snapshot_offsets(disk, directory)
    for offset in reversed(available):
        path = layout.segment_file(directory, offset, layout.SNAPSHOT)
        if offset > end_offset:
            disk.unlink(path)
        elif offset <= wanted and offset >= segments.bases[0]:
            try:
                entries = snapshots.decode(path, disk.read(path))
            except DamagedData as error:
                logger.warning("%s: removed", error)
                disk.unlink(path)
                continue
            for producer_id, state in entries:
                producers.put(producer_id, state)
            start = offset
            break
    else:
        if clean and not rebuilt and not available:
            start = end_offset
    replay(segments, producers, start, rebuilt)
    if start == end_offset and len(producers):
        _fill_last_batches(segments.active, producers)
    producers.end_offset = end_offset
    for segment in rebuilt:
        if segment is not segments.active:
            segment.save_aborted()
    _remove_stray_snapshots(disk, directory, segments, end_offset)


def _remove_stray_snapshots(
    disk: Disk, directory: str, segments: Segments, end_offset: int
) -> None:
    bases = set(segments.bases)
    kept = [o for o in snapshot_offsets(disk, directory) if o <= end_offset]
    for offset in kept:
        if offset not in bases and not (offset == kept[-1] and offset > segments.bases[-1]):
            disk.unlink(layout.segment_file(directory, offset, layout.SNAPSHOT))


def replay(
    segments: Segments, producers: ProducerStates, start: int, rebuilt: list[Segment]
) -> None:
    """Take the batches from ``start`` to the log end into the producer state."""
    for segment in segments[segments.floor(start) :]:
        again = any(segment is s for s in rebuilt)
        first = segment.locate(start)
        if first is None:
            continue
        for data in _chunks(segment, first[0]):
            for position, header in _of_producers(data):
                if header.last_offset >= start:
                    aborted = note_producer(producers, header, data, position)
                    if aborted is not None and again:
                        segment.note_aborted(aborted)


def _chunks(segment: Segment, position: int) -> list[bytes] | _Chunks:
    return _Chunks(segment, position) if position < segment.size_bytes else []


class _Chunks:
    """A segment's bytes in pieces of whole batches."""

    def __init__(self, segment: Segment, position: int) -> None:
        self.segment = segment
        self.position = position

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> bytes:
        segment, wanted = self.segment, SCAN_BYTES
        while self.position < segment.size_bytes:
            data = segment.read(self.position, wanted)
            end = 0
            while _holds_batch(data, end):
                end += _size_at(data, end)
            if end:
                self.position += end
                return data[:end]
            if _size_at(data, 0) <= len(data):
                raise DamagedData(segment.file.path, self.position, -1, "no whole batch")
            wanted = _size_at(data, 0)
        raise StopIteration


def _of_producers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of the batches with a producer id, of whole batches; most have none."""
    position, end = 0, len(data)
    while position < end:
        length, producer_id = _LENGTH_AND_PRODUCER.unpack_from(data, position)
        if producer_id >= 0:
            yield position, read_header(data, position)
        position += length + _LENGTH_END


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
    for data in _chunks(active, start):
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


def write_snapshot(disk: Disk, directory: str, producers: ProducerStates, end_offset: int) -> None:
    """Write the producer state at ``end_offset`` (not durably: a flush does that)."""
    path = layout.segment_file(directory, end_offset, layout.SNAPSHOT)
    disk.write_file(path, snapshots.encode(producers))


def remove_snapshots(disk: Disk, directory: str, offsets: list[int]) -> None:
    """Remove snapshots by end offset."""
    for offset in offsets:
        with suppress(FileNotFoundError):
            disk.unlink(layout.segment_file(directory, offset, layout.SNAPSHOT))
