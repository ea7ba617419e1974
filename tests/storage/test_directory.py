"""Whose a data directory is, what a clean stop leaves, and what a crash does not.

Long because what is said of a directory is shown by the same few directories of logs.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from kept.storage import checkpoints, layout
from kept.storage.checkpoints import read_epochs
from kept.storage.directory import (
    GONE_MS,
    Checkpoint,
    ClosedLog,
    LogDirectory,
    NewLog,
    previous_broker_epoch,
)
from kept.storage.disk import Disk, parse_fail_point
from kept.storage.errors import (
    DamagedData,
    DirectoryInUse,
    DirectoryRefused,
    MachineError,
    ResourceExhausted,
)
from kept.storage.log.durability import FlushTicket
from kept.storage.log.log import Log
from kept.storage.producers.producer_states import ProducerQuota
from kept.storage.types import LogConfig, TopicPartition
from tests.support.logs import create_log
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

TP = TopicPartition("t", 0)
DIRECTORY_ID = uuid.UUID("aaaaaaaa-2222-3333-4444-555555555555")


def opened(disk: Disk, path: str = "/d", cluster_id: str = "c", node_id: int = 1) -> LogDirectory:
    return LogDirectory.open(
        path, disk, cluster_id=cluster_id, node_id=node_id, new_directory_id=DIRECTORY_ID, now_ms=0
    )


def test_a_new_directory_gets_its_papers(disk) -> None:
    directory = opened(disk)
    assert directory.directory_id == DIRECTORY_ID and not directory.was_clean
    text = disk.read("/d/meta.properties").decode()
    assert "cluster.id=c\n" in text and "node.id=1\n" in text and "version=1\n" in text
    directory.close(broker_epoch=7)
    again = opened(disk)
    assert again.was_clean and again.broker_epoch == 7
    again.close(clean=False)
    assert not opened(disk).was_clean


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], -1),
        ([7], 7),
        ([None], -1),
        ([7, 7, 7], 7),
        ([7, None], -1),
        ([None, 7], -1),
        ([6, 7], -1),
        ([7, 6, 7], -1),
        ([0, 0], 0),
    ],
)
def test_a_process_stopped_cleanly_where_all_its_directories_say_the_same(
    disk, marks, expected
) -> None:
    """``marks``: with which epoch each directory was closed the last time, None: it was not."""
    paths = [f"/d{number}" for number in range(len(marks))]
    for path, mark in zip(paths, marks, strict=True):
        directory = opened(disk, path)
        directory.close(clean=mark is not None, broker_epoch=-1 if mark is None else mark)
    assert previous_broker_epoch(opened(disk, path) for path in paths) == expected


def test_the_clean_mark_never_comes_back(disk) -> None:
    directory = opened(disk)
    directory.close()
    again = opened(disk)
    assert again.was_clean
    for seed in range(30):
        assert not disk.after_power_loss(seed).exists(f"/d/{layout.CLEAN_SHUTDOWN}")


@pytest.mark.parametrize("changed", [{"cluster_id": "other"}, {"node_id": 2}])
def test_somebody_elses_directory_is_refused(disk, changed) -> None:
    opened(disk).close()
    with pytest.raises(DirectoryRefused):
        opened(disk, **changed)
    assert opened(disk).was_clean, "refusing changed nothing"


@pytest.mark.parametrize("papers", [b"version=1\nnode.id=1\n", b"version=0\nbroker.id=1\n"])
@pytest.mark.parametrize("path", ["/d", "/d/log"])
def test_apache_kafkas_directory_is_refused_and_not_touched(disk, papers, path) -> None:
    disk.mkdir("/d")
    disk.write_file("/d/meta.properties", papers)
    with pytest.raises(DirectoryRefused, match="/d is Apache Kafka's"):
        opened(disk, path)
    assert disk.listdir("/d") == ["meta.properties"]


def test_a_directory_of_a_later_version_is_refused(disk) -> None:
    disk.mkdir("/d")
    disk.write_file("/d/meta.properties", b"version=2\nkept=1\n")
    with pytest.raises(DirectoryRefused, match="version"):
        opened(disk)


def test_logs_without_papers_are_refused(disk) -> None:
    disk.mkdir("/d/t-0")
    with pytest.raises(DirectoryRefused):
        opened(disk)


def test_a_directory_in_use_is_refused(tmp_path) -> None:
    directory = opened(Disk({}), str(tmp_path))
    with pytest.raises(DirectoryInUse, match="this process"):
        opened(Disk({}), str(tmp_path))
    script = (
        "from kept.storage.disk import Disk\nimport sys\n"
        "try: Disk({}).lock(sys.argv[1])\n"
        "except Exception as e: print(type(e).__name__)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / ".lock")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == "DirectoryInUse"
    directory.close()
    opened(Disk({}), str(tmp_path)).close()


def test_checkpoints_survive_and_damage_costs_only_a_scan(kit, disk) -> None:
    directory = opened(disk)
    tp = TopicPartition("t", 0)
    log = create_log(directory, tp, kit.TOPIC_ID, LogConfig(), now_ms=kit.NOW)
    kit.append(log, kit.batch(5))
    log.close()
    for kind, value in zip(Checkpoint, (5, 4, 1, 3), strict=True):
        directory.write_checkpoints(kind, {tp: value})
    directory.close(broker_epoch=2)
    again = opened(disk.after_power_loss(1))
    assert (again.recovery_points, again.high_watermarks) == ({tp: 5}, {tp: 4})
    assert (again.log_starts, again.cleaner) == ({tp: 1}, {tp: 3})
    log = again.open_log(tp, None, LogConfig(), now_ms=kit.NOW)
    assert (log.log_start_offset, log.log_end_offset, log.topic_id) == (1, 5, kit.TOPIC_ID)
    for name in (layout.RECOVERY_POINTS, layout.LOG_STARTS):
        for damage in (b"", b"0\n1\n", b"1\n0\n", b"0\n1\nt x 5\n", b"\xff", b"0\nmany\n"):
            survivor = disk.after_kill()
            survivor.write_file(f"/d/{name}", damage)
            found = opened(survivor)
            assert found.was_clean == (damage == b"")
            log = found.open_log(tp, None, LogConfig(), now_ms=kit.NOW)
            assert log.log_end_offset == 5


def test_scanning_a_directory(kit, disk, caplog) -> None:
    directory = opened(disk)
    tp = TopicPartition("a-b.c", 12)
    log = create_log(directory, tp, kit.TOPIC_ID, LogConfig(), now_ms=kit.NOW)
    disk.mkdir("/d/lost+found")
    disk.mkdir("/d/nonsense")
    assert [(f.topic_partition, f.topic_id, f.is_delete) for f in directory.scan()] == [
        (tp, kit.TOPIC_ID, False)
    ]
    assert "nonsense" in caplog.text and "lost+found" not in caplog.text
    kit.append(log, kit.batch())
    held = log.read(0, 1000, 1)
    directory.mark_deleted(log, DIRECTORY_ID, kit.NOW)
    (found,) = directory.scan()
    assert found.is_delete and found.topic_partition == tp
    assert directory.purge(kit.NOW) == 0 and disk.pread(*held)
    assert directory.purge(kit.NOW + 60_000) == 1 and directory.scan() == []
    log = create_log(directory, tp, uuid.UUID(int=9), LogConfig(), now_ms=kit.NOW)
    directory.mark_deleted(log, DIRECTORY_ID, kit.NOW)
    assert directory.purge(kit.NOW - 1) == 1, "the clock was set back: nobody knows for how long"
    log = create_log(directory, tp, uuid.UUID(int=10), LogConfig(), now_ms=kit.NOW)
    directory.mark_deleted(log, DIRECTORY_ID, kit.NOW)
    directory.close()
    assert opened(disk).finish_deletions() == 1


def test_creating_again_forgets_the_old_start(kit, disk) -> None:
    directory = opened(disk)
    tp = TopicPartition("t", 0)
    directory.write_checkpoints(Checkpoint.LOG_STARTS, {tp: 100})
    directory.close()
    log = create_log(opened(disk), tp, kit.TOPIC_ID, LogConfig(), now_ms=0)
    assert log.log_start_offset == 0


def test_offline_is_never_clean(disk) -> None:
    directory = opened(disk)
    error = MachineError("/d/x", "fsync", OSError(errno.EIO, "I/O error"))
    directory.fail(error)
    directory.fail(MachineError("/d/y", "write", OSError(errno.EIO, "I/O error")))
    assert directory.offline == "/d/x: fsync failed: I/O error"
    directory.close()
    assert not opened(disk).was_clean


def test_long_names_and_ids() -> None:
    tp = TopicPartition("t" * 249, 3)
    name = layout.deleted_directory_name(tp, DIRECTORY_ID)
    assert len(name) <= 255 and layout.parse_directory_name(name).state == "-delete"
    assert layout.decode_uuid(layout.encode_uuid(DIRECTORY_ID)) == DIRECTORY_ID
    for text in ("", "x" * 22 + "y", "!" * 22):
        with pytest.raises(ValueError):
            layout.decode_uuid(text)


@pytest.mark.parametrize("content", [b"", b"version: 0\n", b"version: 1\ntopic_id: x", b"\xff"])
def test_damaged_partition_metadata_is_reported(kit, disk, content) -> None:
    kit.open_log(disk)
    disk.write_file(f"/d/t-0/{layout.PARTITION_METADATA}", content)
    with pytest.raises(DamagedData):
        kit.open_log(disk)


def test_a_crash_anywhere_while_a_directory_is_opened_and_closed(kit) -> None:
    def run(disk: SimulatedDisk) -> None:
        directory = opened(disk)
        tp = TopicPartition("t", 0)
        log = create_log(directory, tp, kit.TOPIC_ID, LogConfig(), now_ms=kit.NOW)
        kit.append(log, kit.batch(3))
        log.close()
        directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {tp: 3})
        directory.close()
        opened(disk)

    whole = SimulatedDisk()
    run(whole)
    for call in range(1, whole.calls + 1):
        disk = SimulatedDisk(seed=call)
        disk.crash_at(call)
        with pytest.raises(SimulatedCrash):
            run(disk)
        for survivor in (disk.after_kill(), disk.after_power_loss(1), disk.after_power_loss(2)):
            directory = opened(survivor)
            for found in directory.scan():
                log = directory.open_log(
                    found.topic_partition, kit.TOPIC_ID, LogConfig(), now_ms=kit.NOW
                )
                assert log.log_end_offset in (0, 3)
                assert not directory.was_clean or log.log_end_offset == 3


def test_fail_points_are_parsed(tmp_path: Path) -> None:
    name, action = parse_fail_point("append.write=enospc:2")
    assert name == "append.write"
    action()
    with pytest.raises(OSError) as raised:
        action()
    assert raised.value.errno == errno.ENOSPC
    assert parse_fail_point("a.b:3")[0] == "a.b"
    slow = tmp_path / "slow"
    name, action = parse_fail_point(f"append.write=slow:40@{slow}")
    began = time.monotonic()
    slow.touch()
    action()
    assert name == "append.write" and time.monotonic() - began >= 0.04
    with pytest.raises(ValueError):
        parse_fail_point("a=explode")


def test_a_crash_after_creating_again_does_not_bring_the_old_start_back(disk) -> None:
    directory = opened(disk)
    tp, other = TopicPartition("t", 0), TopicPartition("other", 0)
    old = create_log(directory, tp, uuid.UUID(int=1), LogConfig(), now_ms=0)
    for kind in (Checkpoint.LOG_STARTS, Checkpoint.RECOVERY_POINTS):
        directory.write_checkpoints(kind, {tp: 500, other: 7})
    directory.mark_deleted(old, uuid.UUID(int=9), 0)
    create_log(directory, tp, uuid.UUID(int=2), LogConfig(), now_ms=0)
    again = opened(disk.after_kill())
    assert again.log_starts == {other: 7} and again.recovery_points == {other: 7, tp: 0}


def test_a_log_that_is_purged_while_it_is_scanned(disk, monkeypatch) -> None:
    directory = opened(disk)
    gone = create_log(directory, TopicPartition("t", 0), uuid.UUID(int=1), LogConfig(), now_ms=0)
    directory.mark_deleted(gone, uuid.UUID(int=9), 0)
    names = disk.listdir("/d")
    directory.finish_deletions()
    monkeypatch.setattr(disk, "listdir", lambda path: names)
    assert directory.scan() == []


@pytest.mark.parametrize("kind", Checkpoint)
def test_what_was_collected_of_a_deleted_log_does_not_reach_its_successor(disk, kind) -> None:
    directory = opened(disk)
    tp, other = TopicPartition("t", 0), TopicPartition("other", 0)
    old = create_log(directory, tp, uuid.UUID(int=1), LogConfig(), now_ms=0)
    create_log(directory, other, uuid.UUID(int=3), LogConfig(), now_ms=0)
    changes, collected = directory.version, {tp: 100, other: 7}
    directory.mark_deleted(old, uuid.UUID(int=9), 0)
    create_log(directory, tp, uuid.UUID(int=2), LogConfig(), now_ms=0)
    directory.write_checkpoints(kind, collected, changes)
    left = {other: 7, tp: 0} if kind is Checkpoint.RECOVERY_POINTS else {other: 7}
    assert directory.checkpoints[kind] == left
    again = opened(disk.after_kill())
    assert again.checkpoints[kind] == left
    log = again.open_log(tp, None, LogConfig(), now_ms=0)
    assert log.log_start_offset == log.log_end_offset == 0
    directory.write_checkpoints(kind, collected, directory.version)
    assert directory.checkpoints[kind] == collected, "looked up after both were made"


@pytest.mark.parametrize("now", [3, 50])
def test_what_was_collected_before_does_not_undo_a_recovery_point(disk, now) -> None:
    """That a log was cut to, or that files are put into place below."""
    directory, tp, other = opened(disk), TopicPartition("t", 0), TopicPartition("other", 0)
    for one in (tp, other):
        create_log(directory, one, uuid.UUID(int=1), LogConfig(), now_ms=0)
    changes, collected = directory.version, {tp: 20, other: 7}
    assert directory.state_recovery_point(tp, now, directory.version)
    assert opened(disk.after_power_loss(1)).recovery_points == {tp: now, other: 0}
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, collected, changes)
    assert directory.recovery_points == {tp: now, other: 7}
    assert opened(disk.after_power_loss(1)).recovery_points == {tp: now, other: 7}
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, collected, directory.version)
    assert directory.recovery_points == collected, "looked up after it was said"


def test_a_recovery_point_of_a_log_that_nothing_was_said_of_counts(disk) -> None:
    """One that was deleted meanwhile is written nowhere, and is no reason to stop."""
    directory = opened(disk)
    log = create_log(directory, TP, uuid.UUID(int=1), LogConfig(), now_ms=0)
    directory.close()
    directory = opened(disk)
    assert directory.version == 0
    assert directory.state_recovery_point(TP, 7, 0) and directory.recovery_points == {TP: 7}
    directory.mark_deleted(log, DIRECTORY_ID, 0)
    assert directory.state_recovery_point(TP, 9, directory.version)
    assert not directory.recovery_points


def test_a_directory_that_is_not_what_its_path_stands_for_any_more_is_noticed(tmp_path) -> None:
    directory = opened(Disk({}), str(tmp_path / "d"))
    directory.verify()
    (tmp_path / "d").rename(tmp_path / "moved")
    with pytest.raises(MachineError):
        directory.verify()
    directory.close(clean=False)
    error = MachineError("/d", "open", OSError(errno.EIO, "I/O error"))
    LogDirectory.broken("/d", Disk({}), error).verify()


def test_a_recovery_point_of_before_a_cut_is_not_made_durable(disk) -> None:
    """A thread comes with it when the loop has lowered it."""
    directory, tp = opened(disk), TopicPartition("t", 0)
    create_log(directory, tp, uuid.UUID(int=1), LogConfig(), now_ms=0)
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {tp: 30})
    version = directory.version
    directory.lower_checkpoints(tp, 20, 10)
    before = disk.calls
    assert not directory.state_recovery_point(tp, 50, version)
    assert disk.calls == before and directory.recovery_points == {tp: 10}
    version = directory.version
    directory.lower_checkpoints(TopicPartition("other", 0), 0, 0)
    assert directory.state_recovery_point(tp, 20, version), "another log was cut"
    assert opened(disk.after_power_loss(1)).recovery_points == {tp: 20}


@pytest.mark.parametrize("kind", Checkpoint)
@pytest.mark.parametrize(("known", "writes"), [(0, False), (20, False), (21, True)])
def test_a_cut_writes_only_what_is_above_it(disk, kind, known, writes) -> None:
    """Many logs are cut at once after a failover, on the node's loop."""
    directory, tp, other = opened(disk), TopicPartition("t", 0), TopicPartition("other", 0)
    for one in (tp, other):
        create_log(directory, one, uuid.UUID(int=1), LogConfig(), now_ms=0)
    directory.write_checkpoints(kind, {tp: known, other: 7})
    changes, before = directory.version, disk.calls
    directory.lower_checkpoints(tp, 20, 20)
    writes = writes and kind is not Checkpoint.CLEANER  # it is for Kafka's tools
    assert (disk.calls > before) is writes
    directory.write_checkpoints(kind, {tp: 30, other: 8}, changes)
    expected = {tp: 20 if writes else known, other: 8}
    assert directory.checkpoints[kind] == expected, "what was collected before the cut is void"
    assert opened(disk.after_power_loss(1)).checkpoints[kind] == expected


