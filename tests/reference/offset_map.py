"""The offset map and the scan of one segment: the specification of
``compaction/kernels/_kernel.pyx``.

**Offset map.** Open addressing with 16-byte slots: an 88-bit tag of the key's hash and a 40-bit
offset, relative to where the map begins. The hash is keyed, with a fresh random key per pass: a
collision would drop a live record, so no producer may be able to construct one. (The kernel uses
SipHash-2-4-128, this one BLAKE2b; both are keyed pseudo-random functions, and only the map's
content differs by it.) Any number of slots works (multiply-shift), so at load factor 0.9 a key
costs 17.8 bytes at any size.

After the last lookup :meth:`OffsetMap.finish` turns the table, in place, into the ascending list
of the offsets in it: these are the newest records of their keys.

**Scan.** A :class:`SegmentScan` reads the batches of one segment and gathers facts: which offsets
are there, tombstones, expired tombstones, keyless records, aborted records, horizons, batches that
stay although empty. In mode ``MAP`` it also puts keys into a map, in mode ``LOOKUP`` it finds out
which records the map does not supersede. All offsets in its results are relative to the segment's
base. Compressed, transactional and control batches are left to the caller (``feed`` stops at them,
``special``).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from typing import Final

from kept.compaction.cleaner.key_tracker import KeyTracker
from kept.compaction.kernels.kernel import LOOKUP, STATS
from kept.storage.errors import CorruptMessage
from kept.storage.records.build import read_varint
from kept.storage.records.header import HEADER_BYTES, BatchHeader, Buffer, read_header
from kept.storage.types import MAX_INT32, MAX_INT64
from tests.reference.batches import Batches

SLOT_BYTES: Final = 16
MAX_RELATIVE: Final = (1 << 40) - 2
"""Largest offset above the map's base that a slot can hold."""

_SLOT: Final = struct.Struct("<QQ")
_OFFSET_BITS: Final = (1 << 40) - 1


class OffsetMap:
    """The offset map in plain Python. ``key`` is 16 random bytes; ``capacity`` is how many keys go
    in.
    """

    def __init__(self, slots: int, load_factor: float, key: bytes) -> None:
        if len(key) != 16:
            raise ValueError("the hash key has 16 bytes")
        self.slots = slots
        self.capacity = min(int(slots * load_factor), slots - 1) if slots else 0
        self._key = key
        self.size = 0
        self.base_offset = 0
        self._table = bytearray(slots * SLOT_BYTES)
        self._sorted: list[int] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return self.slots * SLOT_BYTES

    def clear(self, base_offset: int) -> None:
        """Forget everything; offsets from ``base_offset`` on can be put in."""
        if self.size or self._sorted is not None:
            self._table = bytearray(self.slots * SLOT_BYTES)
        self.size = 0
        self.base_offset = base_offset
        self._sorted = None

    def _find(self, key: bytes) -> tuple[int, int, int, int]:
        """(slot, tag, rest of the tag, relative offset + 1 or 0) of a key or its free slot."""
        if self._sorted is not None:
            raise ValueError("the map is finished")
        digest = hashlib.blake2b(key, digest_size=16, key=self._key).digest()
        low, high = struct.unpack("<QQ", digest)
        short = low & 0xFFFFFF
        slot = (low * self.slots) >> 64
        while True:
            tag, rest = _SLOT.unpack_from(self._table, slot * SLOT_BYTES)
            relative = rest & _OFFSET_BITS
            if not relative or (tag == high and rest >> 40 == short):
                return slot, high, short, relative
            slot = (slot + 1) % self.slots

    def put(self, key: bytes, offset: int) -> bool:
        """Note the newest offset of a key; False when it is a new key and the map is full."""
        if offset < self.base_offset:
            raise ValueError("the offset lies below the map's base")
        slot, high, short, relative = self._find(key)
        if offset - self.base_offset > MAX_RELATIVE:
            return False
        if not relative:
            if self.size >= self.capacity:
                return False
            self.size += 1
        rest = short << 40 | (offset - self.base_offset + 1)
        _SLOT.pack_into(self._table, slot * SLOT_BYTES, high, rest)
        return True

    def get(self, key: bytes) -> int:
        """Newest offset of a key, -1 when it is not in the map."""
        if not self.slots:
            return -1
        relative = self._find(key)[3]
        return relative - 1 + self.base_offset if relative else -1

    def finish(self) -> None:
        """Turn the map into its sorted offsets: no key can be looked up after that."""
        if self._sorted is None:
            found = (rest & _OFFSET_BITS for _, rest in _SLOT.iter_unpack(self._table))
            self._sorted = sorted(relative - 1 for relative in found if relative)

    def winners(self, low: int, high: int) -> array[int]:
        """Offsets in ``low..high`` of the finished map, relative to ``low``, ascending."""
        if self._sorted is None:
            raise ValueError("the map is not finished")
        first = bisect_left(self._sorted, low - self.base_offset)
        last = bisect_left(self._sorted, high - self.base_offset)
        shift = self.base_offset - low
        return array("I", [relative + shift for relative in self._sorted[first:last]])


