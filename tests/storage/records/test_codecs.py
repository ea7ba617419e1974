from __future__ import annotations

import contextlib
import gzip
import random
import struct
import tracemalloc
import zlib

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.storage.errors import InflatesBeyondLimit, InvalidRecord
from kept.storage.records import codecs, compress, decompress
from kept.storage.records.codecs import BLOCK_BYTES, FEW_BLOCKS, PIECE_BYTES, XERIAL_HEADER
from kept.storage.types import Codec

COMPRESSING = [codec for codec in Codec if codec]
LIMIT = 1 << 20
TEXT = b"The quick brown fox jumps over the lazy dog. " * 50


@settings(deadline=None)
@given(st.binary(max_size=5_000), st.sampled_from(list(Codec)), st.integers(1, 50))
def test_round_trip(data: bytes, codec: Codec, times: int) -> None:
    assert decompress(codec, compress(codec, data * times), len(data) * times) == data * times


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(codec: Codec, kind: type) -> None:
    packed = compress(codec, kind(TEXT))
    assert decompress(codec, kind(packed), LIMIT) == TEXT


@pytest.mark.parametrize("codec", list(Codec))
def test_the_limit_is_exact(codec: Codec) -> None:
    packed = compress(codec, TEXT)
    assert decompress(codec, packed, len(TEXT)) == TEXT
    for limit in (len(TEXT) - 1, len(TEXT) // 2, 1, 0):
        with pytest.raises(InvalidRecord):
            decompress(codec, packed, limit)


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("tail", [b"\x00", b"garbage", b"stream"])
def test_what_follows_the_stream_is_refused(codec: Codec, tail: bytes) -> None:
    packed = compress(codec, TEXT)
    if tail == b"stream":
        tail = compress(codec, b"a second one")
    with pytest.raises(InvalidRecord):
        decompress(codec, packed + tail, LIMIT)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_an_unfinished_stream_is_refused(codec: Codec) -> None:
    packed = compress(codec, TEXT)
    for cut in range(len(packed)):
        if codec == Codec.SNAPPY and cut == len(XERIAL_HEADER):
            continue  # no block at all is what nothing compresses to
        with pytest.raises(InvalidRecord):
            decompress(codec, packed[:cut], LIMIT)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(COMPRESSING))
def test_garbage_is_refused_or_bounded(data: bytes, codec: Codec) -> None:
    with contextlib.suppress(InvalidRecord):
        assert len(decompress(codec, data, 1_000)) <= 1_000


@settings(deadline=None)
@given(st.data(), st.sampled_from(COMPRESSING))
def test_damaged_streams_are_refused_or_bounded(data: st.DataObject, codec: Codec) -> None:
    packed = bytearray(compress(codec, TEXT))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidRecord):
        assert len(decompress(codec, packed, 4_000)) <= 4_000


def bomb(codec: Codec, size_bytes: int) -> bytes:
    """Zeros in few bytes; their size is not announced where the format lets one leave it out."""
    zeros = bytes(1 << 20)
    if codec == Codec.GZIP:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        return b"".join(packer.compress(zeros) for _ in range(size_bytes >> 20)) + packer.flush()
    if codec == Codec.LZ4:
        with lz4.frame.LZ4FrameCompressor(block_linked=False) as frame:
            parts = [frame.begin(), *(frame.compress(zeros) for _ in range(size_bytes >> 20))]
            return b"".join([*parts, frame.flush()])
    if codec == Codec.ZSTD:
        stream = zstandard.ZstdCompressor().compressobj()
        return b"".join(stream.compress(zeros) for _ in range(size_bytes >> 20)) + stream.flush()
    block = bytes(cramjam.snappy.compress_raw(zeros))
    return XERIAL_HEADER + (struct.pack(">i", len(block)) + block) * (size_bytes >> 20)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_bomb_is_refused_within_the_limit(codec: Codec) -> None:
    packed = bomb(codec, 128 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRecord, match="limit"):
            decompress(codec, packed, 8 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("announced", [True, False])
def test_what_is_inflated_is_held_once(codec: Codec, announced: bool) -> None:
    """And what a client of several megabytes sends is no more than it inflates to."""
    size = 16 << 20
    packed = compress(codec, random.Random(1).randbytes(1 << 10) * (size >> 10))
    if not announced:
        packed = bomb(codec, size)
    decompress(codec, packed, size)  # imports
    tracemalloc.start()
    try:
        assert len(decompress(codec, packed, size)) == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size + 4 * PIECE_BYTES


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.SNAPPY])
def test_a_size_that_is_too_large_for_the_limit_is_told(codec: Codec) -> None:
    size = 5 << 20
    with pytest.raises(InflatesBeyondLimit) as refused:
        decompress(codec, bomb(codec, size), size - 1)
    told = refused.value.told_bytes
    assert told is not None and size <= told < size + (1 << 22)
    assert len(decompress(codec, bomb(codec, size), told)) == size