def test_a_log_deleted_while_others_are_purged_is_not_forgotten(kit, disk) -> None:
    directory = opened(disk)
    logs = [
        create_log(directory, TopicPartition("t", i), uuid.UUID(int=i), LogConfig(), now_ms=0)
        for i in (1, 2)
    ]
    directory.mark_deleted(logs[0], uuid.UUID(int=8), 0)
    deleting = threading.Thread(
        target=directory.mark_deleted, args=(logs[1], uuid.UUID(int=9), 0), daemon=True
    )

    class Late(int):
        """A time that, compared for what stays, lets another thread go first."""

        def __lt__(self, other: int) -> bool:
            if not deleting.ident:
                deleting.start()
                deleting.join(0.2)
            return int(self) < other

    delay_ms = logs[0].config.file_delete_delay_ms
    assert directory.purge(Late(delay_ms)) == 1
    deleting.join(60)
    assert directory.purge(delay_ms) == 1
    assert directory.scan() == []


def test_what_is_still_to_be_saved_of_a_deleted_log_does_not_reach_its_successor(disk) -> None:
    directory = opened(disk)
    tp = TopicPartition("t", 0)
    old = create_log(directory, tp, uuid.UUID(int=1), LogConfig(), now_ms=0)
    old.leader_epochs.enter(5, 0)
    old.durability.names_changed = True
    ticket = FlushTicket(old.durability, disk, old.leader_epochs, old.tail)
    directory.mark_deleted(old, uuid.UUID(int=9), 0)
    ticket.run()
    create_log(directory, tp, uuid.UUID(int=2), LogConfig(), now_ms=0)
    old.leader_epochs.save()
    again = opened(disk.after_kill()).open_log(tp, None, LogConfig(), now_ms=0)
    assert again.leader_epochs.entries == []


