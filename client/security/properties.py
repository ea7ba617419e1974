"""Java's ``.properties`` files, in which Kafka's tools and clients are configured.

The grammar is that of ``java.util.Properties.load``: ``name=value``, ``name: value`` or ``name
value``; lines that begin with ``#`` or ``!`` are comments; a line that ends with a backslash goes
on in the next one, whose indentation does not count; after a backslash ``t``, ``n``, ``f``, ``r``
and ``u0041`` are characters, any other character is itself. Of a name that is given twice the last
one counts. Files are UTF-8, or Latin-1 where they are not valid UTF-8, as
``PropertyResourceBundle`` has it.
"""

from __future__ import annotations

import re
import string
from typing import Final

from kept.storage.errors import ConfigurationError

MAX_FILE_BYTES: Final = 1 << 20
"""More is no file of properties."""

_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_BLANK: Final = " \t\f"
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str, where: str) -> dict[str, str]:
    """Names and values. Raises ConfigurationError with ``where`` and the number of the line, never
    with what it says: a value may be a password.
    """
    found: dict[str, str] = {}
    logical, first = "", 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_BLANK)
        if not first:
            if not line or line[0] in "#!":
                continue
            first = number
        goes_on = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        logical += line[:-1] if goes_on else line
        if not goes_on:
            _add(found, logical, f"{where}: line {first}")
            logical, first = "", 0
    if first:
        _add(found, logical, f"{where}: line {first}")
    return found


def _add(found: dict[str, str], line: str, where: str) -> None:
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANK:
        end += 1 + (line[end] == "\\")
    rest = line[end:].lstrip(_BLANK)
    if rest and rest[0] in "=:":
        rest = rest[1:].lstrip(_BLANK)
    found[_unescaped(line[:end], where)] = _unescaped(rest, where)


def _unescaped(text: str, where: str) -> str:
    out: list[str] = []
    i = 0
    while i < len(text):
        c = text[i]
        i += 1
        if c == "\\" and i < len(text):
            c = text[i]
            i += 1
            if c == "u":
                digits = text[i : i + 4]
                if len(digits) != 4 or not set(digits) <= set(string.hexdigits):
                    raise ConfigurationError(f"{where}: after \\u come four hexadecimal digits")
                c = chr(int(digits, 16))
                i += 4
            else:
                c = _ESCAPES.get(c, c)
        out.append(c)
    # Java writes what is beyond 16 bits as two escapes.
    return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_properties(path: str) -> dict[str, str]:
    """The properties in a file. Raises ConfigurationError with its path."""
    try:
        with open(path, "rb") as source:
            data = source.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: larger than {MAX_FILE_BYTES} bytes; not properties")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return parse_properties(text, path)
