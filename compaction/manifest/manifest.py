"""The manifest of a pass: all that a replica needs to come to the same records (rule 13).

It covers the whole log below ``end_offset`` (the rules' *b*, always a segment base). Per output
segment it lists the surviving offsets, the batches that stay although empty, the delete horizons,
the aborted transactions that are still of use, and, once built, a digest of the resulting records.
``clean_to`` is the end of what was mapped; records in ``clean_to..end_offset`` are listed as they
are. Generations (leader epoch, generation) are compared for equality only.

On disk it is the file ``manifest-<epoch>-<generation>`` in the partition's directory::

    bytes 0-3 "KMAN", 4-5 version, 6-7 number of sections, then per section
    4 bytes name, int64 length, uint32 CRC-32C of the content xor that of the name, content

Section ``MANI`` is the manifest and may travel; ``PLAN`` says which local segments the swap
replaces, so that recovery never has to guess; ``TOMB`` where the tombstones are that wait for their
horizon, if there are any; ``FULL``, empty, that the log of a replica which holds it is complete for
it (rule 15). Big-endian. A newer version is refused, damage is told by the CRC.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyroaring import BitMap

from kept.storage.errors import DamagedData, DirectoryRefused
from kept.storage.records import Buffer, crc32c
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import Generation

MAGIC: Final = b"KMAN"
VERSION: Final = 1
DIGEST_BYTES: Final = 16
_FILE: Final = struct.Struct(">4sHH")
_SECTION: Final = struct.Struct(">4sqI")
_HEAD: Final = struct.Struct(">16siiqqqqqqI")
_SEGMENT: Final = struct.Struct(">qqqIII")
_TXN: Final = struct.Struct(">qqqq")
_ALL: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class OutputSegment:
    """A segment after the pass. Bitmaps hold offsets relative to ``base_offset``.

    ``empties`` and ``horizons`` name batches by their base offset. ``digest`` is empty until the
    segment was built. ``tombstones`` are the survivors without a value, in batches with a horizon.
    """

    base_offset: int
    end_offset: int
    survivors: BitMap
    empties: BitMap = field(default_factory=BitMap)
    horizons: dict[int, BitMap] = field(default_factory=dict)
    aborted: tuple[AbortedTxn, ...] = ()
    digest: bytes = b""
    size_bytes: int = -1
    tombstones: BitMap = field(default_factory=BitMap)

    def removable(self) -> dict[int, BitMap]:
        """Its tombstones by the time from which a pass removes them."""
        batches = sorted((base, ms) for ms, bases in self.horizons.items() for base in bases)
        by_horizon: dict[int, BitMap] = {}
        for index, (base, ms) in enumerate(batches):
            end = batches[index + 1][0] if index + 1 < len(batches) else _ALL
            if self.tombstones.range_cardinality(base, end):
                there = self.tombstones.copy()
                there.remove_range(0, base)
                there.remove_range(end, _ALL)
                by_horizon[ms] = by_horizon.get(ms, BitMap()) | there
        return by_horizon

    def next_horizon_ms(self, now_ms: int) -> int | None:
        """When the first of its tombstones or markers may go, seen from a pass at ``now_ms``.

        A batch keeps its horizon when its tombstones are gone, so one that had passed then says
        nothing.
        """
        return min((ms for ms in self.horizons if ms > now_ms), default=None)

    def part(self, base_offset: int, end_offset: int) -> OutputSegment:
        """What this segment says about ``base_offset..end_offset``, relative to the new base."""
        low, high = base_offset - self.base_offset, end_offset - self.base_offset
        horizons = {ms: cut(batches, low, high) for ms, batches in self.horizons.items()}
        return OutputSegment(
            base_offset,
            end_offset,
            cut(self.survivors, low, high),
            cut(self.empties, low, high),
            {ms: batches for ms, batches in horizons.items() if batches},
            tuple(t for t in self.aborted if base_offset <= t.last_offset < end_offset),
            tombstones=cut(self.tombstones, low, high),
        )


def cut(bitmap: Any, low: int, high: int) -> Any:
    """Members in ``low..high``, relative to ``low``."""
    part = bitmap.copy()
    if bitmap:
        if low > 0:
            part.remove_range(0, low)
        if bitmap.max() >= high:
            part.remove_range(max(high, 0), bitmap.max() + 1)
    return part.shift(-low) if low > 0 else part


@dataclass(frozen=True, slots=True)
class Manifest:
    """What survives of a log after a pass, and where. ``now_ms`` is when the pass decided,
    ``horizon_ms`` the horizon it set.
    """

    topic_id: uuid.UUID
    partition: int
    generation: Generation
    log_start_offset: int
    clean_to: int
    end_offset: int
    now_ms: int
    horizon_ms: int
    segments: tuple[OutputSegment, ...]

    def check_invariants(self) -> None:
        """Raises DamagedData where it contradicts itself."""
        previous = None
        for segment in self.segments:
            if previous is not None and segment.base_offset != previous:
                raise self._damaged(segment.base_offset, "segments leave a gap or overlap")
            if segment.end_offset <= segment.base_offset:
                raise self._damaged(segment.base_offset, "a segment ends before it begins")
            if segment.survivors and segment.survivors.max() >= (
                segment.end_offset - segment.base_offset
            ):
                raise self._damaged(segment.base_offset, "a survivor lies past its segment")
            previous = segment.end_offset
        if previous is not None and previous != self.end_offset:
            raise self._damaged(self.end_offset, "segments do not end at the end offset")

    def _damaged(self, offset: int, why: str) -> DamagedData:
        return DamagedData(f"manifest {self.generation}", -1, offset, why)

    def survives(self, offset: int) -> bool | None:
        """Whether an offset below the end survives; None outside of what the manifest covers."""
        for segment in self.segments:
            if segment.base_offset <= offset < segment.end_offset:
                return offset - segment.base_offset in segment.survivors
        return None

    def delete_horizon_of(self, batch_offset: int) -> int | None:
        """The delete horizon of the batch with this base offset; None: it has none here."""
        for segment in self.segments:
            if segment.base_offset <= batch_offset < segment.end_offset:
                place = batch_offset - segment.base_offset
                return next(
                    (ms for ms, places in segment.horizons.items() if place in places), None
                )
        return None

    def with_segments(self, segments: Iterable[OutputSegment]) -> Manifest:
        """The same pass with other output segments (cut or with digests)."""
        return replace(self, segments=tuple(segments))


# Encoding.


def _pack_bitmap(bitmap: Any) -> bytes:
    packed = bitmap.copy()
    packed.run_optimize()
    content: bytes = packed.serialize()
    return struct.pack(">I", len(content)) + content


def _pack_segment(segment: OutputSegment) -> Iterator[bytes]:
    yield _SEGMENT.pack(
        segment.base_offset,
        segment.end_offset,
        segment.size_bytes,
        len(segment.horizons),
        len(segment.aborted),
        len(segment.digest),
    )
    yield _pack_bitmap(segment.survivors)
    yield _pack_bitmap(segment.empties)
    for horizon_ms in sorted(segment.horizons):
        yield struct.pack(">q", horizon_ms) + _pack_bitmap(segment.horizons[horizon_ms])
    for txn in segment.aborted:
        yield _TXN.pack(*txn)
    yield segment.digest


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of section ``MANI``: what travels."""
    parts = [
        _HEAD.pack(
            manifest.topic_id.bytes,
            manifest.partition,
            manifest.generation.leader_epoch,
            manifest.generation.number,
            manifest.log_start_offset,
            manifest.clean_to,
            manifest.end_offset,
            manifest.now_ms,
            manifest.horizon_ms,
            len(manifest.segments),
        )
    ]
    for segment in manifest.segments:
        parts += _pack_segment(segment)
    return b"".join(parts)


