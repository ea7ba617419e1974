"""After a kill a directory can show that nothing written to it is lost; after a power cut not."""

from __future__ import annotations

import errno
import json
import logging
import threading
import uuid

import pytest

from kept.storage import checkpoints, layout
from kept.storage.directory import Checkpoint, LogDirectory, NewLog
from kept.storage.disk import Disk
from kept.storage.errors import MachineError, ResourceExhausted
from kept.storage.log.log import Log
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

TP = TopicPartition("t", 0)
MARK = f"/d/{layout.RUNNING}"


def opened(disk) -> LogDirectory:
    return LogDirectory.open(
        "/d", disk, cluster_id="c", node_id=1, new_directory_id=uuid.UUID(int=1), now_ms=0
    )


@pytest.fixture
def disk() -> SimulatedDisk:
    """A disk on which a process with broker epoch 7 runs."""
    found = SimulatedDisk()
    directory = opened(found)
    assert directory.proven_epoch == -1, "nobody was there before"
    directory.mark_running(7)
    return found


def test_a_killed_process_leaves_the_proof(disk) -> None:
    again = opened(disk.after_kill())
    assert again.proven_epoch == 7 and not again.was_clean, "its logs are scanned all the same"


def test_a_power_cut_takes_the_proof(disk) -> None:
    disk.fsync_dir("/d")
    for seed in range(20):
        assert opened(disk.after_power_loss(seed)).proven_epoch == -1


def test_a_kill_and_then_a_power_cut_prove_nothing(disk) -> None:
    assert opened(disk.after_kill().after_power_loss(1)).proven_epoch == -1


def test_the_proof_is_of_the_process_just_before(disk) -> None:
    """One that did not come to register leaves the older epoch, which is not the registered one."""
    killed = disk.after_kill()
    opened(killed)
    again = opened(killed.after_kill())
    assert again.proven_epoch == 7
    again.mark_running(9)
    assert opened(again.disk.after_kill()).proven_epoch == 9


def test_a_clean_stop_says_its_own_epoch(disk) -> None:
    directory = opened(disk.after_kill())
    directory.mark_running(9)
    directory.close(broker_epoch=11)
    again = opened(directory.disk)
    assert again.was_clean and again.proven_epoch == 11


def test_a_machine_without_a_boot_id_proves_nothing(disk) -> None:
    killed = disk.after_kill()
    killed.boots = None
    again = opened(killed)
    assert again.proven_epoch == -1
    again.mark_running(9)
    assert json.loads(killed.read(MARK))["brokerEpoch"] == 7, "and leaves no mark"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"7",
        b"[]",
        b"\0" * 60,
        b'{"version":0,"brokerEpoch":7}',
        b'{"version":0,"brokerEpoch":"7","bootId":"boot-0"}',
        b'{"version":1,"brokerEpoch":7,"bootId":"boot-0"}',
        b'{"version":0,"brokerEpoch":7,"bootId":"boot-1"}',
        b"\xff\xfe",
    ],
)
def test_a_mark_that_cannot_be_relied_on_is_none(disk, content) -> None:
    disk.write_atomic(MARK, content)
    assert opened(disk.after_kill()).proven_epoch == -1


def test_a_failed_device_takes_the_proof(disk) -> None:
    """It may have dropped what it was given, whatever the machine's run."""
    directory = opened(disk.after_kill())
    directory.fail(MachineError("/d/t-0/x.log", "fsync", OSError(errno.EIO, "I/O error")))
    directory.forget_running()
    directory.forget_running()
    directory.mark_running(9)
    assert opened(directory.disk.after_kill()).proven_epoch == -1


