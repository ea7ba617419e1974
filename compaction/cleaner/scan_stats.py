"""What a scan finds out about one source segment, and reading a segment batch by batch.

:func:`scan_segment` feeds a :class:`~kept.compaction.kernels.kernel.SegmentScan` from a file and
handles the batches that the kernel leaves to its caller: compressed, transactional and control
batches. :class:`ScanStats` keeps what the pass needs of the result. All offsets in it are relative
to the segment's base.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pyroaring import BitMap

from kept.compaction.cleaner.job import CACHED_BYTES, INFLATE_LIMIT, Job, Source
from kept.storage.disk import Disk, File
from kept.storage.errors import DamagedData, PeerError
from kept.storage.records import (
    HEADER_BYTES,
    BatchHeader,
    decompress,
    headers,
    read_header,
    read_marker,
    scan,
)
from kept.storage.records.control import ABORT, COMMIT
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import Codec

OTHER: Final = -1
EMPTY: Final = -2
"""Kinds of control batches; the marker of an empty one is gone."""

DROP_BYTES: Final = 16 << 20
"""Read between two advices to the page cache: each has a price of its own."""

Progress = Callable[[int], None]
"""Called with bytes read or written; it may wait, for the cleaner's limit on I/O."""


def no_progress(size_bytes: int) -> None:
    """Progress that is not reported."""
    del size_bytes


@dataclass(frozen=True, slots=True)
class Control:
    """A control batch: ``first..last`` relative offsets, whose marker, which horizon (-1: none)."""

    first: int
    last: int
    producer_id: int
    producer_epoch: int
    kind: int
    horizon_ms: int


@dataclass(slots=True)
class ScanStats:
    """What a scan found out about one source segment. ``events`` are transactions in log order: a
    producer id for its data (once in a row), or a :class:`Control`. ``cached``: the segment was in
    the page cache before the pass read it, so it is left there.
    """

    source: Source
    present: BitMap = field(default_factory=BitMap)
    tombstones: BitMap = field(default_factory=BitMap)
    expired: BitMap = field(default_factory=BitMap)
    keyless: BitMap = field(default_factory=BitMap)
    aborted: BitMap = field(default_factory=BitMap)
    empties: list[tuple[int, int]] = field(default_factory=list)
    bare: list[tuple[int, int]] = field(default_factory=list)
    horizons: list[tuple[int, int, int]] = field(default_factory=list)
    events: list[int | Control] = field(default_factory=list)
    records: int = 0
    cached: bool = False

    @property
    def controls(self) -> list[Control]:
        """The control batches."""
        return [event for event in self.events if isinstance(event, Control)]

    def load(self, scan_: Any) -> None:
        """Take over the facts of a scan of the whole segment."""
        runs = scan_.runs()
        present = BitMap()
        short = array("I")
        for first, last in zip(runs[0::2], runs[1::2], strict=True):
            if last - first < 4:
                short.extend(range(first, last + 1))
            else:
                present.add_range(first, last + 1)
        self.present = present | BitMap(short)
        self.tombstones, self.expired = BitMap(scan_.tombstones()), BitMap(scan_.expired())
        self.keyless, self.aborted = BitMap(scan_.keyless()), BitMap(scan_.aborted())
        self.empties, self.bare = _pairs(scan_.empties()), _pairs(scan_.bare())
        self.horizons = scan_.horizons()
        self.records = scan_.records


