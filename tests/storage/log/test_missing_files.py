"""Files that somebody removed: the log opens, and says what it misses."""

from __future__ import annotations

import logging
import uuid

import pytest

from kept.storage import layout
from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.types import LogConfig, TopicPartition
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100)
TP = TopicPartition("t", 0)
RECORDS = 80


class Site:
    """A data directory with one log, closed cleanly or killed; ``end`` is where it ended."""

    def __init__(self, kit, *, clean: bool = False, checkpointed: bool = True) -> None:
        self.kit = kit
        self.disk = SimulatedDisk()
        directory = self.open()
        log = kit.create_log(directory, TP, kit.TOPIC_ID, CONFIG, now_ms=kit.NOW)
        for n in range(RECORDS // 2):
            kit.append(log, kit.batch(2, mark=n, timestamp=kit.NOW + n))
        self.bases = list(log.segments.bases)
        assert len(self.bases) > 3
        if clean:
            log.close()
            directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: log.recovery_point})
        if checkpointed:
            directory.write_checkpoints(Checkpoint.HIGH_WATERMARKS, {TP: RECORDS})
        if clean:
            directory.close()
        self.disk = self.disk.after_kill()

    def open(self) -> LogDirectory:
        return LogDirectory.open(
            "/d",
            self.disk,
            cluster_id="c",
            node_id=0,
            new_directory_id=uuid.UUID(int=7),
            now_ms=self.kit.NOW,
        )

    def remove(self, base: int, *suffixes: str) -> None:
        for suffix in suffixes or (".log",):
            self.disk.unlink(f"/d/t-0/{base:020d}{suffix}")

    def reopen(self):
        self.directory = self.open()
        return self.directory.open_log(TP, self.kit.TOPIC_ID, CONFIG, now_ms=self.kit.NOW)

    def said(self, caplog) -> list[str]:
        """The errors of :meth:`reopen`: what is lost, and then nothing is proven."""
        messages = errors(caplog)
        assert self.directory.has_lost is bool(messages)
        return messages


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("clean", [True, False])
def test_nothing_is_said_of_a_log_that_lacks_nothing(kit, caplog, clean) -> None:
    site = Site(kit, clean=clean)
    assert site.reopen().log_end_offset == RECORDS
    assert site.said(caplog) == []


def test_a_log_that_is_not_there_is_opened_anew(kit, caplog) -> None:
    site = Site(kit)
    other = TopicPartition("t", 1)
    log = site.open().open_log(other, kit.TOPIC_ID, CONFIG, now_ms=kit.NOW)
    assert log.log_end_offset == 0
    assert errors(caplog) == []


def test_an_active_segment_below_the_high_watermark(kit, caplog) -> None:
    site = Site(kit)
    last = site.bases[-1]
    site.remove(last)
    assert site.reopen().log_end_offset == last
    (said,) = site.said(caplog)
    assert said.startswith(
        f"/d/t-0: it ends at {last}, and was at 80 by replication-offset-checkpoint: "
        f"records from {last} to 79 are lost here"
    )


def test_the_snapshot_of_a_later_roll_is_proof_too(kit, caplog) -> None:
    site = Site(kit, checkpointed=False)
    for base in site.bases[-2:]:
        site.remove(base, ".log", ".index", ".timeindex")
    below = site.bases[-2]
    assert site.reopen().log_end_offset == below
    (said,) = site.said(caplog)
    snapshot = f"{site.bases[-1]:020d}.snapshot"
    assert f"was at {site.bases[-1]} by {snapshot}: records from {below} to" in said


def test_an_index_without_its_log(kit, caplog) -> None:
    """Nothing else tells that there was a segment, and how much was in it nobody knows."""
    site = Site(kit, checkpointed=False)
    last = site.bases[-1]
    site.disk.write_file(f"/d/t-0/{last:020d}.index", b"")
    site.remove(last)
    assert site.reopen().log_end_offset == last
    (said,) = site.said(caplog)
    assert f"the .log of its index {last:020d} is missing: records from {last} on" in said


