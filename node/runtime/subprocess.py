"""Processes of our own beside the node: the worker of a pass, a dry run.

They are spawned, never forked: ``posix_spawn`` shares the parent's memory until the exec,
so it holds the loop for a fraction of a millisecond however large the node is (a fork copies the
page tables: 35 ms for a gigabyte). All our descriptors are close-on-exec, so the child has its
stdin, stdout and stderr and nothing else. It is in a session of its own: Ctrl-C is the node's
business.

These are Unix sockets, not pipes: uvloop 0.23 closes the descriptor of a pipe twice (libuv once,
the file object once more), and between the two a thread of the node may have opened a log there.

A child is asked one line and answers in lines of JSON; it ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

WORDS_BYTES: Final = 1 << 16
"""What is kept of a child's stderr, of its end."""


class ChildFailed(Exception):
    """A child said something that is no answer, or went away while it was asked."""


class ChildProcess:
    """A running process, its stdin and what it says; :func:`spawn` makes one."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ends: list[asyncio.StreamWriter] = []
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            watched = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or not allowed
            waiting = loop.run_in_executor(None, os.waitpid, self.pid, 0)
            waiting.add_done_callback(lambda done: self._end(done.result()[1]))
            return

        def ended() -> None:
            loop.remove_reader(watched)
            os.close(watched)
            self._end(os.waitpid(self.pid, 0)[1])

        loop.add_reader(watched, ended)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(os.waitstatus_to_exitcode(status))

    @property
    def is_running(self) -> bool:
        """It has not ended as far as we know."""
        return not self._ended.done()

    def kill(self) -> None:
        """End it now."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended; its exit code, negative for a signal. Its sockets are closed then."""
        code = await asyncio.shield(self._ended)
        for end in self._ends:
            end.close()
        return code

    async def _words(self) -> bytes:
        """The end of its stderr, which is read to its end: it must not wait for us to take it."""
        said = b""
        while more := await self.stderr.read(WORDS_BYTES):
            said = (said + more)[-WORDS_BYTES:]
        return said

    async def converse(
        self, question: str, on_message: Callable[[Mapping[str, Any]], None]
    ) -> tuple[int, str]:
        """Ask, hand on what it says until it says no more, and wait for its end.

        Returns the exit code and the last line of its stderr. Raises ChildFailed; it is killed
        then.
        """
        words = asyncio.ensure_future(self._words())
        try:
            self.stdin.write(question.encode() + b"\n")
            while line := await self.stdout.readline():
                on_message(json.loads(line))
        except (ConnectionError, ValueError) as error:
            self.kill()
            raise ChildFailed(repr(error)) from error
        except BaseException:
            self.kill()
            raise
        finally:
            self.stdin.close()
            said = (await words).decode("utf-8", "replace").strip()
            code = await self.wait()
        return code, said.rpartition("\n")[2]


async def spawn(command: Sequence[str], line_bytes: int) -> ChildProcess:
    """Start a process; ``line_bytes`` is the longest line that it may say. Raises OSError."""
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        pid = os.posix_spawn(
            command[0],
            tuple(command),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), number)
                for number, (_, theirs) in enumerate(pairs)
            ],
            setsid=True,
        )
    except BaseException:
        for ours, _ in pairs:
            ours.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    child = ChildProcess(pid)
    streams = [await asyncio.open_connection(sock=ours, limit=line_bytes) for ours, _ in pairs]
    child._ends = [writer for _, writer in streams]
    child.stdin = streams[0][1]
    child.stdout, child.stderr = streams[1][0], streams[2][0]
    return child
