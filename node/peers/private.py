"""Where gRPC's unix sockets are: in a directory that only this user may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Final

from kept.storage.errors import MachineError

MAX_PATH_BYTES: Final = 107
"""Of a unix socket's name, on Linux."""
PREFIX: Final = "kept-peers-"


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
