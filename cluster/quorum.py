"""The metadata log of a cluster with one voter: propose, make durable, apply, tell.

A proposal takes three steps, because the disk blocks and images belong to one thread:

1. decide: the caller computes records from :attr:`Quorum.image` (``kept.cluster.controller``);
2. :meth:`Quorum.write`: one entry, durable when it returns. Blocks; a pool may run it;
3. :meth:`Quorum.apply_committed`: the image moves on, subscribers hear of it.

:meth:`Quorum.propose` is 2 and 3 in one call. From a decision until its entry is applied
nobody else may decide, else both decided on the same image: a second :meth:`write` before the first
is applied raises InvariantViolation. With more voters the same calls hide replication; "durable"
then means "by a majority".

Entries that contradict the image are refused before they are written, so the log can always be
replayed. Each opening is a new term, in which the lone voter elects itself; term and vote are on
disk before its first entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from kept.cluster.image import Delta, Image
from kept.cluster.records import MetadataRecord, decode_batch, encode_batch
from kept.cluster.snapshot import load_snapshot, write_snapshot
from kept.cluster.wal import (
    NO_DIRECTORY,
    Entry,
    HardState,
    WriteAheadLog,
    make_directory,
    read_hard_state,
    write_hard_state,
)
from kept.storage.disk import Disk
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    MachineError,
    UnsupportedVersion,
)

SNAPSHOT_AFTER_BYTES: Final = 4 * 1024 * 1024
"""A log larger than this, and than the last snapshot, is replaced by a snapshot: it bounds the disk
and the time of a start, and writes at most twice what was proposed."""

Subscriber = Callable[[Image, Delta], None]
"""Called with the new image and what the entry changed, in order, entry by entry."""


class Quorum:
    """The one voter's view of the metadata: the committed image, and the way to change it."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        *,
        wal: WriteAheadLog,
        image: Image,
        term: int,
        snapshot_bytes: int,
        snapshot_after_bytes: int,
    ) -> None:
        self.directory = directory
        self.image = image
        self.term = term
        self.last_snapshot_error: str | None = None
        self._disk = disk
        self._wal = wal
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_after_bytes = snapshot_after_bytes
        self._subscribers: list[Subscriber] = []
        self._written: tuple[Image, Delta] | None = None
        self._writing = False

    @classmethod
    def open(
        cls,
        directory: str,
        disk: Disk,
        *,
        node_id: int = 0,
        directory_id: UUID = NO_DIRECTORY,
        snapshot_after_bytes: int = SNAPSHOT_AFTER_BYTES,
    ) -> Quorum:
        """Open the metadata of a directory, created when absent: newest snapshot, then the log.

        Blocks. Raises DamagedData (path, position), DirectoryRefused for what a newer kept wrote,
        MachineError. The caller holds the lock of the node's directories.
        """
        make_directory(disk, directory)
        state = read_hard_state(disk, directory)
        image, term, snapshot_bytes = load_snapshot(disk, directory)
        wal = WriteAheadLog.open(directory, disk)
        if wal.base_index > image.index:
            raise DamagedData(
                wal.path, 0, -1, f"begins after entry {wal.base_index}, the snapshot ends before"
            )
        if wal.last_index < image.index:
            wal.restart_at(image.index, term)
        for entry in wal.entries(image.index + 1, 1 << 62):
            image = _replay(wal.path, image, entry)
        term = max(state.term, wal.last_term) + 1
        write_hard_state(disk, directory, HardState(term, node_id, directory_id))
        return cls(
            directory,
            disk,
            wal=wal,
            image=image,
            term=term,
            snapshot_bytes=snapshot_bytes,
            snapshot_after_bytes=snapshot_after_bytes,
        )

    def subscribe(self, callback: Subscriber) -> None:
        """Hear of every entry applied from now on."""
        self._subscribers.append(callback)

    def propose(self, records: Sequence[MetadataRecord]) -> int:
        """Make records true, together; returns their entry's index. Blocks on the disk.

        Raises InvariantViolation when they contradict the image, MachineError.
        """
        index = self.write(records)
        self.apply_committed()
        return index

    def write(self, records: Sequence[MetadataRecord]) -> int:
        """Step 2 of a proposal: the entry's index, durable. Blocks; any thread, one at a time."""
        if self._writing or self._written is not None:
            raise InvariantViolation("a proposal before the last one was applied")
        self._writing = True
        try:
            step = self.image.apply(records)
            entry = Entry(self.term, step[0].index, encode_batch(records))
            self._wal.append([entry])
            self._written = step
            self._snapshot_when_due(step[0])
        finally:
            self._writing = False
        return entry.index

    def apply_committed(self) -> int:
        """Step 3 of a proposal: move the image, tell the subscribers; returns the image's index.

        Every subscriber hears of it before an error that one of them raises goes on.
        """
        if self._written is not None:
            (self.image, delta), self._written = self._written, None
            failed: Exception | None = None
            for callback in tuple(self._subscribers):
                try:
                    callback(self.image, delta)
                except Exception as error:  # noqa: BLE001 - raised below, once all were told
                    failed = failed or error
            if failed is not None:
                raise failed
        return self.image.index

    def _snapshot_when_due(self, image: Image) -> None:
        if self._wal.size_bytes <= max(self._snapshot_after_bytes, self._snapshot_bytes):
            return
        try:
            self._snapshot_bytes = write_snapshot(self._disk, self.directory, image, self.term)
            self._wal.drop_prefix(image.index)
            self.last_snapshot_error = None
        except MachineError as error:
            # The entry itself is durable, and snapshot or not, the directory can be replayed.
            self.last_snapshot_error = str(error)


def _replay(path: str, image: Image, entry: Entry) -> Image:
    try:
        return image.apply(decode_batch(entry.data))[0]
    except UnsupportedVersion as error:
        raise DirectoryRefused(f"{path}: entry {entry.index}: {error}") from error
    except (CorruptMessage, InvariantViolation) as error:
        raise DamagedData(path, -1, -1, f"entry {entry.index}: {error}") from error
