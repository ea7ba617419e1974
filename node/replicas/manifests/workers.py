"""Worker processes of passes and of what follows from another replica's manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.cleaner.planner import Limits
from kept.compaction.cleaner.worker import result_from
from kept.node.replicas.manifests.errors import PassFailed
from kept.node.runtime.subprocess import ChildFailed, ChildProcess, spawn
from kept.storage import layout
from kept.storage.errors import KeptError, MachineError, vanished

if TYPE_CHECKING:
    from kept.compaction.cleaner.cleaner_run import Result
    from kept.node.config.node_config import NodeConfig
    from kept.node.runtime.runtime import Runtime
    from kept.storage.disk import Disk
    from kept.storage.log.log import Log

LINE_BYTES: Final = 1 << 20
"""Longest line that a worker may say."""


def pass_limits(config: NodeConfig, disk: Disk, directory: str) -> Limits:
    """What one pass over a log in one of ``log.dirs`` may use."""
    threads = max(config.log_cleaner_threads, 1)
    return Limits(
        dedupe_buffer_bytes=config.log_cleaner_dedupe_buffer_size // threads,
        load_factor=config.log_cleaner_io_buffer_load_factor,
        max_bytes_per_second=config.log_cleaner_io_max_bytes_per_second / threads,
        free_bytes=disk.free_bytes(directory),
        check_keys=config.compaction_check_keys,
    )


class ManifestWork:
    """One worker's work, and whether it is still wanted.

    ``done_bytes`` of ``total_bytes`` are read or written. ``uncompiled`` are the kernels that the
    process lacks, as it says itself. ``has_turn``: it may use the files of its log; until then it
    only waits for other work to end.
    """

    def __init__(self) -> None:
        self.done_bytes = 0
        self.total_bytes = 0
        self.uncompiled: tuple[str, ...] = ()
        self.cancelled = False
        self.has_turn = False
        self._waiting: asyncio.Task[bool] | None = None
        self._process: ChildProcess | None = None

    def cancel(self) -> None:
        """It is not wanted any more: end the process, if it runs, or the wait for a turn."""
        self.cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._process is not None:
            self._process.kill()

    async def acquire(self, limit: asyncio.Lock | asyncio.Semaphore) -> bool:
        """Acquire ``limit``, which the caller releases; False when the work was cancelled while it
        waited. Whoever is cancelled itself has not acquired it.
        """
        waiting = self._waiting = asyncio.ensure_future(limit.acquire())
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                limit.release()
            if not self.cancelled:
                raise
            return False
        finally:
            self._waiting = None

    async def run(self, command: Sequence[str], question: str) -> Result:
        """Have a worker do it. Raises PassFailed, and MachineError where the worker met a disk
        that fails (not once the work is cancelled: its directory may be gone by then).
        """
        child = self._process = await spawn(command, LINE_BYTES)
        if self.cancelled:
            child.kill()
        last: Mapping[str, Any] = {}

        def heard(message: Mapping[str, Any]) -> None:
            nonlocal last
            last = message
            if "progress" in message:
                self.done_bytes = message["progress"]
                self.total_bytes = message["total"]
            elif "uncompiled" in message:
                self.uncompiled = tuple(message["uncompiled"])

        try:
            code, words = await child.converse(question, heard)
        except ChildFailed as error:
            raise PassFailed(f"the worker process went wrong: {error}", "Worker") from error
        if "result" in last:
            return result_from(last)
        if "error" in last:
            raise failure(last, cancelled=self.cancelled)
        raise PassFailed(f"the worker process ended with code {code}: {words}", "Worker")


def failure(message: Mapping[str, Any], *, cancelled: bool = False) -> KeptError:
    """What a worker's :func:`~kept.compaction.cleaner.worker.error_message` comes to here."""
    if "device" in message and not cancelled:
        path, operation, number, why = message["device"]
        return MachineError(path, operation, OSError(number, why))
    return PassFailed(
        message["error"],
        message["kind"],
        message.get("offset"),
        client_message=message["client_message"],
        missing=message.get("missing"),
    )


async def or_vanished(
    runtime: Runtime, log_: Log, work: ManifestWork, outcome: Awaitable[Result]
) -> Result:
    """The result of work on a log. A segment that it missed and that the log still has was taken
    away from under this node: MachineError, unless the work is cancelled (see
    :meth:`ManifestWork.run`). What is deleted leaves the log before its file goes.
    """
    try:
        return await outcome
    except PassFailed as error:
        path = error.missing
        if path is None or await runtime.in_thread(runtime.disk.exists, path):
            raise
        if not work.cancelled and any(s.path(layout.LOG) == path for s in log_.segments):
            raise vanished(path) from error
        raise
