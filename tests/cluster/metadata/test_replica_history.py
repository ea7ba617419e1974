"""What a node remembers of its own replicas: removals, unclean elections, how far it applied."""

from __future__ import annotations

from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.dump import dump_metadata, is_metadata_file
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import PartitionRecord, RemoveTopicRecord, TopicRecord
from kept.cluster.metadata.replica_history import FILE, ReplicaHistory, read_history, write_history
from kept.cluster.metadata.snapshot import difference
from kept.cluster.metadata.wal import WAL_NAME, WriteAheadLog
from kept.storage.errors import DamagedData
from tests.support.simulated_disk import SimulatedDisk

DIR = "/data/meta"
ME = 0
TOPIC = UUID(int=7)
KEY = (TOPIC, 0)


class Story:
    """One partition on the nodes 0 to 2, as node 0 hears of it entry by entry."""

    def __init__(self, isr=(0, 1, 2)) -> None:
        self.history = ReplicaHistory(ME)
        self.image = Image()
        self.state = PartitionRecord(TOPIC, 0, (0, 1, 2), isr, isr[0], 0, 0)
        self.apply(TopicRecord("t", TOPIC), self.state)

    def apply(self, *records) -> None:
        self.image, delta = self.image.apply(records)
        self.history.observe(self.image.index, delta)

    def change(self, leader: int, isr: tuple[int, ...], *, unclean: bool = False, **more) -> None:
        epoch = self.state.leader_epoch + (leader != self.state.leader)
        self.state = replace(
            self.state,
            leader=leader,
            leader_epoch=epoch,
            isr=isr,
            unclean=unclean,
            partition_epoch=self.state.partition_epoch + 1,
            **more,
        )
        self.apply(self.state)

    def alone_then_unclean(self) -> None:
        """Node 0 leads alone, and dies; node 1 is elected from outside the ISR."""
        self.change(0, (0,))
        self.change(-1, (0,))
        self.change(1, (1,), unclean=True)

    @property
    def epoch(self) -> int | None:
        return self.history.unclean.get(KEY)


def test_an_unclean_election_is_remembered_after_its_mark_is_cleared():
    story = Story()
    story.alone_then_unclean()
    assert story.epoch == story.state.leader_epoch == 2
    story.change(1, (1, 2))
    assert not story.state.unclean and story.epoch == 2
    story.change(2, (2,))  # a clean election after it
    assert (story.state.leader_epoch, story.epoch) == (3, 2)


def test_the_last_of_two_counts():
    story = Story()
    story.alone_then_unclean()
    story.change(2, (2,), unclean=True)
    assert story.epoch == story.state.leader_epoch == 3


def test_it_is_forgotten_once_the_replica_is_in_sync_again():
    story = Story()
    story.alone_then_unclean()
    story.change(1, (1, 0))
    assert story.epoch is None


def test_who_is_elected_and_clean_elections_are_not_concerned():
    story = Story()
    story.change(1, (1, 2))
    story.change(2, (2,))
    assert story.epoch is None
    story.change(0, (0,), unclean=True)
    assert story.epoch is None, "it leads itself"


def test_a_leader_that_comes_back_into_its_own_isr_is_elected_cleanly():
    """Its mark of an earlier election is still there."""
    story = Story()
    story.alone_then_unclean()
    story.change(-1, (1,), unclean=True)
    story.change(1, (1,), unclean=True)
    assert (story.state.leader_epoch, story.epoch) == (4, 2)


def test_what_a_snapshot_hides_may_have_been_unclean():
    story = Story()
    before = story.image
    heard = story.history.copy()
    story.change(1, (1, 2))
    story.change(2, (2,))
    heard.observe(story.image.index, difference(before, story.image), hidden=True)
    assert heard.unclean == {KEY: 2}
    same = ReplicaHistory(ME)
    same.observe(1, difference(before, before), hidden=True)
    assert same.unclean == {}


def test_a_start_from_a_snapshot_that_was_not_observed():
    story = Story()
    story.change(1, (1, 2))
    behind = ReplicaHistory(ME)
    behind.begin(story.image)
    assert behind.unclean == {KEY: 1}
    current = ReplicaHistory(ME, observed_index=story.image.index)
    current.begin(story.image)
    assert current.unclean == {}


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_removals_are_remembered_until_they_are_carried_out(how):
    story = Story()
    story.alone_then_unclean()
    if how == "deleted":
        story.apply(RemoveTopicRecord(TOPIC))
    else:
        story.change(1, (1,), replicas=(1, 2))
    assert story.history.removed == {KEY} and story.epoch is None
    if how == "moved":
        story.change(1, (1,), replicas=(1, 2, 0))
        assert not story.history.removed, "it is wanted again"
        return
    story.history.forget_removed([KEY])
    assert not story.history.removed


def test_it_is_read_as_it_was_written_and_damage_is_named():
    disk = SimulatedDisk(seed=1)
    disk.mkdir("/data")
    disk.mkdir(DIR)
    history = ReplicaHistory(3, 17, 19, {KEY, (UUID(int=9), 4)}, {KEY: 5, (TOPIC, 8): 6})
    write_history(disk, DIR, history)
    assert read_history(disk, DIR, 3) == history
    assert read_history(disk, DIR, 4) == ReplicaHistory(4), "another node's"
    assert is_metadata_file(f"{DIR}/{FILE}")
    assert list(dump_metadata(f"{DIR}/{FILE}", disk)) == [
        "node 3, applied entry 17",
        f"  removed: partition 0 of topic id {TOPIC}",
        f"  removed: partition 4 of topic id {UUID(int=9)}",
        f"  unclean in epoch 5: partition 0 of topic id {TOPIC}",
        f"  unclean in epoch 6: partition 8 of topic id {TOPIC}",
    ]
    data = bytearray(disk.read(f"{DIR}/{FILE}"))
    data[20] ^= 1
    disk.write_atomic(f"{DIR}/{FILE}", bytes(data))
    with pytest.raises(DamagedData, match="remove it"):
        read_history(disk, DIR, 3)


