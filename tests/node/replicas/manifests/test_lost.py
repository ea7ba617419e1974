"""A replica that cannot read what it held, elected: what it does as leader."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from kept.compaction.manifest import manifest_store
from kept.node.replicas.manifests import install, recover
from kept.node.replicas.manifests.errors import Withdrawn
from kept.node.replicas.manifests.status import ManifestStatus
from kept.replication.manifests_events import ManifestRef, ManifestStored, PassCompleted
from kept.storage.errors import DamagedData
from kept.storage.records import build_batch, check
from kept.storage.types import Generation, TopicPartition
from tests.support.given import Given

TP = TopicPartition("t", 0)
WAIT_S = 60


@pytest.fixture
def damaged(lone_node, monkeypatch):
    """A log with a generation, whose manifest was torn while it was one of two replicas."""
    lone = lone_node(log_cleaner_enable="false")
    lone.create("t", cleanup_policy="compact")
    hosted = lone.node.parts.table.replicas[TP]
    now = int(time.time() * 1000)
    batch = build_batch([(now, b"k", b"1", ()), (now, b"k", b"2", ())])
    hosted.partition.append(check(bytearray(batch), hosted.rules, now), now)
    hosted.partition.write()
    core = hosted.manifests.core
    core.held = core.applied = None
    core.lost = True
    resigned = []
    alter_partition = lone.node.parts.alter_partition
    monkeypatch.setattr(alter_partition, "resign", lambda tp, _: resigned.append(tp))
    monkeypatch.setattr(alter_partition, "submit", lambda _: None)
    monkeypatch.setattr(lone.node.parts.notifier, "announce", lambda _: None)
    return lone, hosted, resigned


def elect(lone, hosted, **changes):
    record = lone.node.parts.metadata.image.partition("t", 0)
    record = replace(record, leader_epoch=hosted.partition.leader_epoch + 1, **changes)
    lone.run(asyncio.sleep(0))

    async def take():
        lone.node.parts.replicas.roles.apply(hosted, record)

    lone.run(take())
    return record.leader_epoch


def until(lone, condition):
    async def wait():
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    lone.run(wait())


def test_it_lets_another_member_lead_and_admits_nobody(damaged):
    lone, hosted, resigned = damaged
    elect(lone, hosted, replicas=(0, 1), isr=(0, 1))
    assert resigned == [TP]
    core = hosted.manifests.core
    assert not core.has_offered and not core.may_compute and core.lost
    assert (
        hosted.partition.core.awaits_offer
        and "another one is to lead" in hosted.manifests.pass_blocked_by
    )


def test_it_begins_with_a_base_generation_when_it_is_alone(damaged):
    lone, hosted, resigned = damaged
    epoch = elect(lone, hosted, replicas=(0, 1), isr=(0,))

    until(lone, lambda: hosted.manifests.core.has_offered)
    assert resigned == []
    core = hosted.manifests.core
    assert core.held == core.applied == core.published and not core.lost
    assert core.held.generation == (epoch, 0)
    assert hosted.compaction.end_offset == 2 and hosted.compaction.clean_to == 0


def test_alone_it_begins_anew_when_what_it_is_to_apply_cannot_be_read(damaged):
    """It was published: nobody else is asked, and all that was acknowledged is in its log."""
    lone, hosted, resigned = damaged
    epoch = elect(lone, hosted, replicas=(0, 1), isr=(0,))
    core = hosted.manifests.core
    until(lone, lambda: core.has_offered)
    gone = ManifestRef(Generation(epoch, 1), 2)

    async def rots():
        hosted.manifests.step(PassCompleted(gone, epoch, core.applied))
        core.storing = None
        hosted.manifests.step(ManifestStored(gone))
        assert hosted.partition.core.published == gone.generation

    lone.run(rots())
    until(lone, lambda: core.held == core.applied != gone and core.has_offered)
    assert core.published.generation == (epoch, 2) != gone.generation
    assert hosted.partition.core.all_published and resigned == []
    assert hosted.manifests.retry_schedule.reason == ""
    assert hosted.compaction.end_offset == 2 and hosted.compaction.clean_to == 0


def test_until_the_base_is_in_place_a_start_knows_that_something_was_lost(damaged, monkeypatch):
    """Else it would take itself for one that has nothing, and admit whoever has nothing."""
    lone, hosted, _ = damaged

    place = install.place

    async def dies(*arguments):
        raise Withdrawn("the process ends here")

    monkeypatch.setattr(install, "place", dies)
    elect(lone, hosted, replicas=(0, 1), isr=(0,))
    core, disk, path = (
        hosted.manifests.core,
        lone.node.parts.runtime.disk,
        hosted.partition.log.directory,
    )
    until(lone, lambda: hosted.manifests.retry_schedule.count)
    with pytest.raises(DamagedData):
        manifest_store.load(path, disk)
    monkeypatch.setattr(install, "place", place)
    lone.run(asyncio.sleep(0))
    assert hosted.manifests.retry()
    until(lone, lambda: core.has_offered)
    state, known = recover.before_opening(path, disk, False)
    assert hosted.partition.log.log_end_offset == 2
    state, known = recover.after_opening(path, disk, state, False, hosted.partition.log)
    assert known.held == known.applied == core.held and not known.lost


@pytest.mark.parametrize("before", ["delete", "compact"])
def test_an_unclean_leader_of_what_was_compacted_once_makes_a_base(lone_node, before):
    """Replicas that are away may have been compacted when the policy was another one."""
    lone = lone_node(log_cleaner_enable="false")
    lone.create("t", cleanup_policy=before)
    change = {"name": "cleanup.policy", "config_operation": 0, "value": "delete"}
    topic = {"resource_type": 2, "resource_name": "t", "configs": [change]}
    (done,) = lone.ask(44, 1, resources=[topic], validate_only=False).responses
    assert done.error_code.name == "none"
    assert "kept.compacted.before" not in lone.get("/api/v1/topics/t")["config"]
    hosted = lone.node.parts.table.replicas[TP]
    epoch = elect(lone, hosted, unclean=True)
    core = hosted.manifests.core
    until(lone, lambda: core.has_offered)
    assert (core.held and core.held.generation) == ((epoch, 0) if before == "compact" else None)


def opened_to(end: int, hosted: Any) -> Any:
    """A log of a replica's segments that ends there."""
    segments = hosted.partition.log.segments
    return Given(segments=segments, log_start_offset=0, log_end_offset=end)


