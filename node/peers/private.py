"""Where gRPC's unix sockets are: in a directory that only this user may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, Final

from kept.storage.errors import MachineError

MAX_PATH_BYTES: Final = 107
"""Of a unix socket's name, on Linux."""
PREFIX: Final = "kept-peers-"


class PrivateServer:
    """A gRPC server on a unix socket that only this user can reach."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._directory = ""
        self._server: Any = None

    @property
    def path(self) -> str:
        """Of the unix socket."""
        return f"{self._directory}/{self._socket}"

    async def start(self, server: Any) -> None:
        """Serve with a ``grpc.aio`` server. Raises MachineError."""
        self._directory = private_directory()
        try:
            server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise MachineError(self.path, "bind", OSError(str(error))) from error
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Serve no more; calls under way are cancelled."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
            shutil.rmtree(self._directory, ignore_errors=True)


def private_directory() -> str:
    """A new directory that only this user may enter, with a path short enough for a socket.

    What processes that were killed left behind is removed first. Raises MachineError.
    """
    error: OSError | None = None
    for root in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/run", "/dev/shm")):
        if len(os.fsencode(root)) + len(PREFIX) + 30 > MAX_PATH_BYTES:
            continue
        try:
            _remove_left_behind(root)
            return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)
        except OSError as failed:
            error = failed
    raise MachineError(tempfile.gettempdir(), "mkdir", error or OSError("path too long"))


def _remove_left_behind(root: str) -> None:
    for name in os.listdir(root):
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            path = f"{root}/{name}"
            if os.stat(path).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
