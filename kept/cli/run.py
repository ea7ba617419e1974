"""Runs the command line: signals, closed pipes, errors of one line, the exit status.

Exit status: 0 done (also when the reader of our output has enough, as in ``kept consume | head``),
1 it failed, 2 wrong usage, 130 interrupted by Ctrl-C, 143 by TERM.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

import click

from kept.cli.root import kept
from kept.cli.shell import COMPLETE_VARIABLE, reason_of
from kept.storage.errors import KeptError
from kept.storage.printable import printable_line

INTERRUPTED: Final = 130
TERMINATED: Final = 128 + signal.SIGTERM


def run(arguments: list[str]) -> int:
    """Run ``kept`` with ``arguments`` and return its exit status. Never raises on purpose."""
    if sys.stdout is None and arguments[:1] != ["serve"]:
        return _fail("standard output is closed")
    termination = _Termination()
    if arguments[:1] != ["serve"]:  # a node has a handler of its own
        termination.begin()
    try:
        status = _run(arguments)
    finally:
        termination.end()
    return TERMINATED if termination.came else status


class _Termination:
    """TERM ends a command as Ctrl-C does: it leaves its group, aborts its transaction, says how far
    it came. Another TERM, as ``timeout`` sends, does not disturb it in that.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def begin(self) -> None:
        """Take TERM from now on, also where who started the command has blocked it."""
        self._before = signal.signal(signal.SIGTERM, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def end(self) -> None:
        """Leave TERM to what had it before. Where it came, what is left is to exit, and another one
        is ignored: Python gives handlers up before its end, and the status would be another.
        """
        if self._before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.came else self._before)

    def _handle(self, _number: int, _frame: object) -> None:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    if COMPLETE_VARIABLE in os.environ:
        from kept.cli.completion import complete  # `kept --help` needs none of it

        return complete(kept, os.environ[COMPLETE_VARIABLE])
    try:
        # Not kept.main(): that one has its own ideas about Ctrl-C and closed pipes.
        with kept.make_context("kept", arguments) as context:
            status = kept.invoke(context)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        return 2
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except click.ClickException as error:
        return _fail(error.format_message())
    except (KeptError, OSError) as error:
        if os.environ.get("KEPT_TRACEBACK"):
            raise
        return _fail(reason_of(error))
    return status if isinstance(status, int) else 0


def _fail(message: str) -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    print(f"kept: {printable_line(' '.join(message.split()))}", file=sys.stderr)
    return 1


def _forget_stdout() -> None:
    """Keep the interpreter's flush at exit from failing on the closed pipe once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
