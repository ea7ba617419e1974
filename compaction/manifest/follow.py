"""Applying a manifest that another replica computed: its own segments come to the same records.

The leader's :func:`kept.compaction.cleaner.cleaner_run.run_pass` decides and builds; a follower
(and a leader that finishes what it held at a start) only builds. Both leave the same files, and
:mod:`kept.compaction.manifest.apply` puts them into place; so there is one way in, and one to
recover.

A replica's segments may end elsewhere than the leader's (rule 18). The outputs are the leader's,
boundary by boundary: :func:`pieces` cuts the own segments at them, and what a closed segment has
beyond the end of the manifest is copied as it is into a segment of its own. From then on both have
the same boundaries, and what the last manifest made of a segment need not be read again.

Nothing is decided here: no key is hashed and no clock is read. Every output has the digest of the
manifest (rule 17) or nothing is applied: :class:`LogsDiffer` names the offset from which this
replica is to fetch again (rule 15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyroaring import BitMap

from kept.compaction.cleaner import removal_log
from kept.compaction.cleaner.build import build
from kept.compaction.cleaner.cleaner_run import Result, write_new
from kept.compaction.cleaner.job import DEFAULT_CHECK_KEYS, DEFAULT_CHUNK_BYTES, Source
from kept.compaction.cleaner.removal_log import Reason, Removals
from kept.compaction.cleaner.scan_stats import Progress, chunks, no_progress
from kept.compaction.cleaner.self_check import check_followed
from kept.compaction.cleaner.survey import SegmentGroup
from kept.compaction.manifest import manifest
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData, InvariantViolation
from kept.storage.records import BatchHeader, crc32c, headers, records
from kept.storage.records.header import CRC_START
from kept.storage.segments import txn_index
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import LogConfig

if TYPE_CHECKING:
    from kept.storage.log.log import Log
    from kept.storage.segments.segment import Segment

_NO_LIMIT: Final = 1 << 62


class LogsDiffer(DamagedData):
    """A survivor of the manifest is not here, or is another record: ``offset`` says from where."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One output and where its batches are now. ``output`` None: the rest of the last segment,
    which the manifest says nothing about.
    """

    base_offset: int
    sources: tuple[Source, ...]
    output: OutputSegment | None


@dataclass(frozen=True, slots=True)
class FollowJob:
    """What applying needs. ``previous`` is the manifest applied before; ``aborted`` the aborted
    transactions beyond the manifest's end in the segment that is split. ``check_keys`` records are
    checked at the end (``self_check.py``), which ones ``check_seed`` says.
    """

    directory: str
    manifest: Manifest
    pieces: tuple[Piece, ...]
    config: LogConfig
    previous: Manifest | None = None
    aborted: tuple[AbortedTxn, ...] = ()
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    check_keys: int = DEFAULT_CHECK_KEYS
    check_seed: bytes = b""


def job_for(log: Log, found: Manifest, previous: Manifest | None, now_ms: int) -> FollowJob:
    """The job for a log, on its thread; rolls an active segment that begins below the end.

    Raises InvariantViolation when the log ends below the manifest (rule 15: fetch first), and
    LogsDiffer where a damaged header hides the boundary of an output, or a damaged transaction
    index what was aborted beyond the manifest's end.
    """
    if log.log_end_offset < found.end_offset:
        raise InvariantViolation(
            f"{log}: it ends at {log.log_end_offset}, generation {found.generation} at "
            f"{found.end_offset}"
        )
    if log.active_segment.base_offset < found.end_offset:
        log.roll(now_ms)
    aborted: tuple[AbortedTxn, ...] = ()
    try:
        parts = tuple(pieces(log, found))
        if parts and parts[-1].output is None:
            split = log.segments[log.segments.floor(found.end_offset)]
            aborted = tuple(e for e in split.aborted if e.last_offset >= found.end_offset)
    except DamagedData as error:
        segment = _damaged_segment(log, error)
        if segment is None:
            raise
        # Nobody knows what follows a header that is none, or what of the rest was aborted.
        offset = max(segment.base_offset, log.log_start_offset)
        why = f"{error.why}, where generation {found.generation} has records"
        raise LogsDiffer(error.path, error.position, offset, why) from error
    return FollowJob(log.directory, found, parts, log.config, previous, aborted)


def _damaged_segment(log: Log, error: DamagedData) -> Segment | None:
    for segment in log.segments:
        if error.path in {segment.path(layout.LOG), segment.path(layout.TXN_INDEX)}:
            return segment
    return None


def pieces(log: Log, found: Manifest) -> Iterator[Piece]:
    """The log's closed segments, cut at the boundaries of the manifest's outputs."""
    closed = log.segments[:-1]
    ends = [segment.base_offset for segment in log.segments[1:]]
    own = [
        pair for pair in zip(closed, ends, strict=True) if pair[0].base_offset < found.end_offset
    ]
    if not own:
        return
    start, at = own[0][0].base_offset, 0
    for output in found.segments:
        if output.end_offset > start:
            base = max(output.base_offset, start)
            part = output if base == output.base_offset else output.part(base, output.end_offset)
            while at + 1 < len(own) and own[at][1] <= base:  # both ascend
                at += 1
            yield Piece(base, tuple(_sources(own, at, base, output.end_offset)), part)
    last, end = own[-1]
    if end > found.end_offset:
        yield Piece(found.end_offset, (_source(last, end, found.end_offset, end),), None)


def _sources(own: list[tuple[Segment, int]], at: int, base: int, end: int) -> Iterator[Source]:
    """What ``base..end`` has of the segments from the ``at``-th on, which ends above ``base``."""
    while at < len(own) and own[at][0].base_offset < end:
        yield _source(*own[at], base, end)
        at += 1


def _source(segment: Segment, segment_end: int, base: int, end: int) -> Source:
    """What ``base..end`` has of a segment."""
    first = _position(segment, base) if base > segment.base_offset else 0
    last = _position(segment, end) if end < segment_end else segment.size_bytes
    return Source(
        max(base, segment.base_offset),
        min(end, segment_end),
        last - first,
        segment.mtime_ms,
        start_bytes=first,
        file_offset=segment.base_offset,
    )


def _position(segment: Segment, offset: int) -> int:
    batch = segment.locate(offset)
    return segment.size_bytes if batch is None else batch[0]


def follow(job: FollowJob, disk: Disk, progress: Progress = no_progress) -> Result:
    """Build what the manifest says; :func:`kept.compaction.manifest.apply.commit_files` goes on
    from there.

    Runs anywhere, creates files only, and leaves them for ``discard`` on an error. Raises
    LogsDiffer, CheckFailed, DamagedData, NoSpace, MachineError.
    """
    return _Follower(job, disk, progress).run()


class _Follower:
    def __init__(self, job: FollowJob, disk: Disk, progress: Progress) -> None:
        self.job, self.disk, self.progress = job, disk, progress
        self.known = (
            {} if job.previous is None else {s.base_offset: s for s in job.previous.segments}
        )
        self.users = Counter(s.file_offset for piece in job.pieces for s in piece.sources)
        self.bytes_written = 0

    def run(self) -> Result:
        job, published = self.job, self.job.manifest
        outputs, changed = self._unchanged()
        outputs |= self._built(changed)
        for piece in job.pieces:
            if piece.output is None:
                self._copy_rest(piece)
        plan = SwapPlan(tuple(_groups(job.pieces, {piece.base_offset for piece in changed})))
        checked = check_followed(job, plan, self.disk)
        removed = Removals(
            published.generation, published.now_ms, {Reason.FOLLOWED: self._removed()}
        )
        path = removal_log.new_path(job.directory, self.disk, published.generation)
        write_new(self.disk, path, removal_log.encode(removed))
        segments = [outputs.get(s.base_offset, s) for s in published.segments]
        path = layout.manifest_file(job.directory, *published.generation)
        write_new(self.disk, path, manifest.encode(published.with_segments(segments), plan))
        self.disk.fsync_dir(job.directory)
        self.disk.reach("compaction.written")
        return self._result(plan, removed, checked)

    def _result(self, plan: SwapPlan, removed: Removals, checked: int) -> Result:
        found = self.job.manifest
        rewritten = {base for group in plan.groups for base in group.input_bases}
        sources = [source for piece in self.job.pieces for source in piece.sources]
        return Result(
            generation=found.generation,
            clean_to=found.clean_to,
            end_offset=found.end_offset,
            records_examined=0,
            records_removed=sum(removed.counts().values()),
            bytes_before=sum(s.size_bytes for s in sources if s.file_offset in rewritten),
            bytes_after=self.bytes_written,
            segments_before=len(sources),
            segments_after=len(self.job.pieces),
            scans=0,
            keys=0,
            map_bytes=0,
            removed=removed.counts(),
            keys_checked=checked,
        )

    # Segments that stay as they are.

    def _unchanged(self) -> tuple[dict[int, OutputSegment], list[Piece]]:
        """Outputs that are there already, by base; and the pieces to build."""
        outputs: dict[int, OutputSegment] = {}
        likely, changed = [], []
        for piece in self.job.pieces:
            output = piece.output
            if output is None:
                continue
            if not self._is_whole(piece):
                changed.append(piece)
            elif self._as_before(output):
                outputs[output.base_offset] = replace(
                    output, size_bytes=piece.sources[0].size_bytes
                )
            elif output.size_bytes == piece.sources[0].size_bytes:
                likely.append(piece)
            else:
                changed.append(piece)
        for piece in likely:
            read = self._digest(piece)
            if read is None:
                changed.append(piece)
            else:
                outputs[read.base_offset] = read
        return outputs, sorted(changed, key=lambda piece: piece.base_offset)

    def _is_whole(self, piece: Piece) -> bool:
        """Its source is a segment of these very boundaries, of which no other piece has a part."""
        source, output = piece.sources[0], piece.output
        return (
            output is not None
            and len(piece.sources) == 1
            and self.users[source.file_offset] == 1
            and (source.base_offset, source.end_offset) == (output.base_offset, output.end_offset)
            and source.file_offset == source.base_offset
        )

    def _as_before(self, output: OutputSegment) -> bool:
        """The manifest applied before made this segment, and the new one leaves it so."""
        known = self.known.get(output.base_offset)
        return (
            known is not None
            and bool(known.digest)
            and (known.end_offset, known.digest) == (output.end_offset, output.digest)
            and (known.survivors, known.empties) == (output.survivors, output.empties)
            and (known.horizons, known.aborted) == (output.horizons, output.aborted)
        )

    def _digest(self, piece: Piece) -> OutputSegment | None:
        """The output, if reading its segment shows that nothing would change."""
        output = piece.output
        assert output is not None
        try:
            (read,) = self._build(
                [SegmentGroup(piece.sources, replace(output, digest=b""), changed=False)]
            )
        except DamagedData:
            return None  # the build says which survivor is missing
        same = (read.digest, read.size_bytes) == (output.digest, output.size_bytes)
        return read if same and self._has_horizons(piece) else None

    def _has_horizons(self, piece: Piece) -> bool:
        """The batches carry the delete horizons already: to set one leaves sizes as they are."""
        output = piece.output
        assert output is not None
        missing = {(first, ms) for ms, batches in output.horizons.items() for first in batches}

        def note(_: memoryview, header: BatchHeader) -> None:
            if header.has_delete_horizon:
                first = header.base_offset - output.base_offset
                missing.discard((first, header.delete_horizon_ms))

        if missing:
            _read_batches(self.job, self.disk, piece.sources[0], note)
        return not missing

    # Segments to write.

    def _build(self, groups: list[SegmentGroup]) -> tuple[OutputSegment, ...]:
        job = self.job
        config = replace(job.config, segment_bytes=_NO_LIMIT, segment_index_bytes=_NO_LIMIT)
        built = build(
            job.manifest,
            groups,
            job.directory,
            config,
            self.disk,
            chunk_bytes=job.chunk_bytes,
            progress=self.progress,
            check_crc=True,
        )
        self.bytes_written += built.bytes_written
        return built.manifest.segments

    def _built(self, changed: list[Piece]) -> dict[int, OutputSegment]:
        groups = []
        for piece in changed:
            assert piece.output is not None
            groups.append(SegmentGroup(piece.sources, piece.output, changed=True))
        try:
            outputs = self._build(groups)
        except DamagedData as error:
            for piece in changed:
                self._look_for_missing(piece)
            for piece in changed:
                self._look_for_damage(piece, error)
            raise
        for piece, output in zip(changed, outputs, strict=True):
            self._compare(piece, output)
        return {output.base_offset: output for output in outputs}

    def _compare(self, piece: Piece, made: OutputSegment) -> None:
        output = piece.output
        if output is not None and output.digest and made.digest != output.digest:
            raise LogsDiffer(
                piece.sources[0].path(self.job.directory),
                -1,
                output.base_offset,
                f"it does not come to the digest of generation {self.job.manifest.generation}",
            )

    def _look_for_missing(self, piece: Piece) -> None:
        """Raises LogsDiffer for the first survivor that is not there, or is in a damaged batch.

        Slow; for the report.
        """
        output = piece.output
        assert output is not None
        present, bases = BitMap(), BitMap()

        def note(batch: memoryview, header: BatchHeader) -> None:
            outside = not output.base_offset <= header.base_offset < output.end_offset
            if outside or crc32c(batch[CRC_START:]) != header.crc:
                return
            first = header.base_offset - output.base_offset
            bases.add(first)
            if header.record_count == header.last_offset_delta + 1:
                present.add_range(first, first + header.record_count)
            elif header.record_count:
                present.update([r.offset - output.base_offset for r in records(bytes(batch))])

        for source in piece.sources:
            # Behind a header that is none no batch can be found.
            with suppress(CorruptMessage, DamagedData):
                _read_batches(self.job, self.disk, source, note)
        missing = (output.survivors - present) | (output.empties - bases)
        if missing:
            raise LogsDiffer(
                piece.sources[0].path(self.job.directory),
                -1,
                output.base_offset + missing.min(),
                f"it survives in generation {self.job.manifest.generation}, and is not here",
            )

    def _look_for_damage(self, piece: Piece, error: DamagedData) -> None:
        """Raises LogsDiffer if that damage is in this piece, of which no survivor is missing: it
        would stop every other try as well.
        """
        for source in piece.sources:
            at = error.position - source.start_bytes
            is_here = error.position < 0 or 0 <= at < source.size_bytes
            if is_here and error.path == source.path(self.job.directory):
                why = f"{error.why}, where generation {self.job.manifest.generation} is built"
                raise LogsDiffer(error.path, error.position, source.base_offset, why) from error

    def _copy_rest(self, piece: Piece) -> None:
        """Copy the batches beyond the manifest's end; the indexes come with the swap."""
        job, disk = self.job, self.disk
        (source,) = piece.sources
        out = disk.open_new(_cleaned(job.directory, piece.base_offset, layout.LOG))
        file = disk.open_read(source.path(job.directory))
        written = 0

        def use(view: memoryview) -> int:
            nonlocal written
            disk.writev(out, [view], written)
            written += len(view)
            self.progress(len(view))
            return len(view)

        end = source.start_bytes + source.size_bytes
        chunks(disk, file, end, job.chunk_bytes, use, start=source.start_bytes, drop=False)
        if job.aborted:
            side = disk.open_new(_cleaned(job.directory, piece.base_offset, layout.TXN_INDEX))
            disk.writev(side, [txn_index.encode(list(job.aborted))], 0)
            disk.fsync(side)
        disk.set_mtime(out.path, source.mtime_ms)
        disk.fsync(out)
        self.bytes_written += written

    # The journal.

    def _removed(self) -> list[tuple[int, BitMap]]:
        """What is gone by this generation: all offsets there were, as far as is known, but for the
        survivors. Where the last manifest said what survived, only that can have gone now.
        """
        parts = []
        before = self.job.previous
        for piece in self.job.pieces:
            output = piece.output
            if output is None:
                continue
            base, end = output.base_offset, output.end_offset
            were = BitMap()
            dense_from = base if before is None else max(base, before.end_offset)
            if dense_from < end:
                were.add_range(dense_from - base, end - base)
            for known in () if before is None else before.segments:
                if known.base_offset < end and known.end_offset > base:
                    low = max(base, known.base_offset)
                    cut = known.part(low, min(end, known.end_offset)).survivors
                    were |= cut.shift(low - base)
            gone = were - output.survivors
            if gone:
                parts.append((base, gone))
        return parts


