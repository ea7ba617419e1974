"""Processes of our own beside the node: the worker of a pass, a dry run.

They are spawned, never forked (FACTS): ``posix_spawn`` shares the parent's memory until the exec,
so it holds the loop for a fraction of a millisecond however large the node is (a fork copies the
page tables: 35 ms for a gigabyte). All our descriptors are close-on-exec, so the child has its
three pipes and nothing else. It is in a session of its own: Ctrl-C is the node's business.

A child is asked one line and answers in lines of JSON; it ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

WORDS_BYTES: Final = 1 << 20
"""What is kept of a child's stderr."""


class ChildFailed(Exception):
    """A child said something that is no answer, or went away while it was asked."""


class Child:
    """A running process with pipes; :func:`spawn` makes one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout = self.stderr = asyncio.StreamReader()
        self.stdin: asyncio.WriteTransport
        self._transports: list[asyncio.BaseTransport] = []
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
        """Until it has ended; its exit code, negative for a signal. Its pipes are closed then."""
        code = await asyncio.shield(self._ended)
        for transport in self._transports:
            transport.close()
        return code

    async def converse(
        self, question: str, on_message: Callable[[Mapping[str, Any]], None]
    ) -> tuple[int, str]:
        """Ask, hand on what it says until it says no more, and wait for its end.

        Returns the exit code and the last line of its stderr. Raises ChildFailed; it is killed
        then.
        """
        words = asyncio.ensure_future(self.stderr.read(WORDS_BYTES))
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


async def spawn(command: Sequence[str], line_bytes: int) -> Child:
    """Start a process; ``line_bytes`` is the longest line that it may say. Raises OSError."""
    loop = asyncio.get_running_loop()
    ends = [os.pipe() for _ in range(3)]
    theirs = [ends[0][0], ends[1][1], ends[2][1]]
    ours = [ends[0][1], ends[1][0], ends[2][0]]
    try:
        pid = os.posix_spawn(
            command[0],
            tuple(command),
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)],
            setsid=True,
        )
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    child = Child(pid)
    child.stdout = asyncio.StreamReader(line_bytes)
    files = [os.fdopen(fd, mode, 0) for fd, mode in zip(ours, ("wb", "rb", "rb"), strict=True)]
    child.stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, files[0])
    child._transports.append(child.stdin)
    for reader, file in ((child.stdout, files[1]), (child.stderr, files[2])):
        make = partial(asyncio.StreamReaderProtocol, reader)
        transport, _ = await loop.connect_read_pipe(make, file)
        child._transports.append(transport)
    return child
