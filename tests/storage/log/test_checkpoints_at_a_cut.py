"""What the checkpoints of a directory say of a log that is cut: never more than a start finds."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

import pytest

from kept.storage.directory import Checkpoint, LogDirectory
from kept.storage.log.log import Log
from kept.storage.records import build_batch
from kept.storage.types import LogConfig
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk

CONFIG = LogConfig(segment_bytes=900, index_interval_bytes=100, file_delete_delay_ms=0)
EPOCH = 7


class Site:
    """A directory with one log, under a process of broker epoch 7: batches of two records, the last
    of which are not flushed, and checkpoints that are as new as they can be.
    """

    def __init__(self, kit, disk: SimulatedDisk, batches: int = 30) -> None:
        self.kit, self.disk = kit, disk
        self.directory = self.open(disk)
        self.log: Log = kit.create_log(self.directory, kit.TP, kit.TOPIC_ID, CONFIG)
        self.fill(batches, 0)
        self.log.flush()
        self.fill(3, 0)
        self.written = kit.contents(self.log)
        self.checkpoint()
        self.directory.mark_running(EPOCH)

    def open(self, disk: SimulatedDisk) -> LogDirectory:
        return LogDirectory.open(
            "/d", disk, cluster_id="c", node_id=0, new_directory_id=uuid.UUID(int=7), now_ms=0
        )

    def fill(self, batches: int, epoch: int) -> None:
        for _ in range(batches):
            self.kit.append(self.log, self.kit.batch(2, mark=epoch), leader_epoch=epoch)

    def checkpoint(self) -> None:
        log, tp = self.log, self.kit.TP
        start = log.log_start_offset
        values = {
            Checkpoint.RECOVERY_POINTS: log.recovery_point,
            Checkpoint.HIGH_WATERMARKS: log.log_end_offset,
            Checkpoint.LOG_STARTS: start if start > log.segments.bases[0] else None,
        }
        for kind, value in values.items():
            self.directory.write_checkpoints(kind, {} if value is None else {tp: value})

    def reopened(
        self, disk: SimulatedDisk, *, compacted_to: int | None = None
    ) -> tuple[LogDirectory, Log]:
        directory = self.open(disk)
        log = directory.open_log(
            self.kit.TP, None, CONFIG, now_ms=self.kit.NOW, compacted_to=compacted_to
        )
        log.check_invariants()
        return directory, log


def unclean(site: Site) -> None:
    """A leader that was elected uncleanly lacks what is committed here."""
    site.log.truncate_to(site.log.segments.bases[-2] + 3)


def within(site: Site) -> None:
    site.log.truncate_to(site.log.segments.bases[-1] + 1)


def to_its_start(site: Site) -> None:
    site.log.truncate_to(0)


def starts_above(site: Site) -> None:
    """The leader's log starts above the end."""
    site.log.truncate_fully_and_start_at(site.log.log_end_offset + 40)


def starts_at_its_end(site: Site) -> None:
    site.log.truncate_fully_and_start_at(site.log.log_end_offset)


def starts_at_a_segment(site: Site) -> None:
    site.log.truncate_fully_and_start_at(site.log.segments.bases[2])


def below_its_start(site: Site) -> None:
    """Records were deleted up to 5, and the leader's log lacks what comes from 3 on."""
    site.log.truncate_to(3)


def below_its_files(site: Site) -> None:
    site.log.truncate_to(site.log.segments.bases[0] - 3)


def to_a_batch_around_its_start(site: Site) -> None:
    """Records were deleted up to 5, in the middle of a batch that goes."""
    site.log.truncate_to(5)


def to_a_batch_around_the_leaders_start(site: Site) -> None:
    """Rule 31: the log was emptied, and the leader's first batch begins below where it starts."""
    first = site.log.log_start_offset - 1
    data = build_batch([(site.kit.NOW, b"k", b"v", ())] * 2, base_offset=first, leader_epoch=0)
    site.log.append_as_follower(data, site.kit.NOW)
    site.log.write()


def deleted_to_5(site: Site) -> None:
    site.log.advance_log_start(5)
    site.checkpoint()


