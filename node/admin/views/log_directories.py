"""The entries of ``log.dirs`` with the room on their disks: for the API and metrics."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime


class LogDirectoryView(Struct, frozen=True):
    """One of ``log.dirs``; sizes are of its disk, None where that does not answer."""

    path: str
    offline: str | None
    total_bytes: int | None
    usable_bytes: int | None


@dataclass(frozen=True, slots=True)
class LogDirectories:
    """Describes the directories of one node."""

    runtime: Runtime
    table: ReplicaTable

    async def describe(self) -> list[LogDirectoryView]:
        """Every directory; their disks are looked up in a thread."""
        listed: list[LogDirectoryView] = await self.runtime.in_thread(self.describe_now)
        return listed

    def describe_now(self) -> list[LogDirectoryView]:
        """Every directory; blocks for as long as a disk does."""
        listed = []
        for directory in self.table.directories:
            path = os.path.abspath(directory.name)
            total = usable = None
            try:
                space = os.statvfs(path)
                total, usable = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
            except OSError:
                pass  # an offline disk: its reason is in ``offline``
            listed.append(LogDirectoryView(path, directory.offline, total, usable))
        return listed
