"""Opening the files of a log: what a crash left is brought to a prefix of what was written (rule
22).

With the clean mark of its directory a log is opened from the sizes and last index entries of its
files. Without it, segments are scanned batch by batch (framing and CRC) from the one that holds the
recovery point; the log is cut at the first bad batch, later segments go, indexes are made anew.
Indexes are never trusted over the log (rule 23). Then the epoch cache is cut at the log end and the
log start, and producer state is rebuilt from the newest good snapshot and the batches above it.

Segments are rolled at the log end, so only compaction lets one end below the next. It does so below
the recovery point alone, which is checkpointed before files are put into place: above it a gap is
what a power cut took, and the log is cut there.

A closed segment that was flushed is not scanned. Where somebody cut its file, or it rotted so that
its batches cannot be followed, what is behind that was flushed, too: it goes only where another
replica has it, and is fetched again. Where none has, all stays, and who reads there is refused.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from kept.storage import layout
from kept.storage.disk import Disk, parent
from kept.storage.errors import CorruptMessage, DamagedData
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.producers.producer_state_manager import ProducerStateManager
from kept.storage.producers.producer_states import ProducerQuota, ProducerStates
from kept.storage.records import BatchHeader, check_replica, headers
from kept.storage.records.header import holds_batch, size_at
from kept.storage.segments import swap
from kept.storage.segments.log_segments import Segments
from kept.storage.segments.segment import SCAN_BYTES, Segment
from kept.storage.segments.swap import SwapPlan
from kept.storage.types import MAX_INT32, LogConfig

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """The parts of an open log."""

    segments: Segments
    epochs: LeaderEpochCache
    producers: ProducerStateManager
    log_start_offset: int
    recovery_point: int
    unsynced: list[str]
    """Producer snapshots that may not be durable."""


class _Opening:
    """One run of the recovery of a log."""

    def __init__(
        self, disk: Disk, directory: str, config: LogConfig, now_ms: int, replicated: bool = False
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.config = config
        self.now_ms = now_ms
        self.replicated = replicated
        self.epoch = -1
        self.epoch_starts: list[tuple[int, int]] = []
        self.orphans: set[int] = set()
        """Bases of indexes without a ``.log``; ``missing_files`` reports them."""
        self.shortened: set[int] = set()
        """Bases of segments that an index proves to have been longer, and that are to be cut."""

    def find_segments(self) -> list[Segment]:
        """The segments whose ``.log`` is there; index files without one are removed."""
        by_base: dict[int, Segment] = {}
        others: list[tuple[int, str]] = []
        for name in self.disk.listdir(self.directory):
            parsed = layout.parse_segment_file(name)
            if parsed is None or parsed.state:
                continue
            if parsed.kind == layout.LOG:
                stat = self.disk.stat(f"{self.directory}/{name}")
                by_base[parsed.base_offset] = Segment(
                    self.disk,
                    self.directory,
                    parsed.base_offset,
                    size_bytes=stat.size_bytes,
                    mtime_ms=stat.mtime_ms,
                    index_interval_bytes=self.config.index_interval_bytes,
                )
            elif parsed.kind != layout.SNAPSHOT:
                others.append((parsed.base_offset, name))
        for base_offset, name in others:
            if base_offset not in by_base:
                self.orphans.add(base_offset)
                logger.warning("%s/%s: removed, it has no .log", self.directory, name)
                self.disk.unlink(f"{self.directory}/{name}")
        return [by_base[base] for base in sorted(by_base)]

    def open_clean(self, segment: Segment, next_base: int | None, log_start: int) -> bool:
        """Open a segment that is known to be whole; False where it is to be scanned, and cut.

        Indexes that are made anew are written last: those on disk may be all that proves what is
        missing, to a start after a kill, too.
        """
        named = -1
        damage: DamagedData | None = None
        is_rebuilt = False
        try:
            position = segment.open_closed()
            if segment.max_timestamp >= 0:
                named = segment.max_timestamp_offset
        except (FileNotFoundError, DamagedData) as error:
            is_rebuilt = True
            if isinstance(error, DamagedData):
                named = error.offset
            try:
                segment.rebuild_indexes(str(error), save=False)
            except DamagedData as found:
                damage = found
            position = segment.index.position_floor(segment.size_bytes)
        if next_base is not None and next_base > log_start:
            stays = self._may_stay(segment, position, named, next_base, damage)
        else:
            if next_base is None and damage is None:
                damage = self._open_tail(segment)
            if damage is not None:
                logger.warning("%s", damage)
            stays = damage is None
        if stays and is_rebuilt:
            segment.close_indexes()
        if stays and next_base is not None:
            segment.next_offset = next_base
        return stays

    def _may_stay(
        self,
        segment: Segment,
        position: int,
        named: int,
        next_base: int,
        damage: DamagedData | None,
    ) -> bool:
        """Whether a closed segment that was flushed stays as it is: always, unless another replica
        has what it lacks, and what follows. What is wrong with it is said.

        Where no compaction can have taken records from its end, a file that was cut there shows it,
        if only by the base of the next one. ``named``: an offset that its indexes name, which
        proves that it was there (Apache Kafka's are not relied on for that).
        """
        if damage is None:
            orphaned = any(segment.base_offset < base < next_base for base in self.orphans)
            is_said = orphaned and not self.replicated  # by missing_files
            if is_said or self.config.compact or self.was_compacted:
                return True
            try:
                end = segment.end_of_file_offset(position)
            except DamagedData as found:
                damage = found
        if damage is not None:
            left = "" if self.replicated else "; it stays, and who reads there is refused"
            logger.error("%s%s", damage, left)
            return not self.replicated
        if end >= next_base or next_base - 1 - segment.base_offset > MAX_INT32:
            return True
        logger.error(
            "%s: it ends at %d, the next segment begins at %d: records from %d to %d are lost "
            "here; a file was cut or removed, or the topic was compacted once and nothing "
            "tells of it any more",
            segment.path(layout.LOG),
            end,
            next_base,
            end,
            next_base - 1,
        )
        if not self.replicated or not end <= named < next_base or self._is_adopted:
            return True
        self.shortened.add(segment.base_offset)
        return False

    def _open_tail(self, segment: Segment) -> DamagedData | None:
        """Open the last segment; returns what is wrong with it."""
        try:
            segment.load_index()
            segment.load_time_index()
            start = segment.index.positions[-1] if segment.index.positions else 0
            segment.next_offset = segment.base_offset
            for batch in segment.walk(start, segment.size_bytes):
                segment.next_offset = batch[3] + 1
        except DamagedData as damage:
            return damage
        segment.bytes_since_index = segment.size_bytes - start
        return None

    def scan(self, segment: Segment, next_base: int | None) -> int | None:
        """Check every batch of a segment, rebuild its indexes; where it must be cut, or None."""
        segment.reset_indexes()
        position, limit = 0, segment.size_bytes
        why = ""
        chunk, start = b"", 0
        while position < limit:
            at = position - start
            if not holds_batch(chunk, at):
                wanted = max(SCAN_BYTES, size_at(chunk, at))
                chunk, start, at = self.disk.pread(segment.file, position, wanted), position, 0
            try:
                header = check_replica(chunk, at)
            except CorruptMessage as error:
                if size_at(chunk, at) > len(chunk) - at and start + len(chunk) < limit:
                    chunk, start = (
                        self.disk.pread(segment.file, position, size_at(chunk, at)),
                        position,
                    )
                    if holds_batch(chunk, 0):
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
            segment.index_batch(
                (position, header.size_bytes, header.base_offset, last, header.max_timestamp)
            )
            position += header.size_bytes
        if position == limit:
            return None
        logger.warning("%s", DamagedData(segment.file.path, position, segment.next_offset, why))
        return position

    def cut(self, segment: Segment, position: int, following: list[Segment]) -> None:
        """Cut a segment. What follows it goes first: a crash in between must not leave a gap."""
        self.drop(following[::-1])
        logger.warning(
            "%s: cut from %d to %d bytes", segment.file.path, segment.size_bytes, position
        )
        self.disk.truncate(segment.file, position)
        self.disk.fsync(segment.file)
        segment.size_bytes = position

    def drop(self, segments: list[Segment], why: str = "it follows a cut") -> None:
        """Remove segments at an end of the log, from that end on: a crash leaves no gap."""
        for segment in segments:
            logger.warning("%s: removed, %s", segment.path(layout.LOG), why)
            for kind in reversed(layout.SEGMENT_SUFFIXES):
                self.disk.unlink(segment.path(kind))
        if segments:
            self.disk.fsync_dir(self.directory)

    def open_segments(
        self, clean: bool, recovery_point: int | None, compacted_to: int | None, log_start: int
    ) -> tuple[list[Segment], list[Segment]]:
        """(segments of the log, those among them that were scanned). What lies below the start of
        the log is not scanned, as nobody reads it. Raises DamagedData where it is none to open.
        """
        durable_to = max(recovery_point or 0, log_start)
        segments = self.find_segments()
        scanned: list[Segment] = []
        for i, segment in enumerate(segments):
            next_base = segments[i + 1].base_offset if i + 1 < len(segments) else None
            flushed = next_base is not None and next_base <= durable_to
            if (clean or flushed) and self.open_clean(segment, next_base, log_start):
                segment.flushed = True
                if next_base is not None:
                    segment.close_file()
                continue
            if next_base is not None and next_base <= log_start:
                path = segment.path(layout.LOG)
                raise DamagedData(path, -1, segment.base_offset, "it cannot be opened")
            bad_position = self.scan(segment, next_base)
            scanned.append(segment)
            if bad_position is None and next_base is not None:
                if not self.has_gap(segment, next_base, recovery_point, compacted_to):
                    segment.close_indexes()
                    segment.next_offset = next_base
                    continue
                bad_position = segment.size_bytes
            if bad_position is not None:
                self.cut(segment, bad_position, segments[i + 1 :])
                return segments[: i + 1], scanned
        return segments, scanned

    @property
    def _is_adopted(self) -> bool:
        return self.disk.exists(f"{parent(self.directory)}/{layout.ADOPTED}")

    @cached_property
    def was_compacted(self) -> bool:
        """A cleaner left what tells of it, whatever the policy says today."""
        return layout.tells_of_compaction(self.disk.listdir(self.directory))

    def has_gap(
        self, segment: Segment, next_base: int, recovery_point: int | None, compacted_to: int | None
    ) -> bool:
        """A segment ends below the next one, because a power cut took its tail, or somebody did.

        Not so where compaction may have done it: below the recovery point, below ``compacted_to``,
        or anywhere where a log is compacted and nobody knows how far. Nor where the next batch was
        too far away for the segment (:mod:`kept.storage.log.follower_append`).
        """
        if segment.next_offset >= next_base:
            return False
        if segment.base_offset in self.shortened:
            return True
        if next_base <= max(recovery_point or 0, compacted_to or 0):
            return False
        if next_base - 1 - segment.base_offset > MAX_INT32:
            return False
        unknown = recovery_point is None and compacted_to is None
        if unknown and (self.config.compact or self.was_compacted):
            return False
        why = f"it ends at {segment.next_offset}, the next segment starts at {next_base}"
        logger.warning(
            "%s", DamagedData(segment.file.path, segment.size_bytes, segment.next_offset, why)
        )
        return True


def recover(
    disk: Disk,
    directory: str,
    config: LogConfig,
    *,
    now_ms: int,
    log_start_offset: int,
    recovery_point: int | None,
    clean: bool,
    unfinished_swap: SwapPlan | None,
    expiration_ms: int,
    compacted_to: int | None = None,
    first_epoch: int | None = None,
    unsynced: bool = False,
    quota: ProducerQuota | None = None,
    replicated: bool = False,
) -> Recovered:
    """Open the files of a log that exists or not; see the module. A log without segments gets one,
    and ``first_epoch``; what is new in its directory, ``unsynced`` names too, is synced together.

    Without a recovery point (its checkpoint is lost) the closed segments that are found are made
    durable: what is checkpointed from now on must not lie below a gap that compaction left.

    Raises DamagedData, and may be called again after it: :func:`drop_damaged_start`.
    """
    retired = swap.finish(disk, directory, unfinished_swap)
    opening = _Opening(disk, directory, config, now_ms, replicated)
    found, scanned = opening.open_segments(clean, recovery_point, compacted_to, log_start_offset)
    unknown = recovery_point is None
    if recovery_point is None:
        recovery_point = found[-1].base_offset if found else 0
    segments = Segments(disk, directory, found)
    if found and found[-1].next_offset < log_start_offset:
        why = f"ends at {found[-1].next_offset}, below its start {log_start_offset}"
        logger.warning("%s: %s: emptied", directory, why)
        segments.remove(found)
        opening.drop(found[::-1])
        scanned = []
    born = not len(segments)
    if born:
        segments.create(log_start_offset, config.index_interval_bytes, now_ms)
    known_start, log_start_offset = log_start_offset, max(log_start_offset, segments.bases[0])
    end_offset = segments.active.next_offset
    if end_offset < recovery_point:
        _report_lost_end(directory, end_offset, recovery_point)
    epochs = _load_epochs(disk, directory, segments)
    if segments.bases[0] > known_start:
        _report_lost_start(directory, epochs, segments.bases[0], retired)
    _complete_epochs(epochs, segments, log_start_offset)
    for epoch, start in opening.epoch_starts:
        if epoch > (-1 if epochs.latest is None else epochs.latest):
            epochs.assign(epoch, start)
    # After a clean stop the latest leader may have appended nothing: no record of its is lost.
    epochs.truncate_from_end(end_offset + (clean and not scanned))
    epochs.truncate_from_start(log_start_offset)
    if born and first_epoch is not None and epochs.latest is None:
        epochs.assign(first_epoch, end_offset)
    if (born or unsynced) and not epochs.dirty:
        disk.fsync_dir(directory)
    # An epoch whose records are lost must not come back when others have taken their place.
    epochs.save()
    producers = ProducerStateManager(disk, segments, ProducerStates(expiration_ms, quota))
    snapshots = producers.load(end_offset, scanned=scanned, clean=clean)
    producers.states.truncate_from_start(log_start_offset)
    if unknown:
        _make_durable(disk, segments)  # with their transaction indexes, which were made just now
    if clean and not scanned:
        recovery_point = end_offset
    recovery_point = min(recovery_point, end_offset)
    return Recovered(segments, epochs, producers, log_start_offset, recovery_point, snapshots)


def drop_damaged_start(
    disk: Disk, directory: str, config: LogConfig, log_start_offset: int, error: DamagedData
) -> bool:
    """Whether a segment that lies wholly below the start of the log is what is damaged. Producers
    and leader epochs are read from there, too; but nobody reads its records, so all below the start
    goes, as retention would have it go.
    """
    opening = _Opening(disk, directory, config, 0)
    segments = opening.find_segments()
    upper = bisect_right([segment.base_offset for segment in segments], log_start_offset)
    below = segments[: max(0, upper - 1)]
    if error.path not in [segment.path(layout.LOG) for segment in below]:
        return False
    logger.error("%s", error)
    opening.drop(below, f"it lies below the log start {log_start_offset}")
    return True


def _make_durable(disk: Disk, segments: Segments) -> None:
    """All closed segments."""
    for segment in segments[:-1]:
        if not segment.flushed:
            segment.fsync()
            segment.flushed = True
            segment.close_file()
    if len(segments) > 1:
        disk.fsync_dir(segments.directory)


def _report_lost_end(directory: str, end_offset: int, recovery_point: int) -> None:
    logger.error(
        "%s: ends at %d, though everything below %d was durable: records are lost",
        directory,
        end_offset,
        recovery_point,
    )


def _report_lost_start(
    directory: str, epochs: LeaderEpochCache, base: int, retired: set[int]
) -> None:
    """The first segment holds the start of the first leader epoch, unless segments vanished.

    What retention takes goes from the epochs before its files do: until then it is ``retired``.
    """
    if not epochs.entries or base <= (first := epochs.entries[0][1]):
        return
    if min(retired, default=base) > first:
        logger.error(
            "%s: begins at %d, its leader epochs at %d: records may be lost",
            directory,
            base,
            first,
        )


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
            for header in _headers(segment):
                if header.partition_leader_epoch > latest:
                    latest = header.partition_leader_epoch
                    epochs.assign(latest, header.base_offset)
    return epochs


def _complete_epochs(epochs: LeaderEpochCache, segments: Segments, log_start_offset: int) -> None:
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
        for header in _headers(segment):
            if header.base_offset >= end:
                return
            if header.next_offset > start:
                yield header


def _headers(segment: Segment) -> Iterator[BatchHeader]:
    """Of all its batches. Raises DamagedData."""
    for data in segment.chunks(0):
        try:
            yield from (header for _, header in headers(data))
        except CorruptMessage as error:
            raise DamagedData(segment.path(layout.LOG), -1, -1, str(error)) from error
