"""Distinguished names as text, and the names of principals made of them.

The text is that of Java's ``X500Principal.getName()`` (RFC 2253 with Java's choice of keywords and
escapes), since Kafka's principals, ACLs and ``ssl.principal.mapping.rules`` are written against it.
The rules are those of Kafka's ``SslPrincipalMapper``; patterns are compiled when they are read, and
what Python's ``re`` reads otherwise than Java's ``Pattern`` is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec import Struct

from kept.client.security.certificates import OID, SEQUENCE, SET, element, elements
from kept.storage.errors import ConfigurationError

MAX_ATTRIBUTES: Final = 64
MAX_NAME_CHARACTERS: Final = 4096

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
_STRINGS: Final = frozenset({0x0C, 0x13, 0x14, 0x16, 0x1B, 0x1C, 0x1E})
"""UTF8, Printable, T61, IA5, General, Universal, BMP: Java reads the bytes of all as UTF-8."""
_ESCAPED: Final = frozenset(',=+<>#;"\\')


def distinguished_name(data: bytes) -> str:
    """A name in DER (a sequence of sets of attributes) as text. Raises ValueError."""
    tag, start, end = element(data, 0, len(data))
    if tag != SEQUENCE:
        raise ValueError("a distinguished name is a sequence")
    parts: list[str] = []
    for set_tag, value, stop, _ in elements(data, start, end):
        if set_tag != SET:
            raise ValueError("a distinguished name consists of sets")
        parts.append("+".join(_attribute(data, *one) for one in elements(data, value, stop)))
        if len(parts) > MAX_ATTRIBUTES:
            raise ValueError(f"a distinguished name of more than {MAX_ATTRIBUTES} parts")
    text = ",".join(reversed(parts))
    if len(text) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a distinguished name of more than {MAX_NAME_CHARACTERS} characters")
    return text


def _attribute(data: bytes, tag: int, start: int, end: int, _: int) -> str:
    pair = list(elements(data, start, end))
    if tag != SEQUENCE or len(pair) != 2 or pair[0][0] != OID:
        raise ValueError("an attribute is an object identifier and a value")
    oid = _oid(data[pair[0][1] : pair[0][2]])
    tag, start, end, whole = pair[1]
    keyword = _KEYWORDS.get(oid)
    if keyword is None or tag not in _STRINGS:
        return f"{keyword or oid}=#{data[whole:end].hex()}"
    return f"{keyword}={_escape(data[start:end].decode('utf-8', 'replace'))}"


def _oid(data: bytes) -> str:
    if not data or data[-1] & 0x80:
        raise ValueError("an object identifier that is none")
    numbers: list[int] = []
    value = 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if value >> 64:
            raise ValueError("an object identifier that is none")
        if not byte & 0x80:
            numbers.append(value)
            value = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _escape(text: str) -> str:
    escaped = [f"\\{c}" if c in _ESCAPED else "\\00" if c == "\0" else c for c in text]
    joined = "".join(escaped)
    inner = joined.strip(" \r")
    lead = len(joined) - len(joined.lstrip(" \r")) if inner else len(joined)
    trail = joined[lead + len(inner) :]
    return "".join(f"\\{c}" for c in joined[:lead]) + inner + "".join(f"\\{c}" for c in trail)


# Rules.

_RULE: Final = re.compile(
    r"(?P<default>DEFAULT)|RULE:(?P<pattern>(?:\\.|[^\\/])*)/(?P<replacement>(?:\\.|[^\\/])*)/"
    r"(?P<case>[LU]?)"
)
_REFERENCE: Final = re.compile(r"\\(?P<literal>.)|\$(?P<group>\d+)", re.DOTALL)
_LINE_ENDS: Final = frozenset("\n\r\x85\u2028\u2029")
_OTHERWISE: Final = re.compile(r"\\[ZzvBG0hHVRXQEpPkcue]|&&|\(\?(?!:|i\)|=|!|<=|<!)|\{,")
_UNESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_CLASS_IN_CLASS: Final = re.compile(r"\[\^?\]?[^\]]*\[")


class _Rule(Struct, frozen=True):
    pattern: re.Pattern[str] | None
    replacement: str
    case: str


class PrincipalMapper:
    """``ssl.principal.mapping.rules``: ``DEFAULT`` and ``RULE:pattern/replacement/[LU]``."""

    def __init__(self, rules: str) -> None:
        """Raises ConfigurationError, which names the rule."""
        self._rules = tuple(_parse(rules))

    def name(self, distinguished: str) -> str:
        """The name of the first rule whose pattern takes the whole DN. Raises ValueError."""
        for rule in self._rules:
            if rule.pattern is None:
                return distinguished
            # Java's dot takes no end of a line, of which it knows more than Python's.
            if _LINE_ENDS.isdisjoint(distinguished) and rule.pattern.fullmatch(distinguished):
                found = rule.pattern.sub(partial(_expand, rule), distinguished)
                if rule.case:
                    found = found.lower() if rule.case == "L" else found.upper()
                if not found:
                    raise ValueError(f"{distinguished} is mapped to an empty name")
                return found
        raise ValueError(f"no rule of ssl.principal.mapping.rules takes {distinguished}")


def _expand(rule: _Rule, match: re.Match[str]) -> str:
    def group(reference: re.Match[str]) -> str:
        if reference["literal"] is not None:
            return reference["literal"]
        digits, count = reference["group"], match.re.groups
        if int(digits[0]) > count or not count:
            return reference[0]  # Kafka takes a reference to no group literally
        used = 1
        while used < len(digits) and int(digits[: used + 1]) <= count:
            used += 1
        return (match[int(digits[:used])] or "") + digits[used:]

    return _REFERENCE.sub(group, rule.replacement)


def _parse(text: str) -> Iterator[_Rule]:
    position, text = 0, text.strip()
    found = False
    while position < len(text):
        match = _RULE.match(text, position)
        end = len(text) if match is None else match.end()
        comma = re.compile(r"\s*(?:,\s*|$)").match(text, end)
        if match is None or comma is None:
            raise ConfigurationError(
                f"ssl.principal.mapping.rules: {text[position:]}: DEFAULT or "
                "RULE:pattern/replacement/ with L or U after it is wanted, separated by commas"
            )
        position, found = comma.end(), True
        pattern = None if match["default"] else _compile(match["pattern"])
        yield _Rule(pattern, match["replacement"] or "", match["case"] or "")
    if not found:
        raise ConfigurationError("ssl.principal.mapping.rules: empty; DEFAULT takes the whole name")


def _compile(pattern: str) -> re.Pattern[str]:
    plain = _UNESCAPED.sub("..", pattern)
    differs = _OTHERWISE.search(pattern) or _CLASS_IN_CLASS.search(plain)
    if differs:
        raise ConfigurationError(
            f"ssl.principal.mapping.rules: {pattern}: {differs[0]} means something else here than "
            "in Java; write it without"
        )
    try:
        with warnings.catch_warnings(action="error"):  # of what a later Python reads otherwise
            return re.compile(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ConfigurationError(f"ssl.principal.mapping.rules: {pattern}: {error}") from None
