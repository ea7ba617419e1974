"""What the cleaner says of a log: tombstones that wait, and logs that it leaves alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kept.node.replicas.manifests import replica
from kept.replication.events import (
    EligibleBrokersChanged,
    IsrChanged,
    ManifestAcknowledged,
    ManifestApplied,
)
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)
DAY_MS = 86_400_000
WAIT_S = 60


def append(lone, *rows):
    hosted = lone.node.parts.table.replicas[TP]
    now = int(time.time() * 1000)
    batch = build_batch([(now, key, value, ()) for key, value in rows])
    hosted.partition.append(check(bytearray(batch), hosted.rules, now), now)
    hosted.partition.write()
    return hosted


def status(lone):
    (found,) = lone.get("/api/v1/compaction?topic=t")["partitions"]
    return found


def explained(lone, query=""):
    (found,) = lone.get(f"/api/v1/compaction/explain?topic=t{query}")["partitions"]
    return found


def metrics(lone):
    _, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


@pytest.fixture
def with_tombstones(lone_node):
    """A log with two tombstones that a pass has kept, and a third on top of it."""
    lone = lone_node(log_cleaner_enable="false", kept_metrics_partitions="all")
    lone.create("t", cleanup_policy="compact", delete_retention_ms=str(DAY_MS))
    append(lone, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    append(lone, (b"a", None), (b"b", None))
    before = int(time.time() * 1000)
    lone.post("/api/v1/compaction/now", topic="t", wait=True)
    append(lone, (b"c", None))
    return lone, before


def test_tombstones_that_wait_are_counted(with_tombstones):
    lone, before = with_tombstones
    found = status(lone)
    assert found["tombstones_pending"] == 2
    assert before + DAY_MS <= found["next_horizon_ms"] <= int(time.time() * 1000) + DAY_MS
    numbers = metrics(lone)
    assert numbers["kept_tombstones_pending",] == 2
    assert numbers["kept_log_cleaner_tombstones_pending", "0", "t"] == 2


def test_explain_says_when_each_tombstone_goes_also_of_a_clean_log(with_tombstones):
    lone, _ = with_tombstones
    clean = explained(lone, "&key=a")
    horizon_ms = status(lone)["next_horizon_ms"]
    two = {"removable_at_ms": horizon_ms, "tombstones": 2, "first_offset": 3, "last_offset": 4}
    assert clean["dry_run"] is None
    assert clean["tombstones"] == [two]
    assert [(r["offset"], r["removable_at_ms"]) for r in clean["key"]] == [(3, horizon_ms)]
    lone.node.parts.table.replicas[TP].partition.log.roll(lone.node.parts.runtime.now_ms())
    dirty = explained(lone, "&key=c")
    assert dirty["tombstones"][0] == two
    (third,) = dirty["tombstones"][1:]
    assert (third["tombstones"], third["first_offset"], third["last_offset"]) == (1, 5, 5)
    assert third["removable_at_ms"] >= horizon_ms
    assert [(r["offset"], r["removable_at_ms"]) for r in dirty["key"]] == [
        (2, None),
        (5, third["removable_at_ms"]),
    ]


def test_they_are_known_after_a_restart(with_tombstones, lone_node):
    lone, _ = with_tombstones
    data = lone.node.config.log_dirs[0], lone.node.config.metadata_log_dir
    lone.stop()
    again = lone_node(log_dirs=data[0], metadata_log_dir=data[1], log_cleaner_enable="false")
    assert status(again)["tombstones_pending"] == 2
    assert explained(again)["tombstones"][0]["tombstones"] == 2


@pytest.mark.parametrize("bare", [True, False])
def test_a_log_without_tombstones_has_none(lone, bare):
    lone.create("t", cleanup_policy="compact")
    if not bare:
        append(lone, (b"a", b"1"), (b"a", b"2"))
        lone.post("/api/v1/compaction/now", topic="t", wait=True)
    assert (status(lone)["tombstones_pending"], status(lone)["next_horizon_ms"]) == (0, None)
    assert explained(lone)["tombstones"] == []


# Logs with several replicas.


def test_a_generation_waits_for_the_replicas_in_sync(lone, monkeypatch):
    lone.create("t", cleanup_policy="compact")
    hosted = append(lone, (b"a", b"1"), (b"a", b"2"))
    core = hosted.partition.core
    hosted.partition.step(IsrChanged(core.partition_epoch + 1, (0, 1), (0, 1)), 0)

    async def go():
        asked = lone.node.parts.cleaner.started.request(TP)
        async with asyncio.timeout(WAIT_S):
            while core.offered is None:
                await asyncio.sleep(0.01)
        return asked

    asked = lone.run(go())
    found = status(lone)
    assert (found["held"], found["published"], found["generation"]) == ("0.1", None, None)
    assert found["awaits"] == [1] and "waits for 1" in found["reason"]
    (other,) = found["replicas"]
    assert (other["replica"], other["held"], other["behind"]) == (1, None, False)
    assert metrics(lone)["kept_log_cleaner_awaiting_manifests_partitions",] == 1
    assert hosted.partition.log.segments[0].base_offset == 0 and hosted.compaction is None

    async def acknowledge():
        hosted.partition.step(ManifestAcknowledged(1, core.offered), 0)
        return await asyncio.wait_for(asked, WAIT_S)

    assert lone.run(acknowledge()).records_removed == 1
    found = status(lone)
    assert (found["held"], found["published"], found["generation"]) == ("0.1", "0.1", "0.1")
    assert found["awaits"] == [] and found["replicas"][0]["behind"] is True
    hosted.partition.step(EligibleBrokersChanged(frozenset({0, 1})), 0)
    waits = hosted.manifests.waits_for_appliers
    assert waits(), "the next one would come too early for replica 1"
    assert waits(overdue=True), "also where records are old when they come"
    config = hosted.partition.config
    hosted.partition.update_config(replace(config, max_compaction_lag_ms=1))
    assert not waits(overdue=True) and waits()
    hosted.partition.update_config(config)
    monkeypatch.setattr(replica, "APPLY_MS", 0)
    monkeypatch.setattr(replica, "APPLY_PASSES", 0)
    assert not waits(), "it does not wait for ever"
    monkeypatch.undo()
    hosted.partition.step(ManifestApplied(1, core.published), 0)
    assert not waits()
    assert status(lone)["replicas"][0]["behind"] is False
    assert metrics(lone)["kept_log_cleaner_awaiting_manifests_partitions",] == 0


def test_one_who_asks_while_the_node_does_not_lead_is_answered(lone):
    lone.create("t", cleanup_policy="compact")
    hosted = append(lone, (b"a", b"1"))

    async def go():
        asked = lone.node.parts.cleaner.started.request(TP)
        hosted.partition.resign()
        return await asyncio.wait_for(asked, WAIT_S)

    assert "does not lead" in lone.run(go()).reason