@pytest.mark.parametrize("alone", [False, True])
def test_a_log_that_ends_below_its_manifest_relies_on_none(damaged, alone):
    """A power cut took its tail: what comes there next is not what was compacted."""
    lone, hosted, _ = damaged
    elect(lone, hosted, replicas=(0, 1), isr=(0,))
    core, disk, path = (
        hosted.manifests.core,
        lone.node.parts.runtime.disk,
        hosted.partition.log.directory,
    )
    until(lone, lambda: core.has_offered)
    opened, end = opened_to(core.held.end_offset, hosted), core.held.end_offset
    state, _ = recover.before_opening(path, disk, alone)
    assert recover.after_opening(path, disk, state, alone, opened)[1].applied == core.applied
    state, known = recover.after_opening(path, disk, state, alone, opened_to(end - 1, hosted))
    assert state is None and known == ManifestStatus(lost=not alone)
    state, found = recover.before_opening(path, disk, alone)
    assert (
        found if state is None else recover.after_opening(path, disk, state, alone, opened)[1]
    ) == known


@pytest.mark.parametrize("alone", [False, True])
def test_what_was_given_up_is_no_damage_at_the_next_start(damaged, monkeypatch, alone):
    """The first start has said why; every later one, until the leader has answered, only knows.
    A file that is damaged is an error each time, also where nothing but zeros is left of it.
    """
    lone, hosted, _ = damaged
    elect(lone, hosted, replicas=(0, 1), isr=(0,))
    core, disk, path = (
        hosted.manifests.core,
        lone.node.parts.runtime.disk,
        hosted.partition.log.directory,
    )
    until(lone, lambda: core.has_offered)
    opened = opened_to(core.held.end_offset, hosted)
    said = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(
            recover.log, level, lambda event, level=level, **fields: said.append((level, event))
        )

    def start():
        said.clear()
        state, found = recover.before_opening(path, disk, alone)
        if state is None:
            return found
        return recover.after_opening(path, disk, state, alone, opened)[1]

    manifest_store.mark_lost(path, disk)
    for _ in range(2):
        assert start() == ManifestStatus(lost=not alone)
        assert said == ([("info", "manifest awaited")] if not alone or _ == 0 else [])
    for junk in (b"\0", bytes(100), b"junk"):
        disk.write_atomic(f"{path}/held-manifest", junk)
        assert start() == ManifestStatus(lost=not alone)
        assert said == [("error", "manifest given up")], junk