@pytest.mark.parametrize("stated", [0, 1, 10 * PIECE_BYTES - 1, 10 * PIECE_BYTES + 1, 1 << 31])
def test_gzip_that_lies_about_its_size(stated: int) -> None:
    packed = compress(Codec.GZIP, bytes(10 * PIECE_BYTES))
    lie = packed[:-4] + stated.to_bytes(4, "little")
    with pytest.raises(InvalidRecord):
        decompress(Codec.GZIP, lie, 20 * PIECE_BYTES)
    with pytest.raises(InvalidRecord, match="cannot be"):
        decompress(Codec.GZIP, compress(Codec.GZIP, b"x")[:-4] + b"\xff\xff\xff\x0f", 1 << 31)


def test_several_members_of_gzip_are_refused() -> None:
    empty, whole = compress(Codec.GZIP, b""), compress(Codec.GZIP, TEXT * 10_000)
    for stream in (empty + whole, whole + empty, whole + whole):
        with pytest.raises(InvalidRecord):
            decompress(Codec.GZIP, stream, 8 * len(TEXT) * 10_000)


def test_snappy_that_lies_about_its_size() -> None:
    block = bytearray(cramjam.snappy.compress_raw(b"abcdef"))
    for claim in (b"\xff\xff\xff\xff\x0f", b"\x07", b"\x05"):
        with pytest.raises(InvalidRecord):
            decompress(Codec.SNAPPY, claim + block[1:], LIMIT)


def test_snappy_counts_all_blocks_against_the_limit() -> None:
    packed = compress(Codec.SNAPPY, bytes(100_000))
    with pytest.raises(InvalidRecord, match="more than the limit of 99999 bytes"):
        decompress(Codec.SNAPPY, packed, 99_999)


@pytest.mark.parametrize("framed", [True, False])
def test_snappy_that_is_too_small_for_what_it_says(framed: bool) -> None:
    """And so is damaged, not too large: nothing is drawn for it."""
    block = b"\xff\xff\xff\x07" + bytes(1_000)
    packed = XERIAL_HEADER + struct.pack(">i", len(block)) + block if framed else block
    with pytest.raises(InvalidRecord, match="1004 bytes cannot be 16777215") as refused:
        decompress(Codec.SNAPPY, packed, LIMIT)
    assert not isinstance(refused.value, InflatesBeyondLimit)


def test_snappy_in_one_raw_block() -> None:
    assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), LIMIT) == TEXT


def test_snappy_is_written_in_blocks_of_32_kib() -> None:
    packed = compress(Codec.SNAPPY, bytes(100_000))
    assert packed.startswith(XERIAL_HEADER)
    position, sizes = len(XERIAL_HEADER), []
    while position < len(packed):
        (size,) = struct.unpack_from(">i", packed, position)
        position += 4
        sizes.append(cramjam.snappy.decompress_raw_len(packed[position : position + size]))
        position += size
    assert sizes == [32_768, 32_768, 32_768, 1_696]


@pytest.mark.parametrize("size", [0, -1, 2**31 - 1])
def test_snappy_blocks_of_impossible_size(size: int) -> None:
    with pytest.raises(InvalidRecord, match="block"):
        decompress(Codec.SNAPPY, XERIAL_HEADER + struct.pack(">i", size) + b"abc", LIMIT)


def test_lz4_blocks_are_independent_for_java() -> None:
    packed = compress(Codec.LZ4, TEXT * 100)
    assert packed[4] & 0x20


def test_lz4_with_linked_blocks_is_refused_because_java_cannot_read_it() -> None:
    with pytest.raises(InvalidRecord, match="linked"):
        decompress(Codec.LZ4, lz4.frame.compress(TEXT * 100, block_linked=True), LIMIT)


