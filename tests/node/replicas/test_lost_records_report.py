"""Reports of records that a cut takes away: durable before it, one for each loss."""

from __future__ import annotations

import os

from kept.node.replicas import lost_records_report
from kept.replication.replica_effects import LostRecord, RecordsLost
from kept.storage.records import CheckRules, build_batch, check
from kept.storage.types import TopicPartition

TP = TopicPartition("t", 0)


def append(partition, count: int) -> None:
    for _ in range(count):
        partition.append(check(build_batch([(1000, b"k", b"v", ())]), CheckRules(), 1000), 1000)
    partition.write()


def lose(lone, start: int) -> None:
    hosted = lone.node.parts.table.replicas[TP]
    end = hosted.partition.log_end_offset
    records = tuple(LostRecord(offset, b"k", False) for offset in range(start, end))
    parts = lone.node.parts
    losing = RecordsLost(start, end, start, records, None)
    lost_records_report.report(parts.runtime, parts.counters, 0, hosted, losing)


def spans(lone) -> list[tuple[int, int]]:
    directory = lone.node.parts.table.replicas[TP].partition.log.directory
    found = list(lost_records_report.reports(directory, lone.node.parts.runtime.disk))
    names = [name for name in os.listdir(directory) if name.startswith("lost-")]
    assert len(names) == len(found)
    return sorted((one["first_offset"], one["end_offset"]) for one in found)


def test_a_report_whose_cut_did_not_happen_is_replaced(lone_node):
    """The node ended in between; the leader is another one by now, and has more, or less."""
    lone = lone_node()
    lone.create("t")
    partition = lone.node.parts.table.partition(TP)
    append(partition, 8)
    lose(lone, 5)
    partition.core.leader_epoch = 1
    lose(lone, 3)
    assert spans(lone) == [(3, 8)]
    partition.core.leader_epoch = 2
    lose(lone, 6)
    assert spans(lone) == [(6, 8)]


def test_a_second_loss_does_not_hide_the_first(lone_node):
    lone = lone_node()
    lone.create("t")
    partition = lone.node.parts.table.partition(TP)
    append(partition, 8)
    lose(lone, 5)
    partition.resign()
    partition.core.leading = False
    partition.follower.truncate_to(5)
    ticket = partition.become_leader(1, 1, (0,), (0,), 0)
    if ticket is not None:
        ticket.run()
        ticket.done()
    append(partition, 3)
    assert partition.log_end_offset == 8, "the same end, in another epoch"
    lose(lone, 4)
    assert spans(lone) == [(4, 8), (5, 8)]
