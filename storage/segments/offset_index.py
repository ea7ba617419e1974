"""``.index``: from an offset to the position of a batch in its segment.

Entry: big-endian int32 (LAST offset of the batch - base offset), int32 (position of the batch's
START). Offsets and positions ascend strictly; the first batch of a segment has no entry. The active
segment's entries live in memory only and are written when it is rolled or the log is closed: a
segment that was not, is scanned at the next start anyway. Closed segments read theirs at the first
look-up.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Final

from kept.storage.disk import Disk
from kept.storage.errors import DamagedData

ENTRY_BYTES: Final = 8
_SWAP: Final = sys.byteorder == "little"


def decode_entries(data: bytes) -> tuple[array[int], array[int]]:
    """(relative offsets, positions) of a file's bytes; zeros of a preallocation are left off."""
    whole = array("i", data[: len(data) - len(data) % ENTRY_BYTES])
    if _SWAP:
        whole.byteswap()
    offsets, positions = whole[0::2], whole[1::2]
    while positions and positions[-1] == 0 and offsets[-1] == 0:
        positions.pop()
        offsets.pop()
    return offsets, positions


def encode_entries(offsets: array[int], positions: array[int]) -> bytes:
    """The file's bytes."""
    whole = array("i", bytes(len(offsets) * ENTRY_BYTES))
    whole[0::2] = offsets
    whole[1::2] = positions
    if _SWAP:
        whole.byteswap()
    return whole.tobytes()


def ascends(values: array[int]) -> bool:
    """Strictly ascending."""
    return all(a < b for a, b in pairwise(values))


class OffsetIndex:
    """The offset index of one segment.

    ``offsets`` (relative to the base) and ``positions`` are the entries while ``loaded``; the log's
    append path extends them in place.
    """

    __slots__ = ("_disk", "base_offset", "loaded", "offsets", "path", "positions")

    def __init__(self, disk: Disk, path: str, base_offset: int, *, loaded: bool) -> None:
        self._disk = disk
        self.path = path
        self.base_offset = base_offset
        self.offsets = array("i")
        self.positions = array("i")
        self.loaded = loaded

    def check(self, log_bytes: int) -> int:
        """Rule 23's test at open, from the file's size and last entry only; returns that entry's
        position, 0 without one.

        Raises DamagedData; FileNotFoundError when there is no file.
        """
        file = self._disk.open_read(self.path)
        size = self._disk.size(file)
        if size % ENTRY_BYTES:
            raise DamagedData(self.path, size, -1, f"size is no multiple of {ENTRY_BYTES}")
        if not size:
            return 0
        offsets, positions = decode_entries(self._disk.pread(file, size - ENTRY_BYTES, ENTRY_BYTES))
        if not offsets:
            raise DamagedData(self.path, size, -1, "not trimmed: it ends in zeros")
        if offsets[0] < 0 or not 0 < positions[0] < log_bytes:
            raise DamagedData(
                self.path,
                size - ENTRY_BYTES,
                self.base_offset + offsets[0],
                f"last entry points to byte {positions[0]} of a log of {log_bytes} bytes",
            )
        return positions[0]

    def load(self) -> None:
        """Read the entries, once. Raises DamagedData, or FileNotFoundError."""
        if self.loaded:
            return
        data = self._disk.read(self.path)
        offsets, positions = decode_entries(data)
        if (
            len(data) % ENTRY_BYTES
            or (offsets and (offsets[0] < 0 or positions[0] <= 0))
            or not ascends(offsets)
            or not ascends(positions)
        ):
            raise DamagedData(self.path, 0, self.base_offset, "entries do not ascend")
        self.offsets, self.positions, self.loaded = offsets, positions, True

    def unload(self) -> None:
        """Forget the entries in memory; the file has them."""
        self.offsets, self.positions, self.loaded = array("i"), array("i"), False

    def save(self) -> None:
        """Write the file (not durably). The entries stay loaded."""
        self._disk.write_file(self.path, encode_entries(self.offsets, self.positions))

    def floor(self, offset: int) -> int:
        """Position of the batch of the largest entry <= ``offset``; 0 when there is none."""
        slot = bisect_right(self.offsets, offset - self.base_offset)
        return self.positions[slot - 1] if slot else 0

    def floor_entry(self, offset: int) -> tuple[int, int] | None:
        """(last offset, position) of the largest entry <= ``offset``."""
        slot = bisect_right(self.offsets, offset - self.base_offset)
        if not slot:
            return None
        return self.base_offset + self.offsets[slot - 1], self.positions[slot - 1]

    def ceiling_entry(self, offset: int) -> tuple[int, int] | None:
        """(last offset, position) of the smallest entry >= ``offset``."""
        slot = bisect_left(self.offsets, offset - self.base_offset)
        if slot == len(self.offsets):
            return None
        return self.base_offset + self.offsets[slot], self.positions[slot]

    def position_floor(self, position: int) -> int:
        """The largest batch start known that is <= ``position``; 0 is one always."""
        slot = bisect_right(self.positions, position)
        return self.positions[slot - 1] if slot else 0

    def truncate(self, log_bytes: int) -> None:
        """Drop entries of batches at or above a position."""
        keep = bisect_left(self.positions, log_bytes)
        del self.offsets[keep:], self.positions[keep:]
