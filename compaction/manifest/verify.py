"""What a replica has on disk, as digests that another replica's can be compared with (rule 16).

Recomputed from the files alone, in a worker process: of what the applied generation covers one
digest of the records of each segment (as :mod:`kept.compaction.cleaner.build` makes them; bytes may
differ where something was recompressed, rule 17), and of the tail beyond one of the batches of each
:data:`WINDOW` of offsets, which replicas have byte by byte. Where two replicas differ,
:func:`buckets` halves in on the first record.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kept.compaction.cleaner.build import digest_of
from kept.compaction.cleaner.cleaner_run import read_manifest
from kept.compaction.cleaner.job import DEFAULT_CHUNK_BYTES, INFLATE_LIMIT, Source
from kept.compaction.cleaner.scan_stats import whole_batches
from kept.compaction.cleaner.survey import SegmentGroup
from kept.compaction.manifest.manifest import DIGEST_BYTES, Manifest, OutputSegment
from kept.storage.disk import Disk
from kept.storage.errors import KeptError
from kept.storage.records import HEADER_BYTES, BatchHeader, Record, crc32c, headers, records
from kept.storage.records.header import CRC_START
from kept.storage.types import Generation, LogConfig

WINDOW: Final = 1 << 16
"""Offsets of the tail that share a digest: aligned, so that all replicas cut at the same ones."""
_NUMBERS: Final = struct.Struct(">qqi")
_LENGTH: Final = struct.Struct(">i")


@dataclass(slots=True)
class Range:
    """A part of the log that is compared as a whole; offsets ``base_offset..end_offset``.

    ``count`` is of records in what compaction covers, of batches in the tail. ``wrong`` says what
    was found damaged or missing here, without looking at other replicas.
    """

    base_offset: int
    end_offset: int
    digest: str
    count: int
    wrong: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaFiles:
    """The segments of one replica, as they were when somebody asked."""

    directory: str
    disk: Disk
    sources: tuple[Source, ...]

    def reach(self, start: int, end: int) -> tuple[int, int]:
        """Bounds of the segments that overlap ``start..end``: batches there may reach beyond it."""
        there = [s for s in self.sources if s.base_offset < end and s.end_offset > start]
        if not there:
            return start, end
        return there[0].base_offset, max(end, there[-1].end_offset)


def covered(files: ReplicaFiles, manifest: Manifest, start: int) -> Iterator[Range]:
    """The segments of an applied manifest that reach above ``start``, the highest log start."""
    by_base = {source.base_offset: source for source in files.sources}
    for output in manifest.segments:
        if output.end_offset <= start:
            continue
        if output.base_offset < start:
            yield _part(files, start, output.end_offset)
            continue
        source = by_base.get(output.base_offset)
        if source is None and not output.survivors and not output.empties:
            yield Range(output.base_offset, output.end_offset, "", 0)
        elif source is None or source.end_offset != output.end_offset:
            why = f"no segment {output.base_offset}..{output.end_offset} is here"
            yield Range(output.base_offset, output.end_offset, "", 0, why)
        else:
            yield _segment(files, source, output)


def _segment(files: ReplicaFiles, source: Source, output: OutputSegment) -> Range:
    """Read a whole segment, and compare it with what the manifest says of it."""
    whole = Range(output.base_offset, output.end_offset, "", len(output.survivors))
    group = SegmentGroup((source,), replace(output, digest=b""), changed=False)
    try:
        segment_digest = digest_of(
            group, files.directory, LogConfig(), files.disk, chunk_bytes=DEFAULT_CHUNK_BYTES
        )
    except (KeptError, OSError) as error:
        whole.wrong = str(error)
        return whole
    whole.digest = segment_digest.digest.hex()
    if output.digest and segment_digest.digest != output.digest:
        whole.wrong = "its records are not those of the generation"
    return whole


def _part(files: ReplicaFiles, start: int, end: int) -> Range:
    """The part of a segment above the log start: of its records alone."""
    hash_, count = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    try:
        for _, digest in _entries(files, start, end):
            hash_.update(digest)
            count += 1
    except (KeptError, OSError) as error:
        return Range(start, end, "", count, str(error))
    return Range(start, end, hash_.hexdigest(), count)


def tail(files: ReplicaFiles, start: int, end: int) -> Iterator[Range]:
    """The batches of ``start..end`` as they are, window by window; every CRC is checked."""
    window: Range | None = None
    hash_ = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for header, batch in _batches(files, start, end):
            base = header.base_offset // WINDOW * WINDOW
            if window is None or window.base_offset != max(base, start):
                if window is not None:
                    window.digest = hash_.hexdigest()
                    yield window
                window = Range(max(base, start), min(base + WINDOW, end), "", 0)
                hash_ = hashlib.blake2b(digest_size=DIGEST_BYTES)
            window.count += 1
            hash_.update(batch)
            if crc32c(batch[CRC_START:]) != header.crc:
                window.wrong = window.wrong or f"the batch at {header.base_offset} is damaged"
    except (KeptError, OSError) as error:
        window = window or Range(start, end, "", 0)
        window.wrong = str(error)
    if window is not None:
        window.digest = hash_.hexdigest()
        yield window


def _batches(files: ReplicaFiles, start: int, end: int) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Whole batches that lie in ``start..end``."""
    for source in files.sources:
        if source.end_offset <= start or source.base_offset >= end:
            continue
        file = files.disk.open_read(source.path(files.directory))
        for data in whole_batches(files.disk, file, source.size_bytes, DEFAULT_CHUNK_BYTES):
            view = memoryview(data)
            for position, header in headers(data):
                if header.base_offset >= start and header.next_offset <= end:
                    yield header, view[position : position + header.size_bytes]


