"""The four codecs of record batches, bounded.

A batch holds exactly one compressed stream and nothing after it. Trailing bytes, a second member or
frame, an unfinished stream and an output above the caller's limit are refused, and memory stays
within the limit whatever the stream claims: what is inflated is made in one buffer, of the size
that the stream says or its blocks allow, and never copied. (Apache Kafka 4.3 accepts gzip with
trailing bytes and bombs of 512 MB, after which consumers cannot read on.)

======  =========================================================================================
gzip    one member (RFC 1952), from the standard library
snappy  read: Java's framing (xerial: magic, then blocks with int32 lengths) or one raw block, as
        librdkafka writes; written: Java's framing
lz4     one frame, written with independent 64 KiB blocks because Java reads no others
zstd    one frame; contexts are kept, one set per thread
======  =========================================================================================
"""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Final, cast

from kept.storage.errors import InflatesBeyondLimit, InvalidRecord
from kept.storage.records.header import Buffer
from kept.storage.types import Codec

MAX_GUESS_BYTES: Final = 1 << 20
"""Output of unknown size is first tried with this much, then with the caller's whole limit."""
PIECE_BYTES: Final = 1 << 18
"""zlib inflates into buffers of its own: so much at a time, from as much of its input."""
DEFLATE_FACTOR: Final = 1032
"""Nothing inflates to more than so many times its size (RFC 1951)."""
SNAPPY_FACTOR: Final = 22
"""The same: three bytes copy 64."""
LZ4_FACTOR: Final = 255
"""The same: a byte of a match's length stands for so many."""
FEW_BLOCKS: Final = 4096
"""So many blocks of one batch, however small, are walked under any limit; it takes 10 ms."""
BLOCK_BYTES: Final = 256
"""More of them count as so much each. Encoders make blocks of 32 KiB and more."""

XERIAL_HEADER: Final = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
XERIAL_MAGIC_BYTES: Final = 8
XERIAL_BLOCK_BYTES: Final = 32 * 1024
"""Block size of Java's SnappyOutputStream."""
LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
LZ4_INDEPENDENT_BIT: Final = 0x20
"""In the flags, the byte after the magic."""
LZ4_SIZED_BIT: Final = 0x08
LZ4_SIZE_AT: Final = 6
"""Where the size of the content is, if the flags say so."""
LZ4_STORED_MASK: Final = 0x7FFFFFFF
"""Of a block's size; the highest bit says that it is stored as it is."""
LZ4_DICTIONARY_BIT: Final = 0x01
LZ4_CHECKSUM_BIT: Final = 0x04
LZ4_BLOCK_CHECKSUM_BIT: Final = 0x10
LZ4_DAMAGED: Final = "lz4: "
"""So begins what the library says of damage, and not of too little room."""
LZ4_SMALL_BYTES: Final = 1 << 15
LZ4_BLOCK_BYTES: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
"""Largest block by the three bits of the byte after the flags."""
_INT32: Final = struct.Struct(">i")


def compress(codec: Codec, data: Buffer, level: int | None = None) -> bytes:
    """``data`` as one stream of ``codec``; ``level`` None is the codec's own default."""
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.GZIP:
            packer = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, 31)
            return packer.compress(data) + packer.flush()
        case Codec.SNAPPY:
            return _snappy_compress(data)
        case Codec.LZ4:
            return _lz4_compress(data, 0 if level is None else level)
        case Codec.ZSTD:
            return _zstd_compress(data, 3 if level is None else level)


def decompress(codec: Codec, data: Buffer, limit: int) -> bytes:
    """The content of the one stream in ``data``, at most ``limit`` bytes.

    Raises InflatesBeyondLimit when it is longer than ``limit``, before inflating anything where the
    stream says its size; InvalidRecord when it is damaged, unfinished or followed by anything.
    """
    match codec:
        case Codec.NONE:
            if len(data) > limit:
                raise _too_large(limit, len(data))
            return bytes(data)
        case Codec.GZIP:
            return _gzip_decompress(data, limit)
        case Codec.SNAPPY:
            return _snappy_decompress(data, limit)
        case Codec.LZ4:
            return _lz4_decompress(data, limit)
        case Codec.ZSTD:
            return _zstd_decompress(data, limit)


