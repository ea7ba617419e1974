"""The console: a page that a browser gets at ``/``, which shows what ``/api/v1/`` says.

``page.html``, a style sheet and modules of JavaScript, as they are: no build step, nothing from
elsewhere. The page's modules put every value into the document as text, and its policy (CSP) allows
scripts and styles from this node alone, so that the name of a topic stays a name and a record what
it is. It changes something only where ``kept.console.actions`` allows it.

===============  ===================================================================================
``page.js``      which view is shown, and when it is asked for again
``ask.js``       what is asked of the node; the stream of events
``dom.js``       making the document
``cluster.js``   nodes, topics, groups
``topic.js``     a topic, a partition
``log.js``       a log as its segments, its dirty ratio over time
``records.js``   records, the life of a key
:mod:`.events`   server-sent events
:mod:`.history`  dirty ratios over time
===============  ===================================================================================
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_SCRIPTS: Final = ("page.js", "ask.js", "dom.js", "cluster.js", "topic.js", "log.js", "records.js")

TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8"),
}


def text(name: str) -> str:
    """One of the page's files."""
    return (files("kept.node.http.console") / name).read_text(encoding="utf-8")
