"""Damage: bytes and text that are nearly right. Pure; the randomness comes in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

MAX_BYTES: Final = 64 * 1024

NUMBERS: Final = (
    *(struct.pack(">b", value) for value in (-1, 127, -128, 0)),
    *(struct.pack(">h", value) for value in (-1, 2**15 - 1, -(2**15), 0, 1)),
    *(struct.pack(">i", value) for value in (-1, 2**31 - 1, -(2**31), 0, 1, 1 << 24)),
    *(struct.pack(">q", value) for value in (-1, 2**63 - 1, -(2**63), 0)),
    b"\xff\xff\xff\xff\x0f",
    b"\x80\x80\x80\x80\x80\x01",
    b"\xff" * 16,
)
"""What lengths, counts and offsets must not be."""

TEXTS: Final = (
    b"\0",
    b"\r\n",
    b"\n",
    b"\x1b[2J",
    "\u202e".encode(),
    "\U0001f512".encode(),
    b"=",
    b",",
    b"%00",
    b"%ff",
    b"/../",
    b"${env:HOME}",
    b"${file:/etc/passwd:x}",
    b"'",
    b'"',
    b"\\",
    b"\\u",
    b"{",
    b"[[[[",
    b"<script>",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b"0x10",
    b"NaN",
    b";",
    b"user_",
    b"RULE:",
    b"$1",
    b"(a*)*b",
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"A" * 5000,
)
"""What names and values must not do harm by."""

JSON_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    5,
    -1,
    1.5,
    2**64,
    "",
    "x",
    [],
    {},
    [5],
    [[]],
    ["verify", {}],
    {"x": []},
)
"""What may stand where a value of another type is wanted."""


def retyped(value: Any, random: Random) -> Any:
    """``value``, of JSON, with one of the values in it, or itself, replaced by one of any type."""
    if value and isinstance(value, dict | list) and random.random() < 0.9:
        at = random.choice([*value] if isinstance(value, dict) else range(len(value)))
        made = value.copy()
        made[at] = retyped(value[at], random)
        return made
    return random.choice(JSON_VALUES)


def mutated(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """``data`` with one to four pieces of damage; ``others`` are what it may be crossed with."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        random.choice(_DAMAGE)(made, random)
        if others and random.random() < 0.05:
            other = random.choice(others)
            at = random.randint(0, len(made))
            made[at:] = other[random.randint(0, len(other)) :]
    return bytes(made[:MAX_BYTES])


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _random_byte(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _cut(data: bytearray, random: Random) -> None:
    start, stop = _range(data, random)
    del data[start:stop]


def _end(data: bytearray, random: Random) -> None:
    del data[random.randint(0, len(data)) :]


def _repeat(data: bytearray, random: Random) -> None:
    start, stop = _range(data, random)
    data[start:start] = data[start:stop] * random.choice((1, 1, 2, 30))


def _swap(data: bytearray, random: Random) -> None:
    start, stop = _range(data, random)
    piece = data[start:stop]
    del data[start:stop]
    at = random.randint(0, len(data))
    data[at:at] = piece


def _number(data: bytearray, random: Random) -> None:
    number = random.choice(NUMBERS)
    at = random.randint(0, len(data))
    data[at : at + len(number)] = number


def _text(data: bytearray, random: Random) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.choice(TEXTS)


def _noise(data: bytearray, random: Random) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.randbytes(random.choice((1, 4, 40)))


def _range(data: bytearray, random: Random) -> tuple[int, int]:
    start = random.randint(0, len(data))
    return start, min(len(data), start + random.choice((1, 2, 4, 16, 100)))


_DAMAGE: Final[tuple[Callable[[bytearray, Random], None], ...]] = (
    _flip,
    _flip,
    _random_byte,
    _cut,
    _end,
    _repeat,
    _swap,
    _number,
    _number,
    _text,
    _noise,
)
