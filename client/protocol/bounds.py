"""The shape of a message is checked before kio reads it: no length is larger than what is left.

kio's native reader reserves room for an array as soon as it has read its length: five bytes that
announce 2^32 elements made it reserve 32 GiB, and the process ended. So each class of kio is
compiled once to a :class:`Program`, a flat list of steps, and :meth:`Program.check` walks a message
along it first. It refuses with CorruptMessage

- an array of more elements than the bytes left can hold at the least size of one,
- a string, bytes, records or tagged field that ends outside the message,
- a negative length other than null's -1, a varint of more than five bytes,
- a string of more than 32,767 bytes (:data:`MAX_STRING_BYTES`, Kafka's limit in either encoding),
  but for values of settings, which the controller refuses by name,
- a known tagged field whose content has another size than it says,

and counts the entries: elements of arrays on all levels, and tagged fields. More than the caller
allows is InvalidRequest, said as soon as it is known. What a newer peer adds as tagged fields is
passed over (KIP-482): kio refuses tags it has no name for, and :meth:`Program.without_unknown_tags`
writes the message again without them.

The walk is ``kept.client.protocol._bounds`` (Cython) where that was compiled, :class:`Walk` here
otherwise and with ``KEPT_KERNEL=python``: same results. A reader that checks lengths itself is
what kio needs upstream: ``with_capacity(min(length, bytes left))``.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from dataclasses import fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kept.client.protocol.wire import Bytes, read_uvarint, uvarint
from kept.storage.errors import CorruptMessage, InvalidRequest, InvariantViolation

MAX_STRING_BYTES: Final = 32767
"""The longest string of Kafka's protocol: a STRING's length is an INT16, and Kafka refuses longer
ones in the compact encoding, too."""
NO_LIMIT: Final = 2**31 - 1
"""Of entries: a message cannot have as many bytes."""

END: Final = 0
"""The steps of a program, each an int32 followed by its operands: no more fields."""
FIXED: Final = 1
"""(n): n bytes of any content."""
STRING: Final = 2
"""A varint, length + 1 or 0 for null, and as many bytes."""
STRING16: Final = 3
"""An int16, -1 for null, and as many bytes."""
BYTES: Final = 4
"""As STRING, of any length."""
BYTES32: Final = 5
"""An int32, -1 for null, and as many bytes."""
ARRAY: Final = 6
"""(at, least): a varint, count + 1 or 0, and as many times the program at ``at``, each at least
``least`` bytes."""
ARRAY32: Final = 7
"""The same with an int32."""
FIXEDS: Final = 8
"""(n): a varint, count + 1 or 0, and as many times n bytes."""
FIXEDS32: Final = 9
"""The same with an int32."""
ENTITY: Final = 10
"""(at): the program at ``at``."""
ENTITY_OR_NULL: Final = 11
"""The same behind an int8; below 0 there is none."""
TAGS: Final = 12
"""(n, then n times tag and at): a section of tagged fields, of which n are known."""

_LONG: Final = frozenset({("CreatableTopicConfig", "value"), ("AlterableConfig", "value")})
"""Strings of any length: the value of a setting. The answer says which is too long."""

_SIZES: Final = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "int16": 2,
        "uint16": 2,
        "error_code": 2,
        "int32": 4,
        "uint32": 4,
        "timedelta_i32": 4,
        "int64": 8,
        "uint64": 8,
        "timedelta_i64": 8,
        "datetime_i64": 8,
        "float64": 8,
        "uuid": 16,
    }
)
"""Bytes of each fixed kind; the others have a length."""


class Walk:
    """One walk along a program; the Cython class of this name does the same, much faster.

    ``entries`` and ``unknown`` (tagged fields without a name here) are counted on the way.
    """

    def __init__(self, code: array[int], data: Bytes, max_entries: int) -> None:
        self._code = code
        self._data = memoryview(data)
        self._max_entries = max_entries
        self._out: bytearray | None = None
        self._copied = 0
        """Where what is not yet in ``_out`` begins."""
        self.entries = 0
        self.unknown = 0

    def check(self, start: int, position: int) -> int:
        """Walk the message at ``position``; the position after it."""
        return self._struct(start, position, len(self._data))

    def rewritten(self, start: int, position: int) -> bytes:
        """The message at ``position`` without its unknown tagged fields."""
        self._out, self._copied = bytearray(), position
        end = self._struct(start, position, len(self._data))
        self._out += self._data[self._copied : end]
        return bytes(self._out)

    def _struct(self, pc: int, at: int, end: int) -> int:
        code = self._code
        while (step := code[pc]) != END:
            if step == FIXED:
                at = self._bytes(at, code[pc + 1], end)
                pc += 2
            elif step in (STRING, STRING16, BYTES, BYTES32):
                at = self._text(step, at, end)
                pc += 1
            elif step in (FIXEDS, FIXEDS32):
                count, at = self._count(step == FIXEDS, at, end, code[pc + 1])
                at += count * code[pc + 1]
                pc += 2
            elif step in (ARRAY, ARRAY32):
                count, at = self._count(step == ARRAY, at, end, code[pc + 2])
                for _ in range(count):
                    at = self._struct(code[pc + 1], at, end)
                pc += 3
            elif step == TAGS:
                at = self._tags(pc, at, end)
                pc += 2 + 2 * code[pc + 1]
            else:
                present = True
                if step == ENTITY_OR_NULL:
                    start, at = at, self._bytes(at, 1, end)
                    present = self._data[start] < 0x80
                if present:
                    at = self._struct(code[pc + 1], at, end)
                pc += 2
        return at

    @staticmethod
    def _bytes(at: int, size: int, end: int) -> int:
        if size > end - at:
            raise CorruptMessage(f"a field of {size} bytes where {end - at} are left")
        return at + size

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        return read_uvarint(self._data[:end], at)

    def _number(self, at: int, size: int, end: int) -> tuple[int, int]:
        after = self._bytes(at, size, end)
        return int.from_bytes(self._data[at:after], "big", signed=True), after

    def _text(self, step: int, at: int, end: int) -> int:
        if step in (STRING, BYTES):
            size, at = self._varint(at, end)
            size -= 1
        else:
            size, at = self._number(at, 2 if step == STRING16 else 4, end)
        if size < -1:
            raise CorruptMessage(f"a field of length {size}")
        if step == STRING and size > MAX_STRING_BYTES:
            raise CorruptMessage(f"a string of {size} bytes: {MAX_STRING_BYTES} is the longest")
        return self._bytes(at, max(size, 0), end)

    def _count(self, compact: bool, at: int, end: int, least: int) -> tuple[int, int]:
        if compact:
            count, at = self._varint(at, end)
            count -= 1
        else:
            count, at = self._number(at, 4, end)
        if count < -1 or count > (end - at) // least:
            raise CorruptMessage(f"an array of {count} where {end - at} bytes are left")
        self._enter(max(count, 0))
        return max(count, 0), at

    def _enter(self, more: int) -> None:
        self.entries += more
        if self.entries > self._max_entries:
            raise InvalidRequest(f"more than {self._max_entries} entries")

    def _tags(self, pc: int, at: int, end: int) -> int:
        code, start = self._code, at
        known = {code[i]: code[i + 1] for i in range(pc + 2, pc + 2 + 2 * code[pc + 1], 2)}
        count, at = self._varint(at, end)
        if count > (end - at) // 2:
            raise CorruptMessage(f"{count} tagged fields where {end - at} bytes are left")
        self._enter(count)
        kept: list[bytes] = []
        for _ in range(count):
            tag, at = self._varint(at, end)
            size, at = self._varint(at, end)
            stop = self._bytes(at, size, end)
            if tag not in known:
                self.unknown += 1
            elif self._out is None:
                self._known(tag, known[tag], at, stop)
            else:
                outer, copied = self._out, self._copied
                self._out, self._copied = bytearray(), at
                self._known(tag, known[tag], at, stop)
                content = self._out + self._data[self._copied : stop]
                self._out, self._copied = outer, copied
                kept.append(uvarint(tag) + uvarint(len(content)) + content)
            at = stop
        if self._out is not None and count:
            self._out += self._data[self._copied : start]
            self._out += uvarint(len(kept)) + b"".join(kept)
            self._copied = at
        return at

    def _known(self, tag: int, pc: int, at: int, stop: int) -> None:
        if self._struct(pc, at, stop) != stop:
            raise CorruptMessage(f"tag {tag} has another size than it says")


if not TYPE_CHECKING and os.environ.get("KEPT_KERNEL") != "python":
    with contextlib.suppress(ImportError):
        from kept.client.protocol._bounds import Walk


class Program(NamedTuple):
    """How to walk the messages of one class: ``code`` from ``start`` on."""

    code: array[int]
    start: int

    def check(
        self, data: Bytes, position: int, max_entries: int = NO_LIMIT
    ) -> tuple[int, int, int]:
        """(position after it, entries, unknown tagged fields) of the message at ``position``.

        Raises CorruptMessage, and InvalidRequest for more than ``max_entries``.
        """
        walk = Walk(self.code, data, max_entries)
        end = walk.check(self.start, position)
        return end, walk.entries, walk.unknown

    def without_unknown_tags(self, data: Bytes, position: int) -> bytes:
        """The message at ``position`` without the tagged fields that its class lacks; raises as
        :meth:`check`.
        """
        return Walk(self.code, data, NO_LIMIT).rewritten(self.start, position)


def check_string(what: str, text: str) -> None:
    """Raises InvalidRequest for a text that no request can hold: the node that is sent it closes
    the connection, and whether it was done would be unknown.
    """
    size = len(text.encode(errors="replace"))
    if size > MAX_STRING_BYTES:
        raise InvalidRequest(f"{what} has {size} bytes: {MAX_STRING_BYTES} is the longest")


@cache
def program(cls: Any) -> Program:
    """The program of a class of kio."""
    code: list[int] = []
    start, _ = _compile(cls, code)
    return Program(array("i", code), start)


def _compile(cls: Any, code: list[int]) -> tuple[int, int]:
    """Add the program of ``cls`` and those it refers to; (where it starts, least size)."""
    hints = get_type_hints(cls)
    steps: list[int] = []
    tagged: list[int] = []
    least = 0
    in_row = False
    for field in fields(cls):
        kind = field.metadata.get("kafka_type")
        if (cls.__name__, field.name) in _LONG and cls.__flexible__:
            kind = "bytes"
        step, size = _field(hints[field.name], kind, cls, code)
        if "tag" in field.metadata:
            tagged += [field.metadata["tag"], _place([*step, END], code)]
        else:
            least += size
            if in_row and step[0] == FIXED:
                steps[-1] += step[1]  # plain fields in a row are one step
            else:
                steps += step
            in_row = step[0] == FIXED
    if cls.__flexible__:
        steps += [TAGS, len(tagged) // 2, *tagged]
        least += 1
    return _place([*steps, END], code), least


def _place(steps: list[int], code: list[int]) -> int:
    start = len(code)
    code += steps
    return start


def _field(hint: Any, kind: str | None, cls: Any, code: list[int]) -> tuple[list[int], int]:
    """(the step of a field, its least size)."""
    nullable = get_origin(hint) in (Union, UnionType)
    if nullable:
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    compact = cls.__flexible__
    if get_origin(hint) is not tuple:
        return _single(hint, kind, nullable, compact, code)
    step, least = _single(get_args(hint)[0], kind, False, compact, code)
    if least < 1:
        raise InvariantViolation(f"{cls.__module__}.{cls.__name__}: elements without a byte")
    if step[0] == FIXED:
        return [FIXEDS if compact else FIXEDS32, step[1]], 1 if compact else 4
    at = step[1] if step[0] == ENTITY else _place([*step, END], code)
    return [ARRAY if compact else ARRAY32, at, least], 1 if compact else 4


def _single(
    hint: Any, kind: str | None, nullable: bool, compact: bool, code: list[int]
) -> tuple[list[int], int]:
    if is_dataclass(hint):
        start, least = _compile(hint, code)
        return ([ENTITY_OR_NULL, start], 1) if nullable else ([ENTITY, start], least)
    if (size := _SIZES.get(kind or "")) is not None:
        return [FIXED, size], size
    if kind == "string":
        return ([STRING], 1) if compact else ([STRING16], 2)
    if kind in ("bytes", "records"):
        return ([BYTES], 1) if compact else ([BYTES32], 4)
    raise InvariantViolation(f"kio has a kind of field that is unknown here: {kind}")
