"""What commands print of names and keys that others chose: nothing that moves a terminal."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kept.cli import output, record_format, run
from kept.client.consume.consumer import ConsumedRecord

HOSTILE = ["\x1b[2J", "\r", "\x9b31m", "\x85", "\x7f", "\u2028", "\u202e", "\ud800", "\udc9b", "\0"]


def shown(capfdbinary) -> str:
    """Standard output, decoded as a terminal does."""
    return capfdbinary.readouterr().out.decode("utf-8", "surrogateescape")


def check(printed: str, hostile: str) -> None:
    assert not any(c in printed for c in hostile if not c.isprintable()), repr(printed)
    assert f"\\u{ord(hostile[0]):04x}" in printed


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_tables_and_trees(capfdbinary, hostile) -> None:
    name = f"a{hostile}b"
    output.show_table(("group", "topics"), [(name, [name, "t"])])
    output.show_tree({name: {name: name, "list": [name]}, "rows": [{"x": name}]})
    output.write(f"{name}\n")
    output.echo(name)
    check(shown(capfdbinary), hostile)


def test_wide_characters_take_two_columns_of_a_table(capfdbinary) -> None:
    output.show_table(("key", "value"), [("日本", 1), ("user", 12)])
    assert shown(capfdbinary).splitlines() == ["KEY   VALUE", "日本      1", "user     12"]


def test_a_new_line_in_a_name_makes_no_row(capfdbinary) -> None:
    output.show_table(("group", "state"), [("a\nb  Stable", "Empty")])
    assert len(shown(capfdbinary).splitlines()) == 2


@pytest.mark.parametrize("in_terminal", [True, False])
def test_people_are_told_why_a_table_is_empty(capfd, monkeypatch, in_terminal) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: in_terminal)
    output.show_table(("name", "size"), [], empty="nothing yet")
    output.show_table(("name", "size"), [("a", 1)], empty="nothing yet")
    written = capfd.readouterr()
    assert written.out.splitlines() == ["NAME  SIZE", "NAME  SIZE", "a        1"]
    assert written.err == ("nothing yet\n" if in_terminal else "")


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_json_is_escaped_and_says_the_same(capfdbinary, hostile) -> None:
    value = {"group": f"a{hostile}b", "größe": "日本\t\n"}
    output.show_json(value)
    for printed in (shown(capfdbinary), output.json_line(value)):
        assert not any(c in printed for c in hostile if not c.isprintable()), repr(printed)
        assert json.loads(printed) == value and "größe" in printed


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x9b31m", "\u2028", "\u202e", "\r"], ids=ascii)
def test_records(hostile) -> None:
    text = f"a{hostile}b"
    record = ConsumedRecord("t", 0, 1, 2, text.encode(), text.encode(), ((text, text.encode()),))
    every_field = record_format.formatted(" ".join(f"%{letter}" for letter in record_format.FIELDS))
    for render in (
        record_format.for_people(topics=True, headers=True),
        record_format.as_json_line,
        *map(record_format.printable, (record_format.value_line, record_format.key_line)),
        record_format.printable(every_field),
    ):
        line = render(record).decode()
        assert not any(c in line[:-1] for c in hostile if not c.isprintable()), line
    assert record_format.value_line(record) == f"{text}\n".encode(), "for programs"


def test_errors(capfd) -> None:
    assert run._fail("no group a\x1b[2J\x9bb") == 1
    assert capfd.readouterr().err == "kept: no group a\\u001b[2J\\u009bb\n"


@pytest.mark.parametrize(("total", "said"), [(3, "1/3"), (None, "")])
def test_a_bar_of_unknown_length_shows_no_count(monkeypatch, total, said):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("TTY_INTERACTIVE", raising=False)
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(output.sys, "stderr", shown)
    with output.progress("compacting users", total) as done:
        done(1)
    assert "compacting users" in shown.getvalue() and "None" not in shown.getvalue()
    assert said in shown.getvalue()
