"""Offline: would a start take this metadata directory? For ``kept log check``.

Reads only; the node must not run. What a start refuses is damage here, in its own words; what it
cuts off is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kept.cluster.metadata import replica_history
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_files import impossible_term
from kept.cluster.metadata.snapshot import is_snapshot_name, load_snapshot
from kept.cluster.metadata.wal import (
    HARD_STATE_NAME,
    IDENTITY_NAME,
    WAL_NAME,
    WriteAheadLog,
    read_hard_state,
    read_identity,
)
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData
from kept.storage.inspect.findings import Finding

_T = TypeVar("_T")

_NAMES: Final = frozenset({IDENTITY_NAME, HARD_STATE_NAME, WAL_NAME, replica_history.FILE})


def has_metadata(names: Iterable[str]) -> bool:
    """Whether a directory with these names was a node's metadata directory, whatever it lacks."""
    return any(name in _NAMES or is_snapshot_name(name) for name in names)


def check_metadata(directory: str, disk: Disk, node_id: int | None = None) -> list[Finding]:
    """Check the files of a metadata directory: identity, hard state, snapshot, history and log.

    ``node_id`` is whose history counts; None: nobody knows, and the history of any node does.
    Raises FileNotFoundError, DirectoryRefused for what a newer kept wrote, MachineError.
    """
    findings: list[Finding] = []

    def read(reading: Callable[[], _T]) -> _T | None:
        try:
            return reading()
        except DamagedData as error:
            findings.append(Finding(error.path, error.position, error.offset, error.why, True))
            return None

    read(lambda: read_identity(disk, directory))
    hard_state = read(lambda: read_hard_state(disk, directory))
    snapshot = read(lambda: load_snapshot(disk, directory))
    image = Image() if snapshot is None else snapshot[0]
    terms = [0 if hard_state is None else hard_state.term, 0 if snapshot is None else snapshot[1]]
    applied = read(lambda: _applied_index(disk, directory, node_id)) or 0
    awaited = applied if applied > image.index else 0  # else the snapshot has those entries
    path = f"{directory}/{WAL_NAME}"
    if disk.exists(path):
        log = read(lambda: WriteAheadLog.inspect(path, disk, applied_index=awaited))
        if log is not None:
            terms.append(log.last_term)
        if log is not None and log.cut is not None:
            why = f"{log.cut}; the next start cuts the log here"
            findings.append(Finding(path, log.size_bytes, -1, why, False))
        if log is not None and snapshot is not None and log.base_index > image.index:
            why = f"begins after entry {log.base_index}, the snapshot ends before"
            findings.append(Finding(path, 0, -1, why, True))
    elif awaited and all(finding.path != path for finding in findings):
        why = f"is not there, but this node had applied entry {awaited}"
        findings.append(Finding(path, -1, -1, why, True))
    if why_not := impossible_term(directory, max(terms)):
        findings.append(Finding(directory, -1, -1, why_not, True))
    return findings


def _applied_index(disk: Disk, directory: str, node_id: int | None) -> int:
    """Up to which entry the replica history says that this node has applied the log; 0: nothing."""
    if node_id is not None:
        return replica_history.read_history(disk, directory, node_id).applied_index
    path = f"{directory}/{replica_history.FILE}"
    try:
        return replica_history.decode_history(path, disk.read(path)).applied_index
    except FileNotFoundError:
        return 0
