"""The directory of the metadata log: taken for this process, and watched while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.shutdown import Shutdown
    from kept.storage.disk import Lock

LOCK: Final = ".lock"


class MetadataDirectory:
    """See the module."""

    def __init__(self, runtime: Runtime, shutdown: Shutdown) -> None:
        self._runtime = runtime
        self._shutdown = shutdown
        self._lock: Lock | None = None
        self._verifying = False

    def acquire(self, path: str) -> None:
        """Make the directory if there is none, and lock it. Raises MachineError, DirectoryInUse."""
        self._runtime.disk.ensure_data_directory(path)
        self._lock = self._runtime.disk.lock(f"{path}/{LOCK}")

    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def verify(self) -> Iterator[None]:
        """A job: end this node when the directory was removed or replaced under it, for what it
        promised to the other voters would be forgotten. A thread looks.
        """
        if self._lock is not None and not self._verifying:
            self._verifying = True
            self._runtime.in_thread(self._lock.verify).add_done_callback(self._verified)
        yield

    def _verified(self, finished: asyncio.Future[Any]) -> None:
        self._verifying = False
        error = finished.exception()
        if error is not None and not self._shutdown.requested.is_set():
            self._shutdown.fatal(f"the metadata log failed: {error}")
