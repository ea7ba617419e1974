"""Varints and tagged fields (KIP-482), for codecs written by hand: the client's and the node's."""

from __future__ import annotations

from kept.storage.errors import CorruptMessage

Bytes = bytes | bytearray | memoryview

_LAST_SHIFT = 28
"""An unsigned varint has at most 5 bytes of 7 bits."""

MAX_TAGS = 1024
"""Tagged fields of one section. No message of Kafka's has ten, and each costs a microsecond here:
a header could hold fifty million.
"""


def read_uvarint(data: Bytes, position: int) -> tuple[int, int]:
    """(value, position after it). Raises CorruptMessage at the end of data and over 5 bytes."""
    try:
        value = data[position]
        position += 1
        if value < 0x80:
            return value, position
        value &= 0x7F
        for shift in range(7, _LAST_SHIFT + 1, 7):
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
    except IndexError:
        pass
    raise CorruptMessage("a varint that does not end")


def uvarint(value: int) -> bytes:
    """An unsigned varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag_count(data: Bytes, position: int) -> tuple[int, int]:
    count, after = read_uvarint(data, position)
    if count > MAX_TAGS:
        raise CorruptMessage(f"{count} tagged fields; {MAX_TAGS} are the most")
    return count, after


def skip_tags(data: Bytes, position: int) -> int:
    """The position after a section of tagged fields. Raises CorruptMessage, also for more fields
    than :data:`MAX_TAGS`.
    """
    count, position = _tag_count(data, position)
    for _ in range(count):
        _, position = read_uvarint(data, position)
        size, position = read_uvarint(data, position)
        position += size
        if position > len(data):
            raise CorruptMessage("a tagged field ends outside its message")
    return position


def tags(data: Bytes, position: int) -> tuple[list[tuple[int, int, int]], int]:
    """([(tag, start, end)], position after the section). Raises as :func:`skip_tags`."""
    count, position = _tag_count(data, position)
    tagged = []
    for _ in range(count):
        tag, position = read_uvarint(data, position)
        size, position = read_uvarint(data, position)
        if position + size > len(data):
            raise CorruptMessage("a tagged field ends outside its message")
        tagged.append((tag, position, position + size))
        position += size
    return tagged, position
