"""Where a failure of a log directory is reported, whoever meets it.

The replica manager listens and takes the directory offline with all its partitions (Kafka's
``LogDirFailureChannel``): so a log's fetcher, its compaction and the timers need not know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kept.node.runtime.logging import log

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalDirectory
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.storage.errors import MachineError


class LogDirFailureChannel:
    """``on_failure`` takes a directory offline; it is called on the loop."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self.on_failure: Callable[[LocalDirectory, BaseException], None]

    def fail(self, directory: LocalDirectory, error: BaseException) -> None:
        """A file call in ``directory`` failed."""
        self.on_failure(directory, error)

    def machine_failed(self, error: MachineError) -> None:
        """A file call failed: the directory that holds the file goes offline, if one does."""
        directory = self._table.directory_of(error)
        if directory is None:
            log.error("disk error", path=error.path, error=str(error))
        else:
            self.on_failure(directory, error)