def _new_logs(count: int, epoch: int | None = None) -> list[NewLog]:
    return [
        NewLog(TopicPartition("t", i), uuid.UUID(int=i + 1), LogConfig(), epoch)
        for i in range(count)
    ]


def test_logs_created_together_are_durable_with_the_epoch_they_are_led_in(disk) -> None:
    directory = opened(disk)
    directory.create_logs(_new_logs(3, epoch=4), now_ms=0)
    for seed in range(30):
        again = opened(disk.after_power_loss(seed))
        for tp, topic_id, config, _ in _new_logs(3):
            epochs = f"{again.log_path(tp)}/{layout.LEADER_EPOCHS}"
            assert read_epochs(again.disk, epochs) == [(4, 0)]
            assert f"{0:020d}.log" in again.disk.listdir(again.log_path(tp))
            assert again.open_log(tp, None, config, now_ms=0).topic_id == topic_id


def test_logs_created_together_sync_the_directory_once(disk, monkeypatch) -> None:
    directory = opened(disk)
    synced: list[str] = []
    monkeypatch.setattr(disk, "fsync_dir", synced.append)
    logs = directory.create_logs(_new_logs(3, epoch=4), now_ms=0)
    assert synced == ["/d", "/d/t-0", "/d/t-1", "/d/t-2", "/d"], "the checkpoint's name, too"
    synced.clear()
    directory.mark_all_deleted([(log, uuid.UUID(int=9 + i)) for i, log in enumerate(logs)], 0)
    assert synced == ["/d", "/d"], "the checkpoint that forgets them, and their names"


