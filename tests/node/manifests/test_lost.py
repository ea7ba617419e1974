"""A replica that cannot read what it held, elected: what it does as leader."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)
WAIT_S = 60


@pytest.fixture
def damaged(lone_node):
    """A log with a generation, whose manifest was torn while it was one of two replicas."""
    lone = lone_node(log_cleaner_enable="false")
    lone.create("t", cleanup_policy="compact")
    hosted = lone.node.hosting.hosted[TP]
    now = int(time.time() * 1000)
    batch = build_batch([(now, b"k", b"1", ()), (now, b"k", b"2", ())])
    hosted.partition.append(check(bytearray(batch), hosted.rules, now), now)
    hosted.partition.write()
    core = hosted.manifests.core
    core.held = core.applied = None
    core.lost = True
    resigned = []
    isr_changes = SimpleNamespace(
        resign=lambda tp, record: resigned.append(tp), ask=lambda partition: None
    )
    lone.node.membership = SimpleNamespace(
        isr_changes=isr_changes,
        news=SimpleNamespace(announce=lambda hosted: None),
        fetchers=SimpleNamespace(stop_following=lambda tp: None),
        broker_epoch=1,
    )
    yield lone, hosted, resigned
    lone.node.membership = None


def elect(lone, hosted, **changes):
    record = lone.node.image.partition("t", 0)
    record = replace(record, leader_epoch=hosted.partition.leader_epoch + 1, **changes)
    lone.run(asyncio.sleep(0))

    async def take():
        lone.node.hosting.roles.take(hosted, record)

    lone.run(take())
    return record.leader_epoch


def test_it_lets_another_member_lead_and_admits_nobody(damaged):
    lone, hosted, resigned = damaged
    elect(lone, hosted, replicas=(0, 1), isr=(0, 1))
    assert resigned == [TP]
    core = hosted.manifests.core
    assert not core.settled and not core.may_compute and core.lost
    assert hosted.partition.core.settling and "another one is to lead" in hosted.manifests.why_not


def test_it_begins_with_a_base_generation_when_it_is_alone(damaged):
    lone, hosted, resigned = damaged
    epoch = elect(lone, hosted, replicas=(0, 1), isr=(0,))

    async def settled():
        async with asyncio.timeout(WAIT_S):
            while not hosted.manifests.core.settled:
                await asyncio.sleep(0.01)

    lone.run(settled())
    assert resigned == []
    core = hosted.manifests.core
    assert core.held == core.applied == core.published and not core.lost
    assert core.held.identity == (epoch, 0)
    assert hosted.compaction.end_offset == 2 and hosted.compaction.clean_to == 0
