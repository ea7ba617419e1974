"""Messages of a newer peer: tagged fields that this version of kio does not know are passed over.

KIP-482: whoever reads a flexible message skips tags it has no name for, so that fields can be added
without a new version. kio refuses them; :func:`without_unknown_tags` writes the message again with
those left out, field by field as kio's classes describe it. Only such messages pay for it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from kept.client.wire import Bytes, read_uvarint, tags, uvarint
from kept.storage.errors import CorruptMessage

_SIZES: Final = {
    "bool": 1, "int8": 1, "int16": 2, "uint16": 2, "error_code": 2, "int32": 4, "timedelta_i32": 4,
    "int64": 8, "timedelta_i64": 8, "datetime_i64": 8, "float64": 8, "uuid": 16,
}  # fmt: skip
"""Bytes of each fixed kind; all others are a varint (size + 1, 0 for null) and as many bytes."""


class _Field(NamedTuple):
    entity: Any
    """The class of a nested message; None for a plain kind."""
    kind: str
    array: bool
    nullable: bool


def without_unknown_tags(cls: Any, data: Bytes, position: int) -> tuple[bytes, int]:
    """(a flexible message of class ``cls`` at ``position`` without the tags that ``cls`` lacks,
    position after the original). Raises CorruptMessage.
    """
    out = bytearray()
    end = _message(cls, memoryview(data), position, out)
    return bytes(out), end


@cache
def _fields(cls: Any) -> tuple[list[_Field], dict[int, _Field]]:
    """(the fields in order, the tagged ones by tag)."""
    hints = get_type_hints(cls)
    plain: list[_Field] = []
    tagged: dict[int, _Field] = {}
    for one in fields(cls):
        hint = hints[one.name]
        nullable = get_origin(hint) in (Union, UnionType)
        if nullable:
            hint = next(arg for arg in get_args(hint) if arg is not NoneType)
        array = get_origin(hint) is tuple
        if array:
            hint = get_args(hint)[0]
        entity = hint if is_dataclass(hint) else None
        field = _Field(entity, str(one.metadata.get("kafka_type", "")), array, nullable)
        if "tag" in one.metadata:
            tagged[one.metadata["tag"]] = field
        else:
            plain.append(field)
    return plain, tagged


def _message(cls: Any, data: memoryview, position: int, out: bytearray) -> int:
    plain, tagged = _fields(cls)
    for field in plain:
        position = _value(field, data, position, out)
    found, end = tags(data, position)
    kept = []
    for tag, start, stop in found:
        if tag in tagged:
            content = bytearray()
            if _value(tagged[tag], data, start, content) != stop:
                raise CorruptMessage(f"tag {tag} of a {cls.__name__} has another size than said")
            kept.append(uvarint(tag) + uvarint(len(content)) + content)
    out += uvarint(len(kept))
    for one in kept:
        out += one
    return end


def _value(field: _Field, data: memoryview, position: int, out: bytearray) -> int:
    if not field.array:
        return _single(field, data, position, out)
    count, start = read_uvarint(data, position)
    out += data[position:start]
    if count - 1 > len(data):
        raise CorruptMessage(f"an array of {count - 1} in a message of {len(data)} bytes")
    single = field._replace(nullable=False)
    for _ in range(count - 1):
        start = _single(single, data, start, out)
    return start


def _single(field: _Field, data: memoryview, position: int, out: bytearray) -> int:
    if field.entity is not None:
        if field.nullable:
            marker = _taken(data, position, 1)
            out += marker
            position += 1
            if marker[0] >= 0x80:
                return position
        return _message(field.entity, data, position, out)
    size = _SIZES.get(field.kind)
    if size is None:
        length, start = read_uvarint(data, position)
        size = max(length - 1, 0) + start - position
    out += _taken(data, position, size)
    return position + size


def _taken(data: memoryview, position: int, size: int) -> memoryview:
    taken = data[position : position + size]
    if len(taken) < size:
        raise CorruptMessage("a field ends outside its message")
    return taken
