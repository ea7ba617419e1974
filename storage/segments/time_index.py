"""``.timeindex``: from a timestamp to an offset in its segment.

Entry: big-endian int64 (largest timestamp so far), int32 (last offset of the batch that first
reached it - base offset). Timestamps ascend strictly. An entry is added with each one of the offset
index, if the timestamp is larger than the last entry's; when the segment is rolled or closed one
more holds the segment's maximum, and reopening takes it from there.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from itertools import pairwise
from struct import Struct
from typing import Final

from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.types import NO_TIMESTAMP

ENTRY_BYTES: Final = 12
_ENTRY: Final = Struct(">qi")
_SWAP: Final = sys.byteorder == "little"


def decode_entries(data: bytes) -> tuple[array[int], array[int]]:
    """(timestamps, relative offsets) of a file's bytes; zeros of a preallocation are left off."""
    whole = data[: len(data) - len(data) % ENTRY_BYTES].rstrip(b"\0")
    whole = data[: -(-len(whole) // ENTRY_BYTES) * ENTRY_BYTES]
    timestamps, offsets = array("q"), array("i")
    for timestamp, offset in _ENTRY.iter_unpack(whole):
        timestamps.append(timestamp)
        offsets.append(offset)
    return timestamps, offsets


def encode_entries(timestamps: array[int], offsets: array[int]) -> bytes:
    """The file's bytes."""
    words = array("i", bytes(len(offsets) * ENTRY_BYTES))
    halves = array("q", timestamps)
    if _SWAP:
        halves.byteswap()
    pairs = array("i", halves.tobytes())
    lasts = array("i", offsets)
    if _SWAP:
        lasts.byteswap()
    words[0::3], words[1::3], words[2::3] = pairs[0::2], pairs[1::2], lasts
    return words.tobytes()


class TimeIndex:
    """The time index of a segment; ``timestamps`` and ``offsets`` hold it while ``loaded``."""

    __slots__ = ("_disk", "base_offset", "loaded", "offsets", "path", "timestamps")

    def __init__(self, disk: Disk, path: str, base_offset: int, *, loaded: bool) -> None:
        self._disk = disk
        self.path = path
        self.base_offset = base_offset
        self.timestamps = array("q")
        self.offsets = array("i")
        self.loaded = loaded

    def check(self) -> tuple[int, int]:
        """Rule 23's test at open; returns the last entry as (timestamp, offset).

        (-1, base offset) stands for an empty index. Raises DamagedData, or FileNotFoundError.
        """
        file = self._disk.open_read(self.path)
        size = self._disk.size(file)
        if size % ENTRY_BYTES:
            raise DamagedData(self.path, size, -1, f"size is no multiple of {ENTRY_BYTES}")
        if not size:
            return NO_TIMESTAMP, self.base_offset
        last = self._disk.pread(file, size - ENTRY_BYTES, ENTRY_BYTES)
        timestamp, offset = _ENTRY.unpack(last)
        if last == bytes(ENTRY_BYTES) and size > ENTRY_BYTES:
            raise DamagedData(self.path, size, -1, "not trimmed: it ends in zeros")
        if offset < 0 or timestamp < 0:
            raise DamagedData(
                self.path,
                size - ENTRY_BYTES,
                self.base_offset + offset,
                f"impossible last entry: timestamp {timestamp}, relative offset {offset}",
            )
        return timestamp, self.base_offset + offset

    def load(self) -> None:
        """Read the entries, once. Raises DamagedData, or FileNotFoundError."""
        if self.loaded:
            return
        data = self._disk.read(self.path)
        timestamps, offsets = decode_entries(data)
        if len(data) % ENTRY_BYTES or any(a >= b for a, b in pairwise(timestamps)):
            raise DamagedData(self.path, 0, self.base_offset, "entries do not ascend")
        self.timestamps, self.offsets, self.loaded = timestamps, offsets, True

    def unload(self) -> None:
        """Forget the entries in memory; the file has them."""
        self.timestamps, self.offsets, self.loaded = array("q"), array("i"), False

    def save(self) -> None:
        """Write the file (not durably). The entries stay loaded."""
        self._disk.write_file(self.path, encode_entries(self.timestamps, self.offsets))

    def append(self, timestamp: int, offset: int) -> None:
        """Add an entry if its timestamp is larger than the last one's."""
        if timestamp > (self.timestamps[-1] if self.timestamps else NO_TIMESTAMP):
            self.timestamps.append(timestamp)
            self.offsets.append(offset - self.base_offset)

    @property
    def last_entry(self) -> tuple[int, int]:
        """(timestamp, offset) of the last one; (-1, base offset) stands for none."""
        if not self.timestamps:
            return NO_TIMESTAMP, self.base_offset
        return self.timestamps[-1], self.base_offset + self.offsets[-1]

    def floor_offset(self, timestamp: int) -> int:
        """Offset of the last entry whose timestamp is below ``timestamp``; the base if there is
        none.

        No batch before that offset reaches ``timestamp``.
        """
        slot = bisect_left(self.timestamps, timestamp)
        return self.base_offset + (self.offsets[slot - 1] if slot else 0)

    def truncate(self, end_offset: int) -> None:
        """Drop entries of offsets at or above ``end_offset``."""
        keep = bisect_right(self.offsets, end_offset - 1 - self.base_offset)
        del self.timestamps[keep:], self.offsets[keep:]
