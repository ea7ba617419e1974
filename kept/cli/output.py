"""What commands print: tables for people, JSON for programs, progress on a terminal."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from kept.cli.table_layout import fitted, padded, width_of
from kept.storage.printable import printable_line, printable_text

TOMBSTONE: Final = "(tombstone)"
NO_KEY: Final = "(no key)"
_ESCAPES: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_ESCAPE: Final = re.compile(r"\\(x[0-9A-Fa-f]{2}|.|$)", re.DOTALL)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def write(text: str) -> None:
    """Print to standard output in UTF-8, whatever the locale is.

    Control characters but LF and TAB are spelled out: what is printed came from others.
    """
    sys.stdout.buffer.write(printable_text(text).encode("utf-8", "surrogateescape"))


def echo(message: str = "", *, err: bool = False) -> None:
    """A line for people, to standard error if ``err``; spelled out as in :func:`write`."""
    click.echo(printable_text(message), err=err)


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, before a write says so."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def show_json(value: Any) -> None:
    """Print one JSON document."""
    write(json.dumps(value, ensure_ascii=False, indent=2, default=str) + "\n")


def json_line(value: Any) -> str:
    """One line of JSON."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return printable_text(line) + "\n"


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str = "") -> None:
    """Print aligned columns: numbers to the right, ``-`` for None.

    A table that is wider than the terminal is laid out anew, see :mod:`kept.cli.table_layout`; in a
    pipe or a file every row stays one line, whole. Without rows people are told ``empty``, where
    standard error is a terminal.
    """
    cells = [table_cells(row) for row in rows]
    widths = [max(map(width_of, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(columns))]
    lines = [[name.upper() for name in columns], *cells]
    if not rows and empty and sys.stderr.isatty():
        echo(empty, err=True)
    if sys.stdout.isatty():
        from shutil import get_terminal_size  # with bz2 and lzma, which `kept serve` does not need

        terminal = get_terminal_size().columns
        if sum(widths) + 2 * (len(widths) - 1) > terminal:
            write("".join(f"{line}\n" for line in fitted(lines, numeric, terminal)))
            return
    for line in lines:
        parts = [
            padded(cell, width, right)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        write("  ".join(parts).rstrip() + "\n")


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column holds numbers, and perhaps some that are unknown."""
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) for value in known)


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def show_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], as_json: bool, *, empty: str = ""
) -> None:
    """Print rows whole as JSON, or these columns of them as :func:`show_table` does."""
    if as_json:
        show_json(rows)
    else:
        cells = [[row[column] for column in columns] for row in rows]
        show_table(columns, cells, empty=empty)


def show_tree(value: Any, indent: int = 0) -> None:
    """Print nested data as indented ``name: value`` lines; a list of flat objects is a table."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        for name, member in value.items():
            label = printable_line(str(name).replace("_", " "))
            if isinstance(member, (Mapping, list)) and member:
                write(f"{pad}{label}:\n")
                show_tree(member, indent + 1)
            else:
                dated = str(name).endswith(("_ms", "timestamp")) and _is_moment(member)
                sized = str(name).endswith("bytes") and isinstance(member, int)
                shown = moment(member) if dated else size(member) if sized else member
                write(f"{pad}{label.removesuffix(' ms') if dated else label}: {_cell(shown)}\n")
    elif isinstance(value, list):
        for element in value:
            if isinstance(element, Mapping):
                show_tree(element, indent)
                write("\n" if indent == 0 else f"{pad}--\n" if element is not value[-1] else "")
            else:
                write(f"{pad}{_cell(element)}\n")
    else:
        write(f"{pad}{_cell(value)}\n")


def _is_moment(value: Any) -> bool:
    """A number of milliseconds that is a date rather than a duration."""
    return isinstance(value, int) and value > 946_684_800_000


def table_cells(row: Sequence[Any]) -> list[str]:
    """The cells of a row as :func:`show_table` prints them."""
    return [_cell(value) for value in row]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, (list, tuple)):
        return printable_line(",".join(map(str, value))) or "-"
    return printable_line(str(value))


def size(count: float | None) -> str | None:
    """A number of bytes for people."""
    if count is None or count < 0:
        return None
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return (
        f"{count:.0f} {_UNITS[unit]}"
        if unit == 0 or count >= 100
        else f"{count:.1f} {_UNITS[unit]}"
    )


def percent(ratio: float | None) -> str | None:
    """A ratio for people: ``34 %``."""
    return None if ratio is None else f"{100 * ratio:.4g} %"


def moment(timestamp_ms: int | None) -> str | None:
    """A timestamp in UTC; None where there is none."""
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    try:
        at = datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def text(data: bytes | None, none: str) -> str:
    """Bytes for people: text where they are UTF-8 without control characters, else escaped."""
    if data is None:
        return none
    try:
        decoded = data.decode()
    except UnicodeDecodeError:
        return repr(data)[2:-1]
    if decoded.isprintable():
        return decoded
    return decoded.encode("unicode_escape").decode() if _has_control(decoded) else decoded


def _has_control(decoded: str) -> bool:
    return printable_line(decoded) != decoded


def unescaped(given: str) -> bytes:
    r"""``\n``, ``\r``, ``\t``, ``\0``, ``\\`` and ``\xHH`` as the bytes that they stand for, other
    text in UTF-8. ValueError names an escape that is none of these.
    """
    out, at = bytearray(), 0
    for found in _ESCAPE.finditer(given):
        out += given[at : found.start()].encode("utf-8", "surrogateescape")
        name, at = found[1], found.end()
        if name[:1] == "x" and len(name) == 3:
            out.append(int(name[1:], 16))
        elif name in _ESCAPES:
            out += _ESCAPES[name]
        else:
            raise ValueError(f"\\{name} is no escape: there are \\n \\r \\t \\0 \\xHH and \\\\")
    return bytes(out + given[at:].encode("utf-8", "surrogateescape"))


# Records as JSON: what ``consume --json`` writes and ``produce --json`` reads.


def put_bytes(into: dict[str, Any], name: str, data: bytes | None) -> None:
    """Text as ``name``, other bytes as ``name_base64``, none as null."""
    if data is None:
        into[name] = None
        return
    try:
        into[name] = data.decode()
    except UnicodeDecodeError:
        into[f"{name}_base64"] = base64.b64encode(data).decode()


def get_bytes(source: Mapping[str, Any], name: str) -> bytes | None:
    """The opposite of :func:`put_bytes`; a value that is not text is written as JSON.

    ValueError says what is wrong.
    """
    if f"{name}_base64" in source:
        encoded = source[f"{name}_base64"]
        if name in source or not isinstance(encoded, str):
            raise ValueError(f"{name} and {name}_base64 contradict each other")
        try:
            return base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise ValueError(f"{name}_base64 is no base64: {error}") from None
    value = source.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar while the block runs, if standard error is a terminal.

    Yields a function that takes how much is done by now.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if total is not None:
        columns += [TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