LZ4_OF_4_MIB = lz4.frame.LZ4FrameCompressor(
    block_size=lz4.frame.BLOCKSIZE_MAX4MB, block_linked=False
).begin()


def lz4_block(block: bytes, stored: bool) -> bytes:
    return struct.pack("<I", len(block) | stored << 31) + block


def in_blocks(codec: Codec, count: int, damage: bytes = b"") -> bytes:
    """One byte in each block, and perhaps one more that is ``damage``."""
    if codec == Codec.SNAPPY:
        block = bytes(cramjam.snappy.compress_raw(b"a"))
        return XERIAL_HEADER + (struct.pack(">i", len(block)) + block) * count
    last = lz4_block(damage, stored=False) if damage else b""
    return LZ4_OF_4_MIB + lz4_block(b"a", stored=True) * count + last + bytes(4)


@pytest.mark.parametrize(
    "packed",
    [
        in_blocks(Codec.LZ4, 4_000, b"\xff" * 20_000),
        LZ4_OF_4_MIB + lz4_block(b"\xff" * 40_000, stored=False) * 4 + bytes(4),
    ],
)
def test_a_damaged_lz4_frame_is_not_called_too_large(packed: bytes) -> None:
    """Its blocks bound it by their own sizes; and where they allow too much, the library tells."""
    with pytest.raises(InvalidRecord, match="damaged") as refused:
        decompress(Codec.LZ4, packed, LIMIT)
    assert not isinstance(refused.value, InflatesBeyondLimit)


def test_lz4_blocks_are_bounded_by_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a frame of many small ones is inflated where it fits, into no more than that."""
    drawn = []
    monkeypatch.setattr(codecs, "_filled", lambda size, fill: drawn.append(size) or b"")
    packed = in_blocks(Codec.LZ4, 4_000, b"\xff" * 20_000)
    decompress(Codec.LZ4, packed, 100 * LIMIT)
    stated = bytearray(compress(Codec.LZ4, random.Random(1).randbytes(40_000)))
    decompress(Codec.LZ4, bytes(stated), LIMIT)
    assert drawn == [4_000 + (4 << 20), 40_000]


def test_lz4_that_says_more_than_its_blocks_can_be() -> None:
    packed = bytearray(lz4.frame.compress(random.Random(1).randbytes(40_000), block_linked=False))
    packed[6:14] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(InvalidRecord, match=f"cannot be {1 << 40} bytes"):
        decompress(Codec.LZ4, bytes(packed), LIMIT)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.SNAPPY])
def test_blocks_without_number_need_a_larger_limit(codec: Codec) -> None:
    """On a loop they would hold everybody up; a thread has larger limits, and no list of them."""
    count = 10 * FEW_BLOCKS
    packed = in_blocks(codec, count)
    for limit in (LIMIT, 8 * LIMIT):
        with pytest.raises(InflatesBeyondLimit, match="too many blocks"):
            decompress(codec, packed, limit)
    tracemalloc.start()
    try:
        inflated = decompress(codec, packed, count * BLOCK_BYTES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert inflated == b"a" * count
    assert peak < count + PIECE_BYTES, "it is walked, not listed"
    few = in_blocks(codec, FEW_BLOCKS)
    assert decompress(codec, few, FEW_BLOCKS) == b"a" * FEW_BLOCKS


def test_gzip_with_a_name_and_a_comment_is_read() -> None:
    packed = gzip.compress(TEXT)
    named = packed[:3] + b"\x08" + packed[4:10] + b"name.txt\x00" + packed[10:]
    assert decompress(Codec.GZIP, named, LIMIT) == TEXT


def test_zstd_that_announces_its_size_and_lies() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(100_000))
    with pytest.raises(InvalidRecord, match="limit"):
        decompress(Codec.ZSTD, packed, 50_000)


def test_zstd_without_a_size_may_need_the_whole_limit() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    packed = stream.compress(bytes(4 << 20)) + stream.flush()
    assert zstandard.get_frame_parameters(packed).content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert decompress(Codec.ZSTD, packed, 4 << 20) == bytes(4 << 20)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_levels(codec: Codec) -> None:
    for level in (1, 9):
        assert decompress(codec, compress(codec, TEXT, level), LIMIT) == TEXT
