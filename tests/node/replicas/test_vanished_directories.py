"""What is removed, moved, replaced or truncated under a running node fails its directory: nothing
that goes into files which no start will find is acknowledged.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from kept.storage.disk import Disk
from kept.storage.errors import KafkaStorageError, MachineError
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition

ACTIVE = "t-0/00000000000000000000.log"
NOTICED_S = 30
"""Far more than the second that it takes, on a machine with other work."""


class Site:
    """A node over two log directories with a topic of two partitions, one in each."""

    def __init__(self, lone_node, tmp_path) -> None:
        self.meta = str(tmp_path / "meta")
        dirs = ",".join(str(tmp_path / name) for name in "ab")
        self.lone = lone_node(log_dirs=dirs, metadata_log_dir=self.meta)
        self.node = self.lone.node
        self.lone.create("t", partitions=2)
        self.doomed = self.node.parts.table.replicas[TopicPartition("t", 0)].directory
        self.other = self.node.parts.table.replicas[TopicPartition("t", 1)].directory
        assert self.doomed is not self.other
        for number in range(2):
            self.append(number)

    def append(self, number: int, topic: str = "t") -> None:
        partition = self.node.parts.table.partition(TopicPartition(topic, number))
        partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
        partition.write()

    def flush(self, number: int, topic: str = "t") -> None:
        """What an acknowledgement with ``flush.messages`` waits for."""
        hosted = self.node.parts.table.replicas[TopicPartition(topic, number)]

        async def flushed() -> None:
            await hosted.flushed(hosted.partition.log_end_offset)

        self.lone.run(flushed())

    def wait(self, condition) -> None:
        async def until() -> None:
            end = time.monotonic() + NOTICED_S
            while not condition():
                assert time.monotonic() < end, "nobody noticed"
                await asyncio.sleep(0.01)

        self.lone.run(until())

    def assert_failed(self) -> None:
        self.wait(lambda: self.doomed.offline is not None)
        assert "removed, moved, replaced" in self.doomed.offline
        with pytest.raises(KafkaStorageError, match="log directory is offline"):
            self.append(0)
        self.append(1)
        assert self.other.offline is None
        status, _, body = self.lone.http("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 503 and self.doomed.name.encode() in body


@pytest.fixture
def site(lone_node, tmp_path):
    return Site(lone_node, tmp_path)


def remove(path: str) -> None:
    shutil.rmtree(path)


def move(path: str) -> None:
    os.rename(path, path + "-elsewhere")


def replace(path: str) -> None:
    """As a file system that is mounted over it."""
    move(path)
    shutil.copytree(path + "-elsewhere", path)


@pytest.mark.parametrize("happens", [remove, move, replace])
def test_a_directory_that_goes_fails_though_nobody_writes(site, happens):
    happens(site.doomed.name)
    site.assert_failed()


def test_whose_directory_it_is_goes_and_no_start_would_take_it(site):
    os.unlink(f"{site.doomed.name}/meta.properties")
    site.assert_failed()


@pytest.mark.parametrize("happens", [remove, move, replace])
@pytest.mark.parametrize("what", ["t-0", ACTIVE])
def test_a_log_or_its_active_segment_that_goes_fails_the_directory_once_written(
    site, happens, what
):
    path = f"{site.doomed.name}/{what}"
    if happens is replace and what.endswith(".log"):
        move(path)
        shutil.copy(path + "-elsewhere", path)
    elif happens is remove and what.endswith(".log"):
        os.unlink(path)
    else:
        happens(path)
    site.append(0)
    site.assert_failed()


def truncate(path: str, left: int) -> None:
    """To ``left`` bytes; from the end if negative."""
    os.truncate(path, left if left >= 0 else os.path.getsize(path) + left)


@pytest.mark.parametrize("left", [0, -1])
def test_an_active_segment_that_is_truncated_fails_the_directory(site, left):
    truncate(f"{site.doomed.name}/{ACTIVE}", left)
    site.wait(lambda: site.doomed.offline is not None)
    site.assert_failed()


@pytest.mark.parametrize("left", [0, -1])
def test_nothing_is_acknowledged_behind_a_hole_that_somebody_truncated(site, left):
    """Without waiting for any clock: a write there would make the file as long as before."""
    site.node.parts.maintenance.stop()
    path = f"{site.doomed.name}/{ACTIVE}"
    truncate(path, left)
    size = os.path.getsize(path)
    with pytest.raises(KafkaStorageError, match="truncated"):
        site.append(0)
    assert os.path.getsize(path) == size
    site.assert_failed()


def test_a_cut_by_the_node_while_its_file_is_looked_for_is_no_failure(site, monkeypatch):
    timers = site.node.parts.maintenance
    timers.stop()
    site.append(0)
    log_ = site.node.parts.table.partition(TopicPartition("t", 0)).log
    is_at, cut, outcomes = Disk.is_at, threading.Event(), []

    def cut_on_the_loop() -> None:
        log_.truncate_to(1)
        cut.set()

    def cut_meanwhile(disk: Disk, file, path: str, size_bytes: int = 0) -> bool:
        if path == log_.active_segment.path(".log"):
            timers._runtime.loop.call_soon_threadsafe(cut_on_the_loop)
            assert cut.wait(NOTICED_S)
            outcomes.append(is_at(disk, file, path, size_bytes))
            return outcomes[-1]
        return is_at(disk, file, path, size_bytes)

    monkeypatch.setattr(Disk, "is_at", cut_meanwhile)
    for _ in timers.verify_files():
        pass
    site.wait(lambda: not timers._verifying)
    assert outcomes == [False] and site.doomed.offline is None


def test_a_log_that_nobody_writes_to_is_looked_for_too(site):
    timers, dirty_logs = site.node.parts.maintenance, site.node.parts.replicas.dirty_logs
    timers.stop()

    def look() -> None:
        for _ in timers.verify_files():
            pass
        site.wait(lambda: not timers._verifying)

    look()
    look()
    assert not dirty_logs.written
    move(f"{site.doomed.name}/t-0")
    look()
    site.assert_failed()


@pytest.mark.parametrize("what", ["", "/t-0", f"/{ACTIVE}"])
def test_nothing_is_said_to_be_durable_in_files_that_are_gone(site, what):
    """Without waiting for any clock: each fsync is followed by a look for the file's name."""
    site.node.parts.maintenance.stop()
    site.append(0)
    site.flush(0)
    site.append(0)
    move(site.doomed.name + what)
    with pytest.raises(MachineError, match="removed, moved"):
        site.flush(0)
    assert site.doomed.offline is not None


