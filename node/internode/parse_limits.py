"""Bounds what a node's message makes of memory and time, before protobuf reads it. Pure.

A repeated field of empty messages takes two bytes an item on the wire and some hundred in memory:
one body of :data:`kept.node.internode.frames.MAX_BODY_BYTES` would make gigabytes. So the fields of
a large body are counted first. Small bodies need no look: they cannot hold much.
"""

from __future__ import annotations

from typing import Any, Final

from kept.storage.errors import CorruptMessage

MAX_ITEMS: Final = 1 << 15
"""Items of all repeated fields of a message: an append of 1 MiB has at most 29,127 entries, since
36 bytes count for each; other messages have some thousands."""
MAX_FIELDS: Final = 8 * MAX_ITEMS
UNCOUNTED_BYTES: Final = 64 * 1024
"""A body up to this size is not counted: 32,768 items at most."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZE: Final = {_FIXED64: 8, _FIXED32: 4}


def check_counts(
    descriptor: Any, data: bytes, max_items: int = MAX_ITEMS, max_fields: int = MAX_FIELDS
) -> None:
    """Raises CorruptMessage for a message of that protobuf ``descriptor`` with more than
    ``max_items`` items in its repeated fields, and for bytes that are no message.
    """
    if len(data) > UNCOUNTED_BYTES:
        _Counter(descriptor.name, data, max_items, max_fields).count(descriptor, 0, len(data))


class _Counter:
    def __init__(self, name: str, data: bytes, max_items: int, max_fields: int) -> None:
        self._name = name
        self._data = data
        self._max_items = max_items
        self._max_fields = max_fields
        self._items = 0
        self._fields = 0

    def count(self, descriptor: Any, at: int, end: int) -> None:
        """Count the fields of one message at [at, end), and of those in it."""
        fields = descriptor.fields_by_number
        while at < end:
            tag, at = self._varint(at)
            kind, size = tag & 7, 1
            if kind == _VARINT:
                _, at = self._varint(at)
            elif kind == _BYTES:
                size, at = self._varint(at)
                at += size
            elif kind in _FIXED_SIZE:
                at += _FIXED_SIZE[kind]
            else:
                raise CorruptMessage(f"{self._name}: a field of wire type {kind}")
            if at > end:
                raise CorruptMessage(f"{self._name}: a field ends {at - end} bytes too late")
            self._add(fields.get(tag >> 3), kind, at - size, at)

    def _add(self, field: Any, kind: int, start: int, end: int) -> None:
        self._fields += 1
        inner = None if field is None else field.message_type
        if field is not None and field.is_repeated:
            packed = kind == _BYTES and inner is None and field.cpp_type != field.CPPTYPE_STRING
            self._items += end - start if packed else 1
        if self._items > self._max_items or self._fields > self._max_fields:
            raise CorruptMessage(
                f"{self._name}: more than {self._max_items} items or {self._max_fields} fields in "
                "one message"
            )
        if kind == _BYTES and inner is not None and _has_items(inner):
            self.count(inner, start, end)

    def _varint(self, at: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(self._data):
                raise CorruptMessage(f"{self._name}: ends within a number")
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise CorruptMessage(f"{self._name}: a number of more than 10 bytes")


def _has_items(descriptor: Any) -> bool:
    """Whether anything in such a message must be counted: it has repeated fields or messages."""
    return any(field.is_repeated or field.message_type for field in descriptor.fields)