def test_a_log_that_is_not_open_is_deleted_like_an_open_one(disk) -> None:
    directory = opened(disk)
    new_logs = _new_logs(3)
    directory.create_logs(new_logs[:2], now_ms=0)
    again = opened(disk.after_power_loss(0))
    open_log = again.open_log(new_logs[0].topic_partition, None, LogConfig(), now_ms=0)
    config = LogConfig(file_delete_delay_ms=50)
    closed = [
        ClosedLog(new_log.topic_partition, new_log.topic_id, again.log_path(tp), config)
        for new_log in new_logs[1:]
        for tp in (new_log.topic_partition,)
    ]
    logs = [(log, uuid.UUID(int=9)) for log in (open_log, *closed)]
    again.mark_all_deleted(logs, 0)
    names = {f"t-{number}.{uuid.UUID(int=9).hex}-delete" for number in range(2)}
    assert names <= set(again.disk.listdir("/d")), "the third was never made"
    assert not any(entry for entry in again.scan() if not entry.is_delete)
    assert not again.unopened and not again.recovery_points
    assert again.purge(49) == 0 and again.purge(50) == 1
    assert names & set(again.disk.listdir("/d")) == {f"t-0.{uuid.UUID(int=9).hex}-delete"}


def test_a_power_cut_anywhere_in_a_creation_leaves_logs_that_open(disk) -> None:
    crashes = 0
    for at in range(1, 200):
        fresh = SimulatedDisk()
        directory = opened(fresh)
        fresh.crash_at(fresh.calls + at)
        try:
            directory.create_logs(_new_logs(2, epoch=4), now_ms=0)
        except SimulatedCrash:
            crashes += 1
        else:
            break
        for seed in range(5):
            again = opened(fresh.after_power_loss(seed))
            there = {entry.topic_partition for entry in again.scan()}
            for tp, topic_id, config, _ in _new_logs(2):
                if tp in there:
                    log = again.open_log(tp, topic_id, config, now_ms=0)
                    assert log.log_end_offset == 0 and log.leader_epochs.entries in ([], [(4, 0)])
    assert crashes > 10


