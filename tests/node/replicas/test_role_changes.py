"""Roles of many partitions: one that goes wrong keeps no other from its own."""

from __future__ import annotations

import asyncio
import errno
import uuid
from typing import Any

import pytest
from msgspec.structs import replace

from kept.cluster.metadata.records import BrokerRecord, RemoveTopicRecord
from kept.node.replicas import role_changes
from kept.node.replicas.role_changes import RoleChanges
from kept.node.runtime.time_slices import IN_PLACE_STEPS, TURN_S, TimeSlices
from kept.replication.events import EligibleBrokersChanged
from kept.replication.replica_effects import AcknowledgementsLeft
from kept.storage.errors import InvariantViolation, KafkaStorageError, ResourceExhausted
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.types import TopicPartition
from tests.support.decisions import propose
from tests.support.given import Given
from tests.support.loops import run, until

BROKEN, WHOLE = TopicPartition("broken", 0), TopicPartition("whole", 0)


@pytest.mark.parametrize("when", ["serving again", "start"])
def test_a_bug_at_one_partition_takes_that_one_offline(
    lone_node, tmp_path, monkeypatch, capsys, when
) -> None:
    settings = {"log_dirs": str(tmp_path / "log"), "metadata_log_dir": str(tmp_path / "meta")}
    lone = lone_node(**settings)
    for tp in (BROKEN, WHOLE):
        lone.create(tp.topic)
    lead = RoleChanges._lead

    def lead_or_fail(roles, hosted, record) -> None:
        if hosted.partition.topic_partition == BROKEN:
            raise InvariantViolation("leader epoch 3 after 4")
        lead(roles, hosted, record)

    async def serve_again(parts) -> None:
        parts.roles.suspend()
        parts.roles.resume(parts.metadata.image)

    if when == "start":
        lone.stop()
    monkeypatch.setattr(RoleChanges, "_lead", lead_or_fail)
    if when == "start":
        lone = lone_node(**settings)
    else:
        lone.run(serve_again(lone.node.parts))
    partition = lone.node.parts.table.partition
    assert partition(WHOLE).is_leader
    with pytest.raises(KafkaStorageError, match="leader epoch 3 after 4"):
        partition(BROKEN).check_online()
    assert 'event="partition offline"' in capsys.readouterr().err
    health = lone.node.parts.admin.health
    assert health.unready() is None, "the other partitions are served"
    assert health.offline_replicas() == ["broken:0"]
    status, _, body = lone.http("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200
    assert b"replica offline until this node is started again: broken:0\n" in body
    metrics = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")[2]
    assert b"kept_offline_partitions 1.0\n" in metrics
    topic_id = lone.node.parts.metadata.image.topics[BROKEN.topic].topic_id
    lone.run(propose(lone.node, [RemoveTopicRecord(topic_id)]))
    assert health.offline_replicas() == []


def test_what_a_bug_took_offline_leaves_the_isr_as_often_as_it_is_there(lone, monkeypatch) -> None:
    lone.create(BROKEN.topic)
    parts = lone.node.parts
    hosted, record = parts.table.replicas[BROKEN], parts.metadata.image.partition(BROKEN.topic, 0)
    resigned: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        parts.roles._alter_partition, "resign", lambda _, record: resigned.append(record.isr)
    )

    def fail(*_: object) -> None:
        raise InvariantViolation("leader epoch 3 after 4")

    monkeypatch.setattr(RoleChanges, "_follow", fail)
    record = replace(record, leader=1, replicas=(0, 1), isr=(0, 1))

    async def change() -> None:
        parts.roles.apply(hosted, record)
        parts.roles.apply(hosted, replace(record, isr=(1,)))
        parts.roles.apply(hosted, replace(record, isr=(1, 0)))

    lone.run(change())
    assert resigned == [(0, 1), (1, 0)]
    assert parts.table.is_offline(BROKEN.topic, 0)
    assert not hosted.partition.maybe_roll(1 << 60), "and nobody is told every few seconds"


def test_a_leader_epoch_that_finds_no_descriptor_is_saved_later(lone, monkeypatch) -> None:
    """Until then nothing is appended in it; no disk has failed."""
    lone.create(WHOLE.topic)
    monkeypatch.setattr(role_changes, "EXHAUSTED_RETRY_S", 0.01)
    save, found = LeaderEpochCache.save, []

    def save_the_third_time(cache: LeaderEpochCache) -> None:
        found.append(lone.node.parts.table.partition(WHOLE)._appendable)
        if len(found) < 3:
            raise ResourceExhausted("/d", "open", OSError(errno.EMFILE, "Too many open files"))
        save(cache)

    monkeypatch.setattr(LeaderEpochCache, "save", save_the_third_time)
    record = lone.node.parts.metadata.image.partition(*WHOLE)
    later = replace(record, leader_epoch=5, partition_epoch=record.partition_epoch + 1)
    lone.run(propose(lone.node, [later]))
    lone.run(until(lambda: found and lone.node.parts.table.partition(WHOLE)._appendable))
    assert lone.node.parts.table.partition(WHOLE).leader_epoch == 5 and found == [False] * 3
    assert [one.offline for one in lone.node.parts.table.directories] == [None]


