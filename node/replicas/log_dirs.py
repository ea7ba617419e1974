"""Opening ``log.dirs`` at a start: a broken disk costs what is on it, not the node.

A directory that cannot be read or written is offline from the start, like one that fails later.
What the others lack may be on it, so no log of this node is created anew meanwhile
(:meth:`kept.node.replicas.replica_manager.ReplicaManager.start`). One that is missing, empty or
another's is no broken disk: it is refused (:mod:`kept.node.metadata.directory_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kept.node.metadata import directory_ids
from kept.node.replicas.replica_manager import LocalDirectory
from kept.storage import layout
from kept.storage.directory import LogDirectory, refuse_kafka
from kept.storage.errors import MachineError

if TYPE_CHECKING:
    from kept.node.node import Node
    from kept.node.runtime.executors import FlushPool
    from kept.storage.disk import Disk

Broken = Mapping[str, MachineError]
"""Why a directory cannot be used, by its path."""


def look(disk: Disk, paths: Sequence[str]) -> Broken:
    """Which of them are broken, before anything is created anywhere. Raises DirectoryRefused for
    Apache Kafka's, and MachineError when none is left.
    """
    broken: dict[str, MachineError] = {}
    for path in paths:
        try:
            refuse_kafka(disk, path)
        except MachineError as error:
            broken[path] = error
    _refuse_none(paths, broken)
    return broken


def open_all(node: Node, found: Broken, pool: Callable[[int], FlushPool]) -> None:
    """Open what is not ``found`` broken; ``pool`` makes the threads of each by its number. Raises
    as :meth:`LogDirectory.open` and :func:`known_directories.refuse_missing`, MachineError only
    when no directory is left.
    """
    disk, config, replica_manager = node.disk, node.config, node.replica_manager
    broken = dict(found)
    directory_ids.refuse_missing(disk, config.metadata_log_dir, config.log_dirs, broken)
    node.reads_in_memory = False
    for path in config.log_dirs:
        if path not in broken:
            try:
                directory = _open(node, path)
            except MachineError as error:
                broken[path] = error
        if path in broken:
            directory = LogDirectory.broken(path, disk, broken[path])
        replica_manager.directories.append(
            LocalDirectory(directory, pool(len(replica_manager.directories)), path)
        )
    _refuse_none(config.log_dirs, broken)
    for hosted in replica_manager.directories:
        if hosted.name in broken:
            replica_manager.fail(hosted, broken[hosted.name])
    opened = [one.directory for one in replica_manager.directories if one.offline is None]
    directory_ids.remember(disk, config.metadata_log_dir, opened, broken)


async def mark_running(node: Node, broker_epoch: int) -> None:
    """This process is registered with that epoch: what it writes from now on is lost with the page
    cache only, and the marks tell the next one whether that is the same.
    """
    for hosted in node.replica_manager.directories:
        if hosted.offline is None:
            try:
                await hosted.pool.run(hosted.directory.mark_running, broker_epoch)
            except (MachineError, OSError) as error:
                node.replica_manager.fail(hosted, error)


def _open(node: Node, path: str) -> LogDirectory:
    directory = LogDirectory.open(
        path,
        node.disk,
        cluster_id=node.cluster_id,
        node_id=node.node_id,
        new_directory_id=node.new_id(),
        now_ms=node.now_ms(),
    )
    try:
        probe = node.disk.open_read(f"{path}/{layout.META_PROPERTIES}")
        if node.disk.preadv_nowait(probe, 0, 1) is None:
            node.reads_in_memory = True
    except MachineError:
        directory.close(clean=False)
        raise
    return directory


def _refuse_none(paths: Sequence[str], broken: Broken) -> None:
    if paths and len(broken) == len(paths):
        raise broken[paths[0]]
