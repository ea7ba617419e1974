"""Fetched batches as columns that Apache Arrow takes over without copying.

``read_block`` (``_blocks.pyx``) checks the CRC of every batch, inflates it, and lays the wanted
fields of its records end to end, as Arrow wants them: int64 values, int32 offsets into one run of
bytes, a bitmap of what is not null. Nothing here knows of Arrow itself.

What is asked for decides what is done: without a field of the records, batches that lie wholly in
the range are counted by their headers and not even inflated.
"""

from __future__ import annotations

from array import array
from enum import IntFlag
from typing import NamedTuple

from kept.storage.errors import CorruptMessage
from kept.storage.records.header import Buffer
from kept.storage.records.python import check_replica


class Field(IntFlag):
    """What a block may hold of each record."""

    KEY = 1
    VALUE = 2
    OFFSET = 4
    TIMESTAMP = 8
    TIMESTAMP_TYPE = 16
    HEADERS = 32


class Binary(NamedTuple):
    """Byte strings: the i-th is ``data[offsets[i]:offsets[i + 1]]``, offsets being int32.

    ``validity`` has one bit a string, the lowest first, 0 for null; None when none is null.
    """

    offsets: Buffer
    data: Buffer
    validity: Buffer | None
    nulls: int


class HeaderLists(NamedTuple):
    """The headers of each record, null for a record without any.

    Record i has the headers ``offsets[i]`` to ``offsets[i + 1]`` of ``names`` and ``values``, of
    which there are ``total``. Names are UTF-8: what was not has U+FFFD in its place, as in Java.
    """

    offsets: Buffer
    validity: Buffer | None
    nulls: int
    names: Binary
    values: Binary
    total: int


class Block(NamedTuple):
    """Some records of one partition, a column per wanted field; the others are None.

    ``position`` is where the first batch begins that was not read, ``next_offset`` the offset to
    go on from. Timestamps are int64 microseconds, -1000 where Kafka has none, and the nearest
    possible for what lies beyond 292,000 years; timestamp types are int32, 0 or 1.
    """

    rows: int
    position: int
    next_offset: int
    offsets: Buffer | None
    timestamps: Buffer | None
    timestamp_types: Buffer | None
    key: Binary | None
    value: Binary | None
    headers: HeaderLists | None


class StringsBuilder:
    """A Binary in the making."""

    def __init__(self) -> None:
        self.offsets = array("i", [0])
        self.data = bytearray()
        self.valid: list[bool] = []

    def add(self, one: Buffer | None) -> None:
        """Append a string, or null."""
        if one is not None:
            self.data += one
        self.offsets.append(len(self.data))
        self.valid.append(one is not None)

    def binary(self) -> Binary:
        """All that was added."""
        nulls = self.valid.count(False)
        validity = bitmap(self.valid) if nulls else None
        return Binary(self.offsets.tobytes(), bytes(self.data), validity, nulls)


def bitmap(valid: list[bool]) -> bytes:
    """One bit for each, the lowest first."""
    out = bytearray((len(valid) + 7) // 8)
    for i, bit in enumerate(valid):
        out[i >> 3] |= bit << (i & 7)
    return bytes(out)


def readable_names(names: Binary) -> Binary:
    """Header names with U+FFFD for what is not UTF-8."""
    offsets = memoryview(names.offsets).cast("i")
    strings = StringsBuilder()
    for i in range(len(offsets) - 1):
        name = bytes(names.data[offsets[i] : offsets[i + 1]])
        strings.add(name.decode("utf-8", "replace").encode())
    return strings.binary()


def refuse(buf: Buffer, position: int) -> CorruptMessage:
    """Why the batch at ``position`` cannot be read."""
    try:
        check_replica(buf, position)
    except CorruptMessage as error:
        return error
    return CorruptMessage(f"the batch at byte {position} is not readable")