def _cleaned(directory: str, base_offset: int, kind: str) -> str:
    return layout.segment_file(directory, base_offset, kind, layout.CLEANED)


def _groups(all_pieces: tuple[Piece, ...], changed: set[int]) -> Iterator[SwapGroup]:
    """What replaces what: pieces that share a segment go together."""
    outputs: list[int] = []
    inputs: list[int] = []
    for piece in all_pieces:
        if piece.output is not None and piece.base_offset not in changed:
            continue
        bases = [source.file_offset for source in piece.sources]
        if inputs and bases[0] != inputs[-1]:
            yield SwapGroup(tuple(outputs), tuple(inputs))
            outputs, inputs = [], []
        outputs.append(piece.base_offset)
        inputs += [base for base in bases if not inputs or base != inputs[-1]]
    if inputs:
        yield SwapGroup(tuple(outputs), tuple(inputs))


def _read_batches(
    job: FollowJob, disk: Disk, source: Source, note: Callable[[memoryview, BatchHeader], None]
) -> None:
    """Every batch of a source."""
    file = disk.open_read(source.path(job.directory))

    def use(view: memoryview) -> int:
        used = 0
        for at, header in headers(view):
            used = at + header.size_bytes
            note(view[at:used], header)
        return used

    end = source.start_bytes + source.size_bytes
    chunks(disk, file, end, job.chunk_bytes, use, start=source.start_bytes, drop=False)
