"""Logs of topics that were deleted while the node was down."""

from __future__ import annotations

import errno
import os
import shutil
import uuid

import pytest

from kept.node import hosting
from kept.storage import layout
from kept.storage.checkpoints import write_partition_metadata
from kept.storage.disk import Disk
from kept.storage.errors import MachineError
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition


@pytest.fixture
def two_directories(lone_node, tmp_path):
    """Starts a node over two log directories, the first with a log that no topic owns."""
    first, second = (str(tmp_path / name) for name in "ab")
    settings = {"log_dirs": f"{first},{second}", "metadata_log_dir": str(tmp_path / "meta")}
    lone_node(**settings).stop()
    os.mkdir(f"{first}/gone-0")
    disk = Disk({})
    write_partition_metadata(disk, f"{first}/gone-0/{layout.PARTITION_METADATA}", uuid.uuid4())
    return lambda: lone_node(**settings), first, second


def test_a_stray_is_deleted(two_directories):
    start, first, _ = two_directories
    start()
    assert [name[:4] for name in os.listdir(first) if name.endswith("-delete")] == ["gone"]


def test_a_creation_that_was_interrupted_is_removed_what_may_hold_records_is_not(
    two_directories, capfd
):
    """Both without the file that says whose they are."""
    start, first, _ = two_directories
    os.mkdir(f"{first}/unborn-0")
    open(f"{first}/unborn-0/{0:020}.log", "wb").close()
    os.mkdir(f"{first}/full-0")
    with open(f"{first}/full-0/{0:020}.log", "wb") as file:
        file.write(build_batch([(1000, b"k", b"v", ())]))
    start()
    assert not os.path.exists(f"{first}/unborn-0")
    assert os.path.getsize(f"{first}/full-0/{0:020}.log") > 0
    assert "left alone" in capfd.readouterr().err


@pytest.mark.parametrize("call", ["rename", "listdir"])
def test_a_disk_error_on_a_stray_takes_its_directory_offline_and_no_more(
    two_directories, monkeypatch, call
):
    start, first, second = two_directories
    real = getattr(Disk, call)

    def failing(disk, path, *more):
        if path.startswith(f"{first}/gone"):
            raise MachineError(path, call, OSError(errno.EIO, "I/O error"))
        return real(disk, path, *more)

    monkeypatch.setattr(Disk, call, failing)
    lone = start()
    directories = {one.name: one.offline for one in lone.node.hosting.directories}
    assert "I/O error" in directories[first] and directories[second] is None
    lone.create("t")
    assert os.path.isdir(f"{second}/t-0")


def test_a_directory_that_fails_in_a_creation_serves_none_of_its_new_logs(
    two_directories, monkeypatch
):
    start, first, second = two_directories
    lone = start()
    monkeypatch.setattr(hosting, "LOGS_A_JOB", 1)
    real = Disk.mkdir
    failed: list[str] = []

    def failing(disk, path):
        if path.startswith(f"{first}/t-") and not failed:
            failed.append(path)
            raise MachineError(path, "mkdir", OSError(errno.EIO, "I/O error"))
        return real(disk, path)

    monkeypatch.setattr(Disk, "mkdir", failing)
    lone.create("t", partitions=8)
    topic = lone.node.hosting.by_name[b"t"]
    assert failed and len(topic.offline) == 4, "the emptier directory takes every second one"
    assert {one.directory.name for one in topic.partitions.values()} == {second}
    assert len(topic.partitions) == 4


def test_a_log_that_was_removed_by_hand_is_told(lone_node, tmp_path, capfd):
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("t")
    lone.create("empty")
    partition = lone.node.partition(TopicPartition("t", 0))
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()
    lone.stop()
    for name in ("t-0", "empty-0"):
        shutil.rmtree(tmp_path / "log" / name)
    capfd.readouterr()
    again = lone_node(**settings)
    said = capfd.readouterr().err
    assert f'path={tmp_path}/log/t-0 why="its records, up to offset 1' in said
    assert "empty" not in said
    assert again.node.partition(TopicPartition("t", 0)).log.log_end_offset == 0


@pytest.fixture
def filled(lone_node, tmp_path):
    """Starts a node whose topic ``t`` has a record; and where that is."""
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("t")
    lone.create("other")
    partition = lone.node.partition(TopicPartition("t", 0))
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()
    lone.stop()
    return lambda: lone_node(**settings), tmp_path / "log" / "t-0"


def test_a_log_of_a_deleted_topic_makes_room_for_one_of_the_same_name(filled):
    """It was deleted and made anew while the node was down."""
    start, path = filled
    write_partition_metadata(Disk({}), str(path / layout.PARTITION_METADATA), uuid.uuid4())
    partition = start().node.partition(TopicPartition("t", 0))
    assert partition.offline is None
    assert partition.log.log_end_offset == 0
    (gone,) = path.parent.glob("t-0.*-delete")
    assert (gone / f"{0:020}.log").stat().st_size > 0, "it goes after file.delete.delay.ms"


@pytest.mark.parametrize("wrong", ["a byte", "another topic's"])
def test_an_id_that_is_damaged_or_another_topics_deletes_no_log(filled, wrong):
    start, path = filled
    file = path / layout.PARTITION_METADATA
    text = file.read_bytes()
    if wrong == "a byte":
        damaged = text[:-5] + (b"A" if text[-5:-4] != b"A" else b"B") + text[-4:]
    else:
        damaged = (path.parent / "other-0" / layout.PARTITION_METADATA).read_bytes()
    file.write_bytes(damaged)
    lone = start()
    assert "partition.metadata: damaged: topic id is" in lone.node.hosting.by_name[b"t"].offline[0]
    assert (path / f"{0:020}.log").stat().st_size > 0
    assert file.read_bytes() == damaged


def test_a_log_that_is_there_twice_is_neither_opened_nor_removed(lone_node, tmp_path, capfd):
    """An old copy in the first directory must not be taken for the log, nor the log for a stray."""
    first, second = (str(tmp_path / name) for name in "ab")
    settings = {"log_dirs": f"{first},{second}", "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("t", partitions=2)
    lone.stop()
    twice = TopicPartition("t", next(n for n in (0, 1) if os.path.exists(f"{second}/t-{n}")))
    shutil.copytree(f"{second}/t-{twice.partition}", f"{first}/t-{twice.partition}")
    topic = lone_node(**settings).node.hosting.by_name[b"t"]
    assert set(topic.partitions) == {1 - twice.partition}
    said = f"several times: {first}/t-{twice.partition}, {second}/t-{twice.partition}; move all but"
    assert said in topic.offline[twice.partition]
    assert said in capfd.readouterr().err
    assert os.path.isdir(f"{first}/t-{twice.partition}")
    assert os.path.isdir(f"{second}/t-{twice.partition}")
