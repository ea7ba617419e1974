"""Large snapshots in CRC'd pieces. Pure: :func:`pieces` cuts, :class:`Assembly` puts together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kept.storage.errors import CorruptMessage
from kept.storage.records import crc32c

LARGE_BYTES: Final = 1024 * 1024
"""Images above this travel in pieces on a connection of their own."""
PIECE_BYTES: Final = 256 * 1024
"""Small enough that taking one keeps the loop for well under a millisecond."""
MAX_IMAGE_BYTES: Final = 1 << 30
"""A larger image is refused: 100,000 partitions are some tens of MiB."""


class Piece(NamedTuple):
    """``data`` at ``position`` of the image, with its CRC32C."""

    position: int
    data: bytes
    crc: int


def pieces(image: bytes) -> Iterator[Piece]:
    """An image, cut."""
    view = memoryview(image)
    for position in range(0, len(image), PIECE_BYTES):
        data = bytes(view[position : position + PIECE_BYTES])
        yield Piece(position, data, crc32c(data))


class Assembly:
    """An image that comes in; memory grows with what has arrived, not with what was announced."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes > MAX_IMAGE_BYTES:
            raise CorruptMessage(
                f"a snapshot of {size_bytes} bytes; at most {MAX_IMAGE_BYTES} are taken"
            )
        self.size_bytes = size_bytes
        self._data = bytearray()

    def add(self, piece: Piece) -> None:
        """The next piece. Raises CorruptMessage."""
        if piece.position != len(self._data):
            raise CorruptMessage(
                f"a piece of a snapshot at {piece.position}, {len(self._data)} was due"
            )
        if len(self._data) + len(piece.data) > self.size_bytes:
            raise CorruptMessage(f"a snapshot of {self.size_bytes} bytes has more than that")
        if crc32c(piece.data) != piece.crc:
            raise CorruptMessage(f"the piece of a snapshot at {piece.position} has a wrong CRC")
        self._data += piece.data

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return len(self._data) == self.size_bytes

    def image(self) -> bytes:
        """The whole. Raises CorruptMessage when some of it is missing."""
        if not self.whole:
            raise CorruptMessage(
                f"a snapshot of {self.size_bytes} bytes ended after {len(self._data)}"
            )
        return bytes(self._data)