def test_a_device_that_fails_while_the_mark_is_written_takes_the_proof(disk, monkeypatch) -> None:
    """Another thread removes it, and comes too early."""
    directory, write = opened(disk.after_kill()), checkpoints.write_running
    came = threading.Event()

    class Lock:
        """Says that somebody wants it."""

        lock = threading.Lock()

        def __enter__(self) -> None:
            came.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def fails() -> None:
        directory.fail(MachineError("/d/t-0/x.log", "fsync", OSError(errno.EIO, "I/O error")))
        directory.forget_running()
        came.set()

    failing = threading.Thread(target=fails, daemon=True)

    def slow(*given) -> None:
        came.clear()
        failing.start()
        assert came.wait(60)
        write(*given)

    monkeypatch.setattr(directory, "_marking", Lock())
    monkeypatch.setattr(checkpoints, "write_running", slow)
    directory.mark_running(9)
    failing.join(60)
    assert opened(directory.disk.after_kill()).proven_epoch == -1


def test_a_log_that_is_shorter_than_it_was_known_to_be_takes_the_proof(kit, disk) -> None:
    """Damage within what was committed: the mark of the machine says nothing about that."""
    directory = opened(disk.after_kill())
    (log,) = directory.create_logs([NewLog(TP, uuid.UUID(int=2), LogConfig())], now_ms=0)
    for _ in range(3):
        kit.append(log, kit.batch())
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: 3})
    again = opened(directory.disk.after_kill())
    again.open_log(TP, None, LogConfig(), now_ms=0)
    assert again.proven_epoch == 7
    killed = again.disk.after_kill()
    (path,) = [p for p, _ in killed.files() if p.endswith(".log")]
    killed.flip_bit(path, 70)
    again = opened(killed)
    again.open_log(TP, None, LogConfig(), now_ms=0)
    assert again.proven_epoch == -1


SMALL = LogConfig(segment_bytes=900, index_interval_bytes=100)


def lacking(kit, disk: SimulatedDisk, *, clean: bool = False) -> SimulatedDisk:
    """Epoch 7 made 80 records durable, and stopped or was killed; the last segments are gone."""
    directory = opened(disk.after_kill())
    (log,) = directory.create_logs([NewLog(TP, kit.TOPIC_ID, SMALL)], now_ms=0)
    for mark in range(40):
        kit.append(log, kit.batch(2, mark=mark))
    log.close()
    for kind in (Checkpoint.RECOVERY_POINTS, Checkpoint.HIGH_WATERMARKS):
        directory.write_checkpoints(kind, {TP: 80})
    if clean:
        directory.close(broker_epoch=7)
    left = directory.disk.after_kill()
    for segment in log.segments[-3:]:
        left.unlink(segment.path(layout.LOG))
    left.fsync_dir(log.directory)
    return left


def started(kit, disk: SimulatedDisk) -> tuple[LogDirectory, Log]:
    directory = opened(disk)
    return directory, directory.open_log(TP, None, SMALL, now_ms=kit.NOW)


def said(caplog) -> int:
    return sum(record.levelno >= logging.ERROR for record in caplog.records)


@pytest.mark.parametrize("clean", [True, False])
def test_a_kill_at_any_call_of_a_start_that_finds_a_loss_hides_nothing(
    kit, disk, caplog, clean
) -> None:
    """One of the two starts says what is lost, and the second has no proof either."""
    left = lacking(kit, disk, clean=clean)
    for call in range(1, 1000):
        first = left.after_kill()
        first.crash_at(call)
        caplog.clear()
        try:
            started(kit, first)
        except SimulatedCrash:
            pass
        else:
            break
        for second in (first.after_kill(), first.after_power_loss(call)):
            directory, log = started(kit, second)
            assert directory.proven_epoch == -1, first.trace[-1]
            assert directory.recovery_points[TP] <= log.log_end_offset < 80, first.trace[-1]
        assert said(caplog), first.trace[-1]
    assert call > 10


