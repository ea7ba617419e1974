"""What comes over one connection, put together to whole responses.

Small ones are gathered in a buffer. A large one is received in place: its bytes go where
:meth:`FrameReader.receive_buffer` says, into memory that the next large one uses again. At 8 MiB a
response that saves a third of what receiving costs; most of it is fresh pages.
"""

from __future__ import annotations

import struct
from typing import Final

from kept.storage.errors import CorruptMessage

LARGE_BYTES: Final = 256 * 1024
"""A response of so many bytes is received in place."""
MAX_RESPONSE_BYTES: Final = 512 * 1024 * 1024
"""A longer frame is not Kafka (an HTTP server's answer reads as 1.2 GB)."""


class FrameReader:
    """The receiving side of a connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._large = bytearray()
        self._filled = self._expected = 0

    def receive_buffer(self) -> memoryview | None:
        """Where the rest of a large response goes; None where bytes are to be taken."""
        if not self._expected:
            return None
        return memoryview(self._large)[self._filled : self._expected]

    def feed(self, data: bytes) -> None:
        """Bytes came, and there was no receive buffer."""
        self._buffer += data

    def fill(self, count: int) -> None:
        """So many bytes came into the receive buffer."""
        self._filled += count

    def next(self) -> bytes | memoryview | None:
        """The next response without its length; None until it is whole. A view is good until more
        is received. Raises CorruptMessage for what is no Kafka response.
        """
        if self._expected:
            if self._filled < self._expected:
                return None
            frame = memoryview(self._large)[: self._expected].toreadonly()
            self._expected = 0
            return frame
        if len(self._buffer) < 4:
            return None
        (size,) = struct.unpack_from(">i", self._buffer)
        if not 4 <= size <= MAX_RESPONSE_BYTES:
            raise CorruptMessage("it does not speak the Kafka protocol")
        if len(self._buffer) >= 4 + size:
            small = bytes(memoryview(self._buffer)[4 : 4 + size])
            del self._buffer[: 4 + size]
            return small
        if size >= LARGE_BYTES:
            if len(self._large) < size:
                self._large = bytearray(size)
            self._filled, self._expected = len(self._buffer) - 4, size
            self._large[: self._filled] = memoryview(self._buffer)[4:]
            self._buffer = bytearray()
        return None