def _pairs(flat: array[int]) -> list[tuple[int, int]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


class AbortedIndex:
    """Which batches belong to an aborted transaction."""

    def __init__(self, aborted: Iterable[AbortedTxn]) -> None:
        self._by_producer: dict[int, list[tuple[int, int]]] = {}
        for txn in sorted(aborted, key=lambda txn: txn.first_offset):
            spans = self._by_producer.setdefault(txn.producer_id, [])
            spans.append((txn.first_offset, txn.last_offset))

    def has(self, header: BatchHeader) -> bool:
        """The batch is transactional data that was aborted."""
        spans = self._by_producer.get(header.producer_id)
        if spans is None or not header.is_transactional or header.is_control:
            return False
        index = bisect_right(spans, (header.base_offset, 1 << 63)) - 1
        return index >= 0 and header.base_offset <= spans[index][1]


def producers_by_last_offset(job: Job) -> array[int]:
    """Flat (last data offset, producer id), ascending, as a scan wants it."""
    pairs = sorted((p.last_data_offset, p.producer_id) for p in job.producers)
    return array("q", [value for pair in pairs if pair[0] >= 0 for value in pair])


def chunks(
    disk: Disk,
    file: File,
    size: int,
    chunk_bytes: int,
    use: Callable[[memoryview], int],
    *,
    drop: bool = True,
    start: int = 0,
) -> None:
    """Hand ``start..size`` of a file to ``use`` in chunks of whole batches; it returns how many
    bytes it took.

    ``drop``: leave nothing of it in the page cache, which is the consumers'.

    Raises DamagedData when the file ends in the middle of a batch.
    """
    position, want, dropped = start, chunk_bytes, start
    while position < size:
        data = disk.pread(file, position, min(want, size - position))
        used = use(memoryview(data))
        if not used:
            want = _enough(file, position, data, size)
            continue
        position += used
        if drop and (position - dropped >= DROP_BYTES or position >= size):
            disk.drop_cache(file, dropped, position - dropped)
            dropped = position
        want = chunk_bytes


def whole_batches(disk: Disk, file: File, size: int, chunk_bytes: int) -> Iterator[bytes]:
    """A file in chunks of whole batches. Raises DamagedData when its last batch is cut off."""
    position, want = 0, chunk_bytes
    while position < size:
        data = disk.pread(file, position, min(want, size - position))
        used = 0
        for at, header in headers(data):
            used = at + header.size_bytes
        if not used:
            want = _enough(file, position, data, size)
            continue
        disk.drop_cache(file, position, used)
        position += used
        want = chunk_bytes
        yield data[:used]


def _enough(file: File, position: int, data: bytes, size: int) -> int:
    """Bytes to read so that the batch at ``position``, of which ``data`` is the start, is whole."""
    if len(data) < HEADER_BYTES or position + len(data) >= size:
        raise DamagedData(file.path, position, -1, "the last batch is cut off")
    return max(int.from_bytes(data[8:12], "big", signed=True) + 12, len(data) + 1)


def scan_segment(
    scan_: Any,
    source: Source,
    *,
    job: Job,
    disk: Disk,
    aborted: AbortedIndex,
    facts: ScanStats | None,
    progress: Progress,
) -> None:
    """Scan a segment, transactions going into ``facts``. Raises DamagedData."""
    path = source.path(job.directory)
    file = disk.open_read(path)
    done = 0

    def use(view: memoryview) -> int:
        nonlocal done
        at = 0
        while True:
            used: int = scan_.feed(view[at:])
            at += used
            if scan_.fault is None and scan_.special:
                header = read_header(view, at)
                batch = view[at : at + header.size_bytes]
                where = (path, done + at)
                _special(scan_, batch, header, aborted=aborted, facts=facts, where=where)
                if scan_.fault is None:
                    at += header.size_bytes
                    continue
            if scan_.fault is not None:
                raise DamagedData(path, done + at, -1, scan_.fault)
            done += at
            progress(at)
            return at

    if facts is not None:
        facts.cached = disk.resident(file, 0, source.size_bytes)
    drop = job.source_bytes > CACHED_BYTES and not (facts is not None and facts.cached)
    chunks(disk, file, source.size_bytes, job.chunk_bytes, use, drop=drop)


def _special(
    scan_: Any,
    batch: memoryview,
    header: BatchHeader,
    *,
    aborted: AbortedIndex,
    facts: ScanStats | None,
    where: tuple[str, int],
) -> None:
    if header.is_control:
        control = _control(scan_.base_offset, batch, header)
        first = header.base_offset if control.kind == EMPTY else scan_.base_offset + control.first
        scan_.skip(first, header.next_offset, header.size_bytes, control.kind != EMPTY)
        if facts is not None:
            facts.events.append(control)
        return
    area: memoryview | bytes = batch[HEADER_BYTES:]
    if header.codec != Codec.NONE and header.record_count:
        try:
            area = decompress(header.codec, area, INFLATE_LIMIT)
        except PeerError as error:
            raise DamagedData(*where, header.base_offset, str(error)) from error
    scan_.feed_batch(batch[:HEADER_BYTES], area, aborted.has(header))
    if facts is not None and header.is_transactional:
        events = facts.events
        if not events or events[-1] != header.producer_id:
            events.append(header.producer_id)


def _control(segment_base: int, batch: memoryview, header: BatchHeader) -> Control:
    kind = EMPTY
    if header.record_count:
        marker = read_marker(scan(batch, inflate_limit=INFLATE_LIMIT).key(0), None)
        kind = OTHER if marker is None else COMMIT if marker.is_commit else ABORT
    first = header.base_offset - segment_base
    return Control(
        first,
        first + header.last_offset_delta,
        header.producer_id,
        header.producer_epoch,
        kind,
        header.delete_horizon_ms if header.has_delete_horizon else -1,
    )