@pytest.mark.parametrize("clean", [True, False])
def test_a_loss_is_said_by_one_start(kit, disk, caplog, clean) -> None:
    """The next one finds a log that is whole, and no proof; that comes with the registration."""
    directory, log = started(kit, lacking(kit, disk, clean=clean))
    assert said(caplog) and directory.proven_epoch == -1
    assert directory.recovery_points[TP] == directory.high_watermarks[TP] == log.log_end_offset
    caplog.clear()
    directory, _ = started(kit, directory.disk.after_kill())
    assert not said(caplog) and directory.proven_epoch == -1
    directory.mark_running(9)
    directory, _ = started(kit, directory.disk.after_kill())
    assert not said(caplog) and directory.proven_epoch == 9


def test_who_stops_before_it_is_registered_does_not_prove_what_is_lost(kit, disk) -> None:
    directory, log = started(kit, lacking(kit, disk, clean=True))
    log.close()
    directory.close()
    again, _ = started(kit, directory.disk.after_kill())
    assert again.was_clean and again.proven_epoch == -1


def test_what_is_known_of_a_log_stays_until_its_loss_is_noted(kit, disk) -> None:
    """For want of a descriptor it is not opened, and then tried again."""
    left = lacking(kit, disk)
    directory = opened(left)
    left.fail("create", "recovery-point", errno.EMFILE)
    with pytest.raises(ResourceExhausted):
        directory.open_log(TP, None, SMALL, now_ms=kit.NOW)
    for kind in (Checkpoint.RECOVERY_POINTS, Checkpoint.HIGH_WATERMARKS):
        directory.write_checkpoints(kind, {})
        assert directory.checkpoints[kind] == {TP: 80}
    log = directory.open_log(TP, None, SMALL, now_ms=kit.NOW)
    assert directory.recovery_points == {TP: log.log_end_offset}


def test_what_is_written_where_records_were_lost_is_not_taken_for_durable(kit, disk) -> None:
    _, log = started(kit, lacking(kit, disk))
    for mark in range(40, 100):
        kit.append(log, kit.batch(2, mark=mark), leader_epoch=1)
    written = kit.contents(log)
    for seed in range(40):
        _, again = started(kit, log.disk.after_power_loss(seed))
        found = kit.contents(again)
        assert found == written[: len(found)]
        assert again.log_end_offset == found[-1][1] + 1


def test_a_high_watermark_that_is_written_anew_proves_nothing(kit, disk) -> None:
    """Nothing that was durable is lost; the process is killed before it is registered."""
    left = lacking(kit, disk)
    directory = opened(left)
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: 0})
    log = directory.open_log(TP, None, SMALL, now_ms=kit.NOW)
    directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: log.log_end_offset})
    directory, _ = started(kit, directory.disk.after_kill())
    assert directory.proven_epoch == -1


def test_a_missing_log_that_is_made_anew_proves_nothing(kit, disk) -> None:
    """Nor where that process is killed before it is registered."""
    left = lacking(kit, disk)
    left.remove_tree("/d/t-0")
    directory = opened(left)
    assert directory.missing == {TP: 80} and directory.proven_epoch == -1
    directory.create_logs([NewLog(TP, kit.TOPIC_ID, SMALL)], now_ms=0)
    again = opened(directory.disk.after_kill())
    assert not again.missing and again.proven_epoch == -1


@pytest.mark.parametrize("kind", [Checkpoint.RECOVERY_POINTS, Checkpoint.HIGH_WATERMARKS])
def test_where_a_checkpoint_is_damaged_nothing_is_proven(disk, kind) -> None:
    """Not by the next start either, which finds another one."""
    directory = opened(disk.after_kill())
    directory.disk.write_file(f"/d/{kind.value}", b"0\n1\n")
    again = opened(directory.disk.after_kill())
    assert again.proven_epoch == -1
    again.write_checkpoints(kind, {})
    assert opened(again.disk.after_kill()).proven_epoch == -1


def test_the_machines_own_name_for_its_run() -> None:
    """Linux has one; it is the same for all that ask."""
    found = Disk().boot_id()
    assert found is None or str(uuid.UUID(found)) == found == Disk().boot_id()
