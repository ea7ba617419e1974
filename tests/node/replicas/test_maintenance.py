"""What a node does on a clock: each job does its work, and a fault of one log stops no other."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading

import pytest

from kept.node.metadata.serving_lease import ServingLease
from kept.node.parts import idle_check_ms
from kept.node.replicas import maintenance
from kept.node.replicas.dirty_logs import DirtyLogs
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime import background_steps
from kept.node.runtime.clock import monotonic_ms
from kept.storage.checkpoints import read_offsets
from kept.storage.disk import Disk
from kept.storage.errors import InvariantViolation, MachineError, ResourceExhausted
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition
from tests.support.replicas import InlineRuntime, live_config, recorded_failures


class Kit:
    """One node with two topics, its timers, and a clock that the test turns."""

    def __init__(self, lone_node, monkeypatch, **settings):
        self.lone = lone_node(log_cleaner_enable="false", kept_fsync_threads="1", **settings)
        self.node = self.lone.node
        self.ahead_ms = self.set_ahead_ms = 0  # time that passes; what somebody sets the clock by
        real = self.node.parts.runtime.now_ms
        self.node.parts.runtime.now_ms = lambda: real() + self.ahead_ms + self.set_ahead_ms
        monkeypatch.setattr(maintenance, "monotonic_ms", lambda: monotonic_ms() + self.ahead_ms)
        self.timers = self.node.parts.maintenance

    def hosted(self, topic):
        return self.node.parts.table.replicas[TopicPartition(topic, 0)]

    def append(self, topic, count=1, size=10, **more):
        hosted = self.hosted(topic)
        now = self.node.parts.runtime.now_ms()
        for _ in range(count):
            batch = bytearray(build_batch([(now, b"k", b"v" * size, ())], **more))
            hosted.partition.append(check(memoryview(batch), hosted.rules, now), now)
            hosted.partition.write()

    def drain(self):
        async def drained():
            for directory in self.node.parts.table.directories:
                await directory.pool.run(int)
                await directory.pool.drain()

        self.lone.run(drained())

    def on_loop(self, job):
        async def run():
            for _ in job() or ():  # a job is a generator of small steps
                pass

        return self.lone.run(run())


@pytest.fixture
def kit(lone_node, monkeypatch):
    def make(topic_config=None, **settings):
        kit = Kit(lone_node, monkeypatch, **settings)
        for name in ("first", "second"):
            kit.lone.create(name, **(topic_config or {}))
        return kit

    return make


def checkpoint(kit, name):
    return read_offsets(Disk({}), f"{kit.node.parts.table.directories[0].name}/{name}")


def test_checkpoints_say_what_is_and_are_written_when_it_changed(kit):
    kit = kit()
    kit.append("first", 3)
    writes = []
    directory = kit.node.parts.table.directories[0].directory
    real = directory.write_checkpoints
    directory.write_checkpoints = lambda *args: (writes.append(args[0]), real(*args))
    for _ in range(3):
        kit.on_loop(kit.timers.checkpoint_high_watermarks)
        kit.drain()
    assert len(writes) == 1, "nothing changed since"
    found = checkpoint(kit, "replication-offset-checkpoint")
    assert found == {TopicPartition("first", 0): 3, TopicPartition("second", 0): 0}
    kit.append("second")
    kit.on_loop(kit.timers.checkpoint_high_watermarks)
    kit.drain()
    assert len(writes) == 2
    kit.on_loop(kit.timers.checkpoint_recovery_points)
    kit.drain()
    found = checkpoint(kit, "recovery-point-offset-checkpoint")
    assert found[TopicPartition("first", 0)] == 0, "nothing was flushed"
    log = kit.hosted("first").partition.log
    kit.on_loop(lambda: log.advance_log_start(2))
    kit.on_loop(kit.timers.checkpoint_log_starts)
    kit.drain()
    found = checkpoint(kit, "log-start-offset-checkpoint")
    assert found == {TopicPartition("first", 0): 2}, "only starts inside a segment"


def test_retention_deletes_by_time_and_tells(kit, capsys):
    kit = kit({"segment_bytes": "1024", "retention_ms": "60000", "file_delete_delay_ms": "1000"})
    kit.append("first", 10, size=400)
    kit.on_loop(kit.timers.retention)
    assert kit.hosted("first").partition.log_start_offset == 0
    kit.ahead_ms = 120_000
    kit.append("second")
    kit.on_loop(kit.timers.retention)
    log = kit.hosted("first").partition.log
    assert log.log_start_offset == 10
    assert 'event="segment deleted"' in capsys.readouterr().err
    gone = [path for path in log.retired.paths if path.endswith(".log.deleted")]
    assert gone and all(os.path.exists(path) for path in gone)
    kit.on_loop(kit.timers.delete_expired)
    kit.drain()
    assert all(os.path.exists(path) for path in gone), "file.delete.delay.ms is not over"
    kit.ahead_ms += 2000
    kit.on_loop(kit.timers.delete_expired)
    kit.drain()
    assert not any(os.path.exists(path) for path in gone) and not log.retired.paths


def test_an_idle_log_rolls_and_the_rolled_segment_is_flushed(kit):
    kit = kit({"segment_ms": "60000"})
    kit.append("first", 2)
    log = kit.hosted("first").partition.log
    kit.on_loop(kit.timers.roll_idle)
    assert len(log.segments) == 1
    kit.ahead_ms = 61_000
    kit.on_loop(kit.timers.roll_idle)
    assert [s.base_offset for s in log.segments] == [0, 2]
    assert log.recovery_point == 0
    kit.on_loop(kit.timers.flush_due)
    kit.drain()
    assert log.recovery_point == 2
    kit.ahead_ms = 1_000_000
    kit.on_loop(kit.timers.roll_idle)
    assert [s.base_offset for s in log.segments] == [0, 2], "an empty segment stays"


def test_flush_ms_is_kept_though_the_clock_is_set_back(kit):
    kit = kit({"flush_ms": "1000"})
    kit.append("first")
    kit.on_loop(kit.timers.flush_due)
    kit.set_ahead_ms = -10 * 365 * 86_400_000
    kit.ahead_ms = 5_000
    kit.on_loop(kit.timers.flush_due)
    kit.drain()
    assert kit.hosted("first").partition.log.recovery_point == 1


def test_flush_ms_is_kept(kit):
    kit = kit({"flush_ms": "1000"})
    kit.append("first")
    log = kit.hosted("first").partition.log
    kit.on_loop(kit.timers.flush_due)
    kit.drain()
    assert log.recovery_point == 0
    kit.ahead_ms = 5_000
    kit.on_loop(kit.timers.flush_due)
    kit.drain()
    assert log.recovery_point == 1


def test_silent_producers_are_forgotten(kit):
    kit = kit(producer_id_expiration_ms="10000")
    kit.append("first", producer_id=9, producer_epoch=0, base_sequence=0)
    producers = kit.hosted("first").partition.log.producers
    kit.on_loop(kit.timers.expire_producers)
    assert len(producers) == 1
    kit.ahead_ms = 20_000
    kit.on_loop(kit.timers.expire_producers)
    assert len(producers) == 0


def test_one_logs_trouble_stops_no_other(kit, capsys):
    kit = kit({"segment_ms": "60000"})
    kit.append("first")
    kit.append("second")

    def broken(now_ms):
        raise InvariantViolation("something is wrong")

    kit.hosted("first").partition.log.maybe_roll = broken
    kit.ahead_ms = 61_000
    kit.on_loop(kit.timers.roll_idle)
    assert len(kit.hosted("second").partition.log.segments) == 2
    said = capsys.readouterr().err
    assert 'event="job failed"' in said and "topic=first" in said


def test_a_disk_error_takes_the_directory_offline(kit):
    kit = kit({"segment_ms": "60000"})
    kit.append("first")

    def broken(now_ms):
        raise MachineError(kit.hosted("first").partition.log.directory, "open", OSError(5, "EIO"))

    kit.hosted("first").partition.log.maybe_roll = broken
    kit.ahead_ms = 61_000
    kit.on_loop(kit.timers.roll_idle)
    assert kit.node.parts.table.directories[0].offline is not None
    assert kit.node.parts.shutdown.failure, "it was the only one"


@pytest.mark.parametrize("raises", ["when it begins", "later"])
@pytest.mark.parametrize("error", ["bug", "machine"])
def test_a_job_that_raises_runs_again(kit, capsys, error, raises):

    kit = kit()
    calls = []

    def fail():
        calls.append(1)
        if error == "bug":
            raise ZeroDivisionError
        raise MachineError("/elsewhere/file", "open", OSError(5, "EIO"))

    def fails_later():
        yield
        fail()

    async def wait():
        kit.timers._every(1, "broken", fails_later if raises == "later" else fail)
        async with asyncio.timeout(60):
            while len(calls) < 3:
                await asyncio.sleep(0.001)
        kit.timers.stop()
        seen = len(calls)
        await asyncio.sleep(0.01)
        assert len(calls) == seen, "stopped"

    kit.lone.run(wait())
    said = capsys.readouterr().err
    assert ("ZeroDivisionError" in said and "broken" in said) or "disk error" in said
    assert maintenance.FLUSH_TICK_MS < maintenance.ROLL_TICK_MS


def test_slices_of_jobs_that_are_due_together_do_not_follow_each_other_at_once(kit, monkeypatch):
    kit = kit()
    monkeypatch.setattr(background_steps, "SLICE_S", 0.0)
    kit.timers.stop()
    slices = []

    def job():
        for _ in range(5):
            slices.append(maintenance.perf_counter())
            yield

    async def run():
        kit.timers._stopped = False
        kit.timers._handles.clear()
        for name in ("one", "two", "three"):
            kit.timers._every(1, name, job)
        async with asyncio.timeout(60):
            while len(slices) < 30:
                await asyncio.sleep(0.001)
        kit.timers.stop()

    kit.lone.run(run())
    gaps = [later - earlier for earlier, later in itertools.pairwise(slices)]
    assert min(gaps) >= background_steps.PAUSE_S


def timers(config, also, lease=None):
    """The jobs of a node without logs."""
    return maintenance.Maintenance(
        runtime=InlineRuntime(),
        config=config,
        table=ReplicaTable(),
        dirty_logs=DirtyLogs(),
        failures=recorded_failures([]),
        lease=lease or ServingLease(),
        also=also,
    )


@pytest.mark.parametrize(("idle_ms", "looks_ms"), [(200, 100), (20_000, 5_000), (600_000, 10_000)])
def test_each_job_is_done_as_often_as_its_setting_says(monkeypatch, idle_ms, looks_ms):
    config = live_config(
        replica_high_watermark_checkpoint_interval_ms="5001",
        log_flush_offset_checkpoint_interval_ms="60001",
        log_flush_start_offset_checkpoint_interval_ms="60002",
        replica_lag_time_max_ms="30000",
        log_retention_check_interval_ms="300001",
        connections_max_idle_ms=str(idle_ms),
    )
    done = {}

    def look():
        """Connections that may be idle."""

    jobs = timers(config, {"idle connections": (idle_check_ms(config.current), look)})
    monkeypatch.setattr(jobs, "_every", lambda ms, name, job: done.setdefault(name, (ms, job)))
    jobs.start()
    assert {name: ms for name, (ms, _) in done.items()} == {
        "disks": 1_000,
        "high watermarks": 5_001,
        "recovery points": 60_001,
        "log starts": 60_002,
        "lagging replicas": 15_000,  # Kafka, too: nobody lags for one and a half times as long
        "retention": 300_001,
        "roll": 5_000,
        "flush": 500,
        "delete": 5_000,
        "producers": 60_000,
        "idle connections": looks_ms,
    }
    assert len({job.__name__ for _, job in done.values()}) == len(done)


# What fails in a thread.


def fail_with(error, path):
    if error == "disk":
        return MachineError(path, "write", OSError(5, "EIO"))
    return ZeroDivisionError()


@pytest.mark.parametrize("error", ["disk", "bug"])
@pytest.mark.parametrize("job", ["checkpoint", "purge", "verify"])
def test_an_error_in_a_thread_fails_its_directory_and_a_bug_is_told(kit, capsys, job, error):
    kit = kit()
    kit.timers.stop()
    kit.append("first")
    directory = kit.node.parts.table.directories[0]
    whole = directory.directory.write_checkpoints

    def broken(*_):
        raise fail_with(error, directory.name)

    dirty_logs = kit.node.parts.replicas.dirty_logs
    kit.on_loop(kit.timers.verify_files)
    kit.drain()
    if job == "checkpoint":
        directory.directory.write_checkpoints = broken
        kit.on_loop(kit.timers.checkpoint_high_watermarks)
        assert not dirty_logs.uncheckpointed and not dirty_logs.left
    elif job == "purge":
        directory.directory.purge = broken
        kit.on_loop(kit.timers.delete_expired)
    else:
        directory.directory.verify = broken
        kit.on_loop(kit.timers.verify_files)
    kit.drain()
    assert (directory.offline is not None) is (error == "disk")
    if job == "checkpoint":
        assert dirty_logs.left, "it is written at the next turn"
        directory.directory.write_checkpoints = whole
    what = {"checkpoint": "checkpoint", "purge": "deletion", "verify": "looking for files"}[job]
    told = f'event="{what} failed"' in capsys.readouterr().err
    assert told is (error == "bug")


def test_nothing_is_told_of_what_does_not_fail(kit, capsys):
    kit = kit()
    kit.timers.stop()
    kit.append("first")
    capsys.readouterr()
    for job in ("checkpoint_high_watermarks", "delete_expired", "verify_files"):
        kit.on_loop(getattr(kit.timers, job))
        kit.drain()
    assert "failed" not in capsys.readouterr().err


def test_files_that_were_not_removed_for_want_of_descriptors_are_removed_later(kit, monkeypatch):
    kit = kit({"segment_bytes": "1024", "retention_ms": "60000", "file_delete_delay_ms": "1000"})
    kit.timers.stop()
    kit.append("first", 10, size=400)
    kit.ahead_ms = 120_000
    kit.on_loop(kit.timers.retention)
    log = kit.hosted("first").partition.log
    waiting = sorted(log.retired.paths)

    def exhausted(paths):
        raise ResourceExhausted(paths[0], "unlink", OSError(24, "EMFILE"))

    kit.ahead_ms += 2000
    with monkeypatch.context() as patched:
        patched.setattr(log.retired, "remove", exhausted)
        kit.on_loop(kit.timers.delete_expired)
        kit.drain()
    kit.drain()
    assert waiting and sorted(log.retired.paths) == waiting
    assert kit.node.parts.table.directories[0].offline is None
    kit.ahead_ms += 2000
    kit.on_loop(kit.timers.delete_expired)
    kit.drain()
    assert not any(os.path.exists(path) for path in waiting)


def test_a_directory_is_looked_for_once_at_a_time_and_never_when_it_is_offline(kit):
    kit = kit()
    kit.timers.stop()
    directory = kit.node.parts.table.directories[0]
    looks = []
    gate = threading.Event()
    directory.directory.verify = lambda: (looks.append(1), gate.wait(60))
    kit.on_loop(kit.timers.verify_files)
    kit.on_loop(kit.timers.verify_files)
    gate.set()
    kit.drain()
    assert len(looks) == 1
    kit.on_loop(kit.timers.verify_files)
    kit.drain()
    assert len(looks) == 2
    kit.on_loop(lambda: kit.node.parts.failures.fail(directory, fail_with("disk", directory.name)))
    kit.on_loop(kit.timers.verify_files)
    kit.drain()
    assert len(looks) == 2


@pytest.mark.parametrize(("late_s", "looked"), [(0.001, True), (-60.0, False)])
def test_nobody_lags_for_the_time_that_this_node_stood_still(late_s, looked):
    calls = []
    lease = ServingLease()
    lease.until = maintenance.perf_counter() - late_s
    lease.check = lambda: calls.append("look up")
    clustered = live_config(
        controller_quorum_voters="0@127.0.0.1:10092,1@127.0.0.1:10093", node_id="0"
    )
    assert list(timers(clustered, {}, lease).expel_lagging()) == []
    assert calls == ["look up"] * looked
    lease.until = 0.0
    assert list(timers(live_config(), {}, lease).expel_lagging()) == []
    assert calls == ["look up"] * looked


@pytest.mark.parametrize("job", ["flush_due", "verify_files"])
def test_jobs_over_many_logs_leave_the_loop_free_in_between(kit, monkeypatch, job):
    kit = kit()
    kit.timers.stop()
    for topic in ("first", "second"):
        kit.append(topic)
    steps = []
    for at in (1, 2, 3):
        monkeypatch.setattr(maintenance, "YIELD_EVERY", at)
        for topic in ("first", "second"):
            hosted = kit.hosted(topic)
            kit.node.parts.replicas.dirty_logs.unflushed[hosted] = None
            kit.node.parts.replicas.dirty_logs.written[hosted] = None
        steps.append(kit.lone.run(counted(getattr(kit.timers, job))))
        kit.drain()
    assert [one - steps[2] for one in steps] == [2, 1, 0]


async def counted(job):
    return sum(1 for _ in job())
