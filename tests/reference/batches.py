"""Walking the batches of a segment: what the scans (``offset_map.py``, ``rule_map.py``) have in
common. Compressed, transactional and control batches are left to the
caller.
"""

from __future__ import annotations

from typing import Final

from kept.storage.errors import CorruptMessage
from kept.storage.records.header import HEADER_BYTES, BatchHeader, Buffer, read_header
from kept.storage.records.python import crc32c

_SPECIAL: Final = 0x37
"""Attribute bits of a batch that the caller handles: codec, transactional, control."""


class Batches:
    """A scan; a subclass uses the batches. ``special``: it stands before one for the caller.
    ``fault``: what is damaged there, None for nothing.
    """

    def __init__(self) -> None:
        self.special = False
        self.fault: str | None = None

    def feed(self, data: Buffer) -> int:
        """Read whole batches from the start of ``data``; returns how many bytes.

        Stops at a batch for the caller (``special``) and at damage (``fault``).
        """
        view = memoryview(data)
        at = 0
        self.special = False
        while len(view) - at >= HEADER_BYTES and self.fault is None:
            try:
                header = read_header(view, at)
            except CorruptMessage as error:
                self.fault = str(error)
                break
            if header.size_bytes > len(view) - at:
                break
            batch = view[at : at + header.size_bytes]
            if crc32c(batch[21:]) != header.crc:
                self.fault = "CRC does not match"
                break
            if header.attributes & _SPECIAL:
                self.special = True
                break
            self._batch(header, batch[HEADER_BYTES:])
            if self.fault is None:
                at += header.size_bytes
        return at

    def _batch(self, header: BatchHeader, area: memoryview) -> None:
        """What a subclass does with a batch and the area of its records."""
