"""The directory of the metadata log: taken for this process, and watched while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kept.cluster.metadata.snapshot import is_snapshot_name
from kept.cluster.metadata.wal import HARD_STATE_NAME, IDENTITY_NAME, WAL_NAME
from kept.node.runtime.logging import log
from kept.storage.errors import ResourceExhausted, vanished

if TYPE_CHECKING:
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.shutdown import Shutdown
    from kept.storage.disk import Lock

LOCK: Final = ".lock"
NOT_THE_OWNERS: Final = 0o077
PRIVATE: Final = "chmod -R go="
SNAPSHOT: Final = "snapshot-*"
ALWAYS_THERE: Final = (WAL_NAME, HARD_STATE_NAME, IDENTITY_NAME)
"""Files without which no start goes on; each is replaced under its name only."""


class MetadataDirectory:
    """Locks the directory of the metadata log, and watches it."""

    def __init__(self, runtime: Runtime, shutdown: Shutdown) -> None:
        self._runtime = runtime
        self._shutdown = shutdown
        self._lock: Lock | None = None
        self._path = ""
        self._verifying = False
        self._seen: set[str] = set()
        """What the directory has had; :data:`SNAPSHOT` for any snapshot."""

    def acquire(self, path: str) -> None:
        """Make the directory if there is none, and lock it. Raises MachineError, DirectoryInUse."""
        self._runtime.disk.ensure_data_directory(path)
        self._lock = self._runtime.disk.lock(f"{path}/{LOCK}")
        self._path = path
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
        """A job: end this node when the directory was removed or replaced under it, or a file that
        the next start needs: what it promised to the other voters would be forgotten, and nobody
        would know whose the logs are. A thread looks.
        """
        if self._lock is not None and not self._verifying:
            self._verifying = True
            look = self._runtime.in_thread(self._look, self._lock)
            look.add_done_callback(self._verified)
        yield

    def _look(self, lock: Lock) -> None:
        """Blocks. Raises MachineError."""
        lock.verify()
        for name in ALWAYS_THERE:
            self._expect(name, self._runtime.disk.exists(f"{self._path}/{name}"))
        # A new snapshot is there before the old one goes: one of two listings has either.
        self._expect(SNAPSHOT, self._has_snapshot() or self._has_snapshot())

    def _has_snapshot(self) -> bool:
        return any(map(is_snapshot_name, self._runtime.disk.listdir(self._path)))

    def _expect(self, name: str, is_there: bool) -> None:
        if is_there:
            self._seen.add(name)
        elif name in self._seen:
            raise vanished(f"{self._path}/{name}")

    def _verified(self, finished: asyncio.Future[Any]) -> None:
        self._verifying = False
        error = finished.exception()
        if isinstance(error, ResourceExhausted):
            return  # nothing is known of the directory: a listing takes a descriptor
        if error is not None and not self._shutdown.requested.is_set():
            self._shutdown.fatal(f"the metadata log failed: {error}")
