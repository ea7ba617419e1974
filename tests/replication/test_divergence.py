"""The scenarios of KIP-101 and KIP-279 on real cores, real logs and simulated disks.

Each history is one that lost or mixed records before those proposals. Batches are shown as
(base offset, next offset, leader epoch).
"""

from __future__ import annotations

import pytest

from kept.replication.replica_effects import LogTruncated, LostRecord, RecordsLost
from kept.storage import layout
from kept.storage.checkpoints import read_epochs
from kept.storage.producers import cut_preparation
from tests.replication.trio import Node
from tests.support import partitions as tools
from tests.support.simulated_disk import SimulatedCrash

A, B, C = 0, 1, 2


@pytest.fixture
def nodes() -> list[Node]:
    return [Node(i) for i in range(3)]


def restart(node: Node, **known) -> None:
    """Killed; the page cache is kept."""
    node.disk = node.disk.after_kill()
    node.sessions.clear()
    node.fetcher = None
    node.open(**known)


def epochs(node: Node) -> list[tuple[int, int]]:
    return node.partition.log.leader_epochs.entries


def test_kip_101_a_follower_that_restarts_keeps_what_its_leader_has(nodes) -> None:
    """Scenario 1: B has m2 but not its HW, restarts, and A dies before B has fetched again.

    Cutting at the high watermark would lose m2, which was acknowledged.
    """
    a, b, _ = nodes
    a.lead(0, (A, B))
    b.follow(A, 0, (A, B))
    tools.produce(a.partition)
    tools.produce(a.partition)
    b.fetch(a, rounds=1)
    assert (b.partition.log_end_offset, b.partition.high_watermark) == (2, 0)
    b.fetch(a)
    acknowledged = a.batches()
    assert a.partition.high_watermark == 2
    restart(b)
    assert b.partition.high_watermark == 0
    b.follow(A, 0, (A, B))
    restart(a)
    b.lead(1, (A, B), (B,), 1)
    assert b.batches() == acknowledged, "m2 is there"
    a.follow(B, 1, (A, B), (B,), 1)
    a.fetch(b, rounds=3)
    assert a.batches() == acknowledged
    assert a.partition.high_watermark == 2


def test_kip_101_replicas_that_lost_power_do_not_mix_their_histories(nodes) -> None:
    """Scenario 2: both lose power; B comes back with m1 alone, leads, writes m3 at m2's offset.

    A, with m1 and m2, must end with m1 and m3.
    """
    a, b, _ = nodes
    a.lead(0, (A, B))
    b.follow(A, 0, (A, B))
    tools.produce(a.partition)
    b.fetch(a, rounds=2)
    b.partition.log.flush()
    tools.produce(a.partition, 1)
    a.partition.log.flush()
    restart(a, recovery_point=2)
    restart(b, recovery_point=1)
    b.lead(1, (A, B), (B,), 1)
    tools.produce(b.partition, 1)
    a.follow(B, 1, (A, B), (B,), 1)
    a.fetch(b, rounds=3)
    assert a.batches() == b.batches() == [(0, 1, 0), (1, 2, 1)]
    assert epochs(a) == [(0, 0), (1, 1)]
    assert a.effects[0] == LogTruncated(0, 1)


def test_kip_279_fast_leader_changes_without_common_epochs(nodes) -> None:
    """Two leaders in turn write tails that nobody fetches; the last one has neither epoch.

    The follower's epoch 2 ends in the leader's eyes with epoch 0; its epoch 1 never was there.
    """
    a, b, c = nodes
    r = (A, B, C)
    a.lead(0, r)
    b.follow(A, 0, r)
    c.follow(A, 0, r)
    tools.produce(a.partition, 5)
    for _ in range(2):
        b.fetch(a)
        c.fetch(a)
    b.lead(1, r, r, 1)
    tools.produce(b.partition, 3)
    a.follow(B, 1, r, r, 1)
    a.fetch(b, rounds=1)
    a.fetch(b, rounds=1)
    assert a.batches() == [(0, 5, 0), (5, 8, 1)]
    a.lead(2, r, r, 2)
    tools.produce(a.partition, 2)
    c.lead(3, r, (A, C), 3)
    tools.produce(c.partition, 4)
    tools.produce(c.partition, 4)
    for node in (a, b):
        node.follow(C, 3, r, (A, C), 3)
        node.fetch(c, rounds=4)
        assert node.batches() == c.batches() == [(0, 5, 0), (5, 9, 3), (9, 13, 3)]
        assert epochs(node) == epochs(c) == [(0, 0), (3, 5)]
        assert not [e for e in node.effects if isinstance(e, RecordsLost)]


