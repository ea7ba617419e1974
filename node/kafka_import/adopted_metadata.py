"""Kafka's metadata log, ``__cluster_metadata-0``, as what begins a metadata log of kept.

Kafka's record at offset n is kept's entry n + 1, in the term that is its batch's leader epoch. The
newest checkpoint that the log goes on from is the snapshot; of each batch above it the last entry
holds what the batch comes to and the others nothing. So two nodes whose logs of Kafka end with the
same (epoch, offset) get the same entries, and where one has more, or something else that Kafka had
not committed, kept's Raft settles it as Kafka's would have. A term in which Kafka elected somebody
is never used again: the vote in it is taken for given.

Nothing here writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kept.cluster.controller.features import SECURITY
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    ClusterRecord,
    FeatureRecord,
    NoOpRecord,
    VotersRecord,
    decode_batch,
    encode_batch,
)
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import NO_VOTE, Entry, HardState
from kept.node.kafka_import import kafka_records
from kept.node.kafka_import.kafka_records import KafkaRecord
from kept.node.kafka_import.translate import Translation
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    UnsupportedVersion,
)
from kept.storage.records import BatchHeader, check_replica, headers, scan

QUORUM_STATE: Final = "quorum-state"
_CHECKPOINT = re.compile(r"([0-9]{20})-([0-9]{10})\.checkpoint\Z")
_VOTERS_KEY: Final = 6
"""Type of the control record that names the voters (KIP-853)."""
_NOTHING: Final = encode_batch([NoOpRecord()])


@dataclass(frozen=True, slots=True)
class ImportedMetadata:
    """What a metadata directory of kept begins with: its snapshot, its entries, its promises."""

    image: Image
    term: int
    """Of the snapshot's last entry."""
    final_image: Image
    """After the last entry."""
    entries: tuple[Entry, ...]
    hard_state: HardState
    translation: Translation
    """The state at the end of the log."""


