"""Positions in a partition that only its leader knows as offsets: what ListOffsets is asked for."""

from __future__ import annotations

from typing import Final

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
