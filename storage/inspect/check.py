"""Offline: does a data directory hold what it should? ``kept log check``.

Reads only; the node must not run. Works on ours and on Apache Kafka's directories, on one partition
or a whole entry of ``log.dirs``. A finding is either damage (bytes that are not what they must be)
or a note: what an unclean stop leaves and the next start repairs. A bad end of the last segment is
a note only where an unclean stop can have left it: there is no mark of a clean stop, and no whole
batch follows. Files that are gone are damage, too (:mod:`kept.storage.inspect.lost_files`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from kept.storage import checkpoints, layout
from kept.storage.disk import Disk, parent
from kept.storage.errors import CorruptMessage, DamagedData, InvalidRecord
from kept.storage.inspect.findings import Finding
from kept.storage.inspect.lost_files import (
    Checkpointed,
    lost_segments,
    missing_logs,
    missing_records,
)
from kept.storage.producers import snapshots
from kept.storage.records import BatchHeader, check_replica, read_marker, scan
from kept.storage.records.header import HEADER_BYTES, LENGTH_PREFIX_BYTES, MAGIC_POSITION
from kept.storage.segments import offset_index, time_index, txn_index

LOG_DIRECTORY: Final = "log"
"""Where a node's logs are below its ``--data-dir``; no partition's directory has that name."""
CHUNK_BYTES: Final = 1 << 20
INFLATE_LIMIT_BYTES: Final = 1 << 28
"""Largest batch that the check inflates."""
SEARCH_BYTES: Final = 8 << 20
"""How far behind a bad batch whole ones are looked for."""


class BatchAt(NamedTuple):
    """A batch of a ``.log``: where it starts, its header, all its bytes."""

    position: int
    header: BatchHeader
    data: bytes


def batches(disk: Disk, path: str) -> Iterator[BatchAt]:
    """The batches of a ``.log``, CRCs checked. Raises DamagedData at the first that is wrong."""
    file = disk.open_read(path)
    size = disk.size(file)
    position, wanted = 0, CHUNK_BYTES
    while position < size:
        chunk = disk.pread(file, position, min(wanted, size - position))
        at = 0
        while len(chunk) - at >= HEADER_BYTES:
            length = int.from_bytes(chunk[at + 8 : at + LENGTH_PREFIX_BYTES], "big", signed=True)
            end = at + length + LENGTH_PREFIX_BYTES
            if end > len(chunk) and length > 0 and position + end <= size:
                break
            try:
                header = check_replica(chunk, at)
            except CorruptMessage as error:
                raise DamagedData(path, position + at, -1, str(error)) from error
            yield BatchAt(position + at, header, chunk[at:end])
            at = end
        if at == 0:
            if wanted > len(chunk) and position + len(chunk) >= size:
                raise DamagedData(path, position, -1, f"{size - position} bytes are no batch")
            wanted = max(
                wanted * 2,
                int.from_bytes(chunk[8:LENGTH_PREFIX_BYTES], "big", signed=True)
                + LENGTH_PREFIX_BYTES,
            )
        else:
            wanted = CHUNK_BYTES
        position += at


def _whole_batches(disk: Disk, path: str, position: int) -> int:
    """How many whole batches, by their CRC, lie anywhere in the bytes from ``position`` on."""
    data = disk.pread(disk.open_read(path), position, SEARCH_BYTES)
    count, at = 0, 0
    while (magic := data.find(b"\x02", at + MAGIC_POSITION)) >= 0:
        at = magic - MAGIC_POSITION
        try:
            at += check_replica(data, at).size_bytes
            count += 1
        except CorruptMessage:
            at += 1
    return count


class _Segment(NamedTuple):
    """What the indexes of a segment are compared with."""

    base_offset: int
    last_offset_at: dict[int, int]
    timestamps: list[tuple[int, int]]
    size_bytes: int
    aborts: dict[int, tuple[int, bool]]
    """By the offset of each abort marker its producer, and whether readable data of it is here."""
    next_offset: int
    """After the last whole batch."""


def check_log(  # noqa: PLR0917
    disk: Disk,
    path: str,
    base_offset: int,
    end_offset: int | None,
    may_be_torn: bool,
    log_start_offset: int = 0,
) -> tuple[_Segment, list[Finding]]:
    """Check a ``.log`` down to its records; what its indexes must say."""
    findings: list[Finding] = []
    last_offset_at: dict[int, int] = {}
    timestamps: list[tuple[int, int]] = []
    aborts: dict[int, tuple[int, bool]] = {}
    writing: set[int] = set()
    next_offset = base_offset
    size = disk.stat(path).size_bytes
    try:
        for position, header, data in batches(disk, path):
            if header.base_offset < next_offset or header.last_offset < header.base_offset:
                why = f"offset {header.base_offset} after {next_offset - 1}"
                findings.append(Finding(path, position, header.base_offset, why, True))
            if end_offset is not None and header.last_offset >= end_offset:
                why = f"ends at {header.last_offset}, the next segment starts at {end_offset}"
                findings.append(Finding(path, position, header.base_offset, why, True))
            if header.record_count:
                try:
                    columns = scan(data, inflate_limit=INFLATE_LIMIT_BYTES)
                    if header.is_control:
                        marker = read_marker(columns.key(0), columns.value(0))
                        has_data = header.producer_id in writing
                        writing.discard(header.producer_id)
                        if marker is not None and not marker.is_commit:
                            aborts[header.base_offset] = header.producer_id, has_data
                    elif header.is_transactional and header.last_offset >= log_start_offset:
                        writing.add(header.producer_id)
                except (InvalidRecord, CorruptMessage) as error:
                    findings.append(Finding(path, position, header.base_offset, str(error), True))
            next_offset = header.next_offset
            last_offset_at[position] = header.last_offset
            timestamps.append((header.last_offset, header.max_timestamp))
    except DamagedData as error:
        why, torn = error.why, False
        if may_be_torn:
            behind = _whole_batches(disk, path, error.position + 1)
            torn = not behind
            why += "; the next start cuts the log here"
            if behind:
                why += f" and drops {behind} whole batches behind it"
        findings.append(Finding(path, error.position, next_offset, why, not torn))
    segment = _Segment(base_offset, last_offset_at, timestamps, size, aborts, next_offset)
    return segment, findings


def check_index(disk: Disk, path: str, segment: _Segment, is_last: bool) -> list[Finding]:
    """Compare an offset index with its log."""
    data = disk.read(path)
    offsets, positions = offset_index.decode_entries(data)
    findings = _preallocated(path, data, len(offsets) * offset_index.ENTRY_BYTES, is_last)
    previous = -1
    for i, (relative, position) in enumerate(zip(offsets, positions, strict=True)):
        at = i * offset_index.ENTRY_BYTES
        last_offset = segment.last_offset_at.get(position)
        if relative <= previous:
            findings.append(Finding(path, at, segment.base_offset + relative, "descends", True))
        elif last_offset is None and position < segment.size_bytes:
            why = f"leads to byte {position}, where no batch starts"
            findings.append(Finding(path, at, segment.base_offset + relative, why, True))
        elif last_offset is not None and last_offset != segment.base_offset + relative:
            why = f"leads to the batch that ends at {last_offset}"
            findings.append(Finding(path, at, segment.base_offset + relative, why, True))
        elif last_offset is None:
            why = f"leads to byte {position} of a log of {segment.size_bytes}"
            findings.append(Finding(path, at, segment.base_offset + relative, why, not is_last))
        previous = relative
    return findings


def check_time_index(disk: Disk, path: str, segment: _Segment, is_last: bool) -> list[Finding]:
    """Compare a time index with its log."""
    data = disk.read(path)
    timestamps, offsets = time_index.decode_entries(data)
    findings = _preallocated(path, data, len(offsets) * time_index.ENTRY_BYTES, is_last)
    lasts = [last for last, _ in segment.timestamps]
    reached = list(accumulate((timestamp for _, timestamp in segment.timestamps), max))
    previous = -1
    for i, (timestamp, relative) in enumerate(zip(timestamps, offsets, strict=True)):
        at, offset = i * time_index.ENTRY_BYTES, segment.base_offset + relative
        behind = bisect_right(lasts, offset)
        largest = reached[behind - 1] if behind else -1
        if timestamp <= previous:
            findings.append(Finding(path, at, offset, "descends", True))
        elif timestamp > largest and segment.timestamps:
            why = f"timestamp {timestamp}, the batches up to there reach {largest}"
            findings.append(Finding(path, at, offset, why, False))
        previous = timestamp
    return findings


def check_txn_index(disk: Disk, path: str, segment: _Segment) -> list[Finding]:
    """Compare the aborted transactions with the markers; without any there need be no file."""
    data = b""
    with suppress(FileNotFoundError):
        data = disk.read(path)
    try:
        entries = txn_index.decode(path, data, segment.base_offset)
    except DamagedData as error:
        return [Finding(path, error.position, error.offset, error.why, True)]
    findings = []
    told = set()
    for i, entry in enumerate(entries):
        told.add(entry.last_offset)
        if segment.aborts.get(entry.last_offset, (-1, False))[0] != entry.producer_id:
            why = f"producer {entry.producer_id} aborted nothing at this offset"
            at = i * txn_index.ENTRY_BYTES
            findings.append(Finding(path, at, entry.last_offset, why, True))
    for offset, (producer_id, has_data) in segment.aborts.items():
        if has_data and offset not in told:
            why = f"producer {producer_id} aborted a transaction at this offset, and it is not here"
            findings.append(Finding(path, -1, offset, why, True))
    return findings


def _preallocated(path: str, data: bytes, used: int, is_last: bool) -> list[Finding]:
    if len(data) == used:
        return []
    why = f"{len(data) - used} bytes of zeros: it was not closed"
    return [Finding(path, used, -1, why, not is_last)]


def check_partition(
    path: str, disk: Disk | None = None, checkpointed: Checkpointed | None = None
) -> list[Finding]:
    """Check one partition's directory; ``checkpointed`` are the checkpoints beside it."""
    disk = disk or Disk({})
    checkpointed = checkpointed or Checkpointed(disk, parent(path))
    known = checkpointed.known(path.rpartition("/")[2])
    clean = known.clean
    names = disk.listdir(path)
    findings: list[Finding] = []
    files: dict[tuple[str, int], str] = {}
    for name in names:
        parsed = layout.parse_segment_file(name)
        if parsed is None:
            continue
        if parsed.state:
            why = f"left by an interrupted swap or deletion ({parsed.state})"
            findings.append(Finding(f"{path}/{name}", -1, -1, why, False))
        else:
            files[parsed.kind, parsed.base_offset] = f"{path}/{name}"
    bases = sorted(base for kind, base in files if kind == layout.LOG)
    ends: dict[int, int] = {}
    damaged: set[int] = set()
    for i, base in enumerate(bases):
        is_last = i + 1 == len(bases)
        end_offset = None if is_last else bases[i + 1]
        segment, more = check_log(
            disk,
            files[layout.LOG, base],
            base,
            end_offset,
            is_last and not clean,
            known.log_start_offset,
        )
        findings += more
        ends[base] = segment.next_offset
        damaged.update([base] if more else ())
        if (layout.INDEX, base) in files:
            findings += check_index(disk, files[layout.INDEX, base], segment, is_last)
        if (layout.TIME_INDEX, base) in files:
            findings += check_time_index(disk, files[layout.TIME_INDEX, base], segment, is_last)
        aborted = check_txn_index(disk, layout.segment_file(path, base, layout.TXN_INDEX), segment)
        is_open = not clean and base in bases[-2:]
        findings += [_unfinished(f) if is_open else f for f in aborted]
    snapshot_ends = sorted(end for kind, end in files if kind == layout.SNAPSHOT)
    lost = lost_segments(disk, path, ends, known)
    for (kind, base), name in sorted(files.items()):
        if kind not in (layout.LOG, layout.SNAPSHOT) and (layout.LOG, base) not in files:
            why = "there is no .log beside it"
            why += ": its records are lost here" * (base in lost)
            findings.append(Finding(name, -1, base, why, base in lost))
        if kind == layout.SNAPSHOT:
            unfinished = not clean and base == snapshot_ends[-1]
            found = _read(name, partial(_snapshot, disk, name))
            findings += [_unfinished(f) if unfinished else f for f in found]
    epochs = f"{path}/{layout.LEADER_EPOCHS}"
    findings += _read(epochs, lambda: checkpoints.read_epochs(disk, epochs))
    metadata = f"{path}/{layout.PARTITION_METADATA}"
    findings += _read(metadata, lambda: checkpoints.read_partition_metadata(disk, metadata))
    return findings + missing_records(disk, path, ends, known, damaged)


