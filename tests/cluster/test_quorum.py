from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.image import Image
from kept.cluster.quorum import Quorum
from kept.cluster.records import ClusterRecord, ConfigRecord, PartitionRecord, TopicRecord
from kept.cluster.snapshot import (
    decode_snapshot,
    encode_snapshot,
    load_snapshot,
    snapshot_name,
    write_snapshot,
)
from kept.cluster.wal import WAL_NAME, Entry, WriteAheadLog, read_hard_state
from kept.storage.disk import Disk
from kept.storage.errors import (
    DamagedData,
    DirectoryRefused,
    InvariantViolation,
    KafkaStorageError,
    MachineError,
)
from kept.testing.simulated_disk import SimulatedCrash, SimulatedDisk

DIR = "/data/meta"


def setting(number: int, size: int = 1) -> list[ConfigRecord]:
    """An entry that is recognised in the image."""
    return [ConfigRecord(4, "", f"k{number:04d}", "v" * size)]


def settings_in(image: Image) -> int:
    """How many of the entries 0, 1, 2... are in the image; none may be missing in between."""
    names = sorted(image.config(4, ""))
    assert names == [f"k{number:04d}" for number in range(len(names))]
    return len(names)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


def test_proposals_are_there_after_reopening(tmp_path) -> None:
    quorum = Quorum.open(str(tmp_path / "a" / "meta"), Disk(), node_id=3)
    topic_id = UUID(int=1)
    assert quorum.propose([ClusterRecord("abc")]) == 1
    partition = PartitionRecord(topic_id, 0, (3,), (3,), 3, 0, 0)
    assert quorum.propose([TopicRecord("t", topic_id), partition]) == 2
    again = Quorum.open(str(tmp_path / "a" / "meta"), Disk(), node_id=3)
    assert again.image == quorum.image
    assert again.image.cluster_id == "abc" and again.image.index == 2
    assert again.image.partition("t", 0) == partition


def test_each_opening_is_a_new_term_and_the_vote_is_durable(disk) -> None:
    for expected in (1, 2, 3):
        quorum = Quorum.open(DIR, disk, node_id=5, directory_id=UUID(int=9))
        assert quorum.term == expected
        for seed in range(5):
            state = read_hard_state(disk.after_power_loss(seed), DIR)
            assert (state.term, state.vote, state.vote_directory) == (expected, 5, UUID(int=9))
        quorum.propose(setting(expected - 1))
    wal = WriteAheadLog.open(DIR, disk)
    assert [entry.term for entry in wal.entries(1)] == [1, 2, 3]