def test_nothing_is_said_to_be_durable_in_a_file_that_was_truncated(site):
    site.node.parts.maintenance.stop()
    site.append(0)
    truncate(f"{site.doomed.name}/{ACTIVE}", -1)
    with pytest.raises(MachineError, match="truncated"):
        site.flush(0)
    assert site.doomed.offline is not None


@pytest.mark.parametrize("happens", [os.unlink, lambda path: truncate(path, -1)])
def test_a_roll_of_a_file_that_is_gone_fails(site, happens):
    site.node.parts.maintenance.stop()
    partition = site.node.parts.table.partition(TopicPartition("t", 0))
    happens(f"{site.doomed.name}/{ACTIVE}")
    with pytest.raises(KafkaStorageError, match="removed, moved"):
        partition.maybe_roll(1 << 60)
    assert site.doomed.offline is not None


def test_a_closed_segment_that_is_gone_is_an_error_and_no_empty_file(site):
    site.node.parts.maintenance.stop()
    partition = site.node.parts.table.partition(TopicPartition("t", 0))
    partition.maybe_roll(1 << 60)
    partition.log.flush()
    partition.log.segments[0].close_file()
    path = f"{site.doomed.name}/t-0/00000000000000000000.log"
    os.unlink(path)
    with pytest.raises(KafkaStorageError, match="removed, moved"):
        partition.fetch(0, 1 << 20)
    assert not os.path.exists(path)
    assert site.doomed.offline is not None


