"""Lines of the node's log: one line an event, whatever a name holds."""

from __future__ import annotations

import io
import json
import re

import pytest

from kept.node.runtime.logging import Logger

CONTROLS = [
    *map(chr, range(32)),
    "\x7f",
    *map(chr, range(0x80, 0xA0)),
    "\u2028",
    "\u2029",
    "\u202a",
    "\u202e",
    "\u2066",
    "\u2069",
    "\u200e",
    "\u200f",
    "\u061c",
    "\ud800",
    "\udc9b",
    "\udfff",
]
"""C0, DEL, C1, Unicode's line ends, what turns the direction, halves of surrogate pairs."""


def written(event: str, *, as_json: bool = False, **fields: object) -> str:
    stream = io.StringIO()
    Logger(stream, as_json=as_json).info(event, **fields)
    return stream.getvalue()


@pytest.mark.parametrize("character", CONTROLS, ids=lambda c: f"U+{ord(c):04X}")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_name_with_a_control_character_stays_within_its_field(character, as_json) -> None:
    name = f"g{character}level"
    line = written("group", as_json=as_json, group=name, topic="t")
    assert line.endswith("\n") and len(line.splitlines()) == 1
    assert not any(c in line[:-1] for c in CONTROLS)
    if as_json:
        assert json.loads(line)["group"] == name
    else:
        quoted = re.fullmatch(r'\S+ level=info event=group group=(".*") topic=t\n', line)
        assert quoted is not None, line
        assert json.loads(quoted[1]) == name


@pytest.mark.parametrize(
    "name", ["", "a b", "a=b", 'a"b', "a level=error event=forged", '" level="error']
)
def test_blanks_and_quotes_are_quoted(name) -> None:
    line = written("group", group=name, topic="t")
    assert line.endswith(f" group={json.dumps(name)} topic=t\n")
    assert written(name or " ").endswith(f" event={json.dumps(name or ' ')}\n")


@pytest.mark.parametrize("name", ["orders", "größe-日本", "a\\n", "t-0", "1.5"])
def test_plain_names_are_not(name) -> None:
    assert written("group", group=name).endswith(f" group={name}\n")
