"""The removal journal: why an offset is not there any more.

Each pass leaves a file ``removals-<sequence>-<epoch>-<generation>`` in the partition's directory
with one roaring bitmap per reason (in parts, one per segment, because offsets have 64 bits). The
sequence counts the files of this directory: generations begin anew when a manifest is given up, and
epochs say nothing about order either. Together the files are bounded by
``kept.compaction.history.bytes``: the oldest go first, and what they knew is answered with "before
generation G".

Version 1 had no sequence in the name, and 32 bits for the generation; its files come first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pyroaring import BitMap

from kept.compaction.cleaner.survey import Survey
from kept.compaction.manifest.manifest import (
    Manifest,
    decode_bitmap,
    decode_sections,
    encode_sections,
)
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.types import MAX_INT32, Generation

MAGIC: Final = b"KREM"
VERSION: Final = 2
PREFIX: Final = layout.REMOVALS_PREFIX
_HEADS: Final = {1: struct.Struct(">iiq"), 2: struct.Struct(">iqq")}
_VERSION_AT: Final = 4
_PART: Final = struct.Struct(">qi")


class Reason(StrEnum):
    """Why a record was removed."""

    SUPERSEDED = "superseded"
    EXPIRED = "expired tombstone"
    ABORTED = "aborted"
    CONTROL = "control"
    KEYLESS = "keyless"
    BELOW_LOG_START = "below log start"
    FOLLOWED = "as the leader decided"


_NAMES: Final = {
    Reason.SUPERSEDED: b"SUPE",
    Reason.EXPIRED: b"EXPI",
    Reason.ABORTED: b"ABOR",
    Reason.CONTROL: b"CTRL",
    Reason.KEYLESS: b"KEYL",
    Reason.BELOW_LOG_START: b"STRT",
    Reason.FOLLOWED: b"LEAD",
}


@dataclass(frozen=True, slots=True)
class Removals:
    """What one pass removed, and why: per reason (base offset, offsets relative to it)."""

    generation: Generation
    now_ms: int
    reasons: dict[Reason, list[tuple[int, BitMap]]]

    def reason(self, offset: int) -> Reason | None:
        """Why this pass removed an offset; None when it did not."""
        for reason, parts in self.reasons.items():
            if any(0 <= offset - base <= MAX_INT32 and offset - base in b for base, b in parts):
                return reason
        return None

    def counts(self) -> dict[str, int]:
        """Records removed, by reason."""
        return {r.value: sum(len(b) for _, b in parts) for r, parts in self.reasons.items()}


def removals(survey: Survey) -> Removals:
    """What the pass of a survey removes."""
    start = survey.manifest.log_start_offset
    reasons: dict[Reason, list[tuple[int, BitMap]]] = {}
    for facts in survey.facts:
        base = facts.source.base_offset
        gone = facts.present - survey.survivors[base]
        below = BitMap()
        if start > base:
            below = gone.copy()
            below.remove_range(start - base, 1 << 32)
        for reason, bitmap in (
            (Reason.BELOW_LOG_START, below),
            (Reason.ABORTED, facts.aborted),
            (Reason.CONTROL, survey.markers[base].removed),
            (Reason.KEYLESS, facts.keyless),
            (Reason.EXPIRED, facts.expired),
            (Reason.SUPERSEDED, gone),
        ):
            part = gone & bitmap
            if part:
                reasons.setdefault(reason, []).append((base, part))
                gone = gone - part
    return Removals(survey.manifest.generation, survey.manifest.now_ms, reasons)


def _parse(name: str) -> tuple[int, Generation] | None:
    """Sequence (-1 in version 1) and generation in a file's name; None when it is none of ours."""
    parts = name.removeprefix(PREFIX).split("-")
    if not name.startswith(PREFIX) or not all(
        part.isascii() and part.isdecimal() for part in parts
    ):
        return None
    if len(parts) == 2:
        return -1, Generation(int(parts[0]), int(parts[1]))
    if len(parts) == 3:
        return int(parts[0]), Generation(int(parts[1]), int(parts[2]))
    return None


def _files(directory: str, disk: Disk, suffix: str = "") -> list[tuple[int, Generation, str]]:
    journals = [
        (*parsed, f"{directory}/{name.removesuffix(suffix)}")
        for name in disk.listdir(directory)
        if name.endswith(suffix) and (parsed := _parse(name.removesuffix(suffix))) is not None
    ]
    return sorted(journals, key=lambda item: (item[0], item[1].number, item[1].leader_epoch))


def files(directory: str, disk: Disk) -> list[tuple[Generation, str]]:
    """The journal's files, oldest pass first."""
    return [(generation, path) for _, generation, path in _files(directory, disk)]


def new_path(directory: str, disk: Disk, generation: Generation) -> str:
    """Where the next pass leaves what it removed."""
    newest = max((sequence for sequence, _, _ in _files(directory, disk)), default=0)
    return f"{directory}/{PREFIX}{max(newest, 0) + 1}-{generation.leader_epoch}-{generation.number}"


def find(directory: str, disk: Disk, generation: Generation, suffix: str = "") -> str | None:
    """The newest file of an generation, its name without ``suffix``; None when there is none."""
    paths = [path for _, of_pass, path in _files(directory, disk, suffix) if of_pass == generation]
    return paths[-1] if paths else None


