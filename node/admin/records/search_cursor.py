"""Where a search stands, as text that its client gives back: nothing is kept at the node.

A cursor holds a fingerprint of what is searched for and, of each partition, whether it is done, not
begun, or where it stands, how many offsets its next chunk has and how old what is left may be. It
comes from anybody: whatever it says is checked, and moved into what the log has.
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

MAX_CURSOR_CHARACTERS: Final = 24 * 1024
MAX_SPAN: Final = 1 << 31
_FORMAT: Final = 2
_NOT_BEGUN, _DONE, _STANDS = 0, 1, 2
_HALF: Final = 1 << 32
"""Varints of the wire have 32 bits at most; a position takes two."""


class LanePosition(Struct, frozen=True):
    """Where one partition stands; ``position`` is None before it has begun. ``bound_ms`` is the
    time that no record of what is left is on the wrong side of, as far as it is known.
    """

    position: int | None = None
    span: int = 0
    done: bool = False
    bound_ms: int | None = None


def fingerprint(*parts: object) -> int:
    """A number that tells searches apart."""
    return crc32(repr(parts).encode())


def encode_cursor(mark: int, positions: Sequence[LanePosition]) -> str:
    """Text of at most :data:`MAX_CURSOR_CHARACTERS` for a thousand partitions: of a bound it has
    the distance to the latest one.
    """
    bounds = [lane.bound_ms for lane in positions if lane.bound_ms is not None]
    latest = min(max(bounds, default=0), MAX_INT64)
    latest = max(latest, 0)
    out = bytearray((_FORMAT,)) + mark.to_bytes(4, "big") + _number(latest)
    for lane in positions:
        if lane.done:
            out.append(_DONE)
        elif lane.position is None:
            out.append(_NOT_BEGUN)
        else:
            out.append(_STANDS + lane.span.bit_length())
            out += _number(lane.position)
            bound = lane.bound_ms
            before = 0 if bound is None else 1 + min(max(latest - bound, 0), _HALF - 2)
            out += uvarint(before)
    return base64.urlsafe_b64encode(out).decode().rstrip("=")


def decode_cursor(text: str, mark: int, partitions: int) -> list[LanePosition]:
    """The positions of that many partitions. Raises InvalidRequest for what is not a cursor of this
    search.
    """
    wrong = "cursor is not one that this search has given: begin without it"
    if len(text) > MAX_CURSOR_CHARACTERS:
        raise InvalidRequest(f"cursor has {len(text)} characters; {MAX_CURSOR_CHARACTERS} at most")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if data[:5] != bytes((_FORMAT,)) + mark.to_bytes(4, "big"):
            raise InvalidRequest(wrong)
        latest, at = _read_number(data, 5)
        positions = []
        for _ in range(partitions):
            kind, at = data[at], at + 1
            if kind < _STANDS:
                positions.append(LanePosition(done=kind == _DONE))
                continue
            position, at = _read_number(data, at)
            before, at = read_uvarint(data, at)
            span = min(max(1 << (kind - _STANDS) >> 1, 1), MAX_SPAN)
            bound_ms = latest - (before - 1) if before else None
            positions.append(LanePosition(position, span, bound_ms=bound_ms))
    except (binascii.Error, ValueError, IndexError, CorruptMessage) as error:
        raise InvalidRequest(wrong) from error
    if at != len(data):
        raise InvalidRequest(wrong)
    return positions


def _number(value: int) -> bytes:
    high, low = divmod(value, _HALF)
    return uvarint(high) + uvarint(low)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    high, at = read_uvarint(data, at)
    low, at = read_uvarint(data, at)
    return min(high * _HALF + low, MAX_INT64), at
