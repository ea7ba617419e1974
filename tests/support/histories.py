"""Histories of state machines as prose: commands at the margin, effects indented below them.

A command is a line that starts at the margin; what the machine does about it follows, indented.
``#`` begins a comment. KEPT_REWRITE_HISTORIES=1 writes the effects anew into the files; read them
before you commit them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

INDENT = "  "


def milliseconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text).groups()
    return int(number) * {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}[unit]


class Words:
    """Options after a command: ``name value`` pairs and flags in any order."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def option(self, name: str, default: str | None = None) -> str | None:
        if name not in self.words:
            return default
        index = self.words.index(name)
        value = self.words[index + 1]
        del self.words[index : index + 2]
        return value

    def flag(self, name: str) -> bool:
        known = name in self.words
        if known:
            self.words.remove(name)
        return known


def commands(text: str, indent: str = INDENT) -> Iterator[tuple[str, list[str]]]:
    """(command, expected effects) of a history."""
    command: str | None = None
    expected: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(indent):
            expected.append(line.removeprefix(indent))
            continue
        if command is not None:
            yield command, expected
        command, expected = line, []
    if command is not None:
        yield command, expected


def rewritten(text: str, run: Callable[[str], list[str]], indent: str = INDENT) -> str:
    """The history with the effects as they are now."""
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(indent):
            continue
        out.append(line)
        if line.strip() and not line.startswith("#"):
            try:
                out += [indent + effect for effect in run(line)]
            except Exception as error:
                raise AssertionError("\n".join(out)) from error
    return "\n".join(out) + "\n"


def check_history(path: Path, run: Callable[[str], list[str]], indent: str = INDENT) -> None:
    """All happens as a file tells it, or is written anew."""
    text = path.read_text()
    if os.environ.get("KEPT_REWRITE_HISTORIES"):
        path.write_text(rewritten(text, run, indent))
        return
    for command, expected in commands(text, indent):
        assert run(command) == expected, command
