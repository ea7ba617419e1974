"""Where gRPC's unix sockets are: in a directory that only this user may enter.

A node holds a lock (``flock``) on a file in its directory for as long as it lives. What nobody
holds was left behind by a process that was killed, and is removed by the next node that starts. A
process id would not do: the temporary directory may be shared with nodes of another PID namespace,
whose ids mean nothing here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from typing import Any, Final

from kept.node.runtime.logging import log
from kept.storage.errors import MachineError

MAX_PATH_BYTES: Final = 107
"""Of a unix socket's name, on Linux."""
PREFIX: Final = "kept-peers-"
LOCK: Final = "lock"
MAX_ATTEMPTS: Final = 10
"""Another node that starts may take a directory without a lock yet for one left behind."""


class PrivateDirectory:
    """A new directory that only this user may enter, with a path short enough for a socket.

    What processes that were killed left behind is removed first. Raises MachineError.
    """

    def __init__(self) -> None:
        self.path, self._lock = _make()

    def remove(self) -> None:
        """Remove it with all that is in it; again is no fault."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class PrivateServer:
    """A gRPC server on a unix socket that only this user can reach."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._directory: PrivateDirectory | None = None
        self._server: Any = None

    @property
    def path(self) -> str:
        """Of the unix socket; it is served between :meth:`start` and :meth:`stop`."""
        return "" if self._directory is None else f"{self._directory.path}/{self._socket}"

    async def start(self, server: Any) -> None:
        """Serve with a ``grpc.aio`` server. Raises MachineError."""
        self._directory = PrivateDirectory()
        try:
            server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            self._directory.remove()
            raise MachineError(self.path, "bind", OSError(str(error))) from error
        await server.start()
        self._server = server

    async def ended(self) -> None:
        """Wait until it serves no more, for whatever reason: grpcio ends a whole server over one
        call whose method is no UTF-8.
        """
        with suppress(Exception):
            await self._server.wait_for_termination()

    async def stop(self) -> None:
        """Serve no more; calls under way are cancelled."""
        if self._server is not None:
            try:
                await self._server.stop(None)
            except Exception as error:  # noqa: BLE001 - why it ended before is told here again
                log.warning("gRPC ended by itself", error=str(error))
            self._server = None
            if self._directory is not None:
                self._directory.remove()


def _make() -> tuple[str, int]:
    """(path, descriptor that holds its lock)."""
    error: OSError | None = None
    for root in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/run", "/dev/shm")):
        if len(os.fsencode(root)) + len(PREFIX) + 30 > MAX_PATH_BYTES:
            continue
        try:
            _remove_left_behind(root)
            for _ in range(MAX_ATTEMPTS):
                path = tempfile.mkdtemp(prefix=PREFIX, dir=root)
                lock = _locked(path, os.O_CREAT)
                if lock is not None:
                    return path, lock
        except OSError as failed:
            error = failed
    raise MachineError(tempfile.gettempdir(), "mkdir", error or OSError("path too long"))


def _locked(directory: str, flags: int = 0) -> int | None:
    """A descriptor that holds a directory's lock; None: somebody else has it, or removed it."""
    try:
        lock = os.open(
            f"{directory}/{LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600
        )
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _remove_left_behind(root: str) -> None:
    for name in os.listdir(root):
        if name.startswith(PREFIX):
            with suppress(OSError):
                _remove_if_left_behind(f"{root}/{name}")


def _remove_if_left_behind(path: str) -> None:
    """Remove a directory whose lock nobody holds, or that is empty: killed before it had one."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    lock = _locked(path)
    if lock is None:
        os.rmdir(path)
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
