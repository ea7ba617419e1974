"""Second half of a pass: write the segments that a manifest describes, beside the log.

``build(manifest, groups, ...)`` copies the surviving records of each group into
``<base>.log.cleaned`` with its indexes and transaction index, and computes the digest of each
output. It hashes no key and reads no clock, so the same manifest gives the same records on every
replica. Files are created exclusively; nothing that is in use is touched. Output is made durable
every 16 MiB (one fsync of a gigabyte would stall appends) and leaves the page cache, as do sources
that the pass brought in; what was there before stays, for it is the consumers'.

A group whose only segment would not change is not written; its digest is computed from the file,
unless the manifest has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pyroaring import BitMap

from kept.compaction.cleaner.job import INFLATE_LIMIT, Source
from kept.compaction.cleaner.scan_stats import Progress, chunks, no_progress
from kept.compaction.cleaner.survey import SegmentGroup
from kept.compaction.manifest.manifest import DIGEST_BYTES, Manifest, OutputSegment, cut
from kept.storage import layout
from kept.storage.disk import Disk, File
from kept.storage.errors import DamagedData, KeptError, PeerError
from kept.storage.records import filter as records_filter
from kept.storage.records import read_header
from kept.storage.segments import txn_index
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.types import LogConfig

SYNC_BYTES: Final = 16 << 20
"""Output between two calls of fdatasync."""
RESERVE_BYTES: Final = 64 << 20
"""Free space that a pass leaves; it stops before it gets below."""
_NO_LIMIT: Final = 1 << 62


class NoSpace(KeptError):
    """The pass would fill the disk: it stops, and the log stays as it is."""


@dataclass(frozen=True, slots=True)
class Built:
    """What was written: the manifest with digests and final boundaries, and what replaces what."""

    manifest: Manifest
    plan: SwapPlan
    bytes_written: int


def build(
    manifest: Manifest,
    groups: Sequence[SegmentGroup],
    directory: str,
    config: LogConfig,
    disk: Disk,
    *,
    chunk_bytes: int,
    progress: Progress = no_progress,
    cached: frozenset[int] = frozenset(),
    check_crc: bool = False,
) -> Built:
    """Write the segments that a manifest describes. The sources in ``cached`` stay in the page
    cache. ``check_crc``: nobody has read them just now.

    Raises DamagedData, NoSpace and MachineError; the files are then to be discarded.
    """
    builder = _Builder(directory, config, disk, chunk_bytes, progress)
    builder.cached, builder.check_crc = cached, check_crc
    segments: list[OutputSegment] = []
    swaps: list[SwapGroup] = []
    for group in groups:
        if group.changed:
            outputs = builder.write(group)
            segments += outputs
            swaps.append(
                SwapGroup(
                    tuple(output.base_offset for output in outputs),
                    tuple(source.base_offset for source in group.sources),
                )
            )
        elif group.output.digest:
            segments.append(group.output)
        else:
            segments.append(builder.digest_of(group))
    disk.fsync_dir(directory)
    return Built(manifest.with_segments(segments), SwapPlan(tuple(swaps)), builder.bytes_written)


def digest_of(
    group: SegmentGroup, directory: str, config: LogConfig, disk: Disk, *, chunk_bytes: int
) -> OutputSegment:
    """A group's output with the digest that its files come to; nothing is written.

    Raises DamagedData where a survivor is missing, or a batch cannot be read.
    """
    return _Builder(directory, config, disk, chunk_bytes, no_progress).digest_of(group)


class _Builder:
    def __init__(
        self, directory: str, config: LogConfig, disk: Disk, chunk_bytes: int, progress: Progress
    ) -> None:
        self.directory, self.config, self.disk = directory, config, disk
        self.chunk_bytes, self.progress = chunk_bytes, progress
        self.bytes_written = 0
        self.cached: frozenset[int] = frozenset()
        self.check_crc = False

    def write(self, group: SegmentGroup) -> list[OutputSegment]:
        """Write a group's outputs."""
        filter_ = records_filter.SegmentFilter(
            interval_bytes=self.config.index_interval_bytes,
            limit_bytes=self.config.segment_bytes,
            index_limit_bytes=self.config.segment_index_bytes,
            check_crc=self.check_crc,
        )
        run = _Run(self, group, filter_, write=True)
        return run.outputs()

    def digest_of(self, group: SegmentGroup) -> OutputSegment:
        """Digest of a segment that stays as it is."""
        filter_ = records_filter.SegmentFilter(
            interval_bytes=_NO_LIMIT,
            limit_bytes=_NO_LIMIT,
            index_limit_bytes=_NO_LIMIT,
            check_crc=True,
        )
        return _Run(self, group, filter_, write=False).outputs()[0]


