"""Which directories are this node's, so that one that is missing or another's is noticed.

A disk that is not mounted looks like an empty directory. To open it as such would answer for its
partitions with empty logs, and for their offsets with records of other data. So the metadata
directory keeps a list, ``log-directories`` (a properties file: directory id = path when last seen),
and a node whose ``log.dirs`` lack one of them does not start. Apache Kafka does the same with the
directory ids that a broker registers (KIP-858), partition by partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kept.cluster.metadata.wal import WAL_NAME
from kept.storage import checkpoints, layout
from kept.storage.directory import META_VERSION, OWNER, LogDirectory
from kept.storage.disk import Disk
from kept.storage.errors import DirectoryRefused

FILE: Final = "log-directories"
OWNER_FILE: Final = "owner"
"""Beside it: ``cluster.id`` and ``node.id`` of the node that the metadata directory belongs to."""


def _known(disk: Disk, metadata_directory: str) -> dict[str, str]:
    return checkpoints.read_properties(disk, f"{metadata_directory}/{FILE}") or {}


def _last_seen_at(paths: Iterable[str], known: dict[str, str]) -> dict[str, str]:
    there = {path.rstrip("/") or "/" for path in paths}
    return {directory_id: path for directory_id, path in known.items() if path in there}


def refuse_missing(
    disk: Disk,
    metadata_directory: str,
    log_directories: Iterable[str],
    broken: Collection[str] = (),
) -> None:
    """Raise DirectoryRefused when a directory that was used is not among ``log_directories``.

    To be asked before any of them is opened, for opening an empty one makes it a new one. What was
    last seen where one is ``broken`` now is still there.
    """
    known = _known(disk, metadata_directory)
    ids: set[str | None] = set(_last_seen_at(broken, known))
    unknown = ""
    for path in log_directories:
        if path in broken:
            continue
        name = f"{path}/{layout.META_PROPERTIES}"
        directory_id = (checkpoints.read_properties(disk, name) or {}).get("directory.id")
        ids.add(directory_id)
        if directory_id not in known:
            unknown += f" ({name} has {directory_id or 'no directory.id'})"
    for directory_id, path in known.items():
        if directory_id not in ids:
            raise DirectoryRefused(
                f"the log directory {directory_id}, last seen at {path}, is not in log.dirs or is "
                f"empty{unknown}: mount it or name it; to give up what it holds, take its line out "
                f"of {metadata_directory}/{FILE}"
            )


def refuse_foreign(
    disk: Disk,
    metadata_directory: str,
    log_directories: Iterable[str],
    *,
    node_id: int,
    alone: bool,
) -> None:
    """Raise DirectoryRefused for a log directory that cannot be this node's.

    To be asked before the metadata directory is made, so that a start which fails leaves nothing
    behind. A node that is ``alone`` makes up a cluster id when it has no metadata, and no directory
    that is in use can have it; others are told theirs by the cluster.
    """
    owner = _owner(disk, metadata_directory).get("node.id")
    if owner not in (None, str(node_id)):
        raise DirectoryRefused(
            f"{metadata_directory} belongs to node.id {owner!r}, not to {str(node_id)!r} (says "
            f"{metadata_directory}/{OWNER_FILE}): set metadata.log.dir to this node's own"
        )
    fresh = not disk.exists(f"{metadata_directory}/{WAL_NAME}")
    for path in log_directories:
        name = f"{path}/{layout.META_PROPERTIES}"
        properties = checkpoints.read_properties(disk, name)
        if properties is None:
            continue
        _refuse_incomplete(disk, metadata_directory, path, properties, node_id)
        owner, cluster_id = properties.get("node.id"), properties.get("cluster.id")
        if owner != str(node_id):
            raise DirectoryRefused(
                f"{path} belongs to node.id {owner!r}, not to {str(node_id)!r} (says {name})"
            )
        if alone and fresh:
            disk.lock(f"{path}/{layout.LOCK}").release()  # in use: that is said first
            raise DirectoryRefused(
                f"{path} belongs to cluster.id {cluster_id!r}, and {metadata_directory} holds no "
                f"metadata of it: set metadata.log.dir to where that is, or take other log.dirs"
            )


def _refuse_incomplete(
    disk: Disk, metadata_directory: str, path: str, properties: Mapping[str, str], node_id: int
) -> None:
    """Raise DirectoryRefused for a meta.properties that is empty or lacks a line, with the lines
    that would be right, as far as the metadata directory knows them.
    """
    ids = [
        directory_id
        for directory_id, where in _known(disk, metadata_directory).items()
        if where == path
    ]
    right = {
        "version": META_VERSION,
        "cluster.id": cluster_of(disk, metadata_directory) or "(this cluster's)",
        "node.id": str(node_id),
        "directory.id": ids[0] if ids else "(any 22 characters of base64, its own)",
        OWNER: "1",
    }
    lacking = [name for name in right if not properties.get(name) and name != OWNER]
    if lacking:
        what = f"lacks {', '.join(lacking)}" if properties else "is empty"
        lines = ", ".join(f"{name}={text}" for name, text in right.items())
        raise DirectoryRefused(
            f"{path}/{layout.META_PROPERTIES} {what}: put it back, or write these lines into it: "
            f"{lines}. Remove it only where the directory holds nothing"
        )


def _owner(disk: Disk, metadata_directory: str) -> dict[str, str]:
    return checkpoints.read_properties(disk, f"{metadata_directory}/{OWNER_FILE}") or {}


def cluster_of(disk: Disk, metadata_directory: str) -> str | None:
    """The cluster that a metadata directory belongs to; None while that was not noted.

    A node with several voters must know it before it has heard what of its log is committed: as
    one that has no cluster yet it would be welcome in any other, and its log might win there.
    """
    return _owner(disk, metadata_directory).get("cluster.id")


def remember_cluster(disk: Disk, metadata_directory: str, node_id: int, cluster_id: str) -> None:
    """Note whose the metadata directory is, durably."""
    now = {"cluster.id": cluster_id, "node.id": str(node_id)}
    if now != _owner(disk, metadata_directory):
        checkpoints.write_properties(disk, f"{metadata_directory}/{OWNER_FILE}", now)


def remember(
    disk: Disk,
    metadata_directory: str,
    opened: Iterable[LogDirectory],
    broken: Collection[str] = (),
) -> None:
    """Note the directories that are open now, durably, and still those that are ``broken``."""
    known = _known(disk, metadata_directory)
    now = _last_seen_at(broken, known)
    now |= {layout.encode_uuid(log_dir.directory_id): log_dir.path for log_dir in opened}
    if now != known:
        checkpoints.write_properties(disk, f"{metadata_directory}/{FILE}", now)
