"""Responses are put together from whatever pieces they come in."""

from __future__ import annotations

import random
import struct

import pytest

from kept.client.protocol.frame_reader import LARGE_BYTES, MAX_RESPONSE_BYTES, FrameReader
from kept.storage.errors import CorruptMessage

SIZES = (4, 5, 100, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES + 7, 4, LARGE_BYTES + 1)


def sent(sizes: tuple[int, ...]) -> tuple[list[bytes], bytes]:
    frames = [bytes([n % 251]) * size for n, size in enumerate(sizes, 1)]
    return frames, b"".join(struct.pack(">i", len(f)) + f for f in frames)


def receive(incoming: FrameReader, stream: bytes, most: int, draw: random.Random) -> list[bytes]:
    """As a shell does, with pieces of at most so many bytes; copies of what comes out."""
    found, at = [], 0
    while at < len(stream):
        piece = stream[at : at + draw.randint(1, most)]
        room = incoming.receive_buffer()
        if room is None:
            incoming.feed(piece)
        else:
            piece = piece[: len(room)]
            room[: len(piece)] = piece
            incoming.fill(len(piece))
        at += len(piece)
        while (frame := incoming.next()) is not None:
            found.append(bytes(frame))
    return found


@pytest.mark.parametrize("most", [7, 1000, LARGE_BYTES, 4 * LARGE_BYTES])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_pieces(most: int, seed: int) -> None:
    draw = random.Random(seed)
    sizes = SIZES if most > 7 else (4, 5, 100, LARGE_BYTES, 6)
    for _ in range(1 if most == 7 else 5):
        frames, stream = sent(tuple(draw.sample(sizes, len(sizes))))
        assert receive(FrameReader(), stream, most, draw) == frames


def test_large_ones_share_their_memory() -> None:
    incoming, places = FrameReader(), set()
    frames, _ = sent((2 * LARGE_BYTES,) * 4)
    for frame in frames:
        incoming.feed(struct.pack(">i", len(frame)) + frame[:10])
        assert incoming.next() is None
        room = incoming.receive_buffer()
        assert room is not None and len(room) == len(frame) - 10
        places.add(id(room.obj))
        room[:] = frame[10:]
        incoming.fill(len(room))
        assert incoming.next() == frame and incoming.next() is None
    assert len(places) == 1


@pytest.mark.parametrize("size", [0, 3, -1, MAX_RESPONSE_BYTES + 1])
def test_what_is_no_response(size: int) -> None:
    incoming = FrameReader()
    incoming.feed(struct.pack(">i", size) + b"HTTP")
    with pytest.raises(CorruptMessage, match="does not speak the Kafka protocol"):
        incoming.next()