def test_a_log_that_is_missing_after_a_clean_stop_makes_it_an_unclean_one(disk, caplog) -> None:
    directory = opened(disk)
    for new_log in _new_logs(2):
        create_log(directory, new_log.topic_partition, new_log.topic_id, new_log.config, now_ms=0)
    there, gone = TopicPartition("t", 0), TopicPartition("t", 1)
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {there: 7, gone: 7})
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {there: 0, gone: 9})
    directory.close()
    clean = opened(disk.after_kill())
    assert clean.was_clean and not clean.missing and not caplog.records
    disk.remove_tree(directory.log_path(gone))
    again = opened(disk.after_kill())
    assert not again.was_clean and again.missing == {gone: 9}
    assert "lacks t-1 now" in caplog.text


LONG = TopicPartition("t" * 249, 1)
"""Its name does not fit into that of its directory once it is deleted."""


def with_two_logs(disk, gone: TopicPartition) -> tuple[LogDirectory, Log]:
    """A directory that has records of ``t-0`` and of ``gone`` by its checkpoints, under a process
    of broker epoch 5; and the log of ``gone``.
    """
    directory = opened(disk)
    there, leaving = (
        create_log(directory, tp, uuid.UUID(int=1 + number), LogConfig(), now_ms=0)
        for number, tp in enumerate((TP, gone))
    )
    assert there.topic_partition == TP
    for kind in Checkpoint:
        directory.write_checkpoints(kind, {TP: 7, gone: 9})
    directory.mark_running(5)
    return directory, leaving


