"""JSON of the operator's results (``kept.node.admin.results``); it is made here alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final

from msgspec import Struct

from kept.node.admin.results import OMITTED, Remote
from kept.node.runtime.time_slices import ITEMS_PER_SLICE, Pace
from kept.storage.types import Generation

CHUNK_BYTES: Final = 64 * 1024
"""Large answers are sent in pieces of about this size."""
_SCALARS: Final = frozenset({bool, int, float, str, type(None), Generation})
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """A result, or any JSON value, as compact JSON."""
    return _encode(plain(value)).encode()


def plain(value: Any) -> Any:
    """A result as dicts, lists, text and numbers."""
    if isinstance(value, Remote):
        return value.value
    if isinstance(value, Generation):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Struct) or is_dataclass(value):
        return {name: plain(member) for name, member in _members(value)}
    return value


@cache
def _fields(of: Any) -> tuple[tuple[str, str, bool], ...]:
    """Of a Struct's or a dataclass' fields: the name, the name in JSON, whether it is inlined."""
    if issubclass(of, Struct):
        inlined = getattr(of, "INLINED", ())
        return tuple((name, name, name in inlined) for name in of.__struct_fields__)
    listed: tuple[Any, ...] = fields(of)
    return tuple((field.name, field.metadata.get("json", field.name), False) for field in listed)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    for attribute, name, inlined in _fields(value.__class__):
        member = getattr(value, attribute)
        if member is OMITTED:
            continue
        if inlined:
            yield from _members(member)
        else:
            yield name, member


async def chunks(value: Any) -> AsyncIterator[bytes]:
    """The JSON of a result that may be large: encoded in slices, given in pieces."""
    out, pace = bytearray(), Pace()
    for piece in _pieces(value):
        out += piece
        if len(out) >= CHUNK_BYTES:
            yield bytes(out)
            out.clear()
        await pace.checkpoint()
    yield bytes(out) + b"\n"


def _pieces(value: Any) -> Iterator[bytes]:
    """What :func:`dumps` gives, in pieces that take a few microseconds each."""
    if isinstance(value, Remote):
        value = value.value
    if not _is_nested(value):
        yield dumps(value)
    elif isinstance(value, list | tuple):
        yield b"["
        size = 1 if _is_nested(value[0]) else ITEMS_PER_SLICE
        for at in range(0, len(value), size):
            if at:
                yield b","
            if size == 1:
                yield from _pieces(value[at])
            else:
                yield dumps(value[at : at + size])[1:-1]
        yield b"]"
    else:
        members = list(value.items() if isinstance(value, dict) else _members(value))
        if not any(_is_nested(member) for _, member in members):
            yield _encode({name: plain(member) for name, member in members}).encode()
            return
        begin = b"{"
        for name, member in members:
            yield begin + dumps(name) + b":"
            yield from _pieces(member)
            begin = b","
        yield b"}"


def _is_nested(value: Any) -> bool:
    """Whether it has an object in it, or a long list."""
    if value.__class__ in _SCALARS:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and (len(value) > ITEMS_PER_SLICE or _is_nested(value[0]))
    return isinstance(value, Struct | dict | Remote) or is_dataclass(value)
