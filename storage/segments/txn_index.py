"""``.txnindex``: aborted transactions of a segment, Apache Kafka's format.

Entry of 34 bytes: int16 version 0, then int64 producer id, first offset, last offset (of the
marker), and the last stable offset at that time. The file exists from the first abort on. An entry
is in the segment that holds the marker.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from kept.storage.errors import DamagedData

VERSION: Final = 0
_ENTRY: Final = Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size


class AbortedTxn(NamedTuple):
    """An aborted transaction; offsets are inclusive, as Kafka has them."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode(entries: list[AbortedTxn]) -> bytes:
    """The file's bytes."""
    return b"".join(_ENTRY.pack(VERSION, *entry) for entry in entries)


def decode(path: str, data: bytes, base_offset: int = 0) -> list[AbortedTxn]:
    """The entries of a file. Raises DamagedData."""
    if len(data) % ENTRY_BYTES:
        raise DamagedData(path, len(data), -1, f"size is no multiple of {ENTRY_BYTES}")
    entries: list[AbortedTxn] = []
    for version, *values in _ENTRY.iter_unpack(data):
        entry = AbortedTxn(*values)
        position = len(entries) * ENTRY_BYTES
        if version != VERSION:
            raise DamagedData(path, position, -1, f"version {version}, expected {VERSION}")
        if entry.last_offset < base_offset or entry.first_offset > entry.last_offset:
            raise DamagedData(path, position, entry.last_offset, "offsets do not fit the segment")
        if entries and entry.last_offset <= entries[-1].last_offset:
            raise DamagedData(path, position, entry.last_offset, "entries do not ascend")
        entries.append(entry)
    return entries
