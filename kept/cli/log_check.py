"""What ``kept log check`` looks at, whichever part of the house wrote it.

Logs with their indexes, snapshots and checkpoints are :mod:`kept.storage.inspect.check`'s, the
metadata :mod:`kept.cluster.metadata.check`'s. Of compaction, manifests and removal journals have to
be readable, and the log has to be what the applied manifest says.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Final

from kept.cli.log_dump import dump, is_of_compaction
from kept.cluster.metadata.check import check_metadata, has_metadata
from kept.cluster.metadata.wal import WAL_NAME
from kept.compaction.cleaner.cleaner_run import read_manifest
from kept.compaction.cleaner.job import Source
from kept.compaction.manifest import apply as applying
from kept.compaction.manifest import manifest_store, verify
from kept.storage import layout
from kept.storage.checkpoints import read_properties
from kept.storage.disk import Disk, parent
from kept.storage.errors import DamagedData
from kept.storage.inspect.check import LOG_DIRECTORY, check_directory
from kept.storage.inspect.findings import Finding
from kept.storage.types import decimal_number

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
    if has_metadata(names):
        return check_metadata(path, disk, _node_id(parent(path), disk))
    findings = check_directory(path, disk, more=_check_compaction)
    metadata = f"{path}/{METADATA_DIRECTORY}"
    if disk.exists(metadata) and has_metadata(disk.listdir(metadata)):
        findings += check_metadata(metadata, disk, _node_id(path, disk))
    elif LOG_DIRECTORY in names:
        why = f"{WAL_NAME} is not there: no metadata were checked"
        findings.append(Finding(metadata, -1, -1, why, False))
    return findings


def _node_id(data: str, disk: Disk) -> int | None:
    """Whose ``--data-dir`` this is, by the directory of its logs; None where that does not tell."""
    try:
        properties = read_properties(disk, f"{data}/{LOG_DIRECTORY}/{layout.META_PROPERTIES}")
    except DamagedData:
        return None
    return decimal_number((properties or {}).get("node.id", ""))


def _check_compaction(path: str, disk: Disk, found: list[Finding]) -> list[Finding]:
    """What of a partition's compaction cannot be read, and where the log is not what the applied
    manifest says.
    """
    findings: dict[str, Finding] = {}
    for name in filter(is_of_compaction, disk.listdir(path)):
        for entry in dump(f"{path}/{name}"):
            if entry.kind == "damage":
                finding = Finding(**entry.values, damaged=True)
                findings[finding.path] = finding
    try:
        manifest_store.load(path, disk)
    except manifest_store.MarkedLost as error:
        findings[error.path] = Finding(error.path, -1, -1, error.why, False)
    except DamagedData as error:
        finding = Finding(error.path, error.position, error.offset, error.why, True)
        findings.setdefault(finding.path, finding)
    if any(finding.damaged for finding in findings.values()):
        return list(findings.values())
    return [*findings.values(), *_check_generation(path, disk, found)]


def _check_generation(path: str, disk: Disk, found: list[Finding]) -> list[Finding]:
    """Whether the segments have the records that the applied manifest names: a file that was cut
    between two batches shows it in no other way, where compaction may have left gaps.
    """
    files = [file for name in disk.listdir(path) if (file := layout.parse_segment_file(name))]
    pending = any(file.state in (layout.CLEANED, layout.SWAP) for file in files)
    newest = max(applying.manifests(path, disk), default=None)
    if newest is None or pending or applying.read_mark(path, disk) is None:
        return []  # the next start says what is applied
    bases = sorted(f.base_offset for f in files if f.kind == layout.LOG and not f.state)
    sizes = [disk.stat(layout.segment_file(path, base, layout.LOG)).size_bytes for base in bases]
    sources = [
        Source(base, following, size, 0)
        for (base, following), size in zip(pairwise(bases), sizes, strict=False)
        if size
    ]
    damaged = {finding.path for finding in found if finding.damaged}
    replica = verify.ReplicaFiles(path, disk, tuple(sources))
    manifest = read_manifest(path, newest, disk)
    findings = []
    for part in verify.covered(replica, manifest, bases[0] if bases else manifest.end_offset):
        log = layout.segment_file(path, part.base_offset, layout.LOG)
        if part.wrong is not None and log not in damaged:
            why = part.wrong.removeprefix(f"{log}: damaged (offset {part.base_offset}): ")
            findings.append(Finding(log, -1, part.base_offset, why, True))
    return findings
