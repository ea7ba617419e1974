"""Frames between nodes: there and back however they are cut, and what no node sends is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.node.internode import frames
from kept.node.internode.frames import (
    CHUNK_BYTES,
    MORE,
    Frame,
    FrameKind,
    FrameReader,
    LongBody,
    encode,
)
from kept.storage.errors import CorruptMessage

ids = st.integers(0, 2**32 - 1)
methods = st.integers(0, 2**16 - 1)
short_frames = st.builds(Frame, st.sampled_from(FrameKind), ids, methods, st.binary(max_size=200))


def read_all(reader: FrameReader) -> list[Frame]:
    found = []
    while (frame := reader.next()) is not None:
        found.append(frame)
    return found


def long_frames(frame: Frame) -> list[bytes]:
    body = LongBody(*frame)
    made = []
    while body.rest_bytes:
        made.append(body.next_frame())
    return made


@given(st.lists(short_frames, max_size=8), st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_frames_come_back_however_their_bytes_are_cut(sent, sizes):
    data = b"".join(encode(*frame) for frame in sent)
    reader, found, position = FrameReader(), [], 0
    while position < len(data):
        for size in sizes:
            reader.feed(data[position : position + size])
            position += size
            found += read_all(reader)
    assert found == sent


@pytest.mark.parametrize("size", [CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
def test_long_bodies_come_back_though_their_frames_alternate(size):
    first = Frame(FrameKind.REQUEST, 1, 5, b"a" * size)
    second = Frame(FrameKind.REQUEST, 2, 6, b"b" * size)
    message = Frame(FrameKind.MESSAGE, 0, 0, b"short")
    reader = FrameReader()
    found = []
    for one, two in zip(long_frames(first), long_frames(second), strict=True):
        for data in (one, encode(*message), two):
            reader.feed(data)
            found += read_all(reader)
    assert [frame for frame in found if frame != message] == [first, second]
    assert reader._partial_bytes == 0 and not reader._partial


def frame_of(length: int, tag: int = FrameKind.PING, body: bytes = b"") -> bytes:
    return length.to_bytes(4, "big") + bytes([tag]) + bytes(6) + body


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame_of(0), "a frame of 0 bytes"),
        (frame_of(6), "a frame of 6 bytes"),
        (frame_of(7 + CHUNK_BYTES + 1), "are right"),
        (frame_of(2**32 - 1), "a frame of 4294967295 bytes"),
        (frame_of(7, 0), "a frame of kind 0"),
        (frame_of(7, 13), "a frame of kind 13"),
        (frame_of(7, 127 | MORE), "a frame of kind 127"),
        (frame_of(7, FrameKind.PING | MORE), "a PING in several frames"),
        (frame_of(7, FrameKind.OPEN | MORE), "a OPEN in several frames"),
        (frame_of(7, FrameKind.REQUEST | MORE), "0 bytes of a REQUEST of which more follows"),
        (b"GET / HTTP/1.1\r\n\r\n", "are right"),
    ],
)
def test_what_no_node_sends_is_refused(data, words):
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(CorruptMessage, match=words):
        reader.next()


def test_bodies_that_are_never_whole_are_bounded(monkeypatch):
    monkeypatch.setattr(frames, "MAX_BODY_BYTES", 4 * CHUNK_BYTES)
    reader = FrameReader()
    with pytest.raises(CorruptMessage, match="bodies that are not whole, the last one of REQUEST"):
        for call_id in range(6):
            reader.feed(
                LongBody(FrameKind.REQUEST, call_id, 1, bytes(2 * CHUNK_BYTES)).next_frame()
            )
            assert reader.next() is None
    assert call_id == 4


@given(st.lists(st.binary(max_size=400), max_size=20))
def test_garbage_is_refused_or_waited_for(pieces):
    reader = FrameReader()
    for piece in pieces:
        reader.feed(piece)
        try:
            for frame in read_all(reader):
                assert len(frame.body) <= CHUNK_BYTES
        except CorruptMessage:
            return


@given(short_frames, st.data())
def test_a_truncated_frame_is_waited_for(frame, data):
    whole = encode(*frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    reader = FrameReader()
    reader.feed(whole[:cut])
    assert reader.next() is None
    reader.feed(whole[cut:])
    assert reader.next() == frame
