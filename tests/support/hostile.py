"""Text that clears the screen, sets the title, turns the direction and begins lines of its own, and
what a command shows in a terminal.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time

HOSTILE = (
    "h\x1b[2J\x1b]0;t\x07\r\nlevel=error event=forged\x08\x00\x7f\x85\x9b31m\u2028\u2029"
    "\u061c\u200e\u200f\u202e\u2066gnp"
)
PRINTABLE = HOSTILE.partition("\x1b")[0]
FORBIDDEN = {c for c in HOSTILE if not c.isprintable()} - {"\n"}
NOT_TEXT = b"h\xed\xb2\x9b\xff\x1b[2J"
"""What no UTF-8 is: half a surrogate pair of a C1 byte among it."""


def check(what: str, shown: str) -> None:
    """Nothing that moves a cursor, turns text or begins a line of its own."""
    found = {c for c in shown if c in FORBIDDEN}
    assert not found, f"{what}: {found} in {shown[:2000]!r}"


def in_terminal(command: list[str], environ: dict[str, str], stdin: bytes = b"") -> str:
    """What a command shows in a terminal, standard error included; that of the terminal itself,
    which ends lines by CR and LF, not.
    """
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    process = subprocess.Popen(command, stdin=read, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    os.close(read)
    os.write(write, stdin)
    os.close(write)
    shown, end = b"", time.monotonic() + 120
    try:
        while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the last writer has closed it
                break
            if not data:
                break
            shown += data
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


def following(command: list[str], environ: dict[str, str], *, until: str, key: bytes) -> str:
    """What a command that goes on shows in a terminal, until it has shown a text and, at a key,
    ended. AssertionError after a minute.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown, pressed, end = "", False, time.monotonic() + 60
    try:
        while True:
            assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], shown
            try:
                data = os.read(ours, 65_536)
            except OSError:  # it has ended
                break
            shown += data.decode("utf-8", "surrogateescape")
            if until in shown and not pressed:
                os.write(ours, key)
                pressed = True
        assert pressed, shown
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown
