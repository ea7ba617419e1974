from __future__ import annotations

from random import Random
from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import ClusterRecord, ConfigRecord, TopicRecord
from kept.cluster.metadata.snapshot import (
    decode_snapshot,
    encode_snapshot,
    load_snapshot,
    snapshot_name,
    write_snapshot,
)
from kept.cluster.metadata.wal import WAL_NAME
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, DirectoryRefused
from tests.support.simulated_disk import SimulatedDisk

DIR = "/data/meta"


def setting(number: int, size: int = 1) -> list[ConfigRecord]:
    return [ConfigRecord(4, "", f"k{number:04d}", "v" * size)]


def settings_in(image: Image) -> int:
    """How many of the entries 0, 1, 2... are in the image; none may be missing in between."""
    names = sorted(image.config(4, ""))
    assert names == [f"k{number:04d}" for number in range(len(names))]
    return len(names)


def open_lone(disk: Disk, after_bytes: int = 1 << 30) -> MetadataNode:
    return MetadataNode.open(
        DIR,
        disk,
        node_id=0,
        directory_id=UUID(int=100),
        random=Random(0).randrange,
        snapshot_after_bytes=after_bytes,
    )


def propose(member: MetadataNode, records: list[ConfigRecord]) -> None:
    member.propose(records)
    while (work := member.work()) is not None:
        work.run()
        member.done(work)


def snapshots(disk: Disk) -> list[str]:
    return [name for name in disk.listdir(DIR) if name.startswith("snapshot")]


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


def test_a_snapshot_is_its_image_again() -> None:
    image, _ = Image().apply([ClusterRecord("x"), *setting(0), TopicRecord("t", UUID(int=7))])
    assert decode_snapshot("p", encode_snapshot(image, 4)) == (image, 4)


def test_a_large_log_is_replaced_by_a_snapshot(disk) -> None:
    member = open_lone(disk, 1000)
    for number in range(30):
        propose(member, setting(number, size=20))
        wal = disk.stat(f"{DIR}/{WAL_NAME}").size_bytes
        assert wal <= max(1000, member._files.snapshot_bytes) + 200
    (name,) = snapshots(disk)
    again = open_lone(disk, 1000)
    assert settings_in(member.image) == settings_in(again.image) == 30
    image, term, size = load_snapshot(disk, DIR)
    assert name == snapshot_name(image.index, term) and 1 < image.index <= member.image.index
    assert size == disk.stat(f"{DIR}/{name}").size_bytes


def test_a_snapshot_that_cannot_be_written_does_not_stop_the_log(disk) -> None:
    """Nor is it tried again until the log has grown."""
    member = open_lone(disk, 400)
    disk.fail("write", "snapshot")
    number = 0
    while member.last_snapshot_error is None and number < 6:
        propose(member, setting(number, size=100))
        number += 1
    number -= 1
    assert "snapshot" in (member.last_snapshot_error or "")
    propose(member, setting(number + 1, size=100))
    assert member.last_snapshot_error is None and len(snapshots(disk)) == 1
    assert settings_in(open_lone(disk).image) == number + 2


def test_a_snapshot_ahead_of_the_log_replaces_it(disk) -> None:
    """As after another voter's snapshot was taken over."""
    member = open_lone(disk)
    propose(member, setting(0))
    image, _ = member.image.apply(setting(1))
    write_snapshot(disk, DIR, replace(image, index=50), 7)
    for seed in range(3):
        after = disk.after_power_loss(seed)
        again = open_lone(after)
        assert (again.image.index, again.term) == (51, 8), "51: the no-op of term 8"
        propose(again, setting(2))
        assert settings_in(open_lone(after).image) == 3


@pytest.mark.parametrize("position", range(0, 90, 7))
def test_a_damaged_snapshot_is_refused(disk, position) -> None:
    member = open_lone(disk, 100)
    for number in range(3):
        propose(member, setting(number, size=30))
    path = f"{DIR}/{snapshots(disk)[0]}"
    disk.flip_bit(path, position)
    with pytest.raises((DamagedData, DirectoryRefused)) as caught:
        open_lone(disk)
    assert path in str(caught.value)


def test_a_log_that_begins_behind_the_snapshot_is_refused(disk) -> None:
    member = open_lone(disk, 100)
    for number in range(3):
        propose(member, setting(number, size=30))
    disk.unlink(f"{DIR}/{snapshots(disk)[0]}")
    with pytest.raises(DamagedData, match="begins after entry"):
        open_lone(disk)