def test_subscribers_hear_every_entry_with_its_image(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    heard = []
    quorum.subscribe(lambda image, delta: heard.append((image, delta)))
    quorum.propose(setting(0))
    quorum.propose([TopicRecord("t", UUID(int=1))])
    assert [image.index for image, _ in heard] == [1, 2]
    assert heard[0][1].configs == {(4, "")}
    assert heard[1][1].topics_created == (quorum.image.topics["t"],)
    assert heard[1][0] is quorum.image


def test_every_subscriber_hears_even_if_one_fails(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    heard = []

    def fails(image, delta):
        raise ValueError("mine")

    quorum.subscribe(fails)
    quorum.subscribe(lambda image, delta: heard.append(image.index))
    with pytest.raises(ValueError, match="mine"):
        quorum.propose(setting(0))
    assert heard == [1] and quorum.image.index == 1


def test_in_two_steps_the_image_moves_with_the_second(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    assert quorum.write(setting(0)) == 1
    assert quorum.image.index == 0
    with pytest.raises(InvariantViolation, match="before the last one was applied"):
        quorum.write(setting(1))
    assert quorum.apply_committed() == 1
    assert settings_in(quorum.image) == 1
    assert quorum.apply_committed() == 1, "nothing more to apply"


def test_what_contradicts_the_image_is_not_written(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    quorum.propose([ClusterRecord("one")])
    before = disk.read(f"{DIR}/{WAL_NAME}")
    with pytest.raises(InvariantViolation, match="cannot become"):
        quorum.propose([ClusterRecord("two")])
    assert disk.read(f"{DIR}/{WAL_NAME}") == before
    assert quorum.propose(setting(0)) == 2


# Snapshots.


def snapshots(disk: Disk) -> list[str]:
    return [name for name in disk.listdir(DIR) if name.startswith("snapshot")]


def test_a_large_log_is_replaced_by_a_snapshot(disk) -> None:
    quorum = Quorum.open(DIR, disk, snapshot_after_bytes=1000)
    for number in range(30):
        quorum.propose(setting(number, size=20))
        wal = disk.stat(f"{DIR}/{WAL_NAME}").size_bytes
        assert wal <= max(1000, quorum._snapshot_bytes) + 200
    (name,) = snapshots(disk)
    again = Quorum.open(DIR, disk, snapshot_after_bytes=1000)
    assert again.image == quorum.image and settings_in(again.image) == 30
    image, term, size = load_snapshot(disk, DIR)
    assert name == snapshot_name(image.index, term) and 1 < image.index <= 30
    assert size == disk.stat(f"{DIR}/{name}").size_bytes


def test_a_snapshot_that_cannot_be_written_does_not_stop_the_log(disk) -> None:
    quorum = Quorum.open(DIR, disk, snapshot_after_bytes=300)
    disk.fail("write", "snapshot")
    for number in range(4):
        quorum.propose(setting(number, size=100))
        if quorum.last_snapshot_error:
            break
    assert "snapshot" in (quorum.last_snapshot_error or "")
    quorum.propose(setting(number + 1, size=100))
    assert quorum.last_snapshot_error is None and len(snapshots(disk)) == 1
    assert settings_in(Quorum.open(DIR, disk).image) == number + 2


def test_a_snapshot_ahead_of_the_log_replaces_it(disk) -> None:
    """As after another voter's snapshot was taken over."""
    Quorum.open(DIR, disk).propose(setting(0))
    image, _ = Image().apply([*setting(0), *setting(1)])
    write_snapshot(disk, DIR, replace(image, index=50), 7)
    for seed in range(3):
        after = disk.after_power_loss(seed)
        quorum = Quorum.open(DIR, after)
        assert (quorum.image.index, quorum.term) == (50, 8)
        assert quorum.propose(setting(2)) == 51
        assert settings_in(Quorum.open(DIR, after).image) == 3


def test_a_snapshot_is_its_image_again() -> None:
    image, _ = Image().apply([ClusterRecord("x"), *setting(0), TopicRecord("t", UUID(int=7))])
    assert decode_snapshot("p", encode_snapshot(image, 4)) == (image, 4)


@pytest.mark.parametrize("position", range(0, 90, 7))
def test_a_damaged_snapshot_is_refused(disk, position) -> None:
    quorum = Quorum.open(DIR, disk, snapshot_after_bytes=100)
    for number in range(3):
        quorum.propose(setting(number, size=30))
    path = f"{DIR}/{snapshots(disk)[0]}"
    disk.flip_bit(path, position)
    with pytest.raises((DamagedData, DirectoryRefused)) as caught:
        Quorum.open(DIR, disk)
    assert path in str(caught.value)


def test_a_log_that_begins_behind_the_snapshot_is_refused(disk) -> None:
    quorum = Quorum.open(DIR, disk, snapshot_after_bytes=100)
    for number in range(3):
        quorum.propose(setting(number, size=30))
    disk.unlink(f"{DIR}/{snapshots(disk)[0]}")
    with pytest.raises(DamagedData, match="begins after entry"):
        Quorum.open(DIR, disk)


# Faults.


def test_an_entry_of_a_newer_kept_is_refused(disk) -> None:
    Quorum.open(DIR, disk).propose(setting(0))
    WriteAheadLog.open(DIR, disk).append([Entry(1, 2, b"\0\0\0\1\0\0\0\2\xc8\0")])
    with pytest.raises(DirectoryRefused, match="entry 2: metadata record of type 200"):
        Quorum.open(DIR, disk)


def test_an_entry_that_is_no_batch_is_damage(disk) -> None:
    Quorum.open(DIR, disk).propose(setting(0))
    WriteAheadLog.open(DIR, disk).append([Entry(1, 2, b"\0\0\0\1")])
    with pytest.raises(DamagedData, match="entry 2"):
        Quorum.open(DIR, disk)


def test_a_failed_write_changes_nothing(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    quorum.propose(setting(0))
    disk.fail("write", WAL_NAME, partial=True)
    with pytest.raises(MachineError):
        quorum.propose(setting(1))
    assert settings_in(quorum.image) == 1
    quorum.propose(setting(1))
    assert settings_in(Quorum.open(DIR, disk).image) == 2


def test_after_a_failed_fsync_nothing_is_accepted(disk) -> None:
    quorum = Quorum.open(DIR, disk)
    disk.fail("fsync", WAL_NAME)
    with pytest.raises(MachineError):
        quorum.propose(setting(0))
    with pytest.raises(KafkaStorageError):
        quorum.propose(setting(0))
    assert quorum.image.index == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 90), st.integers(0, 2**31), st.booleans(), st.sampled_from([150, 100_000]))
def test_a_crash_at_any_call_loses_nothing_acknowledged(call, seed, power, limit) -> None:
    disk = SimulatedDisk(seed=seed)
    disk.crash_at(call)
    acknowledged = 0
    try:
        quorum = Quorum.open(DIR, disk, snapshot_after_bytes=limit)
        for number in range(12):
            if number == 6:
                quorum = Quorum.open(DIR, disk, snapshot_after_bytes=limit)
            quorum.propose(setting(number, size=20))
            acknowledged = number + 1
    except SimulatedCrash:
        pass
    after = disk.after_power_loss(seed) if power else disk.after_kill()
    again = Quorum.open(DIR, after, snapshot_after_bytes=limit)
    found = settings_in(again.image)
    assert acknowledged <= found <= acknowledged + 1
    assert again.image.index == found
    again.propose(setting(found))
    last = Quorum.open(DIR, after.after_power_loss(seed + 1), snapshot_after_bytes=limit)
    assert settings_in(last.image) == found + 1
    assert last.term > again.term
