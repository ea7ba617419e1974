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
BUG_INTERVAL_S: Final = 10.0
"""At most one traceback of the same bug in this time."""


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


class BugLog:
    """Bugs of ours that requests or events may show again and again: each once in
    :data:`BUG_INTERVAL_S`. One is known by its event, its kind and where it was raised.
    """

    def __init__(self, logger: Logger = log) -> None:
        self._logger = logger
        self._last: dict[tuple[str, str, str, int], tuple[float, int]] = {}
        """Until when each is left out, in seconds of the monotonic clock, and how often it was.
        Places in the code are few."""

    def report(self, event: str, error: BaseException, **fields: Any) -> None:
        """Write the line and the traceback, unless that was done a moment ago; ``left_out`` is how
        often it happened in between.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        bug = event, type(error).__name__, *place
        now_s = time.monotonic()
        until_s, left_out = self._last.get(bug, (0.0, 0))
        if now_s < until_s:
            self._last[bug] = until_s, left_out + 1
            return
        self._last[bug] = now_s + BUG_INTERVAL_S, 0
        if left_out:
            fields["left_out"] = left_out
        self._logger.exception(event, error, **fields)

    def clear(self) -> None:
        """Forget all: each is written when it comes next."""
        self._last.clear()


bugs: Final = BugLog()
"""Of the node's log."""


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