def test_what_a_node_does_to_its_own_files_is_no_failure(site):
    """Rolls, retention, deletion of records and of topics, while files are looked for."""
    site.lone.create("passing", partitions=4, file_delete_delay_ms="0")
    for turn in range(4):
        for number in range(4):
            site.append(number, "passing")
            partition = site.node.parts.table.partition(TopicPartition("passing", number))
            partition.maybe_roll(1 << 60)
            partition.delete_records(-1)
            partition.retention(1 << 60)
            site.append(number, "passing")
            hosted = site.node.parts.table.replicas[TopicPartition("passing", number)]
            hosted.directory.pool.flush(hosted.partition.log)
            if turn % 2:
                partition.maybe_roll(1 << 60)
                partition.retention(1 << 60)
        for _ in site.node.parts.maintenance.verify_files():
            pass
    site.lone.ask(20, 6, topics=[{"name": "passing", "topic_id": None}], timeout=1000)
    for _ in site.node.parts.maintenance.verify_files():
        pass
    site.wait(lambda: not site.node.parts.maintenance._verifying and site.doomed.pool.idle)
    assert [one.offline for one in site.node.parts.table.directories] == [None, None]


def test_the_metadata_directory_that_goes_ends_the_node(site):
    remove(site.meta)
    site.wait(site.node.parts.shutdown.requested.is_set)
    assert "metadata log failed" in site.node.parts.shutdown.failure


@pytest.mark.parametrize("name", ["metadata.wal", "hard-state", "identity", "snapshot-*"])
def test_a_file_of_the_metadata_that_goes_ends_the_node_though_nothing_is_decided(site, name):
    """Without it no start would go on, whatever was acknowledged meanwhile."""
    site.node.parts.maintenance.stop()
    directory = site.node.parts.metadata_directory

    def look() -> None:
        for _ in directory.verify():
            pass
        site.wait(lambda: not directory._verifying)

    snapshots = [Path(site.meta, f"snapshot-{index:020}-{1:010}") for index in (1, 2)]
    snapshots[0].write_bytes(b"any")
    look()
    snapshots[0].rename(snapshots[1])
    look()
    assert not site.node.parts.shutdown.requested.is_set(), "one took the place of the other"
    for path in Path(site.meta).glob(name):
        path.unlink()
    look()
    assert f"{name}: stat failed: it was removed" in site.node.parts.shutdown.failure


def test_a_look_without_a_descriptor_is_no_failure(site, monkeypatch):
    site.node.parts.maintenance.stop()
    directory = site.node.parts.metadata_directory
    with monkeypatch.context() as patch:
        listdir = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        patch.setattr(os, "listdir", listdir)
        for _ in directory.verify():
            pass
        site.wait(lambda: not directory._verifying)
        assert listdir.called
    assert not site.node.parts.shutdown.requested.is_set()


@pytest.mark.parametrize(
    "happens", [move, lambda directory: truncate(f"{directory}/metadata.wal", -1)]
)
def test_no_decision_is_acknowledged_in_a_metadata_log_that_is_gone(site, happens):
    site.node.parts.maintenance.stop()
    happens(site.meta)
    with pytest.raises(MachineError, match="removed, moved"):
        site.lone.create("late")
    assert "removed, moved" in site.node.parts.shutdown.failure


def test_the_only_directory_that_goes_ends_the_node(lone_node, tmp_path):
    lone = lone_node(log_dirs=str(tmp_path / "a"), metadata_log_dir=str(tmp_path / "meta"))
    remove(str(tmp_path / "a"))

    async def ended() -> None:
        async with asyncio.timeout(NOTICED_S):
            await lone.node.parts.shutdown.requested.wait()

    lone.run(ended())
    assert "no log directory is left" in lone.node.parts.shutdown.failure
