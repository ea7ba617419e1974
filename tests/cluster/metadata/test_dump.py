from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.dump import dump_metadata, is_metadata_file
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import (
    ClusterRecord,
    ConfigRecord,
    ScramCredentialRecord,
    encode_batch,
)
from kept.cluster.metadata.snapshot import write_snapshot
from kept.cluster.metadata.wal import Entry, HardState, WriteAheadLog, write_hard_state
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData


@pytest.fixture
def directory(tmp_path) -> str:
    """Two entries in the log, as a lone node of 0.1.0 left it."""
    path, disk = str(tmp_path), Disk()
    write_hard_state(disk, path, HardState(1, 4, UUID(int=1)))
    batches = [[ClusterRecord("abc")], [ConfigRecord(4, "", "k", "v")]]
    entries = [Entry(1, n + 1, encode_batch(batch)) for n, batch in enumerate(batches)]
    WriteAheadLog.open(path, disk).append(entries)
    return path


def test_the_log(directory) -> None:
    assert list(dump_metadata(f"{directory}/metadata.wal")) == [
        "log after entry 0 of term 0, 138 bytes",
        "at 32: entry 1, term 1, 15 bytes",
        "  ClusterRecord(cluster_id='abc')",
        "at 83: entry 2, term 1, 19 bytes",
        "  ConfigRecord(resource_type=4, resource_name='', name='k', value='v')",
    ]


def test_secrets_are_hidden(tmp_path) -> None:
    """Who has the keys of a credential may log in as the user."""
    credential = ScramCredential(b"salt", b"stored", b"server", 4096)
    record = ScramCredentialRecord("ada", ScramMechanism.SCRAM_SHA_256, credential)
    WriteAheadLog.open(str(tmp_path), Disk()).append([Entry(1, 1, encode_batch([record]))])
    write_snapshot(Disk(), str(tmp_path), Image().apply([record])[0], 1)
    for path in tmp_path.iterdir():
        lines = "".join(dump_metadata(str(path)))
        assert "ScramCredentialRecord(user='ada'" in lines and "[hidden]" in lines
        assert not any(secret in lines for secret in ("salt", "stored", "server"))


def test_a_torn_tail_is_shown_and_left(directory, tmp_path) -> None:
    path = tmp_path / "metadata.wal"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert list(dump_metadata(str(path)))[-1] == (
        "at 83: 52 bytes are no whole entry (a torn tail is cut at start)"
    )
    assert path.read_bytes() == whole[:-3]


def test_damage_below_the_end_is_no_torn_tail(tmp_path) -> None:
    """A start refuses it, and cuts nothing."""
    path = tmp_path / "metadata.wal"
    log = WriteAheadLog.open(str(tmp_path), Disk())
    for index in (1, 2):
        log.append([Entry(1, index, encode_batch([ConfigRecord(4, "", "k", "v")]))])
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match="entry 1 is not whole, but entry 2 behind it is"):
        list(dump_metadata(str(path)))


def test_an_empty_log(tmp_path) -> None:
    WriteAheadLog.open(str(tmp_path), Disk())
    assert list(dump_metadata(str(tmp_path / "metadata.wal"))) == [
        "log after entry 0 of term 0, 32 bytes"
    ]


def test_a_snapshot(directory) -> None:
    image, _ = Image().apply([ClusterRecord("abc")])
    write_snapshot(Disk(), directory, replace(image, index=3), 2)
    (name,) = [name for name in Disk().listdir(directory) if name.startswith("snapshot")]
    assert list(dump_metadata(f"{directory}/{name}")) == [
        "snapshot up to entry 3 of term 2",
        "  ClusterRecord(cluster_id='abc')",
    ]


def test_the_hard_state(directory) -> None:
    assert list(dump_metadata(f"{directory}/hard-state")) == [
        f"term 1, voted for node 4 ({UUID(int=1)})"
    ]


def test_the_identity(directory) -> None:
    MetadataNode.open(
        directory, Disk(), node_id=4, directory_id=UUID(int=7), random=lambda n: n - 1
    )
    assert list(dump_metadata(f"{directory}/identity")) == [
        f"directory {UUID(int=7)}, begun by a lone node of 0.1.0"
    ]
    assert len(Disk().read(f"{directory}/identity")) == 33


def test_damage_is_raised(directory, tmp_path) -> None:
    path = tmp_path / "hard-state"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData):
        list(dump_metadata(str(path)))
    with pytest.raises(FileNotFoundError):
        list(dump_metadata(str(tmp_path / "none" / "hard-state")))


def test_files_are_known_by_name() -> None:
    for name in (
        "metadata.wal",
        "x/hard-state",
        "identity",
        "snapshot-" + "0" * 20 + "-" + "0" * 10,
    ):
        assert is_metadata_file(name)
    assert not is_metadata_file("00000000000000000000.log")
    assert not is_metadata_file("snapshot-1-1")