def gives_reasons_of(disk: Disk, known: str, followed: str) -> bool:
    """Whether a file gives the reasons of a pass of which another only says that it was followed.

    Generations come again when generations begin anew; a pass's time does not.
    """
    try:
        maker, follower = (decode(path, disk.read(path)) for path in (known, followed))
    except DamagedData:
        return False
    same = (maker.generation, maker.now_ms) == (follower.generation, follower.now_ms)
    return same and set(follower.reasons) <= {Reason.FOLLOWED}


def encode(record: Removals) -> bytes:
    """The file's bytes."""
    sections = {b"HEAD": _HEADS[VERSION].pack(*record.generation, record.now_ms)}
    for reason, parts in record.reasons.items():
        packed: list[bytes] = []
        for base, bitmap in parts:
            bitmap.run_optimize()
            content = bitmap.serialize()
            packed += (_PART.pack(base, len(content)), content)
        sections[_NAMES[reason]] = b"".join(packed)
    return encode_sections(MAGIC, VERSION, sections)


def decode(path: str, data: bytes) -> Removals:
    """The content of a file. Raises DamagedData; DirectoryRefused for a newer version."""
    sections = decode_sections(path, data, MAGIC, VERSION)
    head = _HEADS[int.from_bytes(data[_VERSION_AT : _VERSION_AT + 2], "big")]
    if b"HEAD" not in sections or len(sections[b"HEAD"]) != head.size:
        raise DamagedData(path, 0, -1, "there is no head in the file")
    epoch, generation, now_ms = head.unpack(sections[b"HEAD"])
    reasons = {
        reason: list(_parts(path, sections[name]))
        for reason, name in _NAMES.items()
        if name in sections
    }
    return Removals(Generation(epoch, generation), now_ms, reasons)


def _parts(path: str, data: memoryview) -> Iterator[tuple[int, BitMap]]:
    at = 0
    while at < len(data):
        if len(data) - at < _PART.size:
            raise DamagedData(path, at, -1, "a bitmap is cut off")
        base, size = _PART.unpack_from(data, at)
        at += _PART.size
        if size < 0 or size > len(data) - at:
            raise DamagedData(path, at, -1, "a bitmap is cut off")
        yield base, decode_bitmap(path, at, data[at : at + size])
        at += size


def trim(directory: str, disk: Disk, history_bytes: int) -> int:
    """Remove the oldest files until the journal is within its bound; returns how many went."""
    sizes = [(path, disk.stat(path).size_bytes) for _, path in files(directory, disk)]
    total, gone = sum(size for _, size in sizes), 0
    for path, size in sizes:
        if total <= history_bytes:
            break
        disk.unlink(path)
        total -= size
        gone += 1
    return gone


class Fate(StrEnum):
    """What became of an offset."""

    PRESENT = "present"
    NEVER_WRITTEN = "never written"
    ABOVE_HIGH_WATERMARK = "above the high watermark"
    BELOW_LOG_START = "below log start"
    REMOVED = "removed"
    BEFORE_HISTORY = "before the history kept here"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class OffsetFate:
    """What became of one offset, with a sentence that says it and names the evidence."""

    fate: Fate
    text: str
    reason: Reason | None = None
    generation: Generation | None = None


def explain_offset(
    offset: int,
    *,
    directory: str,
    disk: Disk,
    log_start_offset: int,
    high_watermark: int,
    log_end_offset: int,
    manifest: Manifest | None,
    is_there: Callable[[int], bool],
) -> OffsetFate:
    """Why ``offset`` is missing. ``manifest``: the applied one; ``is_there`` looks into the log."""
    if offset < 0 or offset >= log_end_offset:
        return OffsetFate(Fate.NEVER_WRITTEN, f"never written: the log ends at {log_end_offset}")
    if offset < log_start_offset:
        text = f"below log start {log_start_offset}: retention or DeleteRecords removed it"
        return OffsetFate(Fate.BELOW_LOG_START, text)
    if offset >= high_watermark:
        text = f"above the high watermark {high_watermark}: not committed yet"
        return OffsetFate(Fate.ABOVE_HIGH_WATERMARK, text)
    if is_there(offset):
        return OffsetFate(Fate.PRESENT, "it is there")
    history = files(directory, disk)
    for generation, path in reversed(history):
        reason = decode(path, disk.read(path)).reason(offset)
        if reason is not None:
            how = reason if reason is Reason.FOLLOWED else f"as {reason}"
            text = f"removed in generation {generation} {how}"
            return OffsetFate(Fate.REMOVED, text, reason, generation)
    if manifest is None:
        return OffsetFate(Fate.LOST, "lost: no compaction ran here, and there is no record", None)
    if manifest.survives(offset):
        text = f"lost: manifest {manifest.generation} says it survives, and it is not in the log"
        return OffsetFate(Fate.LOST, text, None, manifest.generation)
    if offset >= manifest.end_offset:
        return OffsetFate(
            Fate.LOST,
            f"lost: compaction has not come past {manifest.end_offset}",
            None,
            manifest.generation,
        )
    oldest = history[0][0] if history else manifest.generation
    text = f"removed before generation {oldest}, which is as far back as the journal goes"
    return OffsetFate(Fate.BEFORE_HISTORY, text, None, oldest)