# With the files of a member.


def open_member(disk: SimulatedDisk, **more) -> MetadataNode:
    return MetadataNode.open(
        DIR, disk, node_id=ME, directory_id=UUID(int=100), random=lambda _: 0, **more
    )


def propose(member: MetadataNode, *records) -> None:
    member.propose(records)
    work(member)


def work(member: MetadataNode) -> None:
    while (job := member.work()) is not None:
        job.run()
        member.done(job)


def alone_then_unclean(member: MetadataNode) -> None:
    state = PartitionRecord(TOPIC, 0, (0, 1), (0,), 0, 0, 0)
    propose(member, TopicRecord("t", TOPIC), state)
    unclean = replace(state, leader=1, isr=(1,), leader_epoch=1, partition_epoch=1, unclean=True)
    propose(member, unclean)
    propose(member, replace(unclean, unclean=False, partition_epoch=2))


@pytest.mark.parametrize("snapshot_after_bytes", [1, 1 << 20])
def test_a_restart_remembers_elections_and_removals_also_behind_a_snapshot(snapshot_after_bytes):
    disk = SimulatedDisk(seed=1)
    member = open_member(disk, snapshot_after_bytes=snapshot_after_bytes)
    alone_then_unclean(member)
    gone = UUID(int=9)
    propose(member, TopicRecord("gone", gone), PartitionRecord(gone, 0, (0,), (0,), 0, 0, 0))
    propose(member, RemoveTopicRecord(gone))
    for number in range(3):
        topic_id = UUID(int=50 + number)
        propose(member, TopicRecord(f"more{number}", topic_id))
    assert (disk.exists(f"{DIR}/{FILE}")) == (snapshot_after_bytes == 1)
    again = open_member(disk.after_kill())
    assert again.image.partition("t", 0).unclean is False
    assert again.history.unclean == {KEY: 1}
    assert again.history.removed == {(gone, 0)}


def test_an_end_that_was_applied_and_is_missing_is_refused_and_not_cut():
    disk = SimulatedDisk(seed=1)
    member = open_member(disk)
    path = f"{DIR}/{WAL_NAME}"
    sizes = []
    for number in range(12):
        sizes.append(disk.size(disk.open_read(path)))
        propose(member, TopicRecord(f"t{number}", UUID(int=number + 1)))
    job = member.remember_applied()
    job.run()
    assert member.remember_applied() is None
    last = member.image.index
    data = disk.read(path)
    lost = len(data) - sizes[4]
    disk.write_atomic(path, data[: sizes[4]] + bytes(lost))
    with pytest.raises(DamagedData) as refused:
        open_member(disk)
    said = str(refused.value)
    assert f"{lost} bytes from byte {sizes[4]} on" in said and "are zeros" in said
    assert f"applied entry {last}" in said and "8 entries that were durable are gone" in said
    assert "kept cluster voter add" in said and FILE in said
    assert len(disk.read(path)) == len(data)
    disk.unlink(f"{DIR}/{FILE}")  # somebody says so
    again = open_member(disk)
    assert "t3" in again.image.topics and "t4" not in again.image.topics
    assert f"{lost} bytes from byte {sizes[4]} on" in again.cut_at_start


@pytest.mark.parametrize("zeroed", [40, 2_250])
def test_zeros_that_begin_within_an_entry_are_named_from_its_first_byte_on(zeroed):
    disk = SimulatedDisk(seed=1)
    member = open_member(disk)
    path = f"{DIR}/{WAL_NAME}"
    begins = []
    for number in range(60):
        begins.append(disk.size(disk.open_read(path)))
        propose(member, TopicRecord(f"t{number}", UUID(int=number + 1)))
    member.remember_applied().run()
    data = disk.read(path)
    first = max(begin for begin in begins if begin <= len(data) - zeroed)
    gone = len(begins) - begins.index(first)
    assert first < len(data) - zeroed, "it begins within an entry"
    damaged = data[:-zeroed] + bytes(zeroed)
    disk.write_atomic(path, damaged)
    with pytest.raises(DamagedData) as refused:
        open_member(disk)
    said = str(refused.value)
    assert f"{len(data) - first} bytes from byte {first} on" in said
    assert f"{gone} entries that were durable are gone" in said
    assert disk.read(path) == damaged, "nothing is cut"


def test_what_a_torn_append_leaves_is_cut_and_said_and_a_whole_log_is_not():
    disk = SimulatedDisk(seed=1)
    member = open_member(disk)
    propose(member, TopicRecord("t", UUID(int=1)))
    member.remember_applied().run()
    path = f"{DIR}/{WAL_NAME}"
    data = disk.read(path)
    assert open_member(disk.after_kill()).cut_at_start is None
    propose(member, TopicRecord("u", UUID(int=2)))
    longer = disk.read(path)
    disk.write_atomic(path, longer[:-3])
    cut = open_member(disk).cut_at_start
    rest = len(longer) - 3 - len(data)
    assert cut == (
        f"{rest} bytes from byte {len(data)} on, behind entry {member.image.index - 1}, "
        "are no whole entry"
    )
    assert WriteAheadLog.open(DIR, disk).cut is None