def test_kip_279_the_leader_names_an_epoch_that_the_follower_never_had(nodes) -> None:
    """The follower cuts at the end of its largest smaller epoch and asks again."""
    a, b, _ = nodes
    r = (A, B)
    for epoch, count in ((0, 4), (1, 2), (4, 6)):
        a.lead(epoch, r)
        tools.produce(a.partition, count)
    for epoch, count in ((0, 4), (3, 9)):
        b.lead(epoch, r)
        tools.produce(b.partition, count)
    b.lead(5, r, (B,))
    a.follow(B, 5, r, (B,))
    a.fetch(b)
    assert epochs(a) == [(0, 0), (1, 4)], "epoch 4 is gone; the leader named 3"
    a.fetch(b)
    assert epochs(a) == [(0, 0)]
    a.fetch(b)
    assert a.batches() == b.batches() == [(0, 4, 0), (4, 13, 3)]


def test_a_leader_that_wrote_nothing_leaves_no_epoch_behind(nodes) -> None:
    """Its entry at the log end would be asked about for ever."""
    a, b, _ = nodes
    r = (A, B)
    b.lead(1, r)
    tools.produce(b.partition, 3)
    a.follow(B, 1, r)
    a.fetch(b, rounds=2)
    a.lead(2, r)
    b.lead(3, r)
    assert epochs(a) == [(1, 0), (2, 3)]
    a.follow(B, 3, r)
    a.fetch(b)
    assert epochs(a) == [(1, 0)]
    assert read_epochs(a.disk, "/d/t-0/leader-epoch-checkpoint") == [(1, 0)]
    assert a.partition.log_end_offset == 3
    tools.produce(b.partition, 2)
    a.fetch(b)
    assert a.batches() == b.batches()


def test_an_unclean_election_is_reported_with_what_it_lost(nodes) -> None:
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r, (A,))
    b.follow(A, 1, r, (A,))
    tools.produce(a.partition, 4)
    b.fetch(a)
    tools.produce(a.partition, 3)
    a.partition.log.flush()
    a.partition.applied_end = 5
    assert a.partition.high_watermark == 7
    b.lead(2, r, (B,), 1)
    a.follow(B, 2, r, (B,), 1)
    a.fetch(b, rounds=2)
    assert a.batches() == [(0, 4, 1)]
    losing, *rest = a.effects
    assert losing == RecordsLost(
        4, 7, 7, tuple(LostRecord(o, b"k", False) for o in (4, 5, 6)), None
    )
    assert rest == [LogTruncated(0, 4)]
    assert (a.partition.high_watermark, a.partition.applied_end) == (4, 0)


def test_what_is_cut_to_be_fetched_again_is_not_reported_as_lost(nodes) -> None:
    """A record is missing or damaged here, so that a manifest cannot be applied: the leader has all
    that goes with it.
    """
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r)
    b.follow(A, 1, r)
    tools.produce(a.partition, 4)
    tools.produce(a.partition, 3)
    b.fetch(a, rounds=3)
    assert b.partition.high_watermark == 7
    b.partition.follower.cut_to_fetch_again(4)
    assert b.effects == [LogTruncated(0, 4)]
    assert b.partition.high_watermark == 4
    b.fetch(a, rounds=3)
    assert b.batches() == a.batches() == [(0, 4, 1), (4, 7, 1)]


