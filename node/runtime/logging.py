"""One line per event, structured: ``key=value``, or JSON with ``kept.log.format=json``.

``log.info("segment rolled", topic="t", partition=0, offset=7)``. Values with spaces, quotes or
control characters are quoted as JSON strings, so that no name of a topic or a group begins a line
or a field, or moves a terminal's cursor. Lines go to stderr; a line is written with one call, so
that lines never mix.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any, Final, TextIO

from kept.storage.printable import printable_line, printable_text

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Logger:
    """Writes events at or above its level."""

    def __init__(self, stream: TextIO | None = None, *, as_json: bool = False) -> None:
        self._stream = stream
        self._as_json = as_json
        self._level = LEVELS["info"]

    def configure(self, *, as_json: bool, level: str = "info") -> None:
        """Set format and level, once the configuration is known."""
        self._as_json = as_json
        self._level = LEVELS[level]

    def debug(self, event: str, **fields: Any) -> None:
        """For those who look for a fault."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something happened as it should."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something happened that an operator may want to know."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that an operator has to act on."""
        self._write("error", event, fields)

    def exception(self, event: str, error: BaseException, **fields: Any) -> None:
        """A bug of ours: the line, and where it happened."""
        trace = "".join(traceback.format_exception(error))
        self._write("error", event, {**fields, "error": repr(error), "trace": trace})

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] < self._level:
            return
        now = time.time()
        stamp = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e3) % 1000:03}Z"
        )
        if self._as_json:
            record = {"time": stamp, "level": level, "event": event}
            line = json.dumps({**record, **fields}, default=str)
        else:
            parts = [stamp, f"level={level}", f"event={_quoted(event)}"]
            parts += [f"{key}={_quoted(value)}" for key, value in fields.items()]
            line = " ".join(parts)
        stream = self._stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()


def _quoted(value: Any) -> str:
    text = str(value)
    if text and not any(c in ' "=' for c in text) and printable_line(text) == text:
        return text
    return printable_text(json.dumps(text, ensure_ascii=False))


log: Final = Logger()
"""The node's log."""


def bridge() -> None:
    """Send what the layers below say through :mod:`logging` to the node's log."""
    import logging

    class Bridge(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            level = record.levelname.lower()
            write = {"warning": log.warning, "error": log.error, "critical": log.error}
            write.get(level, log.debug)(record.getMessage(), module=record.name)

    root = logging.getLogger("kept")
    root.handlers = [Bridge()]
    root.setLevel(logging.INFO)
    root.propagate = False
