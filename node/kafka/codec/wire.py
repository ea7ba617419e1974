"""What Produce and Fetch messages are made of, in the flexible encoding (KIP-482) and the older."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kept.client.protocol.wire import read_uvarint, skip_tags, uvarint
from kept.storage.errors import CorruptMessage

_H: Final = struct.Struct(">h").unpack_from
_I: Final = struct.Struct(">i").unpack_from


class RequestReader:
    """A cursor over a request. Past the end its methods raise CorruptMessage, struct.error or
    IndexError.
    """

    __slots__ = ("data", "end", "flexible", "position")

    def __init__(self, data: memoryview, position: int, flexible: bool) -> None:
        self.data = data
        self.position = position
        self.end = len(data)
        self.flexible = flexible

    def int16(self) -> int:
        """A signed integer of 2 bytes."""
        (value,) = _H(self.data, self.position)
        self.position += 2
        return int(value)

    def int32(self) -> int:
        """A signed integer of 4 bytes."""
        (value,) = _I(self.data, self.position)
        self.position += 4
        return int(value)

    def int64(self) -> int:
        """A signed integer of 8 bytes."""
        return int.from_bytes(self.read(8), "big", signed=True)

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        start = self.position
        self.skip(size)
        return bytes(self.data[start : self.position])

    def skip(self, size: int) -> None:
        """Pass ``size`` bytes."""
        if size < 0 or self.position + size > self.end:
            raise CorruptMessage(
                f"a field of {size} bytes where {self.end - self.position} are left"
            )
        self.position += size

    def length(self, *, wide: bool) -> int:
        """The length before a string, or with ``wide`` before an array or bytes; -1 for null."""
        if self.flexible:
            value, self.position = read_uvarint(self.data, self.position)
            return value - 1
        return self.int32() if wide else self.int16()

    def count(self) -> int:
        """An array's length, of which each element takes at least a byte."""
        value = self.length(wide=True)
        if value > self.end - self.position:
            raise CorruptMessage(f"an array of {value} where {self.end - self.position} are left")
        return value

    def skip_tags(self) -> None:
        """Pass the tagged fields at the end of a structure, in the encoding that has them."""
        if self.flexible:
            self.position = skip_tags(self.data, self.position)

    def expect_end(self, api: str) -> None:
        """Raises CorruptMessage unless everything is read."""
        if self.position != self.end:
            raise CorruptMessage(f"{self.end - self.position} bytes after a {api} request")


class Endpoint(NamedTuple):
    """One node, as clients of a listener reach it."""

    node_id: int
    host: str
    port: int
    rack: str | None


def encode_count(value: int, flexible: bool) -> bytes:
    """The length of an array."""
    return uvarint(value + 1) if flexible else struct.pack(">i", value)


def encode_name(data: bytes, flexible: bool) -> bytes:
    """A string, from its UTF-8."""
    return (uvarint(len(data) + 1) if flexible else struct.pack(">h", len(data))) + data


def encode_text(text: str | None, flexible: bool) -> bytes:
    """A string that may be null."""
    if text is None:
        return b"\0" if flexible else b"\xff\xff"
    return encode_name(text.encode()[:32767], flexible)


def endpoint_tags(endpoints: Sequence[Endpoint]) -> bytes:
    """The tagged fields at the end of a response: NodeEndpoints (KIP-951) is tag 0, left out when
    empty. Produce has it from v10 on, Fetch from v16 on.
    """
    if not endpoints:
        return b"\0"
    body = bytearray(uvarint(len(endpoints) + 1))
    for endpoint in endpoints:
        body += struct.pack(">i", endpoint.node_id) + encode_text(endpoint.host, True)
        body += struct.pack(">i", endpoint.port) + encode_text(endpoint.rack, True) + b"\0"
    return b"\x01\x00" + uvarint(len(body)) + bytes(body)


def with_throttle(frame: bytes, position: int, throttle_ms: int) -> bytes:
    """A response whose ``throttle_time_ms``, at ``position``, is not 0 as it was made."""
    return frame[:position] + struct.pack(">i", throttle_ms) + frame[position + 4 :]