def fill_two_segments(a: Node, b: Node) -> None:
    """A leads, and B has fetched all: two closed segments, of offsets 0 to 3 and 4 to 7."""
    a.lead(1, (A, B))
    b.follow(A, 1, (A, B))
    for _ in range(2):
        tools.produce(a.partition, 2)
        tools.produce(a.partition, 2)
        b.fetch(a, rounds=2)
        a.partition.log.roll(tools.NOW)
        b.partition.log.roll(tools.NOW)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(("segment", "log_start"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 5)])
def test_where_a_damaged_header_hides_the_record_its_segment_is_fetched_again(
    nodes, segment, log_start, index
) -> None:
    """No try would find the place: the replica would stay out of the ISR for good."""
    a, b, _ = nodes
    fill_two_segments(a, b)
    tools.produce(a.partition, 3)
    b.fetch(a, rounds=3)
    if log_start:
        a.partition.delete_records(log_start)
        b.fetch(a, rounds=2)
    log = b.partition.log
    assert log.segments.bases == [0, 4, 8] and log.log_start_offset == log_start
    damaged = log.segments[segment]
    b.disk.writev(damaged.file, [bytes(64)], 0)
    if not index:
        damaged.index.unload()
        b.disk.unlink(damaged.path(layout.INDEX))
    b.effects.clear()
    b.partition.follower.cut_to_fetch_again(damaged.base_offset + 2)
    start = max(damaged.base_offset, log_start)
    assert b.effects == [LogTruncated(log_start, start)]
    assert b.partition.high_watermark == b.partition.log_end_offset == start
    b.fetch(a, rounds=4)
    assert b.batches()[-1] == a.batches()[-1] == (8, 11, 1)
    assert b.partition.log_end_offset == 11
    b.partition.check_invariants()


@pytest.mark.parametrize("inside", [True, False])
def test_where_a_transaction_index_is_damaged_its_segment_is_fetched_again(nodes, inside) -> None:
    """No disk failed: a log directory is not to go offline for it."""
    a, b, _ = nodes
    fill_two_segments(a, b)
    damaged = b.partition.log.segments[1]
    b.disk.write_file(damaged.path(layout.TXN_INDEX), bytes(7))
    damaged._aborted = None
    b.effects.clear()
    b.partition.follower.cut_to_fetch_again(damaged.base_offset + 2 * inside)
    assert b.effects == [LogTruncated(0, 4)]
    b.fetch(a, rounds=4)
    assert b.batches() == a.batches()
    assert b.partition.log.aborted_transactions(0, 8) == []
    b.partition.check_invariants()