def lacks_nothing(disk: SimulatedDisk) -> None:
    """A process that is started on ``disk``, after one was killed there, misses no log."""
    after = opened(disk.after_kill())
    assert not after.missing and after.proven_epoch == 5


@pytest.mark.parametrize("gone", [TopicPartition("t", 1), LONG], ids=["short", "long"])
def test_a_log_of_a_deleted_topic_is_not_missing_after_a_kill(disk, gone) -> None:
    """Neither after its files were removed, nor where its name is cut."""
    directory, log = with_two_logs(disk, gone)
    directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
    lacks_nothing(disk)
    assert directory.purge(log.config.file_delete_delay_ms) == 1
    lacks_nothing(disk)
    again = opened(disk.after_kill())
    assert again.checkpoints == {kind: {TP: 7} for kind in Checkpoint}


@pytest.mark.parametrize("gone", [TopicPartition("t", 1), LONG], ids=["short", "long"])
def test_a_kill_anywhere_in_a_deletion_leaves_no_log_missing(gone) -> None:
    crashes = 0
    for at in range(1, 200):
        disk = SimulatedDisk()
        directory, log = with_two_logs(disk, gone)
        disk.crash_at(disk.calls + at)
        try:
            directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
            directory.purge(log.config.file_delete_delay_ms)
        except SimulatedCrash:
            crashes += 1
        else:
            break
        lacks_nothing(disk)
        for seed in range(3):
            assert not opened(disk.after_power_loss(seed)).missing
    assert crashes > 10


def test_a_start_that_purges_a_deleted_log_is_killed_before_its_first_checkpoint(disk) -> None:
    """An earlier snapshot of kept renamed it, and the checkpoints know it still."""
    gone = TopicPartition("t", 1)
    directory, _ = with_two_logs(disk, gone)
    disk.rename(directory.log_path(gone), f"/d/{layout.deleted_directory_name(gone, uuid.uuid4())}")
    disk.fsync_dir("/d")
    lacks_nothing(disk)
    started = opened(disk.after_kill())
    assert started.finish_deletions() == 1
    assert [entry.topic_partition for entry in started.scan()] == [TP]
    lacks_nothing(started.disk)


def test_a_log_of_the_name_of_one_that_is_purged_at_the_start_is_not_forgotten(disk) -> None:
    directory, log = with_two_logs(disk, TopicPartition("t", 1))
    directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
    create_log(directory, log.topic_partition, uuid.UUID(int=8), LogConfig(), now_ms=0)
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: 7, log.topic_partition: 3})
    again = opened(disk.after_kill())
    assert again.finish_deletions() == 1
    assert again.high_watermarks == {TP: 7, log.topic_partition: 3}


def test_a_log_that_is_made_while_one_of_its_name_is_purged_is_not_forgotten(
    disk, monkeypatch
) -> None:
    gone = TopicPartition("t", 1)
    directory, log = with_two_logs(disk, gone)
    directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
    again = opened(disk.after_kill())
    before = again.scan()
    create_log(again, gone, uuid.UUID(int=8), LogConfig(), now_ms=0)
    monkeypatch.setattr(again, "scan", lambda: before)
    assert again.finish_deletions() == 1
    assert again.recovery_points == {TP: 7, gone: 0}


