"""What happens while the cleaner's files are put into place: the node goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from kept.cluster.metadata.records import RemoveTopicRecord
from kept.compaction.cleaner.planner import PassSkipped
from kept.storage.checkpoints import read_offsets
from kept.storage.directory import Checkpoint
from kept.storage.records import build_batch, check, records
from kept.storage.types import TopicPartition
from tests.support.loops import until

TP = TopicPartition("t", 0)
WAIT_S = 60


class Gate:
    """A fail point at which a thread of the directory waits."""

    def __init__(self, node, point):
        self.reached, self.open = threading.Event(), threading.Event()
        node.parts.runtime.disk.fail_points[point] = self._pass

    def _pass(self):
        self.reached.set()
        assert self.open.wait(WAIT_S)

    async def until_reached(self):
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)


def now_ms():
    return int(time.time() * 1000)


def write(hosted, count, start=0, *, key=b"k%d", keys=3, age_ms=0):
    now = now_ms()
    for i in range(start, start + count):
        batch = build_batch([(now - age_ms, key % (i % keys), b"%d" % i * 20, ())])
        hosted.partition.append(check(bytearray(batch), hosted.rules, now), now)
        hosted.partition.write()


def read(hosted):
    log, found = hosted.partition.log, {}
    offset = log.log_start_offset
    while data := log.read_batches(offset, 1 << 20, log.log_end_offset):
        for record in records(data):
            found[record.offset] = record.key
            offset = record.offset + 1
    return found


@pytest.fixture
def filled(lone_node):
    lone = lone_node(log_cleaner_enable="false")
    lone.create("t", cleanup_policy="compact", segment_bytes="1024")
    hosted = lone.node.parts.table.replicas[TP]
    write(hosted, 40)
    assert len(hosted.partition.log.segments) > 3
    return lone, hosted


@pytest.mark.parametrize("point", ["compaction.manifest", "swap.cleaned", "swap.done"])
def test_appends_and_reads_go_on_and_retention_waits(lone_node, point):
    """Before the swap retention may take what it likes: see the test of that."""
    lone = lone_node(log_cleaner_enable="false")
    policy = {"cleanup_policy": "compact,delete", "retention_ms": "3600000"}
    lone.create("t", segment_bytes="1024", **policy)
    hosted = lone.node.parts.table.replicas[TP]
    log, old = hosted.partition.log, 0
    while len(log.segments) == 1:
        write(hosted, 1, start=old, key=b"old%d", keys=100, age_ms=7_200_000)
        old += 1
    write(hosted, 40, start=old)
    gate = Gate(lone.node, point)

    async def go():
        asked = lone.node.parts.cleaner.started.request(TP)
        await gate.until_reached()
        write(hosted, 10, start=old + 40)
        if point != "compaction.manifest":
            assert hosted.partition.retention(now_ms()) == []
        assert set(read(hosted).values()) >= {b"old0", b"k0", b"k1", b"k2"}
        gate.open.set()
        return await asyncio.wait_for(asked, WAIT_S)

    result = lone.run(go())
    assert result.records_removed == 37
    newest = list(range(old + 37, old + 50))
    assert sorted(read(hosted)) == [*range(old), *newest]
    log.check_invariants()
    assert log.replacement is None
    assert hosted.compaction.clean_to == old + 40
    assert [base_offset for base_offset, _ in hosted.partition.retention(now_ms())] == [0]
    assert sorted(read(hosted)) == [old - 1, *newest]


def test_closed_segments_are_durable_before_anything_is_put_into_place(filled, monkeypatch):
    """Those that stay as they are, too: a start takes gaps among them for compaction's work."""
    lone, hosted = filled
    lone.node.parts.maintenance.stop()
    disk, log = lone.node.parts.runtime.disk, hosted.partition.log
    closed = {segment.path(".log") for segment in log.segments[:-1]}
    assert log.recovery_point < log.segments[1].base_offset
    fsync, synced, found = disk.fsync, set(), []

    def notice(file):
        fsync(file)
        synced.add(file.path)

    monkeypatch.setattr(disk, "fsync", notice)
    directory = hosted.directory.directory
    directory.write_checkpoints(Checkpoint.RECOVERY_POINTS, {TP: 0})

    def look():
        path = f"{directory.path}/{Checkpoint.RECOVERY_POINTS.value}"
        found.append((closed - synced, read_offsets(disk, path)[TP] >= 40))

    disk.fail_points["compaction.manifest"] = look

    async def go():
        return await asyncio.wait_for(lone.node.parts.cleaner.started.request(TP), WAIT_S)

    lone.run(go())
    assert found == [(set(), True)]
    assert log.recovery_point >= hosted.compaction.end_offset == 40


