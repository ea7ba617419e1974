"""``check_metadata`` and a start agree about what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.check import check_metadata
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_files import open_metadata_files
from kept.cluster.metadata.records import ClusterRecord, ConfigRecord, encode_batch
from kept.cluster.metadata.replica_history import FILE, ReplicaHistory, write_history
from kept.cluster.metadata.snapshot import write_snapshot
from kept.cluster.metadata.wal import Entry, HardState, WriteAheadLog, write_hard_state
from kept.cluster.raft.message_guard import MAX_TERM
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, DirectoryRefused

NODE = 4


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A snapshot up to entry 1, three entries after it, of which two were applied."""
    path, disk = str(tmp_path), Disk()
    write_hard_state(disk, path, HardState(1, NODE, UUID(int=1)))
    image, _ = Image().apply([ClusterRecord("abc")])
    write_snapshot(disk, path, replace(image, index=1), 1)
    log = open_metadata_files(path, disk, UUID(int=7), NODE).wal
    for index in (2, 3, 4):
        log.append([Entry(1, index, encode_batch([ConfigRecord(4, "", "k", str(index))]))])
    write_history(disk, path, ReplicaHistory(NODE, applied_index=3))
    return tmp_path


def flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_what_is_whole_has_no_findings(directory: Path) -> None:
    assert check_metadata(str(directory), Disk()) == []


def wal(directory: Path) -> Path:
    return directory / "metadata.wal"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: flipped(wal(d), 5), "does not begin with"),
        (lambda d: flipped(wal(d), 60), "entry 2 is not whole, but entry 3 behind it is"),
        (lambda d: wal(d).write_bytes(wal(d).read_bytes()[:100]), "had applied entry 3"),
        (lambda d: wal(d).unlink(), "the directory was in use"),
        (lambda d: flipped(d / "hard-state", 20), "its CRC does not match"),
        (lambda d: flipped(d / "identity", 20), "its CRC does not match"),
        (lambda d: flipped(d / FILE, 20), "its CRC does not match"),
        (lambda d: flipped(next(d.glob("snapshot-*")), 30), "its CRC does not match"),
        (lambda d: next(d.glob("snapshot-*")).unlink(), "begins after entry 1"),
    ],
)
def test_what_a_start_refuses_is_damage(
    directory: Path, damage: Callable[[Path], None], why: str
) -> None:
    damage(directory)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    findings = check_metadata(str(directory), Disk())
    assert [why in finding.why for finding in findings if finding.damaged] == [True], findings
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    with pytest.raises(DamagedData, match=why):
        open_metadata_files(str(directory), Disk(), UUID(int=7), NODE)


def test_a_log_that_is_gone_with_the_identity_is_damage(directory: Path) -> None:
    wal(directory).unlink()
    (directory / "identity").unlink()
    (finding,) = check_metadata(str(directory), Disk())
    assert finding.damaged and "this node had applied entry 3" in finding.why
    with pytest.raises(DamagedData, match="this node had applied entry 3"):
        open_metadata_files(str(directory), Disk(), UUID(int=7), NODE)


@pytest.mark.parametrize("where", ["hard-state", "log"])
def test_a_term_that_no_election_reaches_is_damage(directory: Path, where: str) -> None:
    if where == "log":
        log = WriteAheadLog.open(str(directory), Disk())
        log.append([Entry(MAX_TERM + 1, 5, encode_batch([ConfigRecord(4, "", "k", "5")]))])
    else:
        write_hard_state(Disk(), str(directory), HardState(MAX_TERM + 1))
    why = "which no election reaches"
    (finding,) = check_metadata(str(directory), Disk())
    assert finding.damaged and why in finding.why
    with pytest.raises(DirectoryRefused, match=why):
        open_metadata_files(str(directory), Disk(), UUID(int=7), NODE)


def test_the_history_of_another_node_says_nothing(directory: Path) -> None:
    """As when a directory was copied for a node of another id: nothing that it applied is gone."""
    wal(directory).write_bytes(wal(directory).read_bytes()[:100])
    for node_id, damaged in ((None, True), (NODE, True), (NODE + 1, False)):
        findings = check_metadata(str(directory), Disk(), node_id)
        assert [one.damaged for one in findings] == [damaged], node_id
    with pytest.raises(DamagedData, match="had applied entry 3"):
        open_metadata_files(str(directory), Disk(), UUID(int=7), NODE)
    open_metadata_files(str(directory), Disk(), UUID(int=7), NODE + 1)


def test_what_a_start_cuts_off_is_a_note(directory: Path) -> None:
    whole = wal(directory).read_bytes()
    wal(directory).write_bytes(whole[:-3])
    (finding,) = check_metadata(str(directory), Disk())
    assert not finding.damaged and "the next start cuts the log here" in finding.why
    assert wal(directory).read_bytes() == whole[:-3]
    files = open_metadata_files(str(directory), Disk(), UUID(int=7), NODE)
    assert files.wal.cut is not None and files.wal.size_bytes == finding.position