def deleted_to_the_third_segment(site: Site) -> None:
    log = site.log
    log.advance_log_start(log.segments.bases[2] + 1)
    log.delete_old_segments(site.kit.NOW, log.log_end_offset)
    log.delete_expired(site.kit.NOW)
    site.checkpoint()


def emptied(site: Site) -> None:
    starts_above(site)
    site.checkpoint()


Step = Callable[[Site], None]
CUTS: list[tuple[Step | None, Step]] = [
    (None, unclean),
    (None, within),
    (None, to_its_start),
    (None, starts_above),
    (None, starts_at_its_end),
    (None, starts_at_a_segment),
    (deleted_to_5, unclean),
    (deleted_to_5, below_its_start),
    (deleted_to_5, starts_above),
    (deleted_to_5, to_a_batch_around_its_start),
    (deleted_to_the_third_segment, below_its_files),
    (deleted_to_the_third_segment, starts_above),
    (emptied, to_a_batch_around_the_leaders_start),
]


@pytest.fixture(params=CUTS, ids=lambda cut: "-".join(step.__name__ for step in cut if step))
def cut(request) -> tuple[Step | None, Step]:
    return request.param


def prepared(kit, cut: tuple[Step | None, Step]) -> Site:
    site = Site(kit, SimulatedDisk())
    before, _ = cut
    if before is not None:
        before(site)
    return site


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("compacted_to", [None, 60])
def test_a_kill_at_any_call_of_a_cut_is_no_loss(kit, caplog, cut, compacted_to) -> None:
    """Neither said, nor told to the controller; and the log is one or the other, from its start on.
    Deleted records may be back that were below the start of a log that now begins lower.
    """
    whole = prepared(kit, cut)
    old = [batch for batch in whole.written if batch[0] >= whole.log.segments.bases[0]]
    cut[1](whole)
    new = kit.contents(whole.log)
    for call in range(1, 1000):
        site = prepared(kit, cut)
        site.disk.crash_at(site.disk.calls + call)
        try:
            cut[1](site)
        except SimulatedCrash:
            pass
        else:
            break
        caplog.clear()
        directory, log = site.reopened(site.disk.after_kill(), compacted_to=compacted_to)
        where = site.disk.trace[-1]
        assert errors(caplog) == [], where
        assert directory.proven_epoch == EPOCH, where
        found = kit.contents(log)
        left = [batch for batch in old if batch[1] >= log.log_start_offset]
        assert found in (left[: len(found)], new[: len(found)]), where
        for seed in range(3):
            caplog.clear()
            site.reopened(site.disk.after_power_loss(seed))
            assert "everything below" not in caplog.text, where
    assert call > 4


@pytest.mark.parametrize("flushed", [False, True])
def test_what_comes_after_a_cut_is_there_after_a_kill(kit, caplog, cut, flushed) -> None:
    """All of it, from its start on, whatever was checkpointed before the cut."""
    site = prepared(kit, cut)
    cut[1](site)
    site.fill(12, 1)
    if flushed:
        site.log.flush()
    start, expected = site.log.log_start_offset, kit.contents(site.log)
    survivors = [site.disk.after_kill()]
    if flushed:
        survivors += [site.disk.after_power_loss(seed) for seed in range(3)]
    for disk in survivors:
        caplog.clear()
        _, log = site.reopened(disk)
        assert (log.log_start_offset, kit.contents(log)) == (start, expected)
        assert errors(caplog) == []
    for seed in range(10):
        _, log = site.reopened(site.disk.after_power_loss(seed))
        found = kit.contents(log)
        assert found == expected[: len(found)]


def test_a_cut_above_what_is_known_writes_no_checkpoint(kit) -> None:
    """Many logs are cut at once after a failover, or start where their leaders do, on the loop."""
    site = prepared(kit, (None, starts_above))
    end = site.log.log_end_offset
    site.fill(5, 0)
    for step in (lambda: site.log.truncate_to(end), lambda: starts_above(site)):
        before = len(site.disk.trace)
        step()
        written = site.disk.trace[before:]
        assert written and not any("offset-checkpoint" in call for call in written)
