"""The console: a page that a browser gets at ``/``, which shows what ``/api/v1/`` says.

``page.html``, a style sheet and modules of JavaScript, as they are: no build step, nothing from
elsewhere. The page's modules put every value into the document as text, and its policy (CSP) allows
scripts and styles from this node alone, so that the name of a topic stays a name and a record what
it is. It changes something only where ``kept.console.actions`` allows it.

==================  ================================================================================
``page.js``         which view is shown, and when it is loaded again
``api.js``          requests to the node; the stream of events
``dom.js``          making the document
``charts.js``       values over time
``command.js``      command lines to copy
``actions.js``      forms that change something
``missing.js``      what is shown where a view cannot be loaded
``cluster.js``      nodes, the log cleaner, disks; the settings of a broker
``topics.js``       the list of topics; creating one
``topic.js``        a topic
``settings.js``     settings, more partitions and the deletion of a topic
``produce.js``      appending a record
``records.js``      the records of a topic: search and live tail
``browse.js``       the records of a partition, by offset
``rows.js``         records as rows of a table
``payload.js``      keys and values as text, JSON or hex
``key.js``          the history of a key
``partition.js``    a partition and its compaction
``log.js``          a log as its segments, its dirty ratio over time
``groups.js``       consumer groups; resetting offsets
``transactions.js``  transactional ids
:mod:`.events`      server-sent events
==================  ================================================================================
"""

from __future__ import annotations

from typing import Final

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_SCRIPTS: Final = (
    "page.js",
    "api.js",
    "dom.js",
    "charts.js",
    "command.js",
    "actions.js",
    "missing.js",
    "cluster.js",
    "topics.js",
    "topic.js",
    "settings.js",
    "produce.js",
    "records.js",
    "browse.js",
    "rows.js",
    "payload.js",
    "key.js",
    "partition.js",
    "log.js",
    "groups.js",
    "transactions.js",
)

TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8"),
}


def text(name: str) -> str:
    """One of the page's files."""
    from importlib.resources import files

    return (files("kept.node.http.console") / name).read_text(encoding="utf-8")
