"""Where the records of a few keys are: what a survey notes for the check of its pass.

A :class:`KeyTracker` is filled while the log is scanned anyway. A hash that is not watched costs
one look into a small table, so that nobody notices. Of each key it keeps the newest :data:`RING`
offsets. The kernels read the hashes and write the offsets in place; their references call
:meth:`KeyTracker.note`.

A scan may pass over the same records again: only offsets above those noted before are new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, NamedTuple

RING: Final = 64
"""Offsets kept of a key; ``_chunk.pxd`` has the same number, as of the two below."""
MAX_KEYS: Final = 255
TABLE_SLOTS: Final = 4096
"""By the lower bits of a key's hash: its number from 1 on, 0 for none."""


class KeyOffsets(NamedTuple):
    """The offsets of a key, ascending; ``whole``: there are no more of it below them."""

    offsets: list[int]
    whole: bool


class KeyTracker:
    """Notes where the records of a few keys are. ``hashed``: a kernel has put the hashes of
    ``keys`` into the table.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.keys = list(dict.fromkeys(keys))[:MAX_KEYS]
        count = len(self.keys)
        self.hashed = False
        self.table = bytearray(TABLE_SLOTS)
        self.hashes = array("Q", bytes(16 * count))
        self.offsets = array("q", bytes(8 * RING * count))
        self.counts = array("q", bytes(8 * count))
        """How many were noted; -1: the key's place in the table is another one's."""
        self._index = {key: index for index, key in enumerate(self.keys)}

    def note(self, key: bytes, offset: int) -> None:
        """A record of a key, if it is watched."""
        index = self._index.get(key, -1)
        if index < 0:
            return
        count = self.counts[index]
        if count and offset <= self.offsets[index * RING + (count - 1) % RING]:
            return
        self.offsets[index * RING + count % RING] = offset
        self.counts[index] = count + 1

    def offsets_of(self, key: bytes) -> KeyOffsets | None:
        """What was noted of a key; None when it was not watched."""
        index = self._index.get(key, -1)
        if index < 0 or self.counts[index] < 0:
            return None
        count = self.counts[index]
        ring = self.offsets[index * RING : index * RING + min(count, RING)]
        return KeyOffsets(sorted(ring), count <= RING)


def merged_offsets(key: bytes, below: KeyTracker, above: KeyTracker) -> KeyOffsets | None:
    """What two watches noted of a key; all offsets of ``above`` lie above those of ``below``."""
    low, high = below.offsets_of(key), above.offsets_of(key)
    if low is None or high is None:
        return None
    if not high.whole:
        return high
    return KeyOffsets(low.offsets + high.offsets, low.whole)
