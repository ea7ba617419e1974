"""No node outlives the tests that started it, however they ended: return, Ctrl-C, kill -9.

A test process that starts nodes gets a companion: this module run as a script, which reads from a
pipe which directories have nodes in them. The kernel closes the pipe when the test process is gone,
and then the companion kills every process that works in one of these directories, and removes those
that were temporary. (``PR_SET_PDEATHSIG`` would end nodes with the thread that started them.) It
finds processes by ``/proc``: where there is none, it does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

_ATTEMPTS: Final = 100
_PAUSE_S: Final = 0.02

_companions: dict[int, int] = {}
"""The pipe to the companion, by the process that made it: a forked child gets its own."""


def watch(directory: str, *, remove: bool = False) -> None:
    """See to it that nothing runs in ``directory`` once this process is gone."""
    _tell({"watch": os.path.realpath(directory), "remove": remove})


def forget(directory: str) -> None:
    """Nothing runs there any more."""
    if os.getpid() in _companions:
        _tell({"forget": os.path.realpath(directory)})


def _tell(what: dict[str, object]) -> None:
    pipe = _companions.get(os.getpid())
    if pipe is None:
        theirs, pipe = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        os.close(theirs)
        process.returncode = 0  # it outlives this process; nobody is to wait for it
        _companions[os.getpid()] = pipe
    try:
        os.write(pipe, json.dumps(what).encode() + b"\n")
    except BrokenPipeError:  # somebody ended it: without it tests still run
        del _companions[os.getpid()]


def processes_in(directory: str) -> Iterator[int]:
    """The processes that work in a directory or below it."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal() and int(name) != os.getpid():
            try:
                place = os.readlink(f"/proc/{name}/cwd").removesuffix(" (deleted)")
            except OSError:
                continue
            if place == directory or place.startswith(directory + "/"):
                yield int(name)


def reap(directory: str, remove: bool) -> None:
    """Kill what works in a directory, and remove it if asked to."""
    for _ in range(_ATTEMPTS):
        processes = list(processes_in(directory))
        for number in processes:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not processes:
            break
        time.sleep(_PAUSE_S)
    if remove:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """The companion: read until the other side is gone, then reap."""
    watched: dict[str, bool] = {}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "watch" in request:
            watched[request["watch"]] = request["remove"]
        else:
            watched.pop(request["forget"], None)
    for directory, remove in watched.items():
        reap(directory, remove)


if __name__ == "__main__":
    main()
