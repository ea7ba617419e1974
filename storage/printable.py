"""Text from outside, made fit for a log line or a terminal.

Names of topics and groups, keys, client ids and messages of peers may hold any character. Some move
a terminal's cursor or rewrite what stands on it (C0 and C1 controls, ESC among them), begin a new
line for whoever reads a log (CR, LF, NEL, U+2028, U+2029), or turn the order of what follows round
(bidirectional controls). They are shown as ``\\uXXXX``, which is also JSON's spelling of them.
"""

from __future__ import annotations

import re
from typing import Final

_CONTROLS: Final = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # C0 but TAB and LF, DEL, C1
    "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"  # line ends, direction
    "\\ud800-\\udc9f\\udd00-\\udfff"  # surrogates that are no byte, and those of C1 bytes
)
_IN_TEXT: Final = re.compile(f"[{_CONTROLS}]")
_IN_LINE: Final = re.compile(f"[{_CONTROLS}\\n\\t]")


def printable_line(text: str) -> str:
    """``text`` on one line, with every control character spelled out."""
    return text if text.isascii() and text.isprintable() else _IN_LINE.sub(_spelled, text)


def printable_text(text: str) -> str:
    """The same for text of several lines: LF and TAB stay. JSON stays the same JSON."""
    return _IN_TEXT.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
