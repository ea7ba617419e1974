"""Where a search stands, as text that its client gives back: nothing is kept at the node.

A cursor holds a fingerprint of what is searched for and, of each partition, whether it is done, not
begun, or where it stands and how many offsets its next chunk has. It comes from anybody: whatever
it says is checked, and moved into what the log has.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from msgspec import Struct

from kept.client.protocol.wire import read_uvarint, uvarint
from kept.storage.errors import CorruptMessage, InvalidRequest
from kept.storage.types import MAX_INT64

MAX_CURSOR_CHARACTERS: Final = 16 * 1024
MAX_SPAN: Final = 1 << 31
_FORMAT: Final = 1
_NOT_BEGUN, _DONE, _STANDS = 0, 1, 2
_HALF: Final = 1 << 32
"""Varints of the wire have 32 bits at most; a position takes two."""


class Standing(Struct, frozen=True):
    """Where one partition stands; ``position`` is None before it has begun."""

    position: int | None = None
    span: int = 0
    done: bool = False


def fingerprint(*parts: object) -> int:
    """A number that tells searches apart."""
    return crc32(repr(parts).encode())


def encode_cursor(mark: int, standings: Sequence[Standing]) -> str:
    """Text of at most :data:`MAX_CURSOR_CHARACTERS` for a thousand partitions."""
    out = bytearray((_FORMAT,)) + mark.to_bytes(4, "big")
    for standing in standings:
        if standing.done:
            out.append(_DONE)
        elif standing.position is None:
            out.append(_NOT_BEGUN)
        else:
            out.append(_STANDS + standing.span.bit_length())
            high, low = divmod(standing.position, _HALF)
            out += uvarint(high) + uvarint(low)
    return base64.urlsafe_b64encode(out).decode().rstrip("=")


def decode_cursor(text: str, mark: int, partitions: int) -> list[Standing]:
    """The standings of that many partitions. Raises InvalidRequest for what is not a cursor of this
    search.
    """
    wrong = "cursor is not one that this search has given: begin without it"
    if len(text) > MAX_CURSOR_CHARACTERS:
        raise InvalidRequest(f"cursor has {len(text)} characters; {MAX_CURSOR_CHARACTERS} at most")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if data[:5] != bytes((_FORMAT,)) + mark.to_bytes(4, "big"):
            raise InvalidRequest(wrong)
        standings, at = [], 5
        for _ in range(partitions):
            kind, at = data[at], at + 1
            if kind < _STANDS:
                standings.append(Standing(done=kind == _DONE))
                continue
            high, at = read_uvarint(data, at)
            low, at = read_uvarint(data, at)
            position = min(high * _HALF + low, MAX_INT64)
            span = min(max(1 << (kind - _STANDS) >> 1, 1), MAX_SPAN)
            standings.append(Standing(position, span))
    except (binascii.Error, ValueError, IndexError, CorruptMessage) as error:
        raise InvalidRequest(wrong) from error
    if at != len(data):
        raise InvalidRequest(wrong)
    return standings
