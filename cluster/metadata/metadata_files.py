"""The files of one node's metadata, together: opening them, and writing what the core asks for.

===================  ===============================================================================
``metadata.wal``     the entries (:mod:`kept.cluster.metadata.wal`)
``hard-state``       term and vote
``identity``         which disk this is; written last, so where it is the others were
``snapshot-*``       the image, instead of the entries before it
                     (:mod:`kept.cluster.metadata.snapshot`)
``replica-history``  what else to remember of them (:mod:`kept.cluster.metadata.replica_history`)
===================  ===============================================================================

Order: the hard state before the entries of its term; the history before the snapshot that takes the
place of the entries that it follows from; a snapshot before the log that begins after it. Each step
is atomic and durable when it returns, so a crash between any two leaves a directory that opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from msgspec import Struct

from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.replica_history import ReplicaHistory, read_history, write_history
from kept.cluster.metadata.snapshot import (
    decode_snapshot,
    difference,
    load_snapshot,
    snapshot_name,
    write_snapshot,
    write_snapshot_bytes,
)
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import (
    HARD_STATE_NAME,
    HardState,
    Identity,
    WriteAheadLog,
    read_hard_state,
    read_identity,
    write_hard_state,
    write_identity,
)
from kept.cluster.raft.message_guard import MAX_TERM
from kept.cluster.raft.ready import Ready
from kept.cluster.raft.voter_set import voters_in
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, DirectoryRefused, MachineError, ResourceExhausted


@dataclass(slots=True)
class MetadataFiles:
    """The open files of a metadata directory."""

    directory: str
    disk: Disk
    identity: Identity
    wal: WriteAheadLog
    hard_state: HardState
    image: Image
    """That of the newest snapshot."""
    snapshot_bytes: int
    history: ReplicaHistory

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written into the log."""
        return self.wal.last_index == 0

    def voters(self, me: Voter) -> tuple[Voter, ...]:
        """Who votes below the first entry of the log."""
        if self.image.voters or not self.identity.began_alone:
            return self.image.voters
        return (me,)


def open_metadata_files(
    directory: str, disk: Disk, directory_id: UUID, node_id: int = -1
) -> MetadataFiles:
    """Open a metadata directory, created when absent; it is ``directory_id`` unless it has an id.

    ``node_id`` is whose history counts. Raises DamagedData (path, position), DirectoryRefused for
    what a newer kept wrote, MachineError.
    """
    disk.ensure_data_directory(directory)
    identity = read_identity(disk, directory)
    hard_state = read_hard_state(disk, directory)
    image, term, snapshot_bytes = load_snapshot(disk, directory)
    history = read_history(disk, directory, node_id)
    awaited = history.applied_index if history.applied_index > image.index else 0
    wal = WriteAheadLog.open(directory, disk, applied_index=awaited)
    history.begin(image)
    if why := impossible_term(directory, max(hard_state.term, wal.last_term, term)):
        raise DirectoryRefused(f"{directory}: {why}")
    if wal.base_index > image.index:
        raise DamagedData(
            wal.path, 0, -1, f"begins after entry {wal.base_index}, the snapshot ends before"
        )
    if wal.term_at(image.index) != term and image.index > 0:
        wal.restart_at(image.index, term)
    if identity is None:
        if not disk.exists(f"{directory}/{HARD_STATE_NAME}"):
            write_hard_state(disk, directory, hard_state)
        alone = wal.last_index > 0 and not _names_voters(image, wal)
        identity = Identity(directory_id, began_alone=alone)
        write_identity(disk, directory, identity)
    return MetadataFiles(directory, disk, identity, wal, hard_state, image, snapshot_bytes, history)


def impossible_term(directory: str, term: int) -> str | None:
    """Why a directory in this term is refused; None: it is not.

    Elections do not get that far: the term came with a message that no voter sent, which kept 0.1
    still took. Nobody could be elected after it.
    """
    if term <= MAX_TERM:
        return None
    return (
        f"the metadata log is in term {term}, which no election reaches (at most {MAX_TERM}): "
        "somebody else than a node of this cluster has spoken to this one's listener for nodes. "
        f"Keep strangers from that port. If a majority of the voters is well, empty {directory}: "
        "the node follows then, and `kept cluster voter add` gives it its vote back. If not, put "
        "back the directory's last copy on each of the voters"
    )


