"""The console: one page that a browser gets at ``/``, which shows what ``/api/v1/`` says.

It only reads. Nothing comes from elsewhere, there is no build step, and nothing in it is made of
strings: the page's script puts every value into the document as text, and its policy (CSP) allows
scripts and styles from this node alone, so that the name of a topic stays a name.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}


def text(name: str) -> str:
    """One of the page's files."""
    return (files("kept.node.console") / name).read_text(encoding="utf-8")