@pytest.mark.parametrize("log_start", [0, 9])
@pytest.mark.parametrize("kind", [layout.LOG, layout.TXN_INDEX])
def test_a_log_that_parts_from_its_leaders_in_a_damaged_segment_is_cut_at_its_base(
    nodes, caplog, kind, log_start
) -> None:
    """No try would find the place. A member of the ISR keeps what it has: it counts as having it,
    and the leader may die.
    """
    a, b, _ = nodes
    r = (A, B)
    fill_two_segments(a, b)
    tools.produce(a.partition, 2)
    b.fetch(a, rounds=2)
    b.lead(2, r)
    tools.produce(b.partition, 3)
    if log_start:
        b.partition.delete_records(log_start)
    a.lead(3, r)
    b.follow(A, 3, r)
    log = b.partition.log
    damaged = log.segments[2]
    assert (damaged.base_offset, log.log_end_offset) == (8, 13)
    if kind == layout.LOG:
        b.disk.writev(damaged.file, [bytes(40)], 0)
    else:
        b.disk.write_file(damaged.path(kind), bytes(7))
        damaged._aborted = None
    b.effects.clear()
    b.fetch(a, rounds=2)
    assert b.effects == [] and log.log_end_offset == 13, "it is a member"
    b.follow(A, 3, r, (A,), 1)
    b.fetch(a, now_ms=5000, rounds=2)
    start = max(8, log_start)
    assert b.effects == [LogTruncated(log_start, start)]
    assert f"all from {start} on is fetched again" in caplog.text
    b.fetch(a, now_ms=10_000, rounds=3)
    assert b.batches()[-1] == a.batches()[-1] == (8, 10, 1)
    assert b.partition.log_end_offset == 10
    b.partition.check_invariants()


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_where_producers_below_a_cut_cannot_be_read_their_segment_is_fetched_again(
    nodes, monkeypatch, inline_bytes
) -> None:
    """The place is found past a damaged header, but all that producers wrote is read through it. No
    disk failed: a log directory is not to go offline for it.
    """
    monkeypatch.setattr(cut_preparation, "INLINE_BYTES", inline_bytes)
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r)
    b.follow(A, 1, r)
    for sequence in range(6):
        tools.produce(a.partition, pid=7, sequence=sequence)
        b.fetch(a)
        if sequence == 1:
            b.partition.log.roll(tools.NOW)
    b.lead(2, r, (B,), 1)
    tools.produce(b.partition, pid=7, sequence=6)
    a.lead(3, r, (A,), 2)
    b.follow(A, 3, r, r, 2)
    log = b.partition.log
    assert (log.segments.bases, log.log_end_offset) == ([0, 2], 7)
    damaged = log.segments[1]
    b.disk.writev(damaged.file, [b"\xff" * 4], damaged.locate(3)[0] + 57)  # its count of records
    b.effects.clear()
    b.fetch(a, rounds=2)
    assert b.effects == [] and log.log_end_offset == 7, "it is a member"
    b.follow(A, 3, r, (A,), 3)
    b.fetch(a, now_ms=5000)
    assert b.effects[-1] == LogTruncated(0, 2) and b.partition.listener.errors == []
    b.fetch(a, now_ms=10_000, rounds=4)
    assert b.batches() == a.batches() and b.partition.log_end_offset == 6
    assert log.producers.get(7).last_sequence == 5
    b.partition.check_invariants()


@pytest.mark.parametrize("unclean", [False, True])
def test_what_is_cut_for_damage_is_reported_as_lost_where_the_leader_may_lack_it(
    nodes, unclean
) -> None:
    """Else all below the place agrees with the leader's, and is fetched again."""
    a, b, _ = nodes
    r = (A, B)
    fill_two_segments(a, b)
    tools.produce(a.partition, 1)
    tools.produce(a.partition, 1)
    b.fetch(a, rounds=3)
    b.lead(2, r, (B,), 1)
    tools.produce(b.partition, 1)
    a.lead(3, r, (A,), 2)
    b.follow(A, 3, r, (A,), 2)
    b.partition.unclean_epoch = 3 if unclean else -1
    b.disk.write_file(b.partition.log.segments[2].path(layout.TXN_INDEX), bytes(7))
    b.partition.log.segments[2]._aborted = None
    b.effects.clear()
    b.fetch(a, rounds=1)
    losing, *rest = b.effects
    offsets = [8, 9, 10] if unclean else [10]
    lost = tuple(LostRecord(offset, b"k", False) for offset in offsets)
    assert losing == RecordsLost(offsets[0], 11, 11, lost, None)
    assert rest == [LogTruncated(0, 8)]


@pytest.mark.parametrize("offset", [0, 2, 5, 6])
def test_a_record_below_the_log_start_is_fetched_again_by_starting_anew_there(
    nodes, offset
) -> None:
    """Nobody reads it, but its manifest has it: with it in the middle the segment would never come
    to that digest, and a start below would say that records are there again.
    """
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r)
    b.follow(A, 1, r)
    for _ in range(4):
        tools.produce(a.partition, 2)
    b.fetch(a, rounds=3)
    a.partition.delete_records(6)
    b.fetch(a, rounds=2)
    assert b.partition.log.segments.bases == [0] and b.partition.log.log_start_offset == 6
    b.effects.clear()
    b.partition.follower.cut_to_fetch_again(offset)
    log = b.partition.log
    assert b.effects == [LogTruncated(6, 6)]
    assert (log.segments.bases, log.log_start_offset, log.log_end_offset) == ([6], 6, 6)
    b.fetch(a, rounds=3)
    assert b.batches() == [(6, 8, 1)]
    b.partition.check_invariants()


