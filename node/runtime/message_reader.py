"""Reads messages of Apache Kafka that kio has no schemas of: those in its internal topics."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from kept.storage.errors import CorruptMessage

_T = TypeVar("_T")

_INT8, _INT16, _UINT16, _INT32, _INT64 = map(struct.Struct, (">b", ">h", ">H", ">i", ">q"))
_FLOAT64 = struct.Struct(">d")


class MessageReader:
    """A cursor over one message; ``flexible`` says how lengths are written, and may change.

    Every method raises CorruptMessage for what does not fit.
    """

    __slots__ = ("_data", "_position", "flexible")

    def __init__(self, data: bytes | memoryview, *, flexible: bool = False) -> None:
        self._data = memoryview(data)
        self._position = 0
        self.flexible = flexible

    def raw(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self._position + size
        if end > len(self._data):
            raise CorruptMessage(f"a record ends {end - len(self._data)} bytes early")
        if size < 0:
            raise CorruptMessage(f"a field of {size} bytes at byte {self._position}")
        data = self._data[self._position : end].tobytes()
        self._position = end
        return data

    def _number(self, layout: struct.Struct) -> int:
        position = self._position
        if position + layout.size > len(self._data):
            self.raw(layout.size)  # raises
        self._position += layout.size
        return int(layout.unpack_from(self._data, position)[0])

    def int8(self) -> int:
        """One byte, signed."""
        return self._number(_INT8)

    def int16(self) -> int:
        """Two bytes, signed."""
        return self._number(_INT16)

    def uint16(self) -> int:
        """Two bytes."""
        return self._number(_UINT16)

    def int32(self) -> int:
        """Four bytes, signed."""
        return self._number(_INT32)

    def int64(self) -> int:
        """Eight bytes, signed."""
        return self._number(_INT64)

    def float64(self) -> float:
        """Eight bytes."""
        return float(_FLOAT64.unpack(self.raw(8))[0])

    def boolean(self) -> bool:
        """One byte."""
        return self.int8() != 0

    def uuid(self) -> UUID:
        """Sixteen bytes."""
        return UUID(bytes=self.raw(16))

    def uvarint(self) -> int:
        """An unsigned number of variable length."""
        value = 0
        for shift in range(0, 35, 7):
            if self._position == len(self._data):
                self.raw(1)  # raises
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptMessage("a variable-length number is too long")

    def nullable_string(self) -> str | None:
        """A string or null."""
        size = self.uvarint() - 1 if self.flexible else self.int16()
        if size < 0:
            return None
        try:
            return self.raw(size).decode()
        except UnicodeDecodeError as error:
            raise CorruptMessage(f"a string that is not UTF-8: {error}") from error

    def string(self) -> str:
        """A string."""
        text = self.nullable_string()
        if text is None:
            raise CorruptMessage("null where a string must be")
        return text

    def _length(self) -> int:
        return self.uvarint() - 1 if self.flexible else self.int32()

    def blob(self) -> bytes:
        """Bytes with their length before them."""
        return self.raw(self._length())

    def array(self, item: Callable[[], _T], *, nullable: bool = True) -> tuple[_T, ...]:
        """An array of what ``item`` reads, each at least a byte; null is empty, or refused."""
        size = self._length()
        if not (-1 if nullable else 0) <= size <= len(self._data) - self._position:
            raise CorruptMessage(f"an array of {size} elements does not fit")
        return tuple(item() for _ in range(size))

    def tags(self) -> dict[int, bytes]:
        """The tagged fields; none where the message is not flexible."""
        if not self.flexible:
            return {}
        return {self.uvarint(): self.raw(self.uvarint()) for _ in range(self.uvarint())}
