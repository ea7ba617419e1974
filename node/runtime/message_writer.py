"""Writes messages of Apache Kafka that kio has no schemas of: those in its internal topics."""

from __future__ import annotations

import struct
from typing import Final

_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))


class MessageWriter:
    """Writes one key or value, which begins with its version; ``flexible`` says how lengths and
    counts are written, and that tags follow.
    """

    __slots__ = ("flexible", "parts")

    def __init__(self, version: int, flexible: bool = False) -> None:
        self.parts: list[bytes] = [struct.pack(">h", version)]
        self.flexible = flexible

    def number(self, layout: str, *values: int) -> None:
        """One number or several in a layout of ``struct``."""
        self.parts.append(struct.pack(layout, *values))

    def uvarint(self, value: int) -> None:
        """An unsigned number of 7 bits a byte."""
        if value <= 0x7F:
            self.parts.append(_ONE_BYTE[value])
            return
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self.parts.append(bytes(out))

    def string(self, text: str | None) -> None:
        """UTF-8 behind its length; None has no bytes."""
        data = b"" if text is None else text.encode()
        if self.flexible:
            self.uvarint(0 if text is None else len(data) + 1)
        else:
            self.number(">h", -1 if text is None else len(data))
        self.parts.append(data)

    def blob(self, data: bytes) -> None:
        """Bytes behind their number."""
        self.count(len(data))
        self.parts.append(data)

    def count(self, size: int | None) -> None:
        """The length of an array whose items follow; None is an array that is null."""
        if self.flexible:
            self.uvarint(0 if size is None else size + 1)
        else:
            self.number(">i", -1 if size is None else size)

    def tags(self, tags: dict[int, bytes] | None = None) -> None:
        """Tagged fields, where the message is flexible."""
        if not self.flexible:
            return
        self.uvarint(len(tags or {}))
        for tag, data in sorted((tags or {}).items()):
            self.uvarint(tag)
            self.uvarint(len(data))
            self.parts.append(data)

    def done(self) -> bytes:
        """The message."""
        return b"".join(self.parts)
