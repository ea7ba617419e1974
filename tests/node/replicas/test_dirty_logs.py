"""Idle logs are in no job's way, and what happens to one brings it back to those it concerns."""

from __future__ import annotations

import pytest

from kept.cluster.metadata.records import ConfigRecord, RemoveTopicRecord, ResourceType
from kept.node.replicas import maintenance
from kept.node.runtime.clock import monotonic_ms
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition
from tests.support.decisions import propose

IDLE = 40


class Kit:
    """A node with one busy topic among idle ones, and a clock that the test turns."""

    def __init__(self, lone_node, monkeypatch):
        self.lone = lone_node(log_cleaner_enable="false", kept_fsync_threads="1")
        self.node = self.lone.node
        self.ahead_ms = 0
        real = self.node.parts.runtime.now_ms
        self.node.parts.runtime.now_ms = lambda: real() + self.ahead_ms
        monkeypatch.setattr(maintenance, "monotonic_ms", lambda: monotonic_ms() + self.ahead_ms)
        self.timers = self.node.parts.maintenance
        self.timers.stop()
        self.dirty_logs = self.node.parts.replicas.dirty_logs

    def make(self, name, **config):
        self.lone.create(name, **config)
        return self.node.parts.table.replicas[TopicPartition(name, 0)]

    def configure(self, name, key, value):
        record = ConfigRecord(ResourceType.TOPIC, name, key, value)

        async def changed():
            await propose(self.node, [record])

        self.lone.run(changed())

    def append(self, hosted, size=10):
        now = self.node.parts.runtime.now_ms()
        batch = bytearray(build_batch([(now, b"k", b"v" * size, ())]))
        hosted.partition.append(check(memoryview(batch), hosted.rules, now), now)
        hosted.partition.write()

    def run(self, *jobs):
        async def work():
            for job in jobs:
                for _ in job():
                    pass
            for directory in self.node.parts.table.directories:
                await directory.pool.run(int)
                await directory.pool.drain()

        self.lone.run(work())

    def all_jobs(self):
        jobs = self.timers
        self.run(
            jobs.flush_due, jobs.roll_idle, jobs.delete_expired, jobs.checkpoint_high_watermarks
        )


@pytest.fixture
def kit(lone_node, monkeypatch):
    return Kit(lone_node, monkeypatch)


def looked_at(kit, monkeypatch):
    """The logs that the jobs look at from now on."""
    seen = []
    real = maintenance.wants_flush
    monkeypatch.setattr(
        maintenance, "wants_flush", lambda log, now: (seen.append(log), real(log, now))
    )
    each = kit.timers._each

    def noted(job, chosen=None):
        return each(lambda hosted: (seen.append(hosted.partition.log), job(hosted)), chosen)

    monkeypatch.setattr(kit.timers, "_each", noted)
    values = kit.node.parts.table.directories[0].directory.write_checkpoints
    monkeypatch.setattr(
        kit.node.parts.table.directories[0].directory,
        "write_checkpoints",
        lambda *args: (seen.append("checkpoint"), values(*args)),
    )
    return seen


def test_idle_logs_are_not_looked_at(kit, monkeypatch):
    several = [kit.make(f"idle-{number}") for number in range(IDLE)]
    busy = kit.make("busy", flush_ms="1000")
    for hosted in several:
        kit.append(hosted)
    kit.all_jobs()
    kit.all_jobs()
    seen = looked_at(kit, monkeypatch)
    kit.all_jobs()
    assert seen == []
    kit.append(busy)
    kit.all_jobs()
    assert set(seen) == {busy.partition.log, "checkpoint"}


def test_a_log_that_is_written_again_and_again_has_its_flush_ms(kit):
    hosted = kit.make("busy", flush_ms="1000")
    log = hosted.partition.log
    for expected in (1, 2):
        kit.all_jobs()
        kit.ahead_ms += 100_000
        kit.append(hosted)
        kit.run(kit.timers.flush_due)
        assert log.recovery_point == expected - 1, "an idle log's time starts with its next record"
        kit.ahead_ms += 1_001
        kit.run(kit.timers.flush_due)
        assert log.recovery_point == expected


def test_settings_that_change_reach_logs_at_rest(kit):
    hosted = kit.make("quiet")
    log = hosted.partition.log
    kit.append(hosted)
    kit.all_jobs()
    assert hosted not in kit.dirty_logs.unflushed
    kit.configure("quiet", "flush.ms", "1000")
    kit.run(kit.timers.flush_due)
    kit.ahead_ms += 1_001
    kit.run(kit.timers.flush_due)
    assert log.recovery_point == 1
    kit.configure("quiet", "segment.ms", "60000")
    kit.run(kit.timers.roll_idle)
    assert len(log.segments) == 1
    kit.ahead_ms += 61_000
    kit.run(kit.timers.roll_idle)
    assert len(log.segments) == 2


def test_each_segment_has_its_own_age(kit):
    hosted = kit.make("slow", segment_ms="60000")
    log = hosted.partition.log
    for rolled in (1, 2, 3):
        kit.append(hosted)
        kit.run(kit.timers.roll_idle)
        assert len(log.segments) == rolled
        kit.ahead_ms += 61_000
        kit.run(kit.timers.roll_idle)
        assert len(log.segments) == rolled + 1
    assert len(kit.dirty_logs._queue) <= 2