def test_a_log_that_was_empty_already_is_told_to_have_started_anew(nodes) -> None:
    """Its offsets stay, and what was below the log start is gone: it lacks nothing any more."""
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r)
    b.follow(A, 1, r)
    for _ in range(3):
        tools.produce(a.partition, 2)
    b.fetch(a, rounds=3)
    a.partition.delete_records(6)
    b.fetch(a, rounds=2)
    log = b.partition.log
    assert (log.segments.bases, log.log_start_offset, log.log_end_offset) == ([0], 6, 6)
    b.effects.clear()
    b.partition.follower.cut_to_fetch_again(2)
    assert b.effects == [LogTruncated(6, 6)]
    assert (log.segments.bases, log.log_start_offset, log.log_end_offset) == ([6], 6, 6)
    b.partition.check_invariants()


def test_a_replica_that_was_away_for_long_starts_where_the_leader_does(nodes) -> None:
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r, (A,))
    b.follow(A, 1, r, (A,))
    tools.produce(a.partition, 3)
    b.fetch(a)
    tools.produce(a.partition, 40)
    a.partition.log.roll(tools.NOW)
    tools.produce(a.partition, 2)
    a.partition.delete_records(43)
    b.fetch(a, rounds=4)
    assert b.batches() == [(43, 45, 1)]
    assert (b.partition.log_start_offset, b.partition.high_watermark) == (43, 45)
    assert b.effects == [LogTruncated(43, 43)]


def test_a_log_that_starts_inside_the_leaders_first_batch_takes_it_whole(nodes) -> None:
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r, (A,))
    b.follow(A, 1, r, (A,))
    tools.produce(a.partition, 10)
    a.partition.delete_records(4)
    b.fetch(a, rounds=4)
    assert b.batches() == [(0, 10, 1)]
    assert (b.partition.log_start_offset, b.partition.high_watermark) == (4, 10)


@pytest.mark.parametrize("seed", range(8))
def test_power_may_fail_at_every_step_of_a_cut(seed) -> None:
    """Whatever is left, the next start and the next fetches bring it in line."""
    call = 0
    while True:
        call += 1
        a, b = Node(A), Node(B)
        r = (A, B)
        b.lead(1, r)
        tools.produce(b.partition, 30)
        a.follow(B, 1, r)
        a.fetch(b, rounds=2)
        a.lead(2, r)
        for _ in range(4):
            tools.produce(a.partition, 30)
        a.partition.log.flush()
        recovery_point = a.partition.log.recovery_point
        b.lead(3, r)
        tools.produce(b.partition, 5)
        a.follow(B, 3, r)
        a.disk.crash_at(a.disk.calls + call)
        try:
            a.fetch(b, rounds=1)
        except SimulatedCrash:
            a.disk = a.disk.after_power_loss(seed)
            a.open(recovery_point=recovery_point)
            a.fetcher = None
            a.follow(B, 3, r)
            a.fetch(b, rounds=4)
            assert a.batches() == b.batches()
            assert epochs(a) == epochs(b) == [(1, 0), (3, 30)]
            assert not [e for e in a.effects if isinstance(e, RecordsLost)]
            continue
        assert call > 4, "there is something to interrupt"
        return


def led_alone(nodes) -> tuple[Node, Node, Node]:
    """A leads alone and acknowledges 4 to 12, in two batches; its checkpoint knows 5."""
    a, b, c = nodes
    r = (A, B, C)
    a.lead(1, r, (A,))
    b.follow(A, 1, r, (A,))
    tools.produce(a.partition, 4)
    b.fetch(a)
    for count in (3, 5):
        tools.produce(a.partition, count)
    assert a.partition.high_watermark == 12
    a.partition.log.flush()
    a.high_watermark = 5
    restart(a)
    return a, b, c