def _names_voters(image: Image, wal: WriteAheadLog) -> bool:
    entries = wal.entries(wal.base_index + 1, 1 << 62)
    return bool(image.voters) or any(voters_in(entry.data) for entry in entries)


class DiskWork:
    """What must reach the disk, as one job; :meth:`run` may be called again after an error."""

    def __init__(
        self,
        files: MetadataFiles,
        ready: Ready,
        snapshot: tuple[Image, int] | None,
        image: Image,
        history: ReplicaHistory | None,
    ) -> None:
        """``image`` is the newest one, ``history`` a copy of what it came from: to be written with
        a snapshot; None without one.
        """
        self.ready = ready
        self.snapshot = snapshot
        """An image to write as a snapshot in the place of old entries, and its term."""
        self.snapshot_error: str | None = None
        self.installed: Image | None = None
        """The image of the leader's snapshot, once it is written."""
        self.changed = Delta()
        """In which it differs from the one before."""
        self._image = image
        self._history = history
        self.finished = False
        self._files = files
        self._steps = [self._hard_state, self._install, self._truncate, self._append]

    @property
    def blocks(self) -> bool:
        """Whether :meth:`run` waits for the disk; else it may run anywhere."""
        return self.ready.blocks or self.snapshot is not None

    def run(self) -> None:
        """Write it, durably. Blocks; any thread. Raises MachineError, KafkaStorageError (final),
        DamagedData or DirectoryRefused for a snapshot that cannot be read here (final)."""
        while self._steps:
            self._steps[0]()
            del self._steps[0]
        if not self.finished:
            self._write_snapshot()
            self.finished = True

    def _hard_state(self) -> None:
        if self.ready.hard_state is not None:
            write_hard_state(self._files.disk, self._files.directory, self.ready.hard_state)

    def _install(self) -> None:
        snapshot = self.ready.snapshot
        if snapshot is None:
            return
        files = self._files
        name = f"{files.directory}/{snapshot_name(snapshot.index, snapshot.term)}"
        image, _ = decode_snapshot(name, snapshot.data)
        self.changed = difference(self._image, image)
        if self._history is not None:
            self._history.observe(snapshot.index, self.changed, hidden=True)
            write_history(files.disk, files.directory, self._history)
        write_snapshot_bytes(
            files.disk, files.directory, snapshot.index, snapshot.term, snapshot.data
        )
        files.wal.restart_at(snapshot.index, snapshot.term)
        files.snapshot_bytes = len(snapshot.data)
        self.installed = image

    def _truncate(self) -> None:
        if self.ready.truncate_from is not None:
            self._files.wal.truncate_from(self.ready.truncate_from)

    def _append(self) -> None:
        self._files.wal.append(self.ready.entries)

    def _write_snapshot(self) -> None:
        """Replace old entries by a snapshot. Without it the directory is whole, too."""
        if self.snapshot is None or self.ready.snapshot is not None:
            self.snapshot = None
            return
        image, term = self.snapshot
        files = self._files
        try:
            if self._history is not None:
                write_history(files.disk, files.directory, self._history)
            files.snapshot_bytes = write_snapshot(files.disk, files.directory, image, term)
            files.wal.drop_prefix(image.index)
        except ResourceExhausted:
            raise  # the log may have been replaced under its name: run again
        except MachineError as error:
            self.snapshot_error = str(error)


class HistoryWrite(Struct, frozen=True):
    """A history that is to be durable without a snapshot."""

    files: MetadataFiles
    history: ReplicaHistory

    def run(self) -> None:
        """Write it, durably. Blocks; any thread. Raises MachineError, KafkaStorageError."""
        write_history(self.files.disk, self.files.directory, self.history)
