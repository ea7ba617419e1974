"""What ``kept log check`` looks at, whichever part of the house wrote it.

Logs with their indexes, snapshots and checkpoints are :mod:`kept.storage.inspect.check`'s, the
metadata :mod:`kept.cluster.metadata.check`'s; of compaction, manifests and removal journals have to
be readable.
"""

from __future__ import annotations

import os
from typing import Final

from kept.cli.dumps import dump, is_of_compaction
from kept.cluster.metadata.check import check_metadata
from kept.cluster.metadata.wal import WAL_NAME
from kept.compaction.manifest import manifest_store
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.inspect.check import LOG_DIRECTORY, check_directory
from kept.storage.inspect.finding import Finding

METADATA_DIRECTORY: Final = "meta"
"""Where a node's metadata are below its ``--data-dir``."""


def check(path: str) -> list[Finding]:
    """Check what ``--data-dir`` names, an entry of ``log.dirs``, one partition's directory, or the
    metadata's. Raises FileNotFoundError, DirectoryRefused, MachineError.
    """
    disk = Disk({})
    path = path.rstrip("/") or "/"
    if path.rpartition("/")[2] in (".", ".."):  # a partition's name, and what is beside it, count
        path = os.path.abspath(path)
    names = disk.listdir(path)
    if WAL_NAME in names:
        return check_metadata(path, disk)
    findings = check_directory(path, disk, more=_check_compaction)
    metadata = f"{path}/{METADATA_DIRECTORY}"
    if disk.exists(f"{metadata}/{WAL_NAME}"):
        findings += check_metadata(metadata, disk)
    elif LOG_DIRECTORY in names:
        why = f"{WAL_NAME} is not there: no metadata were checked"
        findings.append(Finding(metadata, -1, -1, why, False))
    return findings


def _check_compaction(path: str, disk: Disk) -> list[Finding]:
    """What of a partition's compaction cannot be read."""
    findings: dict[str, Finding] = {}
    for name in filter(is_of_compaction, disk.listdir(path)):
        for entry in dump(f"{path}/{name}"):
            if entry.kind == "damage":
                found = Finding(**entry.values, damaged=True)
                findings[found.path] = found
    try:
        manifest_store.load(path, disk)
    except manifest_store.GivenUp as error:
        findings[error.path] = Finding(error.path, -1, -1, error.why, False)
    except DamagedData as error:
        found = Finding(error.path, error.position, error.offset, error.why, True)
        findings.setdefault(found.path, found)
    return list(findings.values())