def test_segments_that_retention_takes_just_before_the_swap(filled):
    """The swap was made for segments that are gone: it is made again, and nothing has failed."""
    lone, hosted = filled
    gate, log = Gate(lone.node, "compaction.manifest"), hosted.partition.log
    middle = log.segments[2].base_offset

    async def go():
        asked = lone.node.parts.cleaner.started.request(TP)
        await gate.until_reached()
        log.advance_log_start(middle)
        assert log.delete_old_segments(lone.node.parts.runtime.now_ms(), log.log_end_offset)
        gate.open.set()
        return await asyncio.wait_for(asked, WAIT_S)

    lone.run(go())
    assert lone.node.parts.cleaner.started.status(TP).failure is None
    assert hosted.manifests.retry_schedule.count == 0
    assert hosted.compaction.clean_to == 40
    assert sorted(read(hosted)) == [37, 38, 39]
    log.check_invariants()


@pytest.mark.parametrize("point", ["compaction.manifest", "swap.prepared", "swap.done"])
def test_a_topic_deleted_meanwhile_keeps_its_directory_until_then(filled, point):
    lone, hosted = filled
    gate = Gate(lone.node, point)
    directory = hosted.partition.log.directory

    async def propose(record):
        index = await lone.node.parts.metadata.propose([record])
        await lone.node.parts.replicas.log_lifecycle.done(index)

    async def go():
        asked = lone.node.parts.cleaner.started.request(TP)
        await gate.until_reached()
        gone = RemoveTopicRecord(lone.node.parts.metadata.image.topics["t"].topic_id)
        deleting = asyncio.ensure_future(propose(gone))
        await until(lambda: TP not in lone.node.parts.table.replicas)
        await asyncio.sleep(0.05)
        assert not deleting.done() and os.path.isdir(directory)
        gate.open.set()
        await asyncio.wait_for(deleting, WAIT_S)
        return await asyncio.wait_for(asked, WAIT_S)

    assert isinstance(lone.run(go()), PassSkipped)
    assert not os.path.exists(directory)
    gone = hosted.partition.log.directory
    names = os.listdir(gone)
    assert not [name for name in names if name.endswith((".swap", ".cleaned", ".tmp"))]
    assert ("manifest-applied" in names) == (point == "swap.done")


@pytest.mark.parametrize("point", ["compaction.manifest", "swap.prepared", "swap.done"])
def test_a_stop_waits_for_what_is_being_put_into_place(filled, point):
    lone, hosted = filled
    gate = Gate(lone.node, point)
    directory = hosted.partition.log.directory
    before = read(hosted)

    async def go():
        lone.node.parts.cleaner.started.request(TP)
        await gate.until_reached()
        stopping = asyncio.ensure_future(
            lone.node.parts.cleaner.stop(lone.node.parts.replicas.close_manifests)
        )
        await asyncio.sleep(0.05)
        assert not stopping.done()
        gate.open.set()
        await asyncio.wait_for(stopping, WAIT_S)

    lone.run(go())
    hosted.partition.log.check_invariants()
    names = os.listdir(directory)
    assert not [name for name in names if name.endswith((".swap", ".cleaned", ".tmp"))]
    after = read(hosted)
    assert len(after) == 3 if point == "swap.done" else after == before


def test_what_could_not_be_put_into_place_is_built_again_from_the_manifest(filled, monkeypatch):
    from kept.compaction.manifest import apply as applying
    from kept.node.replicas.manifests import retry
    from kept.storage.errors import InvariantViolation

    lone, hosted = filled
    monkeypatch.setattr(retry, "RETRY_S", 1000.0)
    begin, refused = applying.begin, []

    def refuse(log, installable):
        if not refused:
            refused.append(installable)
            raise InvariantViolation("an input is gone")
        return begin(log, installable)

    monkeypatch.setattr(applying, "begin", refuse)

    async def go():
        return await asyncio.wait_for(lone.node.parts.cleaner.started.request(TP), WAIT_S)

    with pytest.raises(InvariantViolation, match="an input is gone"):
        lone.run(go())
    (status,) = lone.get("/api/v1/compaction?topic=t")["partitions"]
    assert (status["state"], status["reason"]) == ("uncleanable", "an input is gone")
    assert (status["held"], status["generation"]) == ("0.1", None)
    lone.node.parts.cleaner.started.failures.succeeded(
        TP
    )  # as on a follower, whose cleaner runs no pass
    (status,) = lone.get("/api/v1/compaction?topic=t")["partitions"]
    assert (
        status["state"] == "uncleanable"
        and status["retry_at_ms"] > lone.node.parts.runtime.now_ms()
    )
    assert sorted(read(hosted)) == list(range(40)) and hosted.manifests.core.applied is None
    lone.post("/api/v1/compaction/retry", topic="t", partition=0)

    async def applied():
        async with asyncio.timeout(WAIT_S):
            while hosted.manifests.core.applied is None:
                await asyncio.sleep(0.01)

    lone.run(applied())
    assert sorted(read(hosted)) == [37, 38, 39] and hosted.compaction.clean_to == 40
    (status,) = lone.get("/api/v1/compaction?topic=t")["partitions"]
    assert (status["state"], status["generation"]) == ("idle", "0.1")
    names = os.listdir(hosted.partition.log.directory)
    assert "held-manifest" not in names
    assert not [name for name in names if name.endswith((".swap", ".cleaned", ".tmp"))]
