"""The directory of the metadata log: taken for this process, and watched while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kept.node.runtime.logging import log

if TYPE_CHECKING:
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.shutdown import Shutdown
    from kept.storage.disk import Lock

LOCK: Final = ".lock"
NOT_THE_OWNERS: Final = 0o077
PRIVATE: Final = "chmod -R go="


class MetadataDirectory:
    """Locks the directory of the metadata log, and watches it."""

    def __init__(self, runtime: Runtime, shutdown: Shutdown) -> None:
        self._runtime = runtime
        self._shutdown = shutdown
        self._lock: Lock | None = None
        self._verifying = False

    def acquire(self, path: str) -> None:
        """Make the directory if there is none, and lock it. Raises MachineError, DirectoryInUse."""
        self._runtime.disk.ensure_data_directory(path)
        self._lock = self._runtime.disk.lock(f"{path}/{LOCK}")
        self._warn_of_readers(path)

    def _warn_of_readers(self, path: str) -> None:
        """New files are private, but a copy or a backup may have made these readable."""
        disk = self._runtime.disk
        names = [path, *(f"{path}/{name}" for name in disk.listdir(path))]
        open_to_others = [name for name in names if disk.stat(name).mode & NOT_THE_OWNERS]
        if open_to_others:
            log.warning(
                "other users of this machine may read the metadata",
                paths=",".join(open_to_others),
                why=f"who reads its SCRAM credentials may log in as their users: {PRIVATE} {path}",
            )

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
