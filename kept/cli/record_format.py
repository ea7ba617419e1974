"""How ``kept consume`` writes a record: as a line for people, as JSON, or by a format string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from kept.cli.output import NO_KEY, TOMBSTONE, json_line, moment, put_bytes, text, unescaped
from kept.client.consume.consumer import ConsumedRecord
from kept.storage.printable import printable_line, printable_text

Renderer = Callable[[ConsumedRecord], bytes]
"""A record as the bytes that are written for it, with the end of its line."""


def _length(data: bytes | None) -> bytes:
    return b"%d" % (-1 if data is None else len(data))


def _headers(record: ConsumedRecord) -> bytes:
    pairs = (name.encode() + b"=" + (value or b"") for name, value in record.headers)
    return b",".join(pairs)


FIELDS: Final[Mapping[str, tuple[str, Renderer]]] = {
    "t": ("topic", lambda r: r.topic.encode()),
    "p": ("partition", lambda r: b"%d" % r.partition),
    "o": ("offset", lambda r: b"%d" % r.offset),
    "k": ("key", lambda r: r.key or b""),
    "K": ("length of the key (-1: none)", lambda r: _length(r.key)),
    "v": ("value", lambda r: r.value or b""),
    "V": ("length of the value (-1: tombstone)", lambda r: _length(r.value)),
    "s": ("the same as %v", lambda r: r.value or b""),
    "S": ("the same as %V", lambda r: _length(r.value)),
    "h": ("headers as NAME=VALUE,…", _headers),
    "H": ("number of headers", lambda r: b"%d" % len(r.headers)),
    "T": ("timestamp in milliseconds since 1970", lambda r: b"%d" % r.timestamp),
    "d": ("timestamp in UTC (ISO 8601)", lambda r: (moment(r.timestamp) or "-").encode()),
    "%": ("a percent sign", lambda _: b"%"),
}
"""What each letter behind a % of a format string stands for, and how it is written."""

_FIELD: Final = re.compile(r"%(.|$)", re.DOTALL)


def formatted(given: str) -> Renderer:
    """What writes records by the format string ``given``. ValueError names a % or an escape that
    there is not.
    """
    parts: list[bytes | Renderer] = []
    at = 0
    for found in _FIELD.finditer(given):
        parts.append(unescaped(given[at : found.start()]))
        if found[1] not in FIELDS:
            known = " ".join(f"%{letter}" for letter in FIELDS)
            raise ValueError(f"%{found[1]} is no field: there are {known}")
        parts.append(FIELDS[found[1]][1])
        at = found.end()
    parts.append(unescaped(given[at:]))

    def render(record: ConsumedRecord) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(record) for part in parts)

    return render


def value_line(record: ConsumedRecord) -> bytes:
    """The value and nothing else; a tombstone is an empty line."""
    return (record.value or b"") + b"\n"


def key_line(record: ConsumedRecord) -> bytes:
    """The key and nothing else; without one an empty line."""
    return (record.key or b"") + b"\n"


def printable(render: Renderer) -> Renderer:
    """What writes the same with control characters spelled out: for a terminal."""

    def spelled(record: ConsumedRecord) -> bytes:
        shown = printable_text(render(record).decode("utf-8", "backslashreplace"))
        return shown.encode("utf-8", "backslashreplace")

    return spelled


def for_people(*, topics: bool, headers: bool) -> Renderer:
    """What writes a line with place, time, key, value and, unless ``headers`` is False, headers;
    with ``topics`` the place begins with the topic.
    """

    def line(record: ConsumedRecord) -> bytes:
        place = f"{record.partition}:{record.offset}"
        if topics:
            place = f"{printable_line(record.topic)}:{place}"
        key, value = text(record.key, NO_KEY), text(record.value, TOMBSTONE)
        shown = f"{place}  {moment(record.timestamp) or '-'}  {key}  {value}"
        if headers:
            named = ((printable_line(k), text(v, "null")) for k, v in record.headers)
            shown += "".join(f"  {k}={v}" for k, v in named)
        return f"{shown}\n".encode()

    return line


def as_json_line(record: ConsumedRecord) -> bytes:
    """One line of JSON, which ``kept produce --json`` reads."""
    return json_line(as_object(record)).encode("utf-8", "surrogatepass")


def as_object(record: ConsumedRecord) -> dict[str, Any]:
    """A record as ``--json`` prints it."""
    out: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    put_bytes(out, "key", record.key)
    put_bytes(out, "value", record.value)
    headers = []
    for name, value in record.headers:
        header: dict[str, Any] = {"key": name}
        put_bytes(header, "value", value)
        headers.append(header)
    out["headers"] = headers
    return out
