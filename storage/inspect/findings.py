"""What a check of files finds."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something about a file. ``position`` and ``offset`` are -1 where there is none."""

    path: str
    position: int
    offset: int
    why: str
    damaged: bool

    def __str__(self) -> str:
        kind = "damaged" if self.damaged else "note"
        where = f" at byte {self.position}" if self.position >= 0 else ""
        offset = f" (offset {self.offset})" if self.offset >= 0 else ""
        return f"{self.path}: {kind}{where}{offset}: {self.why}"