class _Run:
    """One group on its way through the filter."""

    def __init__(
        self, builder: _Builder, group: SegmentGroup, filter_: Any, *, write: bool
    ) -> None:
        self.builder, self.group, self.filter, self.writing = builder, group, filter_, write
        self.disk = builder.disk
        self.done: list[OutputSegment] = []
        self.file: File | None = None
        self.written = self.synced = 0

    def outputs(self) -> list[OutputSegment]:
        """Do it; returns the output segments."""
        self._open(self.group.output.base_offset)
        for source in self.group.sources:
            self._copy(source)
        self._close(self.group.output.end_offset)
        kept = sum(len(output.survivors) for output in self.done)
        if kept != len(self.group.output.survivors):
            raise DamagedData(
                self.group.sources[0].path(self.builder.directory),
                -1,
                self.group.output.base_offset,
                f"{len(self.group.output.survivors) - kept} records that must survive are missing",
            )
        return self.done

    def _open(self, base_offset: int) -> None:
        from hashlib import blake2b  # only a worker needs it, but the node imports this, too

        self.filter.open_output(base_offset)
        self.base = base_offset
        self.hash = blake2b(digest_size=DIGEST_BYTES)
        self.written = self.synced = 0
        if self.writing:
            path = self._path(layout.LOG)
            self.file = self.disk.open_new(path)

    def _path(self, kind: str) -> str:
        return layout.segment_file(self.builder.directory, self.base, kind, layout.CLEANED)

    def _copy(self, source: Source) -> None:
        output = self.group.output
        shift = source.base_offset - output.base_offset
        length = source.end_offset - source.base_offset
        horizons = sorted(
            (first, value)
            for value, batches in output.horizons.items()
            for first in cut(batches, shift, shift + length)
        )
        self.filter.open_source(
            source.base_offset,
            _array(cut(output.survivors, shift, shift + length)),
            _array(cut(output.empties, shift, shift + length)),
            array("I", [first for first, _ in horizons]),
            array("q", [value for _, value in horizons]),
        )
        path = source.path(self.builder.directory)
        file = self.disk.open_read(path)
        done = source.start_bytes

        def use(view: memoryview) -> int:
            nonlocal done
            used = self._feed(view, path, done)
            done += used
            self._flush()
            self.builder.progress(used)
            return used

        drop = source.base_offset not in self.builder.cached
        start = source.start_bytes
        end, size = start + source.size_bytes, self.builder.chunk_bytes
        chunks(self.disk, file, end, size, use, drop=drop, start=start)

    def _feed(self, view: memoryview, path: str, position: int) -> int:
        at = 0
        while True:
            used: int = self.filter.feed(view[at:])
            at += used
            if self.filter.stop == records_filter.COMPRESSED:
                header = read_header(view, at)
                batch = view[at : at + header.size_bytes]
                try:
                    fits = records_filter.compressed_batch(
                        self.filter, batch, header.codec, INFLATE_LIMIT
                    )
                except PeerError as error:
                    why = str(error)
                    raise DamagedData(path, position + at, header.base_offset, why) from error
                if not fits:
                    self._split()
                elif self.filter.fault is None:
                    at += header.size_bytes
            elif self.filter.stop == records_filter.FULL:
                self._split()
            elif self.filter.fault is None:
                return at
            if self.filter.fault is not None:
                raise DamagedData(path, position + at, -1, self.filter.fault)

    def _split(self) -> None:
        """The output has reached a limit: close it, and begin another at the next batch."""
        base: int = self.filter.next_base
        self._flush()
        self._close(base)
        self._open(base)

    def _flush(self) -> None:
        self.hash.update(self.filter.drain_headers())
        data = self.filter.drain()
        if self.file is None or not data:
            return
        if self.disk.free_bytes(self.builder.directory) < RESERVE_BYTES + len(data):
            raise NoSpace(
                f"{self.builder.directory}: less than {RESERVE_BYTES} bytes would be left "
                "free; the pass stops"
            )
        self.disk.writev(self.file, [data], self.written)
        self.written += len(data)
        if self.written - self.synced >= SYNC_BYTES:
            self.disk.fdatasync(self.file)
            self.disk.drop_cache(self.file, self.synced, self.written - self.synced)
            self.synced = self.written

    def _close(self, end_offset: int) -> None:
        self._flush()
        part = self.group.output.part(self.base, end_offset)
        if self.filter.records != len(part.survivors):
            raise DamagedData(
                self.group.sources[0].path(self.builder.directory),
                -1,
                self.base,
                f"{self.filter.records} records where {len(part.survivors)} must survive",
            )
        size = self.filter.position
        self.done.append(replace(part, digest=self.hash.digest(), size_bytes=size))
        if self.file is None:
            return
        file, self.file = self.file, None
        self.builder.bytes_written += size
        mtime_ms = self.group.sources[-1].mtime_ms
        for kind, content in (
            (layout.INDEX, self.filter.index()),
            (layout.TIME_INDEX, self.filter.time_index()),
            (layout.TXN_INDEX, txn_index.encode(list(part.aborted)) if part.aborted else None),
        ):
            if content is not None:
                side = self.disk.open_new(self._path(kind))
                if content:
                    self.disk.writev(side, [content], 0)
                self.disk.fsync(side)
        self.disk.set_mtime(file.path, mtime_ms)
        self.disk.fsync(file)
        self.disk.drop_cache(file, self.synced, self.written - self.synced)


def _array(bitmap: BitMap) -> array[int]:
    offsets: array[int] = bitmap.to_array()
    return offsets


def discard(directory: str, disk: Disk) -> int:
    """Remove the outputs of a pass that will not be applied; returns how many files."""
    names = [
        name
        for name in disk.listdir(directory)
        if (parsed := layout.parse_segment_file(name)) and parsed.state == layout.CLEANED
    ]
    for name in names:
        disk.unlink(f"{directory}/{name}")
    return len(names)
