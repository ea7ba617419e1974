"""``sasl.jaas.config``: one entry of Java's JAAS grammar, for the login modules that Kafka ships.

``MODULE FLAG name=value ... ;`` where a value is a word or stands in quotes, with Java's escapes.
Source: ``JaasConfig`` and ``JaasContext`` of Kafka 4.3. Stricter: exactly one entry, a module of
:data:`MODULES`, no option twice, no escape by octal digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from kept.storage.errors import ConfigurationError

PLAIN_MODULE: Final = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTH_MODULE: Final = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
MODULES: Final = {
    PLAIN_MODULE: ("PLAIN",),
    SCRAM_MODULE: ("SCRAM-SHA-256", "SCRAM-SHA-512"),
    OAUTH_MODULE: ("OAUTHBEARER",),
}
"""Login modules, and the mechanisms of each."""

_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN: Final = re.compile(
    r"""\s*(?://[^\n]*|/\*.*?\*/|(?P<word>[\w$.\-]+)|"(?P<double>(?:[^"\\\n]|\\.)*)"|"""
    r"""'(?P<single>(?:[^'\\\n]|\\.)*)'|(?P<mark>[=;]))\s*""",
    re.S,
)
_ESCAPE: Final = re.compile(r"\\(.)", re.S)
_ESCAPED: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class JaasEntry(Struct, frozen=True):
    """A login module and its options. Its repr hides the options: passwords are among them."""

    login_module: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"JaasEntry({self.login_module!r}, [hidden])"


def parse_jaas(text: str) -> JaasEntry:
    """The entry that ``text`` holds. Raises ConfigurationError, whose message shows no value."""
    tokens = list(_tokens(text))
    shapes = [shape for shape, _ in tokens]
    values = [value for _, value in tokens]
    if shapes[:2] != ["word", "word"]:
        raise _malformed("it must begin with a login module and a flag: MODULE required ... ;")
    module, flag = values[:2]
    if module not in MODULES:
        raise _malformed(f"login module {module} is not one of {', '.join(MODULES)}")
    if flag.lower() not in _FLAGS:
        raise _malformed(f"{flag} is no control flag; write required")
    if shapes[-1] != ";" or shapes.count(";") != 1:
        raise _malformed("it must be one entry that ends with ;")
    options: dict[str, str] = {}
    rest = list(zip(shapes, values, strict=True))[2:-1]
    for position in range(0, len(rest), 3):
        match rest[position : position + 3]:
            case [("word" | "text", name), ("=", _), ("word" | "text", value)]:
                if name in options:
                    raise _malformed(f"option {name} is given twice")
                options[name] = value
            case [("word", _), *_]:
                # It may be the second word of a password without quotes: it is not shown.
                raise _malformed(
                    f'option {position // 3 + 1} has no value: write name="value"; a value with '
                    "blanks in it stands in quotes"
                )
            case _:
                raise _malformed('options are written name="value"')
    return JaasEntry(module, options)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(shape, value): a word, a quoted text, or one of the marks ``=`` and ``;``."""
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            if not text[position:].strip():
                return
            raise _malformed(f"character {position + 1} begins nothing that JAAS knows")
        position = token.end()
        if token["word"] is not None:
            yield "word", token["word"]
        elif token["mark"] is not None:
            yield token["mark"], token["mark"]
        elif (
            quoted := token["double"] if token["double"] is not None else token["single"]
        ) is not None:
            yield "text", _ESCAPE.sub(_unescape, quoted)


def _unescape(escape: re.Match[str]) -> str:
    character = escape[1]
    if character.isdigit():
        raise _malformed("an escape by digits; write the character itself")
    return _ESCAPED.get(character, character)


def _malformed(why: str) -> ConfigurationError:
    return ConfigurationError(f"sasl.jaas.config: {why}")
