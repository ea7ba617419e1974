"""What the cleaner works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kept.node.config.live_config import LiveConfig
    from kept.node.replicas.log_dir_failures import LogDirFailureChannel
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.counters import Counters
    from kept.node.runtime.runtime import Runtime
    from kept.node.runtime.uncompiled_kernels import Kernels


class CleanerContext(Struct, frozen=True):
    """The collaborators of the cleaner. Made before the cleaner is imported."""

    runtime: Runtime
    config: LiveConfig
    table: ReplicaTable
    failures: LogDirFailureChannel
    counters: Counters
    kernels: Kernels