def cut(a: Node, leader: Node, epoch: int, unclean_epoch: int) -> list:
    """A follows; returns its reports."""
    a.effects.clear()
    a.follow(leader.partition.node_id, epoch, (A, B, C), (leader.partition.node_id,), epoch)
    a.partition.unclean_epoch = unclean_epoch
    a.fetch(leader, rounds=4)
    return [effect for effect in a.effects if isinstance(effect, RecordsLost)]


def spans(reports: list[RecordsLost]) -> list[tuple[int, int, int]]:
    return [(one.start, one.end, one.committed_to) for one in reports]


@pytest.mark.parametrize("unclean_epoch", [2, 3])
def test_all_that_may_have_been_acknowledged_is_reported_though_the_mark_is_cleared(
    nodes, unclean_epoch
) -> None:
    """The high watermark on disk is older than what was acknowledged. A clean election or two have
    come since; the image does not show the mark any more.
    """
    a, b, _ = led_alone(nodes)
    b.lead(2, (A, B, C), (B,), 1)
    b.lead(3, (A, B, C), (B,), 2)
    tools.produce(b.partition, 6)
    reports = cut(a, b, 3, unclean_epoch)
    assert spans(reports) == [(4, 12, 5)]
    assert [record.offset for record in reports[0].records] == list(range(4, 12))
    assert a.batches() == b.batches()


def test_what_nobody_acknowledged_is_not_reported_after_clean_elections(nodes) -> None:
    a, b, _ = nodes
    r = (A, B)
    a.lead(1, r)
    b.follow(A, 1, r)
    tools.produce(a.partition, 4)
    b.fetch(a, rounds=3)
    tools.produce(a.partition, 3)
    a.partition.log.flush()
    a.high_watermark = 4
    restart(a)
    b.lead(2, r, (B,), 1)
    assert cut(a, b, 2, -1) == []
    assert a.batches() == b.batches()


def test_what_was_appended_since_the_unclean_election_is_not_reported(nodes) -> None:
    """It had agreed with that leader: what goes now went after a clean election."""
    a, b, c = nodes
    r = (A, B, C)
    b.lead(2, r, (B, C))
    a.follow(B, 2, r, (B, C))
    c.follow(B, 2, r, (B, C))
    tools.produce(b.partition, 4)
    c.fetch(b, rounds=3)
    tools.produce(b.partition, 3)
    a.fetch(b, rounds=1)
    assert (a.partition.log_end_offset, c.partition.log_end_offset) == (7, 4)
    c.lead(3, r, (C,), 1)
    assert cut(a, c, 3, 2) == []
    assert a.partition.log_end_offset == 4


def test_two_losses_in_a_row_are_both_reported(nodes) -> None:
    a, b, c = led_alone(nodes)
    b.lead(2, (A, B, C), (B,), 1)
    tools.produce(b.partition, 3)
    assert spans(cut(a, b, 2, 2)) == [(4, 12, 5)]
    assert a.partition.log_end_offset == 7
    a.high_watermark = 4
    restart(a)
    c.lead(3, (A, B, C), (C,), 2)
    assert spans(cut(a, c, 3, 3)) == [(0, 7, 4)]


def test_a_leader_whose_log_starts_behind_our_end_lost_what_we_have(nodes) -> None:
    """Its retention went past our end; but at the offsets of ours it had other records."""
    a, b, _ = led_alone(nodes)
    b.lead(2, (A, B, C), (B,), 1)
    tools.produce(b.partition, 40)
    b.partition.log.roll(tools.NOW)
    tools.produce(b.partition, 2)
    b.partition.delete_records(44)
    assert spans(cut(a, b, 2, 2)) == [(0, 12, 5)]
    assert a.partition.log_start_offset == 44
