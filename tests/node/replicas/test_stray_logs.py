"""Logs that the image does not want: of topics deleted while the node was down, or unknown."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import uuid
from typing import Any

import pytest
from msgspec.structs import replace

from kept.cluster.metadata import metadata_files
from kept.cluster.metadata.records import (
    ConfigRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kept.cluster.metadata.replica_history import FILE, ReplicaHistory
from kept.cluster.metadata.wal import WAL_NAME, WriteAheadLog
from kept.node.replicas import log_opener
from kept.node.replicas.stray_logs import StrayLogs
from kept.node.runtime import time_slices
from kept.storage import layout
from kept.storage.checkpoints import write_partition_metadata
from kept.storage.directory import FoundLog
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, MachineError
from kept.storage.inspect.check import check_directory
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition
from tests.support.decisions import propose
from tests.support.given import Given
from tests.support.loops import until


def delete_without_the_disk(lone, name: str) -> None:
    """Delete a topic, and stop before its logs are renamed."""
    lone.run(lone.node.parts.replicas.log_lifecycle.stop())
    lone.run(
        propose(
            lone.node, [RemoveTopicRecord(lone.node.parts.metadata.image.topics[name].topic_id)]
        )
    )


def append(lone, tp: TopicPartition) -> None:
    partition = lone.node.parts.table.partition(tp)
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()


@pytest.fixture
def two_directories(lone_node, tmp_path):
    """Starts a node over two log directories, the first with a log of a deleted topic."""
    first, second = (str(tmp_path / name) for name in "ab")
    settings = {"log_dirs": f"{first},{second}", "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("gone")
    assert os.path.isdir(f"{first}/gone-0")
    delete_without_the_disk(lone, "gone")
    lone.stop()
    return lambda: lone_node(**settings), first, second


@pytest.fixture
def created_at_once(monkeypatch) -> None:
    """All logs of a topic are created in one turn, however slow the machine is."""
    monkeypatch.setattr(time_slices, "SLICE_S", 60.0)


def test_a_log_of_a_deleted_topic_is_deleted(two_directories):
    start, first, _ = two_directories
    start()
    assert [name[:4] for name in os.listdir(first) if name.endswith("-delete")] == ["gone"]


def test_a_deletion_that_only_a_snapshot_knows_is_still_carried_out(lone_node, tmp_path):
    settings = {
        "log_dirs": str(tmp_path / "log"),
        "metadata_log_dir": str(tmp_path / "meta"),
        "metadata_log_max_record_bytes_between_snapshots": "1",
    }
    lone = lone_node(**settings)
    lone.create("gone")
    delete_without_the_disk(lone, "gone")
    lone.run(propose(lone.node, [ConfigRecord(4, "", "k", "v")]))
    lone.stop()
    assert list((tmp_path / "meta").glob("snapshot-*"))
    assert WriteAheadLog.open(str(tmp_path / "meta"), Disk({})).base_index > 2
    again = lone_node(**settings)
    assert "gone" not in again.node.parts.metadata.image.topics
    assert list((tmp_path / "log").glob("gone-0.*-delete"))
    assert again.node.parts.replicas.strays.paths == []


def test_a_log_that_nobody_has_deleted_is_set_aside_and_named(lone_node, tmp_path, capfd):
    """The end of the metadata log is lost, and with it the topics that it created."""
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    wal = tmp_path / "meta" / WAL_NAME
    before = wal.stat().st_size
    lone.create("lost", partitions=2)
    append(lone, TopicPartition("lost", 0))
    topic_id = lone.node.parts.metadata.image.topics["lost"].topic_id
    lone.stop()
    whole = wal.read_bytes()
    wal.write_bytes(whole[:before] + bytes(len(whole) - before))
    with pytest.raises(DamagedData, match="had applied entry") as refused:
        lone_node(**settings)
    said = str(refused.value)
    assert "1 entries that were durable are gone" in said
    assert f"{len(whole) - before} bytes from byte {before} on" in said and "zeros" in said
    assert wal.stat().st_size == len(whole), "nothing is cut"

    (tmp_path / "meta" / FILE).unlink()  # go on without: somebody says so
    capfd.readouterr()
    again = lone_node(**settings)
    paths = again.node.parts.replicas.strays.paths
    assert [os.path.basename(path)[:7] for path in paths] == ["lost-0.", "lost-1."]
    assert all(path.endswith("-stray") for path in paths)
    said = capfd.readouterr().err
    assert 'event="end of the metadata log cut"' in said and "level=warning" in said
    assert said.count('event="log set aside"') == 2 and paths[0] in said
    assert "log of a deleted topic" not in said
    status, _, body = again.http("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200 and f"log set aside: {paths[0]}\n".encode() in body
    findings = [str(one) for one in check_directory(str(tmp_path / "log"))]
    assert any("kept until you remove it" in one for one in findings)

    again.create("lost")  # another topic of that name leaves them alone
    again.stop()
    third = lone_node(**settings)
    assert third.node.parts.replicas.strays.paths == paths
    third.run(
        propose(
            third.node, [RemoveTopicRecord(third.node.parts.metadata.image.topics["lost"].topic_id)]
        )
    )
    known = [TopicRecord("lost", topic_id)]
    known += [PartitionRecord(topic_id, n, (0,), (0,), 0, 0, 0) for n in range(2)]
    third.run(propose(third.node, known))  # as when another voter's log has them
    assert third.node.parts.table.partition(TopicPartition("lost", 0)).log.log_end_offset == 1
    assert third.node.parts.table.partition(TopicPartition("lost", 1)).log.log_end_offset == 0
    assert third.node.parts.replicas.strays.paths == []
    third.stop()
    assert (
        lone_node(**settings).node.parts.table.partition(TopicPartition("lost", 0)).high_watermark
        == 1
    )


def test_after_a_crash_too_no_log_goes_that_nobody_has_deleted(lone_node, tmp_path):
    """It crashed before it remembered how far it had applied the log: only the logs tell."""
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    wal = tmp_path / "meta" / WAL_NAME
    before = wal.stat().st_size
    lone.create("lost")
    shutil.copytree(tmp_path / "meta", tmp_path / "crashed")
    lone.stop()
    settings["metadata_log_dir"] = str(tmp_path / "crashed")
    whole = (tmp_path / "crashed" / WAL_NAME).read_bytes()
    (tmp_path / "crashed" / WAL_NAME).write_bytes(whole[:before] + bytes(len(whole) - before))
    again = lone_node(**settings)
    (path,) = again.node.parts.replicas.strays.paths
    assert os.path.basename(path).startswith("lost-0.")


def test_a_replica_that_moved_away_is_deleted(lone_node, tmp_path):
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("moved")
    lone.run(lone.node.parts.replicas.log_lifecycle.stop())
    state = lone.node.parts.metadata.image.partition("moved", 0)
    away = replace(state, replicas=(5,), isr=(5,), leader=5, leader_epoch=1, partition_epoch=1)
    lone.run(propose(lone.node, [away]))
    lone.stop()
    lone_node(**settings)
    assert list((tmp_path / "log").glob("moved-0.*-delete"))


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
    lines = capfd.readouterr().err.splitlines()
    (kept,) = (line for line in lines if "left alone" in line)
    (removed,) = (line for line in lines if "a creation that was interrupted" in line)
    assert f"{first}/full-0" in kept and "topic=unborn" in removed


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
    directories = {one.name: one.offline for one in lone.node.parts.table.directories}
    assert "I/O error" in directories[first] and directories[second] is None
    lone.create("t")
    assert os.path.isdir(f"{second}/t-0")


def test_a_directory_that_fails_in_a_creation_serves_none_of_its_new_logs(
    two_directories, created_at_once, monkeypatch
):
    start, first, second = two_directories
    lone = start()
    monkeypatch.setattr(log_opener, "LOGS_A_JOB", 1)
    real = Disk.mkdir
    failed: list[str] = []

    def failing(disk, path):
        if path.startswith(f"{first}/t-") and not failed:
            failed.append(path)
            raise MachineError(path, "mkdir", OSError(errno.EIO, "I/O error"))
        return real(disk, path)

    monkeypatch.setattr(Disk, "mkdir", failing)
    lone.create("t", partitions=8)
    topic = lone.node.parts.table.by_name[b"t"]
    lone.run(asyncio.wait_for(until(lambda: len(topic.offline) == 4), 60))
    assert failed, "the emptier directory takes every second one"
    assert {one.directory.name for one in topic.partitions.values()} == {second}
    assert len(topic.partitions) == 4


@pytest.mark.parametrize("logs_a_job", [1, 64])
def test_a_log_whose_files_go_while_it_is_made_keeps_no_other_from_being_made(
    two_directories, created_at_once, monkeypatch, logs_a_job
):
    """Somebody removes its directory: an error that nobody raises on purpose."""
    start, first, _ = two_directories
    lone = start()
    monkeypatch.setattr(log_opener, "LOGS_A_JOB", logs_a_job)
    real = Disk.listdir
    gone: list[str] = []

    def failing(disk, path):
        if path.startswith(f"{first}/t-") and not gone:
            gone.append(path)
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return real(disk, path)

    monkeypatch.setattr(Disk, "listdir", failing)
    lone.create("t", partitions=8)
    topic = lone.node.parts.table.by_name[b"t"]
    wanted = 7 if logs_a_job == 1 else 8  # of several, each is tried once more
    lone.run(asyncio.wait_for(until(lambda: len(topic.partitions) == wanted), 60))
    assert gone and len(topic.offline) == 8 - wanted
    assert not lone.node.parts.replicas.left_closed.begun


def test_a_log_that_was_removed_by_hand_is_told(lone_node, tmp_path, capfd):
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("t")
    lone.create("empty")
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
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
    assert again.node.parts.table.partition(TopicPartition("t", 0)).log.log_end_offset == 0


@pytest.fixture
def filled(lone_node, tmp_path):
    """Starts a node whose topic ``t`` has a record; and where that is."""
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    lone.create("t")
    lone.create("other")
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()
    lone.stop()
    return lambda: lone_node(**settings), tmp_path / "log" / "t-0"


@pytest.mark.parametrize("seen", [True, False])
def test_a_log_of_another_topic_makes_room_for_one_of_the_same_name(filled, monkeypatch, seen):
    """It was deleted and made anew while the node was down; or nobody has ``seen`` that."""
    start, path = filled
    topic_id = uuid.uuid4()
    write_partition_metadata(Disk({}), str(path / layout.PARTITION_METADATA), topic_id)
    if seen:
        removed = ReplicaHistory(0, removed={(topic_id, 0)})
        monkeypatch.setattr(metadata_files, "read_history", lambda *_: removed)
    partition = start().node.parts.table.partition(TopicPartition("t", 0))
    assert partition.offline is None
    assert partition.log.log_end_offset == 0
    (gone,) = path.parent.glob("t-0.*-delete" if seen else "t-0.*-stray")
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
    assert (
        "partition.metadata: damaged: topic id is" in lone.node.parts.table.by_name[b"t"].offline[0]
    )
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
    parts = lone_node(**settings).node.parts
    topic = parts.table.by_name[b"t"]
    assert set(topic.partitions) == {1 - twice.partition}
    assert parts.admin.health.offline_replicas() == [twice.place]
    said = f"several times: {first}/t-{twice.partition}, {second}/t-{twice.partition}; move all but"
    assert said in capfd.readouterr().err
    told = topic.offline[twice.partition]
    assert "several times: move all but the newest elsewhere; the node's log has" in told
    assert str(tmp_path) not in told
    assert os.path.isdir(f"{first}/t-{twice.partition}")
    assert os.path.isdir(f"{second}/t-{twice.partition}")


@pytest.mark.parametrize("known", [True, False])
def test_a_directory_set_aside_before_is_listed_unless_its_removal_was_seen(known):
    """One that does not say whose it is as well; a disk that cannot remove it fails."""
    failed, error = [], MachineError("/d", "remove_tree", OSError(errno.EIO, "I/O error"))
    topic_id = uuid.uuid4()

    async def run(_function, *_given):
        raise error

    directory: Any = Given(name="/d", pool=Given(run=run), offline=None)
    strays = StrayLogs(
        Given(disk__remove_tree=None),  # type: ignore[arg-type]
        Given(raft_node__history__removed={(topic_id, 0)}),  # type: ignore[arg-type]
        Given(fail=lambda *given: failed.append(given)),  # type: ignore[arg-type]
    )
    found = FoundLog("t-0.x-stray", TopicPartition("t", 0), topic_id if known else None, False)
    asyncio.run(strays.add(directory, found))
    assert strays.paths == ([] if known else ["/d/t-0.x-stray"])
    assert failed == ([(directory, error)] if known else [])
