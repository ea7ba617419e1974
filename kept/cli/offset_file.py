"""Files of committed offsets: CSV as ``kafka-consumer-groups --export`` writes and reads it, JSON.

A line of CSV is ``topic,partition,offset``, or with the group before it; JSON is a list of objects
``{"group", "topic", "partition", "offset"}``, of which ``group`` may be missing. Pure.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kept.storage.types import MAX_INT32, MAX_INT64, TopicPartition, decimal_number

MAX_BYTES: Final = 64 << 20
"""Of a file: some two million offsets."""
_FIELDS: Final = ("group", "topic", "partition", "offset")


class FileOffset(NamedTuple):
    """An offset in a file; ``group`` is None where the file does not name it."""

    group: str | None
    topic_partition: TopicPartition
    offset: int


def parse_offsets(content: bytes) -> list[FileOffset]:
    """The offsets in a file of either format. ValueError names the line or entry that is wrong."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8") from None
    offsets: list[FileOffset] = []
    places: dict[tuple[str | None, TopicPartition], str] = {}
    entries = _json_entries(text) if text.lstrip().startswith(("[", "{")) else _csv_entries(text)
    for place, entry in entries:
        offset = _offset(place, entry)
        key = offset.group, offset.topic_partition
        if key in places:
            again = offset.topic_partition.place
            raise ValueError(f"{place} names {again} again, after {places[key]}")
        places[key] = place
        offsets.append(offset)
    if not offsets:
        raise ValueError("there is no offset in it")
    if len({offset.group is None for offset in offsets}) > 1:
        raise ValueError("some entries name their group and some do not")
    return offsets


def _csv_entries(text: str) -> Iterable[tuple[str, dict[str, Any]]]:
    rows = csv.reader(io.StringIO(text), strict=True)
    width = 0
    try:
        for row in rows:
            place, cells = f"line {rows.line_num}", [cell.strip() for cell in row]
            if not any(cells):
                continue
            width = width or len(cells)
            if len(cells) not in (3, 4) or len(cells) != width:
                raise ValueError(
                    f"{place} has {len(cells)} fields; a line is topic,partition,offset or "
                    "group,topic,partition,offset, and all have as many"
                )
            yield place, dict(zip(_FIELDS[-len(cells) :], cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num} is no CSV: {error}") from None


def _json_entries(text: str) -> Iterable[tuple[str, dict[str, Any]]]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(entries, list):
        raise ValueError('no list of objects {"topic": T, "partition": P, "offset": N}')
    for number, entry in enumerate(entries, 1):
        place = f"entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{place} is no object")
        missing = [name for name in _FIELDS[1:] if name not in entry]
        unknown = sorted(entry.keys() - set(_FIELDS))
        if missing or unknown:
            what = f"has no {missing[0]!r}" if missing else f"has an unknown {unknown[0]!r}"
            raise ValueError(f"{place} {what}: it has topic, partition and offset, perhaps group")
        yield place, entry


def _offset(place: str, entry: Mapping[str, Any]) -> FileOffset:
    names = [entry.get("group"), entry["topic"]]
    for kind, name in zip(_FIELDS, names, strict=False):
        if not (kind == "group" and name is None) and (not isinstance(name, str) or not name):
            raise ValueError(f"{place}: {name!r} is no {kind}")
    partition = _number(place, "partition", entry["partition"], MAX_INT32)
    offset = _number(place, "offset", entry["offset"], MAX_INT64)
    return FileOffset(names[0], TopicPartition(names[1], partition), offset)


def _number(place: str, what: str, given: Any, most: int) -> int:
    number = decimal_number(given) if isinstance(given, str) else given
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        hint = " (is that a header? there is none)" if given == what else ""
        raise ValueError(f"{place}: {given!r} is no {what}{hint}")
    return number


def csv_text(offsets: Mapping[str, Mapping[TopicPartition, int]], *, named: bool) -> str:
    """Offsets by group as CSV; the group is in each line where it is ``named``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for group, its in offsets.items():
        before = [group] if named else []
        writer.writerows([*before, *tp, offset] for tp, offset in sorted(its.items()))
    return out.getvalue()


def json_rows(offsets: Mapping[str, Mapping[TopicPartition, int]]) -> list[dict[str, Any]]:
    """Offsets by group as the objects of a JSON file."""
    return [
        {"group": group, "topic": tp.topic, "partition": tp.partition, "offset": offset}
        for group, its in offsets.items()
        for tp, offset in sorted(its.items())
    ]