def test_a_segment_that_was_rolled_early_leaves_nothing_in_the_queue(kit):
    hosted, other = kit.make("rolled", segment_bytes="1024"), kit.make("other", segment_ms="60000")
    kit.append(other)
    for _ in range(200):
        kit.append(hosted, size=900)
        kit.run(kit.timers.roll_idle)
    assert len(hosted.partition.log.segments) == 200
    assert len(kit.dirty_logs._queue) <= 2 * maintenance.YIELD_EVERY
    kit.ahead_ms += 61_000
    kit.run(kit.timers.roll_idle)
    assert len(other.partition.log.segments) == 2, "others keep their moment"


def test_logs_that_left_do_not_stay_in_the_queue(kit):
    """An entry holds its log until the moment of its roll, which may be a week ahead."""
    gone = [kit.make("gone", segment_ms="30000")]
    kit.append(gone[0])
    kit.run(kit.timers.roll_idle)
    late, soon = kit.make("late", segment_ms="90000"), kit.make("soon", segment_ms="60000")
    for hosted in (late, soon):
        kit.append(hosted)
        kit.run(kit.timers.roll_idle)
    for number in range(maintenance.YIELD_EVERY + 4):
        gone.append(kit.make(f"gone-{number}"))
        kit.append(gone[-1])
    kit.run(kit.timers.roll_idle)
    queue = kit.dirty_logs._queue
    assert {entry[2] for entry in queue} == {*gone, late, soon}
    topics = kit.node.parts.metadata.image.topics
    names = [hosted.partition.topic_partition.topic for hosted in gone]
    leave = [RemoveTopicRecord(topics[name].topic_id) for name in names]
    kit.lone.run(propose(kit.node, leave))
    kit.run(kit.timers.roll_idle)
    assert {entry[2] for entry in kit.dirty_logs._queue} == {late, soon}
    kit.ahead_ms += 61_000
    kit.run(kit.timers.roll_idle)
    assert [len(hosted.partition.log.segments) for hosted in (late, soon)] == [1, 2]


def test_high_watermarks_that_move_by_themselves_are_looked_at(kit, monkeypatch):
    hosted = kit.make("lagging")
    kit.append(hosted)
    kit.all_jobs()
    kit.append(hosted)
    partition_class = type(hosted.partition)
    with monkeypatch.context() as patched:  # as when followers are behind
        patched.setattr(partition_class, "high_watermark", property(lambda _: 1))
        kit.run(kit.timers.checkpoint_high_watermarks)
    kit.run(kit.timers.checkpoint_high_watermarks)
    directory = kit.node.parts.table.directories[0].directory
    assert directory.high_watermarks[TopicPartition("lagging", 0)] == 2


def test_what_left_is_forgotten_and_leaves_the_checkpoint(kit):
    for name in ("goes", "stays"):
        kit.append(kit.make(name, segment_ms="60000"))
    kit.all_jobs()
    gone = kit.node.parts.table.replicas[TopicPartition("goes", 0)]
    kit.lone.run(
        propose(
            kit.node, [RemoveTopicRecord(kit.node.parts.metadata.image.topics["goes"].topic_id)]
        )
    )
    kit.all_jobs()
    directory = kit.node.parts.table.directories[0].directory
    assert set(directory.high_watermarks) == {TopicPartition("stays", 0)}
    dirty_logs = kit.dirty_logs
    gone.partition.log.mark_dirty()
    for several in (
        dirty_logs.dirty,
        dirty_logs.unflushed,
        dirty_logs.uncheckpointed,
        dirty_logs.leaving,
    ):
        assert gone not in several
    kit.ahead_ms += 61_000
    assert gone not in list(dirty_logs.due_to_roll(kit.node.parts.runtime.now_ms()))


def test_files_that_wait_and_logs_that_are_cut_are_noticed_at_rest(kit):
    hosted = kit.make("cut", segment_bytes="1024", file_delete_delay_ms="1000")
    log = hosted.partition.log
    for _ in range(3):
        kit.append(hosted, size=900)
    kit.all_jobs()

    async def delete():
        log.advance_log_start(2)
        log.delete_old_segments(kit.node.parts.runtime.now_ms(), 3)

    kit.lone.run(delete())
    kit.all_jobs()
    assert log.retired.paths
    kit.ahead_ms += 1_001
    kit.all_jobs()
    assert not log.retired.paths
    kit.all_jobs()

    async def cut():
        log.truncate_to(2)

    kit.lone.run(cut())
    assert hosted in kit.dirty_logs.dirty


def test_a_segment_that_the_cleaner_rolls_is_flushed(kit):
    hosted = kit.make("asked")
    log = hosted.partition.log
    kit.append(hosted)
    kit.all_jobs()

    async def roll():
        log.roll(kit.node.parts.runtime.now_ms())

    kit.lone.run(roll())
    kit.run(kit.timers.flush_due)
    assert log.recovery_point == 1