def test_a_leader_epoch_is_not_saved_again_once_another_one_began(lone, monkeypatch) -> None:
    lone.create(WHOLE.topic)
    monkeypatch.setattr(role_changes, "EXHAUSTED_RETRY_S", 0.01)
    parts, save, try_to_save = lone.node.parts, LeaderEpochCache.save, RoleChanges._save_epoch
    partition = parts.table.partition(WHOLE)
    tries: list[int] = []
    failed: list[int] = []

    def tried(roles: RoleChanges, *arguments: Any) -> None:
        tries.append(partition.leader_epoch)
        try_to_save(roles, *arguments)

    def save_the_last(cache: LeaderEpochCache) -> None:
        if (epoch := partition.leader_epoch) < 6:
            failed.append(epoch)
            raise ResourceExhausted("/d", "open", OSError(errno.EMFILE, "Too many open files"))
        save(cache)

    monkeypatch.setattr(RoleChanges, "_save_epoch", tried)
    monkeypatch.setattr(LeaderEpochCache, "save", save_the_last)
    for epoch, noted in ((5, failed), (6, tries)):
        record = parts.metadata.image.partition(*WHOLE)
        later = replace(record, leader_epoch=epoch, partition_epoch=record.partition_epoch + 1)
        lone.run(propose(lone.node, [later]))
        lone.run(until(lambda epoch=epoch, noted=noted: epoch in noted))
    lone.run(until(lambda: partition._appendable))
    lone.run(asyncio.sleep(0.05))  # the try of epoch 5 would be due
    assert tries.count(6) == 1


def test_the_node_serves_again_by_the_image_that_it_acts_on(lone, capsys) -> None:
    """It may resume while the roles of a newer image than it has acted on are being taken."""
    lone.create("whole")
    parts = lone.node.parts
    before, record = parts.metadata.image, parts.metadata.image.partition(WHOLE.topic, 0)
    later = replace(record, leader_epoch=5, partition_epoch=record.partition_epoch + 1)
    lone.run(propose(lone.node, [later]))

    async def serve_again() -> None:
        parts.replicas.suspend()
        parts.replicas.resume(before)

    lone.run(serve_again())
    partition = parts.table.partition(WHOLE)
    assert partition.is_leader and partition.leader_epoch == 5 and partition.offline is None
    assert "later leader epoch" not in capsys.readouterr().err


def test_partitions_are_told_of_the_brokers_by_one_event_until_they_change(lone) -> None:
    parts = lone.node.parts
    known = parts.roles._known_brokers
    epoch = parts.identity.broker_epoch
    before = known()
    assert before == EligibleBrokersChanged(frozenset({0}), ((0, epoch),)) and known() is before
    lone.run(propose(lone.node, [BrokerRecord(7, 99, uuid.UUID(int=7), (), None, True, ())]))
    assert known() == EligibleBrokersChanged(frozenset({0}), ((0, epoch), (7, 99)))


@pytest.mark.parametrize(
    ("leader", "lost", "offline", "resigns"),
    [
        (1, False, False, False),
        (0, False, False, False),
        (0, True, False, True),
        (1, True, False, False),
        (0, False, True, True),
        (1, False, True, True),
    ],
)
def test_a_replica_that_resigned_does_it_again_only_while_there_is_reason(
    lone, monkeypatch, *, leader, lost, offline, resigns
) -> None:
    """One that follows meanwhile, or was opened, is fetched for: nobody would begin that again."""
    lone.create(WHOLE.topic)
    parts = lone.node.parts
    hosted, record = parts.table.replicas[WHOLE], parts.metadata.image.partition(WHOLE.topic, 0)
    record = replace(record, leader=leader, replicas=(0, 1), isr=(0, 1))
    hosted.manifests.core.lost, hosted.manifests.core.has_offered = lost, not lost
    if offline:
        hosted.partition.mark_offline("a disk failed")
    done: list[str] = []
    monkeypatch.setattr(parts.alter_partition, "resign", lambda *_: done.append("resign"))
    monkeypatch.setattr(parts.roles._fetchers, "stop_following", lambda _: done.append("stop"))

    async def again() -> None:
        parts.alter_partition.on_still_lost(WHOLE, record)

    lone.run(again())
    assert done == (["stop", "resign"] if offline else ["resign"] if resigns else [])


@run
async def test_very_many_acknowledgements_are_told_in_slices(capsys) -> None:
    """A bug that one of them meets keeps no other from being told."""
    told, now_s = 0, 0.0
    roles: Any = RoleChanges.__new__(RoleChanges)
    slices = TimeSlices(asyncio.get_running_loop(), lambda: now_s)
    roles._runtime = Given(slices=slices)

    def acknowledge_next() -> bool:
        nonlocal told, now_s
        told += 1
        now_s += TURN_S / 10
        if told == 40:
            raise KeyError("a bug of ours")
        return told < 500

    hosted: Any = Given(partition__acknowledge_next=acknowledge_next)
    hosted.partition.topic_partition = WHOLE
    roles.perform(hosted, AcknowledgementsLeft())
    assert told == IN_PLACE_STEPS
    while told < 500:
        before = told
        await asyncio.sleep(0)
        assert 1 <= told - before <= 11
    await asyncio.sleep(0)
    assert told == 500 and "a bug of ours" in capsys.readouterr().err
