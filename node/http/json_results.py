"""JSON of the operator's results (``kept.node.admin.results``); it is made here alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final

from msgspec import Struct

from kept.node.admin.results import OMITTED, Remote
from kept.node.runtime.time_slices import checkpoint
from kept.storage.types import Generation

CHUNK_BYTES: Final = 64 * 1024
"""Large answers are sent in pieces of about this size."""


def dumps(value: Any) -> bytes:
    """A result, or any JSON value, as compact JSON."""
    return json.dumps(plain(value), separators=(",", ":")).encode()


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
    """The JSON of a result whose lists may be long: encoded in slices, given in pieces."""
    members = value.value.items() if isinstance(value, Remote) else _members(value)
    out = bytearray(b"{")
    for number, (name, member) in enumerate(members):
        out += b"," * (number > 0) + json.dumps(name).encode() + b":"
        if not isinstance(member, list | tuple):
            out += dumps(member)
            continue
        out += b"["
        for position, item in enumerate(member):
            out += b"," * (position > 0) + dumps(item)
            if len(out) >= CHUNK_BYTES:
                yield bytes(out)
                out.clear()
            await checkpoint(position)
        out += b"]"
    yield bytes(out) + b"}\n"