def encode_plan(plan: SwapPlan) -> bytes:
    """The content of section ``PLAN``."""
    parts = [struct.pack(">I", len(plan.groups))]
    for group in plan.groups:
        parts.append(struct.pack(">II", len(group.output_bases), len(group.input_bases)))
        bases = (*group.output_bases, *group.input_bases)
        parts.append(struct.pack(f">{len(bases)}q", *bases))
    return b"".join(parts)


def encode_tombstones(manifest: Manifest) -> bytes:
    """The content of section ``TOMB``."""
    return b"".join(
        struct.pack(">q", segment.base_offset) + _pack_bitmap(segment.tombstones)
        for segment in manifest.segments
        if segment.tombstones
    )


def encode(manifest: Manifest, plan: SwapPlan, *, complete: bool = False) -> bytes:
    """The file's bytes; ``complete`` says so of the log beside it."""
    sections = {b"MANI": encode_manifest(manifest), b"PLAN": encode_plan(plan)}
    tombstones = encode_tombstones(manifest)
    if tombstones:
        sections[b"TOMB"] = tombstones
    if complete:
        sections[b"FULL"] = b""
    return encode_sections(MAGIC, VERSION, sections)


def _crc(name: bytes, content: Buffer) -> int:
    return crc32c(content) ^ crc32c(name)


def encode_sections(magic: bytes, version: int, sections: dict[bytes, bytes]) -> bytes:
    """A file of named sections, each with its CRC."""
    parts = [_FILE.pack(magic, version, len(sections))]
    for name, content in sections.items():
        parts += (_SECTION.pack(name, len(content), _crc(name, content)), content)
    return b"".join(parts)


# Decoding.


def decode_bitmap(path: str, position: int, content: Buffer) -> BitMap:
    """A roaring bitmap. Raises DamagedData with path and position."""
    try:
        return BitMap.deserialize(bytes(content))
    except (ValueError, IndexError) as error:
        raise DamagedData(path, position, -1, f"no bitmap: {error}") from error


class _Reader:
    """Reads values off the front of a section."""

    def __init__(self, path: str, data: memoryview) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self, size: int) -> memoryview:
        if size < 0 or size > len(self._data) - self._at:
            raise DamagedData(self._path, self._at, -1, "the manifest is cut off")
        content = self._data[self._at : self._at + size]
        self._at += size
        return content

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        return fields.unpack(self.read(fields.size))

    def number(self, code: str) -> int:
        value: int = self.unpack(struct.Struct(f">{code}"))[0]
        return value

    def bitmap(self) -> BitMap:
        content = self.read(self.number("I"))
        return decode_bitmap(self._path, self._at - len(content), content)

    def has_more(self) -> bool:
        return self._at < len(self._data)

    def end(self) -> None:
        if self._at != len(self._data):
            raise DamagedData(self._path, self._at, -1, "bytes follow the manifest")