class _Log:
    """The batches of the directory, in order, each whole and with its CRC right."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self.names = disk.listdir(path)

    def checkpoints(self) -> list[tuple[int, int, str]]:
        """(end offset, epoch, path), the newest first."""
        matches = (_CHECKPOINT.match(name) for name in self.names)
        return sorted(
            ((int(m[1]), int(m[2]), f"{self.path}/{m[0]}") for m in matches if m), reverse=True
        )

    def segments(self) -> list[tuple[int, str]]:
        """(base offset, path), ascending."""
        parsed = ((layout.parse_segment_file(name), name) for name in self.names)
        return sorted(
            (parsed_name.base_offset, f"{self.path}/{name}")
            for parsed_name, name in parsed
            if parsed_name is not None and parsed_name.kind == layout.LOG and not parsed_name.state
        )

    def batches(self, path: str) -> Iterator[tuple[BatchHeader, bytes]]:
        """Of one file. Raises DamagedData where it does not end with a whole batch."""
        data = self.disk.read(path)
        end = 0
        try:
            for position, header in headers(data):
                check_replica(data, position)
                end = position + header.size_bytes
                yield header, data[position:end]
        except CorruptMessage as error:
            raise _damaged(path, end, str(error)) from error
        if end != len(data):
            raise _damaged(path, end, f"{len(data) - end} bytes follow the last whole batch")


def _damaged(path: str, position: int, why: str) -> DamagedData:
    return DamagedData(
        path, position, -1, f"{why}; start Apache Kafka once more, and stop it cleanly"
    )


def _records(batch: bytes, header: BatchHeader) -> tuple[list[KafkaRecord], tuple[int, ...] | None]:
    """The records of a batch, and the voters where it is a control batch that names them."""
    columns = scan(batch)
    decoded: list[KafkaRecord] = []
    voters = None
    for row in range(columns.count):
        value = bytes(columns.value(row) or b"")
        if header.is_control:
            key = bytes(columns.key(row) or b"")
            if int.from_bytes(key[2:4], "big") == _VOTERS_KEY:
                voters = kafka_records.decode_voters(value)
        elif (record := kafka_records.decode(value)) is not None:
            decoded.append(record)
    return decoded, voters


class _Reading:
    """One reading of the log."""

    def __init__(self, log: _Log, cluster_id: str, voters: Sequence[Voter]) -> None:
        self._log = log
        self._ours = (
            ClusterRecord(cluster_id),
            VotersRecord(tuple(voters)),
            FeatureRecord(SECURITY, 1),
        )
        self.translation = Translation()
        self.image: Image | None = None
        self.base = (0, 0)
        self.entries: list[Entry] = []
        self.voters: tuple[int, ...] | None = None

    @property
    def end(self) -> tuple[int, int]:
        """Index and term of the last entry."""
        return (self.entries[-1].index, self.entries[-1].term) if self.entries else self.base

    def read(self) -> None:
        """Everything. Raises DamagedData, DirectoryRefused."""
        segments = self._log.segments()
        start = segments[0][0] if segments else 0
        for end_offset, epoch, path in self._log.checkpoints():
            if end_offset >= start:
                self._checkpoint(path, end_offset, epoch)
                break
        else:
            if start > 0:
                raise _damaged(self._log.path, -1, f"it begins at {start} and has no checkpoint")
        for number, (_, path) in enumerate(segments):
            following = segments[number + 1][0] if number + 1 < len(segments) else None
            if following is None or following > self.end[0]:
                self._segment(path)
        if self.image is None:
            raise DirectoryRefused(f"{self._log.path} is empty: this node was never part of Kafka")

    def _add(self, path: str, header: BatchHeader, batch: bytes) -> None:
        try:
            records, voters = _records(batch, header)
            self.translation.add(records)
        except CorruptMessage as error:
            raise DamagedData(path, -1, header.base_offset, str(error)) from error
        except UnsupportedVersion as error:
            raise DirectoryRefused(f"{path}: offset {header.base_offset}: {error}") from error
        if voters is not None:
            self.voters = voters

    def _begin(self, index: int, term: int) -> None:
        """What was read so far is the snapshot."""
        image, _ = Image().apply([*self._ours, *self.translation.step()])
        self.image, self.base = replace(image, index=index), (index, term)

    def _checkpoint(self, path: str, end_offset: int, epoch: int) -> None:
        for header, batch in self._log.batches(path):
            self._add(path, header, batch)
        if end_offset > 0:
            self._begin(end_offset, epoch)

    def _segment(self, path: str) -> None:
        for header, batch in self._log.batches(path):
            end = self.end[0]
            if header.last_offset < end:
                continue
            if header.base_offset > end:
                raise _damaged(path, -1, f"offset {header.base_offset} follows {end - 1}")
            self._add(path, header, batch)
            term = header.partition_leader_epoch
            if self.image is None:
                self._begin(header.last_offset + 1, term)
                continue
            step = self.translation.step()
            for index in range(end + 1, header.last_offset + 1):
                self.entries.append(Entry(term, index, _NOTHING))
            data = encode_batch(step) if step else _NOTHING
            self.entries.append(Entry(term, header.last_offset + 1, data))

    def final_image(self) -> Image:
        """Raises DirectoryRefused where the entries would not apply: better now than at a start."""
        image = self.image
        assert image is not None
        for entry in self.entries:
            try:
                image, _ = image.apply(decode_batch(entry.data))
            except InvariantViolation as error:
                raise DirectoryRefused(
                    f"{self._log.path}: offset {entry.index - 1}: {error}"
                ) from error
        return image


def _quorum_state(disk: Disk, path: str) -> tuple[HardState, tuple[int, ...] | None]:
    """Kafka's term, a vote in it that lets nobody be elected in it again, and its voters."""
    name = f"{path}/{QUORUM_STATE}"
    try:
        state = json.loads(disk.read(name))
        epoch = int(state["leaderEpoch"])
        named = state.get("currentVoters")
        voters = None if named is None else tuple(sorted(int(v["voterId"]) for v in named))
    except FileNotFoundError as error:
        raise DirectoryRefused(f"{name} is missing: this is no node of KRaft") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(name, -1, -1, f"not Kafka's quorum state: {error!r}") from error
    leader, voted = int(state.get("leaderId", -1)), int(state.get("votedId", -1))
    vote = leader if leader >= 0 else voted
    return HardState(max(epoch, 0), vote if vote >= 0 else NO_VOTE), voters


def read(
    disk: Disk, path: str, *, cluster_id: str, node_id: int, voters: Sequence[Voter]
) -> ImportedMetadata:
    """Read and translate the directory ``path``. ``voters`` are those of kept's own settings.

    Raises DirectoryRefused for what cannot be kept true, or voters that were not Kafka's;
    DamagedData; MachineError.
    """
    hard_state, listed = _quorum_state(disk, path)
    reading = _Reading(_Log(disk, path), cluster_id, voters)
    reading.read()
    final_image = reading.final_image()
    kafkas = listed if reading.voters is None else reading.voters
    mine = tuple(sorted(voter.node_id for voter in voters))
    if kafkas and kafkas != mine:
        raise DirectoryRefused(
            f"Apache Kafka's controllers were the nodes {list(kafkas)}, and "
            f"controller.quorum.voters names {list(mine)}: name the same ones, and adopt each "
            "(docs/adopting.md)"
        )
    last_term = reading.end[1]
    if last_term > hard_state.term:
        raise DirectoryRefused(
            f"{path}/{QUORUM_STATE} knows epoch {hard_state.term}, its log {last_term}: they are "
            "not of one node"
        )
    if hard_state.vote == NO_VOTE:
        hard_state = HardState(hard_state.term, node_id)
    assert reading.image is not None
    term, entries = reading.base[1], tuple(reading.entries)
    return ImportedMetadata(
        reading.image, term, final_image, entries, hard_state, reading.translation
    )
