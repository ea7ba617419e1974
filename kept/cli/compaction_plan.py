"""What ``kept compact explain`` prints: the plan of each partition, the records of a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kept.cli.output import counted, moment, show_table, show_tree, size, write

SHOWN_RECORDS: Final = 5
"""Of a key, the newest ones."""
RECORD_COLUMNS: Final = ("offset", "timestamp", "value", "fate", "removable from")


def place_of(entry: Mapping[str, Any]) -> str:
    """``TOPIC:PARTITION``."""
    return f"{entry['topic']}:{entry['partition']}"


def show_plans(entries: Sequence[Mapping[str, Any]]) -> None:
    """What a pass would do to each partition, in a line."""
    rows = []
    for entry in entries:
        row = [entry["topic"], entry["partition"], bool(entry["due"])]
        if (plan := entry.get("dry_run")) is None:
            row += [None] * 4 + [entry["status"].get("tombstones_pending")]
        else:
            removed = sum((plan["removed"] or {}).values())
            after = plan["size_bytes"] - plan["bytes_dropped"]
            row += [f"{plan['first_dirty']}..{plan['clean_to']}", plan["records"], removed]
            row += [f"{size(plan['size_bytes'])} to {size(after)}", plan["tombstones_kept"]]
        rows.append([*row, entry["reason"]])
    columns = ("topic", "partition", "due", "offsets", "records", "removed", "size", "tombstones")
    show_table((*columns, "why"), rows)
    waiting = [
        (place_of(entry), *_tombstones(each))
        for entry in entries
        for each in entry.get("tombstones") or ()
    ]
    if waiting:
        write("\n")
        show_table(("partition", "tombstones", "offsets", "removable from"), waiting)


def _tombstones(waiting: Mapping[str, Any]) -> tuple[Any, ...]:
    """How many, where, and from when they may go."""
    offsets = f"{waiting['first_offset']}..{waiting['last_offset']}"
    return waiting["tombstones"], offsets, moment(waiting["removable_at_ms"])


def show_key(entries: Sequence[Mapping[str, Any]]) -> None:
    """The newest records of a key, how many there are, and what a pass would do to them."""
    without = [place_of(entry) for entry in entries if not entry.get("key")]
    if len(without) == len(entries):
        write(f"no record of this key in {', '.join(without)}\n")
    for entry in entries:
        records: list[dict[str, Any]] = entry.get("key") or []
        if not records:
            continue
        fates = Counter(str(record["fate"]) for record in records)
        counts = ", ".join(f"{count} {fate}" for fate, count in fates.items())
        write(f"{place_of(entry)}: {counted(len(records), 'record')} of this key: {counts}\n\n")
        show_table(RECORD_COLUMNS, [_record(record) for record in records[-SHOWN_RECORDS:]])
        if len(records) > SHOWN_RECORDS:
            write(f"and {len(records) - SHOWN_RECORDS} older: --verbose shows all\n")


def _record(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        record["offset"],
        moment(record["timestamp"]),
        "tombstone" if record["is_tombstone"] else size(record["value_bytes"]),
        record["fate"],
        moment(record.get("removable_at_ms")),
    )


def show_dry_run(partition: dict[str, Any]) -> None:
    """What a pass would do, without unset fields; a key's records as a table."""
    key, tombstones = partition.get("key"), partition.get("tombstones")
    apart = ("key", "tombstones")
    show_tree(known({name: value for name, value in partition.items() if name not in apart}))
    if tombstones:
        write("\n")
        columns = ("tombstones", "offsets", "removable from")
        show_table(columns, [_tombstones(waiting) for waiting in tombstones])
    if key:
        write("\n")
        show_table(RECORD_COLUMNS, [_record(record) for record in key])
    elif key is not None:
        write("no record of this key here\n")
    write("\n")


def known(value: Any) -> Any:
    """Without the members that are unset or empty, at every depth."""
    if isinstance(value, list):
        return [known(member) for member in value]
    if isinstance(value, dict):
        return {name: known(member) for name, member in value.items() if member not in (None, [])}
    return value