# Where two replicas differ.


@dataclass(slots=True)
class Bucket:
    """Some of a range's records: their digest, and which is the first."""

    number: int
    digest: str
    count: int
    first_offset: int


def buckets(files: ReplicaFiles, start: int, end: int, parts: int) -> list[Bucket]:
    """The records of ``start..end`` in ``parts`` parts of as many offsets; empty ones are left out.

    Raises DamagedData, CorruptMessage.
    """
    width = max(1, -(-(end - start) // parts))
    filled: list[Bucket] = []
    hash_ = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for offset, digest in _entries(files, start, end):
        number = (offset - start) // width
        if not filled or filled[-1].number != number:
            hash_ = hashlib.blake2b(digest_size=DIGEST_BYTES)
            filled.append(Bucket(number, "", 0, offset))
        hash_.update(digest)
        filled[-1].count += 1
        filled[-1].digest = hash_.hexdigest()
    return filled


def _entries(files: ReplicaFiles, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(offset, digest) of every record in ``start..end``; a control batch counts as one."""
    low, high = files.reach(start, end)
    for header, batch in _batches(files, low, high):
        if header.next_offset <= start or header.base_offset >= end:
            continue
        if header.is_control:
            if start <= header.base_offset < end:
                marker = struct.pack(
                    ">qqh", header.last_offset, header.producer_id, header.producer_epoch
                )
                yield header.base_offset, _digest(marker, bytes(batch[HEADER_BYTES:]))
            continue
        for record in records(batch, inflate_limit=INFLATE_LIMIT):
            if start <= record.offset < end:
                yield record.offset, _record_digest(record)


def _record_digest(record: Record) -> bytes:
    fields = [_NUMBERS.pack(record.offset, record.timestamp, len(record.headers))]
    for content in (record.key, record.value, *(x for pair in record.headers for x in pair)):
        if isinstance(content, str):
            content = content.encode()  # noqa: PLW2901
        fields.append(_LENGTH.pack(-1 if content is None else len(content)))
        fields.append(b"" if content is None else bytes(content))
    return _digest(*fields)


def _digest(*fields: bytes) -> bytes:
    return hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()


# In the worker process.


def digest_ranges(question: Mapping[str, Any], disk: Disk) -> dict[str, Any]:
    """What :mod:`kept.node.compaction.replica_digests` asks for. Raises KeptError, OSError."""
    sources = tuple(Source(**source) for source in question["sources"])
    files = ReplicaFiles(question["directory"], disk, sources)
    start, end = question["start"], question["end"]
    if (parts := question["parts"]) is not None:
        return {
            "buckets": [
                asdict(covered_range) for covered_range in buckets(files, start, end, parts)
            ]
        }
    covers = start
    ranges: list[Range] = []
    if question["applied"] is not None:
        applied = read_manifest(files.directory, Generation(*question["applied"]), disk)
        covers = max(start, applied.end_offset)
        ranges += covered(files, applied, start)
    return {
        "covered_end": covers,
        "covered": [asdict(covered_range) for covered_range in ranges],
        "tail": [asdict(covered_range) for covered_range in tail(files, covers, end)],
    }
