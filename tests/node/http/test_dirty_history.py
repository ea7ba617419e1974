"""Dirty ratios over time: what is sampled, what is kept, and what a rest costs."""

from __future__ import annotations

import pytest

from kept.node.admin.compaction import compaction_status
from kept.node.admin.history import dirty_history
from kept.storage.records import build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)


@pytest.fixture
def lone(lone_node):
    """A node that takes no samples by itself, however slow the machine is."""
    made = lone_node(log_cleaner_enable="false")
    made.run(made.node.warmed_up())
    made.run(made.node.parts.dirty_history.sampling.stop())
    return made


def append(lone, records, tp=TP):
    hosted = lone.node.parts.table.replicas[tp]
    for n in range(records):
        batch = build_batch([(lone.node.parts.runtime.now_ms(), b"k%d" % (n % 3), bytes(400), ())])
        hosted.partition.append(check(batch, hosted.rules, lone.node.parts.runtime.now_ms()), 1)
        hosted.partition.write()


def sample(lone, times=1):
    for _ in range(times):
        lone.run(lone.node.parts.dirty_history.sample())


def ratios(lone, tp=TP):
    return [ratio for _, ratio in lone.node.parts.dirty_history.samples(tp)]


def test_a_log_gets_dirty_and_clean(lone):
    lone.create("t", cleanup_policy="compact", segment_bytes="4096")
    lone.create("plain")
    sample(lone)
    assert ratios(lone) == []  # one segment: there is nothing to clean
    append(lone, 30)
    sample(lone, 2)
    assert ratios(lone) == [1.0, 1.0]
    lone.run(lone.node.parts.cleaner.started.request(TP))
    sample(lone)
    assert ratios(lone) == [1.0, 1.0, 0.0]
    assert ratios(lone, TopicPartition("plain", 0)) == []
    times = [at_ms for at_ms, _ in lone.node.parts.dirty_history.samples(TP)]
    assert times == sorted(times)


def test_a_log_at_rest_is_not_looked_at_again(lone, monkeypatch):
    lone.create("t", cleanup_policy="compact", segment_bytes="4096")
    append(lone, 30)
    looked = []
    real = compaction_status.dirty_ratio
    monkeypatch.setattr(compaction_status, "dirty_ratio", lambda *a: looked.append(1) or real(*a))
    sample(lone, 5)
    assert len(looked) == 1 and len(ratios(lone)) == 5
    append(lone, 30)
    sample(lone)
    assert len(looked) == 2


def test_only_so_much_is_kept(lone, monkeypatch):
    monkeypatch.setattr(dirty_history, "SAMPLES", 4)
    monkeypatch.setattr(dirty_history, "PARTITIONS", 1)
    lone.create("t", cleanup_policy="compact", segment_bytes="4096")
    lone.create("u", cleanup_policy="compact", segment_bytes="4096")
    other = TopicPartition("u", 0)
    append(lone, 30)
    sample(lone, 9)
    assert ratios(lone) == [1.0] * 4
    append(lone, 30, other)
    sample(lone)
    assert ratios(lone, other) == []  # there is no room
    gone = lone.node.parts.table.replicas.pop(TP)
    sample(lone, 6)
    assert ratios(lone) == [] and ratios(lone, other)  # its time is over
    lone.node.parts.table.replicas[TP] = gone


def test_a_time_that_was_missed_is_not_known(lone):
    lone.create("t", cleanup_policy="compact", segment_bytes="4096")
    append(lone, 30)
    sample(lone)
    hosted = lone.node.parts.table.replicas.pop(TP)
    sample(lone, 2)
    lone.node.parts.table.replicas[TP] = hosted
    sample(lone)
    assert ratios(lone) == [1.0, None, None, 1.0]
