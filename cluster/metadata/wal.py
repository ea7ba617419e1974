"""The write-ahead log of the metadata: one file of entries, and the hard state beside it.

Raft's vocabulary from the start: an :class:`Entry` has an index (dense, from the file's base + 1),
the term it was proposed in, and bytes that this module does not read. With one voter every durable
entry is committed.

File ``metadata.wal`` (big-endian; ``docs/formats/metadata.md``)::

    header  magic "kept-wal", version uint32, base index int64, base term int64, CRC32C uint32
    frame   marker "KEPT", length uint32, CRC32C uint32, term int64, index int64, durable int64,
            `length` bytes of the entry

The CRC covers the frame without its marker and the CRC itself. ``durable`` is the size of the file
that was fsynced before this frame was written: whoever reads a whole frame knows that everything
below its ``durable`` had reached the disk.

Guarantees: entries are durable when :meth:`WriteAheadLog.append` returns; a failed write is cut
back, a failed fsync is final (the log refuses everything after it). At open a bad frame with
nothing durable behind it is a torn tail and is cut; a bad frame that a later whole frame vouches
for is damage, and refused with path and position; so is an end that lacks entries which this node
had applied (``kept.cluster.metadata.replica_history``). Nothing else vouches for the last group
written: a flipped bit there cannot be told from a torn write, so what is cut is always said
(``cut``). Raft's other voters will have it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from kept.storage.disk import Disk, File
from kept.storage.errors import (
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
    ResourceExhausted,
    vanished,
)
from kept.storage.records import crc32c

WAL_NAME: Final = "metadata.wal"
HARD_STATE_NAME: Final = "hard-state"
IDENTITY_NAME: Final = "identity"
STRAY: Final = "-stray"

MAX_ENTRY_BYTES: Final = 64 * 1024 * 1024
"""Largest entry: 10,000 partitions take 0.7 MB. A length above it is damage."""

NO_VOTE: Final = -1
NO_DIRECTORY: Final = UUID(int=0)
_WAL_MAGIC: Final = b"kept-wal"
_STATE_MAGIC: Final = b"kept-hst"
_VERSION: Final = 1
_MARKER: Final = b"KEPT"
_HEADER = struct.Struct(">8sIqq")
HEADER_BYTES: Final = _HEADER.size + 4
_FRAME = struct.Struct(">4sII")
_FRAME_BODY = struct.Struct(">qqq")
_FRAME_BYTES: Final = _FRAME.size + _FRAME_BODY.size
_LENGTH = struct.Struct(">I")
_STATE = struct.Struct(">8sIqi16s")
_IDENTITY_MAGIC: Final = b"kept-idn"
_IDENTITY = struct.Struct(">8sI16sB")
_BEGAN_ALONE: Final = 1


class Entry(Struct, frozen=True):
    """One step of the metadata log."""

    term: int
    index: int
    data: bytes


class HardState(Struct, frozen=True):
    """What a Raft node must never forget: its term, and its vote in it (id, directory id)."""

    term: int = 0
    vote: int = NO_VOTE
    vote_directory: UUID = NO_DIRECTORY


def read_hard_state(disk: Disk, directory: str) -> HardState:
    """The hard state of a metadata directory; term 0 where there is none.

    Raises DamagedData, DirectoryRefused for a newer version.
    """
    values = _read_small(disk, f"{directory}/{HARD_STATE_NAME}", _STATE_MAGIC, _STATE)
    if values is None:
        return HardState()
    term, vote, vote_directory = values
    return HardState(term, vote, UUID(bytes=vote_directory))


def _read_small(
    disk: Disk, path: str, magic: bytes, layout: struct.Struct
) -> tuple[Any, ...] | None:
    """The values after magic and version in a file of fixed size; None where there is no file."""
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return None
    check_magic(path, data, magic, _VERSION)
    if len(data) != layout.size + 4 or not crc_matches(data):
        raise DamagedData(path, 0, -1, "its CRC does not match")
    return layout.unpack_from(data)[2:]


def write_hard_state(disk: Disk, directory: str, state: HardState) -> None:
    """Replace the hard state; durable when this returns."""
    body = _STATE.pack(_STATE_MAGIC, _VERSION, state.term, state.vote, state.vote_directory.bytes)
    disk.write_atomic(f"{directory}/{HARD_STATE_NAME}", with_crc(body))


class Identity(Struct, frozen=True):
    """Which disk this is: votes and acknowledgements are those of a node on a disk.

    ``began_alone``: the log was begun by a lone node of version 0.1.0, which wrote no voters into
    it; without that a log without voters is one that is still being copied.
    """

    directory_id: UUID
    began_alone: bool = False


def read_identity(disk: Disk, directory: str) -> Identity | None:
    """The identity of a metadata directory; None where there is none yet.

    Raises DamagedData, also when log or hard state are gone from a directory that had them:
    whoever deletes what a voter promised must give it another identity; DirectoryRefused.
    """
    values = _read_small(disk, f"{directory}/{IDENTITY_NAME}", _IDENTITY_MAGIC, _IDENTITY)
    if values is None:
        return None
    for name in (WAL_NAME, HARD_STATE_NAME):
        if not disk.exists(f"{directory}/{name}"):
            raise DamagedData(
                f"{directory}/{name}",
                0,
                -1,
                "it is missing, but the directory was in use: put it back, or empty the whole "
                "directory, then this node joins as a new one",
            )
    directory_id, flags = values
    return Identity(UUID(bytes=directory_id), bool(flags & _BEGAN_ALONE))


def write_identity(disk: Disk, directory: str, identity: Identity) -> None:
    """Write the identity, once log and hard state exist; durable when this returns."""
    flags = _BEGAN_ALONE * identity.began_alone
    body = _IDENTITY.pack(_IDENTITY_MAGIC, _VERSION, identity.directory_id.bytes, flags)
    disk.write_atomic(f"{directory}/{IDENTITY_NAME}", with_crc(body))


def with_crc(body: bytes) -> bytes:
    """``body`` and its CRC32C."""
    return body + _LENGTH.pack(crc32c(body))


def crc_matches(data: bytes) -> bool:
    """Whether the last four bytes are the CRC32C of the others."""
    return len(data) >= 4 and crc32c(data[:-4]) == _LENGTH.unpack_from(data, len(data) - 4)[0]


def check_magic(path: str, data: bytes, magic: bytes, newest: int) -> None:
    """Raises DamagedData for another magic, DirectoryRefused for a version above ``newest``."""
    if data[: len(magic)] != magic:
        raise DamagedData(path, 0, -1, f"does not begin with {magic.decode()!r}")
    if len(data) < len(magic) + 4:
        raise DamagedData(path, 0, -1, "ends within its header")
    (version,) = _LENGTH.unpack_from(data, len(magic))
    if not 1 <= version <= newest:
        raise DirectoryRefused(
            f"{path} has format version {version}; this kept reads up to {newest}: use a newer one"
        )


class WriteAheadLog:
    """The entries after ``base_index``. One user at a time; every call blocks on the disk."""

    def __init__(self, disk: Disk, path: str, file: File, base: tuple[int, int]) -> None:
        self._disk = disk
        self.path = path
        self._file = file
        self.base_index, self.base_term = base
        self._positions = array("q")
        self._terms = array("q")
        self.size_bytes = HEADER_BYTES
        self.cut: str | None = None
        """What was cut off as a torn end when this was opened, or would be; None: nothing."""
        self._durable = HEADER_BYTES
        self._broken: str | None = None

    @classmethod
    def open(cls, directory: str, disk: Disk, *, applied_index: int = 0) -> WriteAheadLog:
        """Open the log of a directory, created when absent; a torn tail is cut.

        ``applied_index``: this node has applied the entries up to here, and no snapshot holds them.
        Raises DamagedData with path and position, also where such an entry is missing; then nothing
        is cut. DirectoryRefused for a newer version.
        """
        path = f"{directory}/{WAL_NAME}"
        try:
            data = disk.read(path)
        except FileNotFoundError:
            disk.ensure_data_directory(directory)
            disk.write_atomic(path, _header(0, 0))
            data = disk.read(path)
        log = cls(disk, path, disk.open_append(path), read_header(path, data))
        log._load(data, applied_index)
        # So may the name of the log, and that of the hard state beside it: both are acted upon now.
        disk.fsync_dir(directory)
        return log

    @classmethod
    def inspect(cls, path: str, disk: Disk, *, applied_index: int = 0) -> WriteAheadLog:
        """A log as :meth:`open` would find it, to be looked at only: nothing is cut.

        Raises as :meth:`open`, and FileNotFoundError.
        """
        data = disk.read(path)
        log = cls(disk, path, disk.open_read(path), read_header(path, data))
        log._read(data, applied_index)
        return log

    @property
    def last_index(self) -> int:
        """Index of the last entry; ``base_index`` when there is none."""
        return self.base_index + len(self._positions)

    @property
    def last_term(self) -> int:
        """Term of the last entry; ``base_term`` when there is none."""
        return self._terms[-1] if self._terms else self.base_term

    def _load(self, data: bytes, applied_index: int) -> None:
        self._read(data, applied_index)
        if self.cut is not None:
            self._disk.truncate(self._file, self.size_bytes)
        self._disk.fsync(self._file)  # a killed process may have left more than it had synced
        self._durable = self.size_bytes

    def _read(self, data: bytes, applied_index: int) -> None:
        """Note the entries, and what is to be cut. Raises DamagedData."""
        for position, entry in read_frames(data, self.base_index):
            self._note(position, entry.term)
            self.size_bytes = frame_end(position, entry)
        rest = data[self.size_bytes :]
        if rest:
            self._refuse_damage(data)
        if self.last_index < applied_index:
            self._refuse_loss(rest, applied_index)
        if rest:
            self.cut = _described(rest, self.size_bytes, self.last_index)

    def _note(self, position: int, term: int) -> None:
        if term < self.last_term:
            raise DamagedData(self.path, position, -1, f"term {term} after term {self.last_term}")
        self._positions.append(position)
        self._terms.append(term)

    def _refuse_damage(self, data: bytes) -> None:
        """A later whole frame that was written when the bad place was durable makes it damage."""
        bad = self.size_bytes
        marker = data.find(_MARKER, bad + 1)
        while marker >= 0:
            whole = _frame_at(data, marker)
            if whole is not None and bad < whole[1] <= marker:
                raise DamagedData(
                    self.path,
                    bad,
                    -1,
                    f"entry {self.last_index + 1} is not whole, "
                    f"but entry {whole[0].index} behind it is",
                )
            marker = data.find(_MARKER, marker + 1)

    def _refuse_loss(self, rest: bytes, applied_index: int) -> None:
        directory = self.path.rpartition("/")[0]
        raise DamagedData(
            self.path,
            self.size_bytes,
            -1,
            f"it ends with entry {self.last_index}, but this node had applied entry "
            f"{applied_index}: {applied_index - self.last_index} entries that were durable are "
            f"gone ({_described(rest, self.size_bytes, self.last_index)}). Put back the file from "
            f"before. Or, where other voters have the log, empty {directory}: this node follows "
            f"them, and `kept cluster voter add` gives it its vote back. Or remove "
            f"{directory}/replica-history to go on without those entries: logs of topics that "
            f"they created are kept under names that end in {STRAY}",
        )

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries with the next indexes; durable when this returns.

        Raises MachineError; the log then holds what it held before, unless the fsync failed: then
        whether they are on disk is unknown, and the log takes nothing more. Nor does it where
        somebody truncated the file.
        """
        self._refuse_broken()
        buffers: list[bytes] = []
        positions: list[int] = []
        position = self.size_bytes
        index, term = self.last_index, self.last_term
        for entry in entries:
            index += 1
            if entry.index != index or entry.term < term or len(entry.data) > MAX_ENTRY_BYTES:
                raise InvariantViolation(
                    f"entry {entry.index} of term {entry.term} ({len(entry.data)} bytes) "
                    f"after entry {index - 1} of term {term}"
                )
            term = entry.term
            frame = _frame(entry, self._durable)
            buffers.append(frame)
            positions.append(position)
            position += len(frame)
        if buffers:
            self._write(buffers)
            self._sync()
            self._positions.extend(positions)
            self._terms.extend(entry.term for entry in entries)
            self.size_bytes = self._durable = position

    def _write(self, buffers: list[bytes]) -> None:
        if self._disk.size(self._file) < self.size_bytes:
            error = vanished(self.path)  # zeros would be before what is written
            self._broken = str(error)
            raise error
        try:
            self._disk.reach("metadata.append")
            self._disk.writev(self._file, buffers, self.size_bytes)
        except MachineError as error:
            try:
                self._disk.truncate(self._file, self.size_bytes)
            except MachineError as second:
                self._broken = f"{error}; {second}"
            raise

    def _sync(self) -> None:
        try:
            self._disk.fsync(self._file)
            if not self._disk.is_at(self._file, self.path):
                raise vanished(self.path)  # no start would find it
        except MachineError as error:
            self._broken = str(error)
            raise

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise KafkaStorageError(f"{self.path} takes no more entries: {self._broken}")

    def term_at(self, index: int) -> int | None:
        """The term of an entry, or of the base; None outside of the log."""
        if index == self.base_index:
            return self.base_term
        if self.base_index < index <= self.last_index:
            return self._terms[index - self.base_index - 1]
        return None

    def entries(self, first: int, max_bytes: int = MAX_ENTRY_BYTES) -> list[Entry]:
        """Entries from ``first`` on: as many as ``max_bytes`` hold, at least one if there is one.

        Raises InvariantViolation below the base (the snapshot has those), DamagedData.
        """
        if first <= self.base_index:
            raise InvariantViolation(f"entry {first} is in the snapshot {self.base_index}")
        entries: list[Entry] = []
        total = 0
        for slot in range(first - self.base_index - 1, len(self._positions)):
            position = self._positions[slot]
            last = slot + 1 == len(self._positions)
            end = self.size_bytes if last else self._positions[slot + 1]
            total += end - position
            if entries and total > max_bytes:
                break
            whole = _frame_at(self._disk.pread(self._file, position, end - position), 0)
            if whole is None:
                raise DamagedData(self.path, position, -1, "the frame's CRC does not match")
            entries.append(whole[0])
        return entries

    def truncate_from(self, index: int) -> None:
        """Forget the entries from ``index`` on, durably: another leader's replace them."""
        self._refuse_broken()
        slot = index - self.base_index - 1
        if slot < 0:
            raise InvariantViolation(f"entry {index} is in the snapshot {self.base_index}")
        if slot >= len(self._positions):
            return
        self._disk.truncate(self._file, self._positions[slot])
        self.size_bytes = self._durable = self._positions[slot]
        del self._positions[slot:], self._terms[slot:]
        self._sync()

    def drop_prefix(self, index: int) -> None:
        """Forget the entries up to ``index``: a durable snapshot holds them. Atomic."""
        self._refuse_broken()
        term = self.term_at(index)
        if term is None or index == self.base_index:
            return
        rest = self.entries(index + 1, 1 << 62) if index < self.last_index else []
        self._rewrite(index, term, rest)

    def restart_at(self, index: int, term: int) -> None:
        """Forget everything: a snapshot up to ``index`` replaces what this log held. Atomic."""
        self._rewrite(index, term, [])

    def _rewrite(self, base_index: int, base_term: int, rest: list[Entry]) -> None:
        parts = [_header(base_index, base_term)]
        positions = array("q")
        position = HEADER_BYTES
        for entry in rest:
            parts.append(_frame(entry, HEADER_BYTES))
            positions.append(position)
            position += len(parts[-1])
        try:
            self._disk.write_atomic(self.path, b"".join(parts))
            self._file = self._disk.open_append(self.path)
        except MachineError as error:
            if isinstance(error, ResourceExhausted):
                raise  # whoever wants it tries again until it is done
            if error.operation != "write":  # a full disk leaves the old file in its place
                self._broken = str(error)
            raise
        self._positions = positions
        self._terms = array("q", (entry.term for entry in rest))
        self.base_index, self.base_term = base_index, base_term
        self.size_bytes = self._durable = position


