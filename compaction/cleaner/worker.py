"""The process of one pass: ``python -m kept.compaction.cleaner.worker``.

The node starts it with ``exec`` (never fork: a forked child would hold the node's sockets), in a
session of its own, and writes the job as one line to its stdin. The worker writes lines of JSON to
stdout::

    {"uncompiled": ["compaction.kernels._kernel", ...]}   kernels that run as plain Python, if any
    {"progress": bytes read and written so far, "total": bytes of the segments}
    {"result": {...}}                                     the pass is done
    {"error": "...", "kind": "...", "client_message": "..."}  it failed (:func:`error_message`)

The result is a :class:`kept.compaction.cleaner.cleaner_run.Result`.

It stops when its stdin ends (the node is gone, or has changed its mind) and is killed with its
parent; Ctrl-C is the node's business. It is niced, takes only what the processors have left over
(unless the pass is overdue), and sleeps where ``log.cleaner.io.max.bytes.per.second`` asks for it.
It only creates files, exclusively, so an orphan cannot touch a directory in use.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, TextIO

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner.cleaner_run import Result, run_pass
from kept.kernels import uncompiled
from kept.storage.disk import Disk
from kept.storage.errors import (
    MachineError,
    client_message,
    is_bug,
    is_device_error,
    is_shortage,
)
from kept.storage.types import Generation

NICENESS: Final = 10
"""Produce and fetch come first."""
GC_THRESHOLDS: Final = (50_000, 1_000, 1_000)
"""A strategy in Python keeps objects for millions of keys: looking through all of them again and
again takes a fifth of its time. What it drops in cycles is found while it is young.
"""
PROGRESS_INTERVAL_S: Final = 0.25
COMMAND: Final = (sys.executable, "-P", "-m", "kept.compaction.cleaner.worker")
"""How the node starts it. Without ``-P`` Python would look for code in the working directory first:
a ``platform.py`` there would run, and a checkout of kept would clean with its own sources.
"""
_PR_SET_PDEATHSIG: Final = 1
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
"""The system call by machine; there is no other way from Python."""
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_LOWEST: Final = 2 << 13 | 7
"""Best effort, lowest level."""


class Throttle:
    """Reports progress and keeps to a rate."""

    def __init__(self, out: TextIO, total_bytes: int, max_bytes_per_second: float) -> None:
        self._out, self._total, self._rate = out, total_bytes, max_bytes_per_second
        self._started = self._said = time.monotonic()
        self._done = 0

    def __call__(self, size_bytes: int) -> None:
        """So many more bytes."""
        self._done += size_bytes
        now = time.monotonic()
        ahead = self._done / self._rate - (now - self._started)
        if ahead > 0:
            time.sleep(ahead)
        if now - self._said >= PROGRESS_INTERVAL_S:
            self._said = now
            write_message(self._out, {"progress": self._done, "total": self._total})


def write_message(out: TextIO, message: dict[str, Any]) -> None:
    """One line of JSON."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def error_message(error: Exception) -> dict[str, Any]:
    """Why work failed: in full, and as clients may have it.

    ``device`` says which file call failed where that takes the node's log directory offline; a want
    of room or memory does not: nothing was lost by a pass. ``missing`` is the path of a file that
    was expected; only the node knows whether it still is.
    """
    kind = type(error).__name__
    if is_bug(error):
        traceback.print_exception(error)
        said = "".join(traceback.format_exception_only(error)).strip()
    else:
        said = str(error) or kind
    message: dict[str, Any] = {"error": said, "kind": kind, "client_message": client_message(error)}
    if isinstance(error, FileNotFoundError):
        message["missing"] = error.filename
    elif isinstance(error, MachineError) and is_device_error(error) and not is_shortage(error):
        cause = error.cause
        message["device"] = [error.path, error.operation, cause.errno, cause.strerror]
    return message


def report_uncompiled(out: TextIO) -> None:
    """Name the kernels that are not compiled here, if there are any; the node logs them."""
    if missing := uncompiled(load=True):
        write_message(out, {"uncompiled": missing})


def result_from(message: Mapping[str, Any]) -> Result:
    """The result in a message of a worker."""
    fields = dict(message["result"])
    fields["generation"] = Generation(*fields["generation"])
    return Result(**fields)


def _exit_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


def _die_with_parent() -> None:
    """The kernel kills us when the node dies (Linux); elsewhere the end of stdin does."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lower_io_priority() -> None:
    """Read and write after others (Linux). The processor is shared by niceness: an idle-class
    process would starve on a machine that is always busy, and its log would never be cleaned.

    Its reads and writes are not idle: the file system's journal would wait for them, and with it
    every fsync of the node.
    """
    if sys.platform != "linux":
        return
    import ctypes

    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_LOWEST)


def init_worker() -> bytes:
    """What every child of the node does first; returns the line that it is asked."""
    gc.set_threshold(*GC_THRESHOLDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    os.nice(NICENESS)
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_exit_when_stdin_ends, daemon=True).start()
    return line


def main() -> int:
    """Run the job on stdin; the exit code is 0 when its result was written."""
    line = init_worker()
    if not line:
        return 3
    job = jobs.decode(line.decode())
    if not job.urgent:
        lower_io_priority()
    out = sys.stdout
    report_uncompiled(out)
    passes = 2 * job.source_bytes
    throttle = Throttle(out, passes, job.max_bytes_per_second)
    try:
        result = run_pass(job, Disk(), throttle)
    except Exception as error:  # noqa: BLE001 - a strategy may raise anything
        write_message(out, error_message(error))
        return 1
    write_message(out, {"result": asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