@pytest.mark.parametrize("clean", [True, False])
def test_an_index_on_its_way_out_is_no_trace_of_a_log(kit, caplog, clean) -> None:
    """A kill while what compaction had replaced was removed, its ``.log`` first."""
    site = Site(kit, clean=clean)
    for state in (layout.DELETED, layout.SWAP, layout.CLEANED):
        site.disk.write_file(f"/d/t-0/{site.bases[2] + 1:020d}.index{state}", b"")
    assert site.reopen().log_end_offset == RECORDS
    assert site.said(caplog) == []


@pytest.mark.parametrize("clean", [True, False])
def test_a_segment_in_the_middle(kit, caplog, clean) -> None:
    site = Site(kit, clean=clean)
    gone, upper = site.bases[1:3]
    site.remove(gone)
    log = site.reopen()
    said = site.said(caplog)
    wanted = f"the .log of its index {gone:020d} is missing: records from {gone} to {upper - 1}"
    if clean:
        assert log.log_end_offset == RECORDS
        assert len(said) == 1 and wanted in said[0]
    else:
        # What was not flushed is scanned, and cut at the gap: all above it is missing.
        assert log.log_end_offset == gone
        assert f"records from {gone} to 79 are lost here" in said[-1]


def test_every_segment(kit, caplog) -> None:
    site = Site(kit, checkpointed=False)
    for base in site.bases:
        site.remove(base, ".log", ".index", ".timeindex", ".snapshot")
    assert site.reopen().log_end_offset == 0
    (said,) = site.said(caplog)
    assert "there is a leader-epoch-checkpoint and no .log: records from 0 on" in said


def test_what_was_durable_is_told_once(kit, caplog) -> None:
    site = Site(kit, clean=True)
    site.remove(site.bases[-1])
    site.reopen()
    (said,) = site.said(caplog)
    assert "everything below 80 was durable: records are lost" in said


def script(kit, directory: LogDirectory) -> None:
    """All that removes files of a log, in the order that a node does it in."""
    log = kit.create_log(directory, TP, kit.TOPIC_ID, CONFIG, now_ms=kit.NOW)
    sequence = 0

    def fill(batches: int, epoch: int) -> None:
        nonlocal sequence
        for _ in range(batches):
            data = kit.batch(2, mark=sequence, pid=5, epoch=0, sequence=sequence)
            kit.append(log, data, leader_epoch=epoch)
            sequence += 2

    fill(30, 0)
    log.flush()
    log.advance_log_start(log.segments.bases[2])
    log.delete_old_segments(kit.NOW, 60)
    log.delete_expired(kit.NOW + 10**9)
    log.truncate_to(log.segments.bases[-2] - 1)
    sequence = log.log_end_offset
    fill(10, 1)
    log.truncate_fully_and_start_at(7)
    sequence = 0
    fill(10, 2)
    log.close()


def test_a_crash_at_any_call_is_no_alarm(kit, caplog) -> None:
    """Whatever a killed node was doing, nobody but it removed files."""

    def run(disk: SimulatedDisk) -> None:
        site = Site.__new__(Site)
        site.kit, site.disk = kit, disk
        script(kit, site.open())

    whole = SimulatedDisk()
    run(whole)
    assert whole.calls > 200
    for call in range(1, whole.calls + 1):
        disk = SimulatedDisk()
        disk.crash_at(call)
        with pytest.raises(SimulatedCrash):
            run(disk)
        site = Site.__new__(Site)
        site.kit, site.disk = kit, disk.after_kill()
        directory = site.open()
        for found in directory.scan():
            if found.topic_id is not None:
                directory.open_log(TP, kit.TOPIC_ID, CONFIG, now_ms=kit.NOW)
        assert errors(caplog) == [], (call, whole.trace[call - 3 : call + 1])