@pytest.mark.parametrize("kind", Checkpoint)
def test_what_was_collected_of_a_log_before_its_deletion_is_not_written(disk, kind) -> None:
    """Not either if it reaches the disk after the files are gone."""
    gone = TopicPartition("t", 1)
    directory, log = with_two_logs(disk, gone)
    log.update_config(LogConfig(file_delete_delay_ms=0))
    changes, collected = directory.version, {TP: 8, gone: 10}
    directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
    directory.write_checkpoints(kind, collected, changes)
    assert directory.purge(0) == 1
    directory.write_checkpoints(kind, collected, changes)
    directory.state_recovery_point(gone, 10, changes)
    assert directory.checkpoints[kind] == {TP: 8}
    lacks_nothing(disk)


def test_a_want_of_descriptors_keeps_no_log_from_being_deleted(disk, monkeypatch, caplog) -> None:
    directory, log = with_two_logs(disk, TopicPartition("t", 1))

    def refuse(_: Disk, path: str, __: object) -> None:
        raise ResourceExhausted(path, "open", OSError(errno.EMFILE, "Too many open files"))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_offsets", refuse)
        directory.mark_deleted(log, uuid.uuid4(), now_ms=0)
    assert "deleted logs stay in the checkpoints for now" in caplog.text
    assert [(entry.topic_partition, entry.is_delete) for entry in directory.scan()] == [
        (TP, False),
        (log.topic_partition, True),
    ]
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: 8, log.topic_partition: 10})
    assert directory.high_watermarks == {TP: 8}


def test_a_deletion_that_finds_no_descriptor_for_its_names_is_finished_by_the_next(
    disk, monkeypatch
) -> None:
    """Of open logs as of closed ones; no files go before their new names are durable."""
    directory, log = with_two_logs(disk, TopicPartition("t", 1))
    closed = ClosedLog(TP, uuid.UUID(int=1), directory.log_path(TP), LogConfig())
    later = 1_000_000_000

    def refuse(path: str) -> None:
        raise ResourceExhausted(path, "open", OSError(errno.EMFILE, "Too many open files"))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", refuse)
        with pytest.raises(ResourceExhausted):
            directory.mark_all_deleted([(log, uuid.uuid4()), (closed, uuid.uuid4())], 0)
    assert directory.purge(later) == 0
    directory.mark_all_deleted([(log, uuid.uuid4()), (closed, uuid.uuid4())], 0)
    for seed in range(9):
        entries = opened(disk.after_power_loss(seed)).scan()
        assert [entry.is_delete for entry in entries] == [True, True]
    assert directory.purge(later) == 2 and not directory.scan()


def test_files_of_a_deleted_log_go_later_where_descriptors_are_wanting(disk, monkeypatch) -> None:
    directory, log = with_two_logs(disk, TopicPartition("t", 1))
    directory.mark_deleted(log, uuid.uuid4(), now_ms=0)

    def refuse(path: str) -> None:
        raise ResourceExhausted(path, "open", OSError(errno.EMFILE, "Too many open files"))

    later = 1_000_000_000
    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove_tree", refuse)
        with pytest.raises(ResourceExhausted):
            directory.purge(later)
    assert directory.purge(later) == 1
    assert [entry.is_delete for entry in directory.scan()] == [False]


def test_the_start_of_a_log_that_is_not_open_is_raised_durably_and_never_lowered(disk) -> None:
    directory, _ = with_two_logs(disk, TopicPartition("t", 1))
    assert directory.log_starts[TP] == 7
    for offset in (9, 8):
        directory.raise_log_start(TP, offset)
    found = checkpoints.read_offsets(disk.after_kill(), f"{directory.path}/{layout.LOG_STARTS}")
    assert found[TP] == 9


def test_what_is_remembered_of_deleted_logs_does_not_grow(disk) -> None:
    directory = opened(disk)
    for number in range(20):
        (log,) = directory.create_logs(_new_logs(1), now_ms=number * GONE_MS)
        directory.mark_deleted(log, uuid.uuid4(), now_ms=number * GONE_MS)
        directory.purge((number + 1) * GONE_MS)
        assert not directory._gone and not directory._changed


def test_a_log_that_was_set_aside_is_missing(disk) -> None:
    """Nobody is known to have deleted it."""
    gone = TopicPartition("t", 1)
    directory, _ = with_two_logs(disk, gone)
    directory.set_aside(gone, uuid.uuid4())
    after = opened(disk.after_kill())
    assert after.missing == {gone: 9} and after.proven_epoch == -1