def _described(rest: bytes, position: int, last_index: int) -> str:
    """The bytes behind the last whole entry, for whoever must judge what they were."""
    if not rest:
        return f"the file ends at byte {position}"
    what = "zeros" if not rest.strip(b"\0") else "no whole entry"
    begun = rest.count(_MARKER)
    entries = f", where {begun} entries begin" if begun > 1 else ""
    return (
        f"{len(rest)} bytes from byte {position} on, behind entry {last_index}, are {what}{entries}"
    )


def _header(base_index: int, base_term: int) -> bytes:
    return with_crc(_HEADER.pack(_WAL_MAGIC, _VERSION, base_index, base_term))


def _frame(entry: Entry, durable: int) -> bytes:
    body = _FRAME_BODY.pack(entry.term, entry.index, durable) + entry.data
    length = len(entry.data)
    crc = crc32c(body, crc32c(_LENGTH.pack(length)))
    return _FRAME.pack(_MARKER, length, crc) + body


def _frame_at(data: bytes, position: int) -> tuple[Entry, int] | None:
    """The whole frame at a position with its ``durable``; None when there is none."""
    body = position + _FRAME.size
    if body + _FRAME_BODY.size > len(data):
        return None
    marker, length, crc = _FRAME.unpack_from(data, position)
    end = body + _FRAME_BODY.size + length
    if marker != _MARKER or length > MAX_ENTRY_BYTES or end > len(data):
        return None
    if crc32c(memoryview(data)[body:end], crc32c(_LENGTH.pack(length))) != crc:
        return None
    term, index, durable = _FRAME_BODY.unpack_from(data, body)
    return Entry(term, index, bytes(data[body + _FRAME_BODY.size : end])), durable


def read_header(path: str, data: bytes) -> tuple[int, int]:
    """(base index, base term) of a log file. Raises DamagedData, DirectoryRefused."""
    check_magic(path, data, _WAL_MAGIC, _VERSION)
    if len(data) < HEADER_BYTES or not crc_matches(data[:HEADER_BYTES]):
        raise DamagedData(path, 0, -1, "the header's CRC does not match")
    _, _, base_index, base_term = _HEADER.unpack_from(data)
    return base_index, base_term


def frame_end(position: int, entry: Entry) -> int:
    """Where the frame of an entry that starts at ``position`` ends."""
    return position + _FRAME_BYTES + len(entry.data)


def read_frames(data: bytes, base_index: int) -> Iterator[tuple[int, Entry]]:
    """(position, entry) of the whole frames, up to the first that is not the next entry."""
    position = HEADER_BYTES
    index = base_index
    while True:
        whole = _frame_at(data, position)
        if whole is None or whole[0].index != index + 1:
            return
        yield position, whole[0]
        index += 1
        position = frame_end(position, whole[0])