def decode_sections(path: str, data: bytes, magic: bytes, version: int) -> dict[bytes, memoryview]:
    """The sections of a file. Raises DamagedData; DirectoryRefused for a newer version."""
    if len(data) < _FILE.size:
        raise DamagedData(path, 0, -1, "the file is cut off")
    found_magic, found_version, count = _FILE.unpack_from(data)
    if found_magic != magic:
        raise DamagedData(path, 0, -1, f"begins with {found_magic!r}, not {magic!r}")
    if found_version > version:
        raise DirectoryRefused(
            f"{path} has version {found_version} and was written by a newer kept; this one knows "
            f"{version}"
        )
    if found_version < 1:
        raise DamagedData(path, 4, -1, "there is no version 0")
    sections: dict[bytes, memoryview] = {}
    at = _FILE.size
    for _ in range(count):
        if len(data) - at < _SECTION.size:
            raise DamagedData(path, at, -1, "a section is cut off")
        name, length, crc = _SECTION.unpack_from(data, at)
        at += _SECTION.size
        content = memoryview(data)[at : at + length]
        if length < 0 or len(content) != length:
            raise DamagedData(path, at, -1, "a section is cut off")
        if _crc(name, content) != crc:
            raise DamagedData(path, at, -1, f"CRC of section {name!r} does not match")
        sections[name] = content
        at += length
    if at != len(data):
        raise DamagedData(path, at, -1, "bytes follow the last section")
    return sections


def _read_segment(reader: _Reader) -> OutputSegment:
    base, end, size, horizon_count, txn_count, digest_size = reader.unpack(_SEGMENT)
    survivors, empties = reader.bitmap(), reader.bitmap()
    horizons = {}
    for _ in range(horizon_count):
        horizon_ms = reader.number("q")
        horizons[horizon_ms] = reader.bitmap()
    aborted = tuple(AbortedTxn(*reader.unpack(_TXN)) for _ in range(txn_count))
    digest = bytes(reader.read(digest_size))
    return OutputSegment(base, end, survivors, empties, horizons, aborted, digest, size)


def decode_manifest(path: str, data: memoryview) -> Manifest:
    """Section ``MANI``. Raises DamagedData."""
    reader = _Reader(path, data)
    (
        topic_id,
        partition,
        epoch,
        generation,
        log_start,
        clean_to,
        end,
        now_ms,
        horizon_ms,
        count,
    ) = reader.unpack(_HEAD)
    segments = tuple(_read_segment(reader) for _ in range(count))
    reader.end()
    manifest = Manifest(
        uuid.UUID(bytes=bytes(topic_id)),
        partition,
        Generation(epoch, generation),
        log_start,
        clean_to,
        end,
        now_ms,
        horizon_ms,
        segments,
    )
    manifest.check_invariants()
    return manifest


def decode_plan(path: str, data: memoryview) -> SwapPlan:
    """Section ``PLAN``. Raises DamagedData."""
    reader = _Reader(path, data)
    groups = []
    for _ in range(reader.number("I")):
        outputs, inputs = reader.number("I"), reader.number("I")
        bases = reader.unpack(struct.Struct(f">{outputs + inputs}q"))
        groups.append(SwapGroup(tuple(bases[:outputs]), tuple(bases[outputs:])))
    reader.end()
    return SwapPlan(tuple(groups))


def decode_tombstones(path: str, data: memoryview) -> dict[int, BitMap]:
    """Section ``TOMB``: tombstones by the base of their segment. Raises DamagedData."""
    reader = _Reader(path, data)
    horizons = {}
    while reader.has_more():
        base = reader.number("q")
        horizons[base] = reader.bitmap()
    return horizons


def is_log_complete(path: str, data: bytes) -> bool:
    """Whether a manifest's file says that of the log beside it. Raises as :func:`decode`."""
    return b"FULL" in decode_sections(path, data, MAGIC, VERSION)


def decode(path: str, data: bytes) -> tuple[Manifest, SwapPlan]:
    """A manifest file. Raises DamagedData; DirectoryRefused for a newer version."""
    sections = decode_sections(path, data, MAGIC, VERSION)
    if b"MANI" not in sections:
        raise DamagedData(path, 0, -1, "there is no manifest in the file")
    plan = decode_plan(path, sections[b"PLAN"]) if b"PLAN" in sections else SwapPlan(())
    manifest_read = decode_manifest(path, sections[b"MANI"])
    if b"TOMB" in sections:
        tombstones = decode_tombstones(path, sections[b"TOMB"])
        manifest_read = manifest_read.with_segments(
            replace(segment, tombstones=tombstones.get(segment.base_offset, BitMap()))
            for segment in manifest_read.segments
        )
    return manifest_read, plan
