"""Open files are shared: whoever creates replicas or connects leaves what the others need."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid

import pytest
from msgspec.structs import replace

from kept.cluster.metadata import metadata_files
from kept.cluster.metadata.metadata_node import MetadataNode
from kept.cluster.metadata.records import ConfigRecord, ResourceType
from kept.cluster.raft.ready import Role
from kept.node.runtime import fd_quota
from kept.node.runtime.fd_quota import FdQuota, check_room
from kept.storage.disk import HEADROOM
from kept.storage.errors import PolicyViolation, ResourceExhausted
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition
from tests.support.decisions import propose
from tests.support.simulated_disk import SimulatedDisk


@pytest.fixture
def limit(monkeypatch):
    """``limit(files)``: as ``ulimit -n`` would have it."""

    def set_to(files: int) -> None:
        monkeypatch.setattr(fd_quota.resource, "getrlimit", lambda _: (files, files))

    return set_to


def name_them(lone, names) -> dict[str, str]:
    answer = lone.ask(
        3,
        9,
        topics=[{"name": name} for name in names],
        allow_auto_topic_creation=True,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return {topic.name: topic.error_code.name for topic in answer.topics}


def test_topics_that_come_by_themselves_are_bounded_as_those_that_are_created(lone, limit, capfd):
    limit(80)
    names = [f"auto-{number:02d}" for number in range(70)]
    codes = name_them(lone, names)
    assert codes == {n: "none" if i < 60 else "policy_violation" for i, n in enumerate(names)}
    assert len(lone.node.parts.table.replicas) == 60
    said = capfd.readouterr().err
    assert said.count('event="topic not created"') == 1 and "more than open files allow" in said
    assert name_them(lone, ["__consumer_offsets"]) == {"__consumer_offsets": "policy_violation"}
    limit(400)
    assert name_them(lone, ["__consumer_offsets"]) == {"__consumer_offsets": "none"}


def test_whatever_is_decided_is_refused_where_it_would_use_the_last(lone, limit):
    """Also by a way that nobody has thought of."""
    lone.create("t", partitions=2)
    limit(4)
    before = lone.node.parts.metadata.image.partition("t", 1)
    one_more = replace(before, partition=2)
    with pytest.raises(PolicyViolation, match="may open 4 files"):
        lone.run(propose(lone.node, [one_more, replace(one_more, partition=3)]))
    lone.run(propose(lone.node, [replace(before, partition_epoch=before.partition_epoch + 1)]))
    assert len(lone.node.parts.metadata.image.topics["t"].partitions) == 2


def test_connections_count_against_the_replicas_of_this_node(lone, limit):
    limit(100)
    lone.node.parts.client_connections.count = 80
    assert name_them(lone, [f"a{n}" for n in range(10)])["a8"] == "policy_violation"
    lone.node.parts.client_connections.count = 0
    assert name_them(lone, ["a8"]) == {"a8": "none"}


def test_each_broker_is_looked_at_on_its_own(lone, limit):
    """A reassignment adds replicas to one broker; what it had counts, what it loses does not."""
    lone.create("t", partitions=30)
    image, files = lone.node.parts.metadata.image, lone.node.parts.open_files
    held = image.topics["t"].partitions
    limit(32)
    room = FdQuota(files, image)  # 24 replicas each
    moves = [replace(record, replicas=(*record.replicas, 7)) for record in held]
    for record in moves[:24]:
        room.reserve([record])
    with pytest.raises(PolicyViolation, match="broker 7 has 24, and may open 32 files"):
        room.reserve([moves[24]])
    room.reserve([replace(held[25], isr=())])
    room.reserve([replace(held[26], replicas=(*held[26].replicas, 8))])
    check_room(files, image, moves[:24])
    with pytest.raises(PolicyViolation):
        check_room(files, image, moves)


def test_connections_have_what_replicas_and_the_work_leave(lone, limit):
    files = lone.node.parts.open_files
    limit(1 << 20)
    most = 1 << 31
    assert files.connection_limit(most) == (1 << 20) - 500
    limit(1024)
    assert files.connection_limit(most) == 1024 - 128
    lone.create("t", partitions=24)
    assert files.connection_limit(most) == 1024 - 128 - 24
    assert files.connection_limit(77) == 77
    lone.node.parts.node_connections.count += 5
    assert files.connection_limit(most) == 1024 - 128 - 24 - 5, "nodes keep theirs"
    lone.node.parts.node_connections.count -= 5
    assert not files.nearly_out(1024 - 129) and files.nearly_out(1024 - 128)


def append(lone, number: int = 0) -> None:
    partition = lone.node.parts.table.partition(TopicPartition("t", number))
    partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()


def want_of_descriptors() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_want_of_descriptors_takes_nothing_offline(lone, capfd):
    lone.create("t")
    append(lone)
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    points = lone.node.parts.runtime.disk.fail_points
    points["roll.closed"] = want_of_descriptors
    for _ in range(2):
        with pytest.raises(ResourceExhausted):
            partition.maybe_roll(1 << 60)
    append(lone)
    del points["roll.closed"]
    partition.maybe_roll(1 << 60)
    append(lone)
    assert partition.log.log_end_offset == 3 and len(partition.log.segments) == 2
    assert [one.offline for one in lone.node.parts.table.directories] == [None]
    assert capfd.readouterr().err.count("out of open files or memory") == 1


def test_a_flush_that_finds_none_is_done_the_next_time(lone):
    lone.create("t")
    append(lone)
    hosted = lone.node.parts.table.replicas[TopicPartition("t", 0)]
    points = lone.node.parts.runtime.disk.fail_points
    points["flush.synced"] = want_of_descriptors

    async def flushed() -> None:
        await hosted.flushed(1)

    with pytest.raises(ResourceExhausted):
        lone.run(flushed())
    assert hosted.partition.log.recovery_point == 0
    del points["flush.synced"]
    lone.run(flushed())
    assert hosted.partition.log.recovery_point == 1


def test_the_metadata_log_waits_for_a_descriptor(lone):
    points, met = lone.node.parts.runtime.disk.fail_points, []

    def twice() -> None:
        met.append(1)
        if len(met) < 3:
            want_of_descriptors()

    points["metadata.append"] = twice
    lone.create("t")
    assert len(met) == 3 and not lone.node.parts.shutdown.failure
    append(lone)


def test_a_checkpoint_that_found_none_is_written_at_the_next_turn(lone):
    lone.create("t")
    append(lone)
    node = lone.node
    points = node.parts.runtime.disk.fail_points
    points["atomic.written"] = want_of_descriptors
    dirty_logs = node.parts.replicas.dirty_logs

    async def turn() -> None:
        for _ in node.parts.maintenance.checkpoint_high_watermarks():
            pass
        while node.parts.maintenance._writing:
            await asyncio.sleep(0.001)

    lone.run(turn())
    assert dirty_logs.left
    del points["atomic.written"]
    lone.run(turn())
    (directory,) = node.parts.table.directories
    assert directory.offline is None
    assert directory.directory.high_watermarks[TopicPartition("t", 0)] == 1


def test_the_reason_names_what_the_node_has(lone, limit):
    limit(8)
    parts = lone.node.parts
    parts.client_connections.count = 3
    lone.create("t", partitions=2)
    room = FdQuota(parts.open_files, parts.metadata.image)
    record = parts.metadata.image.partition("t", 0)
    with pytest.raises(PolicyViolation, match="broker 0 has 2 and 3 connections"):
        room.reserve([replace(record, partition=n) for n in range(2, 12)])


def test_a_snapshot_that_finds_no_descriptor_is_written_when_there_is_one(monkeypatch):
    disk = SimulatedDisk()
    disk.mkdir("/meta")
    member = MetadataNode.open(
        "/meta",
        disk,
        node_id=1,
        directory_id=uuid.UUID(int=1),
        random=lambda n: 0,
        snapshot_after_bytes=100,
    )
    outcomes = []
    write, refused = metadata_files.write_snapshot, []

    def exhausted(*given):
        if not refused:
            refused.append(given)
            raise ResourceExhausted("snapshot", "open", OSError(errno.EMFILE, "none"))
        return write(*given)

    monkeypatch.setattr(metadata_files, "write_snapshot", exhausted)
    for number in range(60):
        member.tick()
        if member.role is Role.LEADER:
            member.propose([ConfigRecord(ResourceType.BROKER, "", f"n{number}", "x" * 50)])
        while (work := member.work()) is not None:
            try:
                work.run()
            except ResourceExhausted:
                outcomes.append("again")
                work.run()
            assert work.snapshot_error is None
            member.done(work)
    assert outcomes == ["again"]
    assert any(name.startswith("snapshot-") for name in disk.listdir("/meta"))


def test_what_replicas_and_closed_segments_leave_to_others(lone, monkeypatch):
    """Of the soft limit: the other is what a process may raise it to."""
    for files, left, closed in ((80, 20, 5), (4000, 1000, 250), (100_000, 1000, 250)):
        limits = (files, 1 << 30)
        monkeypatch.setattr(fd_quota.resource, "getrlimit", lambda _, limits=limits: limits)
        assert fd_quota.reserved(files) == left
        assert fd_quota.replica_limit() == files - left
        lone.node.parts.open_files.share()
        disk = lone.node.parts.runtime.disk
        assert (disk.keep_below, disk.max_reopenable) == (files - HEADROOM, closed)
    monkeypatch.setattr(fd_quota, "MAX_REOPENABLE", 100)
    lone.node.parts.open_files.share()
    assert disk.max_reopenable == 100
    unlimited = (fd_quota.resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(fd_quota.resource, "getrlimit", lambda _: unlimited)
    assert fd_quota.file_limit() == 2**31 - 1


def test_no_fewer_than_no_connections_are_allowed(lone, limit):
    lone.create("t", partitions=4)
    limit(3)
    assert lone.node.parts.open_files.connection_limit(9) == 0