def crashed_with_a_log(disk) -> SimulatedDisk:
    """A directory whose process was killed; its log begins at 7."""
    directory = opened(disk)
    create_log(directory, TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    for kind in Checkpoint:
        directory.write_checkpoints(kind, {TP: 7})
    return disk.after_kill()


def test_who_stops_before_the_logs_were_opened_does_not_say_that_all_is_well(disk, caplog) -> None:
    """Nobody has looked through them since the crash; and what is known of them stays."""
    disk = crashed_with_a_log(disk)
    early = opened(disk)
    for kind in Checkpoint:
        early.write_checkpoints(kind, {})
    early.close(broker_epoch=5)
    assert "1 logs were not opened since the last crash" in caplog.text
    again = opened(disk)
    assert not again.was_clean
    assert all(again.checkpoints[kind] == {TP: 7} for kind in Checkpoint)
    again.open_log(TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    again.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: 0})
    again.close(broker_epoch=6)
    last = opened(disk)
    assert last.was_clean and last.recovery_points == {TP: 0}


@pytest.mark.parametrize("kind", Checkpoint)
def test_what_is_known_of_a_log_that_was_opened_just_now_stays(disk, kind) -> None:
    """A thread opened it, and the loop that collects the offsets has not heard of it yet."""
    directory = opened(crashed_with_a_log(disk))
    log = directory.open_log(TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    directory.write_checkpoints(kind, {}, directory.version)
    assert directory.checkpoints[kind] == {TP: 7}
    before = directory.version
    directory.serve(TP)
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: 7}, directory.version)
    directory.write_checkpoints(kind, {}, before)
    assert directory.checkpoints[kind] == {TP: 7}, "others are collected while it comes"
    directory.write_checkpoints(kind, {}, directory.version)
    assert directory.checkpoints[kind] == {}, "its log start is that of its first segment, say"
    again = opened(crashed_with_a_log(SimulatedDisk()))
    log = again.open_log(TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    again.mark_deleted(log, uuid.uuid4(), now_ms=0)
    again.write_checkpoints(kind, {}, again.version)
    assert again.checkpoints[kind] == {} and not again._unserved


def test_the_recovery_point_of_a_log_that_was_created_just_now_stays(disk) -> None:
    directory = opened(disk)
    create_log(directory, TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    before = directory.version
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {}, before)
    assert directory.recovery_points == {TP: 0}
    directory.serve(TP)
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {}, before)
    assert directory.recovery_points == {TP: 0}
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: 3}, directory.version)
    assert directory.recovery_points == {TP: 3}


def test_who_stops_early_after_a_clean_stop_leaves_the_mark_as_it_was(disk) -> None:
    directory = opened(disk)
    create_log(directory, TP, DIRECTORY_ID, LogConfig(), now_ms=0)
    directory.close(broker_epoch=5)
    opened(disk).close()
    again = opened(disk)
    assert again.was_clean and again.broker_epoch == 5


def test_what_is_known_of_a_log_that_is_damaged_stays_in_the_checkpoints(disk) -> None:
    directory = opened(disk)
    log = create_log(directory, TP, uuid.UUID(int=7), LogConfig(), now_ms=0)
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: 5})
    metadata = f"{log.directory}/{layout.PARTITION_METADATA}"
    whole = disk.read(metadata)
    disk.write_file(metadata, b"rot")
    directory.close(clean=False)
    again = opened(disk)
    with pytest.raises(DamagedData):
        again.open_log(TP, uuid.UUID(int=7), LogConfig(), now_ms=0)
    again.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {})
    assert again.high_watermarks == {TP: 5}
    again.close(broker_epoch=3)
    disk.write_file(metadata, whole)
    mended = opened(disk)
    assert not mended.was_clean, "the log was not looked through since the crash"
    mended.open_log(TP, uuid.UUID(int=7), LogConfig(), now_ms=0)
    assert mended.high_watermarks == {TP: 5}


def test_logs_of_several_directories_share_a_quota_of_producers(disk) -> None:
    quota = ProducerQuota(3)
    logs = []
    for number in range(2):
        directory = LogDirectory.open(
            f"/d{number}",
            disk,
            cluster_id="c",
            node_id=1,
            new_directory_id=DIRECTORY_ID,
            now_ms=0,
            producer_quota=quota,
        )
        logs.append(create_log(directory, TP, uuid.UUID(int=7), LogConfig(), now_ms=0))
    for pid in range(5):
        for log in logs:
            log.producers.update(pid, 0, 0, 0, pid, 0, False)
    assert quota.used == sum(len(log.producers) for log in logs) <= 3 + len(logs)
    alone = create_log(opened(disk, "/d2"), TP, uuid.UUID(int=7), LogConfig(), now_ms=0)
    alone.producers.update(1, 0, 0, 0, 0, 0, False)
    assert quota.used == sum(len(log.producers) for log in logs), "it has a quota of its own"