def _too_large(limit: int, told_bytes: int | None = None) -> InflatesBeyondLimit:
    why = f"the records inflate to more than the limit of {limit} bytes"
    return InflatesBeyondLimit(why, told_bytes)


def _most_blocks(limit: int) -> int:
    """Blocks of a batch that may inflate to ``limit``: they take time, however small they are."""
    return max(FEW_BLOCKS, limit // BLOCK_BYTES)


def _too_many_blocks(limit: int) -> InflatesBeyondLimit:
    return InflatesBeyondLimit(f"too many blocks for the limit of {limit} bytes")


def _damaged(codec: str, why: object) -> InvalidRecord:
    return InvalidRecord(f"{codec}: damaged data: {why}")


def _unfinished(codec: str) -> InvalidRecord:
    return InvalidRecord(f"{codec}: the stream ends before its end mark")


def _trailing(codec: str) -> InvalidRecord:
    return InvalidRecord(f"{codec}: bytes follow the end of the stream")


# gzip


def _gzip_decompress(data: Buffer, limit: int) -> bytes:
    # The last four bytes are its size modulo 2**32: true, or the stream is refused at its end.
    stated = int.from_bytes(data[-4:], "little")
    if stated > limit:
        raise _too_large(limit, stated)
    if stated > DEFLATE_FACTOR * len(data):
        raise _damaged("gzip", f"{len(data)} bytes cannot be {stated}")
    inflater = zlib.decompressobj(31)
    try:
        if stated <= PIECE_BYTES:
            inflated = inflater.decompress(data, stated + 1)
        else:
            inflated = _filled(stated, lambda view: _inflate_in_pieces(inflater, data, view))
    except zlib.error as error:
        raise _damaged("gzip", error) from None
    if len(inflated) > stated:
        raise _damaged("gzip", "it is longer than it says")
    if not inflater.eof:
        raise _unfinished("gzip")
    if inflater.unused_data:
        raise _trailing("gzip")
    return inflated


def _filled(size_bytes: int, fill: Callable[[memoryview], int]) -> bytes:
    """What ``fill`` writes into so many bytes; it returns how many it wrote. Nothing is copied."""
    out = io.BytesIO()
    if size_bytes:
        out.seek(size_bytes - 1)
        out.write(b"\0")
    with out.getbuffer() as view:
        written = fill(view)
    out.truncate(written)
    return out.getvalue()


def _inflate_in_pieces(inflater: zlib._Decompress, data: Buffer, out: memoryview) -> int:
    """Until the stream or ``out`` ends: then the last byte is tried as well, and refused."""
    view, position, written = memoryview(data), 0, 0
    while not inflater.eof:
        left: Buffer = inflater.unconsumed_tail
        if not left:
            left = view[position : position + PIECE_BYTES]
            position += len(left)
        piece = inflater.decompress(left, PIECE_BYTES)
        if len(piece) > len(out) - written:
            raise _damaged("gzip", "it is longer than it says")
        if not piece and not left:
            break
        out[written : written + len(piece)] = piece
        written += len(piece)
    if inflater.unused_data or position < len(view):
        raise _trailing("gzip")
    return written


# snappy


def _snappy_compress(data: Buffer) -> bytes:
    import cramjam

    view = memoryview(data)
    parts = [XERIAL_HEADER]
    for start in range(0, len(view), XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + XERIAL_BLOCK_BYTES]))
        parts += (_INT32.pack(len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: Buffer, limit: int) -> bytes:
    view = memoryview(data)
    single: memoryview | None = view
    if view[:XERIAL_MAGIC_BYTES] != XERIAL_HEADER[:XERIAL_MAGIC_BYTES]:
        total = _snappy_size(view)
    else:
        total, single = 0, None
        most = _most_blocks(limit)
        for number, block in enumerate(_xerial_blocks(view)):
            if number == most:
                raise _too_many_blocks(limit)
            total += _snappy_size(block)
            single = None if number else block
    if total > limit:
        raise _too_large(limit, total)
    if single is not None and total <= PIECE_BYTES:  # a third of the time
        small = bytearray(total)
        _snappy_block(single, small)
        return bytes(small)

    def fill(out: memoryview) -> int:
        start = 0
        for block in _xerial_blocks(view) if single is None else (single,):
            end = start + _snappy_size(block)
            _snappy_block(block, out[start:end])
            start = end
        return start

    return _filled(total, fill)


def _xerial_blocks(view: memoryview) -> Iterator[memoryview]:
    """The raw blocks of Java's framing."""
    position = len(XERIAL_HEADER)
    if len(view) < position:
        raise _unfinished("snappy")
    while position < len(view):
        if len(view) - position < 4:
            raise _trailing("snappy")
        (size,) = _INT32.unpack_from(view, position)
        position += 4
        if size <= 0 or size > len(view) - position:
            raise _damaged("snappy", f"a block of {size} bytes, {len(view) - position} are left")
        yield view[position : position + size]
        position += size


def _snappy_size(block: memoryview) -> int:
    """What a raw block says that it inflates to."""
    import cramjam

    try:
        size = int(cramjam.snappy.decompress_raw_len(block))
    except cramjam.DecompressionError as error:
        raise _damaged("snappy", error) from None
    if size > SNAPPY_FACTOR * len(block):
        raise _damaged("snappy", f"{len(block)} bytes cannot be {size}")
    return size


def _snappy_block(block: memoryview, out: memoryview | bytearray) -> None:
    """One raw block into all of ``out``."""
    import cramjam

    try:
        written = cramjam.snappy.decompress_raw_into(block, out)
    except cramjam.DecompressionError as error:
        raise _damaged("snappy", error) from None
    if written != len(out):
        raise _unfinished("snappy")


# lz4


def _lz4_compress(data: Buffer, level: int) -> bytes:
    import lz4.frame

    return cast(
        bytes,
        lz4.frame.compress(
            data,
            compression_level=level,
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            store_size=False,
        ),
    )


def _lz4_decompress(data: Buffer, limit: int) -> bytes:
    import cramjam

    view = memoryview(data)
    if len(view) <= len(LZ4_MAGIC) or bytes(view[: len(LZ4_MAGIC)]) != LZ4_MAGIC:
        raise _damaged("lz4", "no frame")
    flags = view[len(LZ4_MAGIC)]
    if not flags & LZ4_INDEPENDENT_BIT:
        raise _damaged("lz4", "its blocks are linked, which Java's clients cannot read")
    if len(view) <= LZ4_SMALL_BYTES:
        inflated = _lz4_small(view, min(limit, PIECE_BYTES))
        if inflated is not None:
            return inflated
    if flags & LZ4_DICTIONARY_BIT:
        raise _damaged("lz4", "it needs a dictionary")
    most = _lz4_most(view, flags, limit)
    if flags & LZ4_SIZED_BIT:
        stated = int.from_bytes(view[LZ4_SIZE_AT : LZ4_SIZE_AT + 8], "little")
        if stated > most:
            raise _damaged("lz4", f"its blocks cannot be {stated} bytes")
        if stated > limit:
            raise _too_large(limit, stated)
        most = stated

    def fill(out: memoryview) -> int:
        return int(cramjam.lz4.decompress_into(view, out))

    try:
        return _filled(min(most, limit), fill)
    except cramjam.DecompressionError as error:
        if most > limit and not str(error).startswith(LZ4_DAMAGED):
            raise _too_large(limit, most) from None
        raise _damaged("lz4", error) from None


def _lz4_small(view: memoryview, limit: int) -> bytes | None:
    """A small frame in half the time; None: look closer."""
    import lz4.frame

    inflater = lz4.frame.LZ4FrameDecompressor()
    try:
        inflated = cast(bytes, inflater.decompress(view, limit))
    except (RuntimeError, EOFError, ValueError):
        return None
    return inflated if inflater.eof and not inflater.unused_data else None


def _lz4_most(view: memoryview, flags: int, limit: int) -> int:
    """What the one frame in ``view`` can inflate to, by its blocks: of those that clients write all
    but the last are as large as the frame's may be.
    """
    position = LZ4_SIZE_AT + (8 if flags & LZ4_SIZED_BIT else 0) + 1
    if len(view) < position:
        raise _unfinished("lz4")
    block_bytes = LZ4_BLOCK_BYTES.get(view[LZ4_SIZE_AT - 1] >> 4 & 7)
    if block_bytes is None:
        raise _damaged("lz4", "blocks of no known size")
    after = 4 if flags & LZ4_BLOCK_CHECKSUM_BIT else 0
    most_blocks = _most_blocks(limit)
    blocks = most = 0
    while word := int.from_bytes(view[position : position + 4], "little"):
        if blocks == most_blocks:
            raise _too_many_blocks(limit)
        blocks += 1
        size = word & LZ4_STORED_MASK
        most += min(block_bytes, size if word > LZ4_STORED_MASK else LZ4_FACTOR * size)
        position += 4 + size + after
    position += 4 + (4 if flags & LZ4_CHECKSUM_BIT else 0)
    if position > len(view):
        raise _unfinished("lz4")
    if position < len(view):
        raise _trailing("lz4")
    return most


def _guess(data: Buffer, limit: int) -> int:
    return min(limit + 1, max(MAX_GUESS_BYTES, 8 * len(data)))


# zstd


class _ZstdContexts(threading.local):
    """Contexts of one thread: they are costly to make and must not be shared while in use."""

    def __init__(self) -> None:
        import zstandard

        self.inflater = zstandard.ZstdDecompressor()
        self.deflaters: dict[int, zstandard.ZstdCompressor] = {}


_zstd_contexts: _ZstdContexts | None = None


def _zstd() -> _ZstdContexts:
    global _zstd_contexts
    if _zstd_contexts is None:
        _zstd_contexts = _ZstdContexts()
    return _zstd_contexts


def _zstd_compress(data: Buffer, level: int) -> bytes:
    import zstandard

    deflaters = _zstd().deflaters
    if level not in deflaters:
        deflaters[level] = zstandard.ZstdCompressor(level=level)
    return deflaters[level].compress(data)


def _zstd_decompress(data: Buffer, limit: int) -> bytes:
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(data)
        size = frame.content_size
        header_bytes = zstandard.frame_header_size(data)
    except zstandard.ZstdError as error:
        raise _damaged("zstd", error) from None
    inflater = _zstd().inflater
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        guess = _guess(data, limit)
        if guess < limit:
            try:
                return inflater.decompress(data, max_output_size=guess, allow_extra_data=False)
            except zstandard.ZstdError:
                pass  # perhaps only too small a guess: the whole limit decides
    elif size > limit:
        raise _too_large(limit, size)
    elif size == 0:  # the library looks no further; nothing but one empty block may follow
        if len(data) != header_bytes + 3 + (4 if frame.has_checksum else 0):
            raise _trailing("zstd")
        return b""
    try:
        inflated = inflater.decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if size != zstandard.CONTENTSIZE_UNKNOWN:
            raise _damaged("zstd", error) from None
        raise InflatesBeyondLimit(
            f"zstd: damaged data: {error} (or above the limit of {limit} bytes)"
        ) from None
    if len(inflated) > limit:
        raise _too_large(limit)
    return inflated