def _unfinished(finding: Finding) -> Finding:
    """A file is written when its segment is rolled: the process may have been killed at it."""
    why = f"{finding.why}; the log was not closed, and the next start makes it anew"
    return finding._replace(why=why, damaged=False)


def _snapshot(disk: Disk, path: str) -> object:
    return snapshots.decode(path, disk.read(path))


def _read(path: str, reading: Callable[[], object]) -> list[Finding]:
    try:
        reading()
    except DamagedData as error:
        return [Finding(path, error.position, error.offset, error.why, True)]
    return []


More = Callable[[str, Disk, list[Finding]], list[Finding]]
"""Checks what else is in a partition's directory, of which so much was found."""


def _nothing_more(_path: str, _disk: Disk, _found: list[Finding]) -> list[Finding]:
    return []


def _check_all(path: str, disk: Disk, checkpointed: Checkpointed, more: More) -> list[Finding]:
    """One partition's directory, with what ``more`` says of it."""
    findings = check_partition(path, disk, checkpointed)
    return findings + more(path, disk, findings)


def check_directory(
    path: str, disk: Disk | None = None, *, more: More = _nothing_more
) -> list[Finding]:
    """Check one partition's directory, or a whole one, an entry of ``log.dirs``. What
    ``kept serve --data-dir`` names has that entry in it. ``more`` is asked about each partition
    besides. Raises FileNotFoundError, MachineError.
    """
    disk = disk or Disk({})
    path = path.rstrip("/") or "/"
    names = disk.listdir(path)
    if any(layout.parse_segment_file(name) for name in names):
        return _check_all(path, disk, Checkpointed(disk, parent(path)), more)
    if LOG_DIRECTORY in names and not any(map(layout.parse_directory_name, names)):
        return check_directory(f"{path}/{LOG_DIRECTORY}", disk, more=more)
    findings: list[Finding] = []
    for kind in (
        layout.RECOVERY_POINTS,
        layout.HIGH_WATERMARKS,
        layout.LOG_STARTS,
        layout.CLEANER_OFFSETS,
    ):
        name = f"{path}/{kind}"
        findings += _read(name, partial(checkpoints.read_offsets, disk, name))
    meta = f"{path}/{layout.META_PROPERTIES}"
    findings += _read(meta, lambda: checkpoints.read_properties(disk, meta))
    checkpointed = Checkpointed(disk, path)
    for name in names:
        inner = f"{path}/{name}"
        if name in layout.IGNORED_NAMES or not disk.stat(inner).is_directory:
            continue
        parsed = layout.parse_directory_name(name)
        if parsed is None:
            findings.append(Finding(inner, -1, -1, "is no partition's directory", False))
        elif parsed.state == layout.STRAY_DIRECTORY:
            why = (
                "a log that the metadata did not know, and whose deletion nobody has seen: it is "
                "kept until you remove it"
            )
            findings.append(Finding(inner, -1, -1, why, False))
            findings += _check_all(inner, disk, checkpointed, more)
        elif not parsed.state:
            findings += _check_all(inner, disk, checkpointed, more)
    findings += missing_logs(path, names, checkpointed)
    if not any(map(layout.parse_directory_name, names)):
        findings.append(Finding(path, -1, -1, "holds no log: nothing was checked", False))
    return findings