class SegmentScan(Batches):
    """Facts about one segment, and what a map says about its records; see the module.

    ``first..last`` bounds the offsets that are put in or looked up; ``survivors`` (relative,
    ascending) limits a lookup to records that are still alive; ``producers`` is a flat array of
    (last data offset, producer id) ascending; ``uncleanable`` the next offset of a batch that
    stays even empty. ``full_at`` is the offset of the first key that did not fit, -1 when all did.
    What is put in or looked up is noted in ``watch``.
    """

    def __init__(
        self,
        base_offset: int,
        *,
        mode: int = STATS,
        map: OffsetMap | None = None,  # noqa: A002
        first: int = 0,
        last: int = MAX_INT64,
        survivors: array[int] | None = None,
        now_ms: int = 0,
        producers: array[int] | None = None,
        uncleanable: int = -1,
        watch: KeyTracker | None = None,
    ) -> None:
        if mode != STATS and map is None:
            raise ValueError("this mode needs a map")
        self.base_offset = self.next_offset = base_offset
        self.full_at = -1
        self.records = self.batches = self.size_bytes = 0
        super().__init__()
        self._mode, self._map, self._first, self._last = mode, map, first, last
        self._survivors = None if survivors is None else set(survivors)
        self._now_ms, self._uncleanable, self._watch = now_ms, uncleanable, watch
        flat = producers or array("q")
        self._producers = set(zip(flat[0::2], flat[1::2], strict=True))
        self._present: list[tuple[int, int]] = []
        self._tombstones, self._expired, self._keyless, self._aborted, self._kept = (
            array("I") for _ in range(5)
        )
        self._empties, self._bare = array("I"), array("I")
        self._horizons: list[tuple[int, int, int]] = []

    def feed_batch(self, header: Buffer, area: Buffer, aborted: bool) -> None:
        """One batch that ``feed`` left to the caller: its header, its records inflated."""
        self._batch(read_header(header), memoryview(area), aborted=aborted)

    def skip(self, offset: int, next_offset: int, size_bytes: int, present: bool) -> None:
        """A control batch that the caller has read: note its offset."""
        if offset < self.next_offset or next_offset - self.base_offset > MAX_INT32:
            self.fault = "offsets do not ascend"
            return
        self.next_offset = next_offset
        self.batches += 1
        self.size_bytes += size_bytes
        if present:
            self.records += 1
            self._run(offset - self.base_offset, offset - self.base_offset)

    def _run(self, first: int, last: int) -> None:
        if self._present and self._present[-1][1] + 1 == first:
            first = self._present.pop()[0]
        self._present.append((first, last))

    def _batch(self, header: BatchHeader, area: memoryview, *, aborted: bool = False) -> None:
        first = header.base_offset - self.base_offset
        delta = header.last_offset_delta
        if first < 0 or header.base_offset < self.next_offset or first + delta >= MAX_INT32:
            self.fault = "offsets do not ascend"
            return
        if header.record_count > delta + 1:
            self.fault = "more records than offsets"
            return
        horizon = header.delete_horizon_ms if header.has_delete_horizon else -1
        expired = header.has_delete_horizon and horizon <= self._now_ms
        self.batches += 1
        self.size_bytes += HEADER_BYTES + len(area)
        if (
            header.last_offset,
            header.producer_id,
        ) in self._producers or header.next_offset == self._uncleanable:
            self._empties.extend((first, first + delta))
        if not header.record_count:
            self._bare.extend((first, first + delta))
        try:
            records = list(_records(area, delta))
        except (ValueError, CorruptMessage) as error:
            self.fault = str(error)
            return
        if len(records) != header.record_count:
            self.fault = "record count does not match"
            return
        for offset_delta, key, is_tombstone in records:
            self._run(first + offset_delta, first + offset_delta)
            self._record(first + offset_delta, key, is_tombstone, expired, aborted)
        self.records += len(records)
        tombstones = any(is_tombstone for _, _, is_tombstone in records) and not aborted
        if records and (tombstones or header.has_delete_horizon):
            self._horizons.append((first, first + delta, horizon))
        self.next_offset = header.next_offset

    def _record(
        self, relative: int, key: bytes | None, is_tombstone: bool, expired: bool, aborted: bool
    ) -> None:
        if aborted:
            self._aborted.append(relative)
            return
        if is_tombstone:
            self._tombstones.append(relative)
            if expired:
                self._expired.append(relative)
        if key is None:
            self._keyless.append(relative)
            return
        offset = relative + self.base_offset
        if self._map is None or self._mode == STATS or not self._first <= offset < self._last:
            return
        if self._mode == LOOKUP:
            if self._survivors is not None and relative not in self._survivors:
                return
            if self._map.get(key) < 0:
                self._kept.append(relative)
        elif self.full_at >= 0:
            return
        elif not self._map.put(key, offset):
            self.full_at = offset
            return
        if self._watch is not None:
            self._watch.note(key, offset)

    def runs(self) -> array[int]:
        """Pairs (first, last) of offsets that are there, as a flat array."""
        return array("I", [end for run in self._present for end in run])

    def tombstones(self) -> array[int]:
        """Records with a null value."""
        return self._tombstones

    def expired(self) -> array[int]:
        """Tombstones whose delete horizon has passed."""
        return self._expired

    def keyless(self) -> array[int]:
        """Records without a key."""
        return self._keyless

    def aborted(self) -> array[int]:
        """Records of aborted transactions."""
        return self._aborted

    def kept(self) -> array[int]:
        """In mode LOOKUP: records that the map does not supersede."""
        return self._kept

    def empties(self) -> array[int]:
        """(first, last) of batches that stay even when they lose all records, as a flat array."""
        return self._empties

    def bare(self) -> array[int]:
        """(first, last) of batches that have no records, as a flat array."""
        return self._bare

    def horizons(self) -> list[tuple[int, int, int]]:
        """(first, last, horizon) of each batch with a tombstone or a horizon; -1: none is set."""
        return self._horizons


def _records(area: memoryview, last_delta: int) -> list[tuple[int, bytes | None, bool]]:
    """(offset delta, key, is a tombstone) of the records in an area."""
    found: list[tuple[int, bytes | None, bool]] = []
    at, end, previous = 0, len(area), -1
    while at < end:
        length, at = read_varint(area, at, end)
        after = at + length
        if length < 6 or after > end:
            raise ValueError("a record's length is wrong")
        _, at = read_varint(area, at + 1, after, 64)
        delta, at = read_varint(area, at, after)
        if not previous < delta <= last_delta:
            raise ValueError("offset deltas of records do not ascend")
        previous = delta
        size, at = read_varint(area, at, after)
        if not -1 <= size <= after - at:
            raise ValueError("a record's key is cut off")
        key = None if size < 0 else bytes(area[at : at + size])
        at += max(size, 0)
        size, at = read_varint(area, at, after)
        if not -1 <= size <= after - at:
            raise ValueError("a record's value is cut off")
        found.append((delta, key, size < 0))
        at = after
    return found
