"""Partition over a real log: writing, reading, waiting, leadership."""

from __future__ import annotations

from struct import pack

import pytest

from kept.replication.events import UNKNOWN_OFFSET, EligibleBrokersChanged, ProposeIsr
from kept.replication.fetch_messages import FetchPartition
from kept.replication.partition import ENOUGH_BYTES, Partition
from kept.storage.checkpoints import read_epochs
from kept.storage.disk import Disk
from kept.storage.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    OutOfOrderSequenceNumber,
    ResourceExhausted,
    UnknownLeaderEpoch,
)
from kept.storage.log import log_reader
from kept.storage.log.log import Log
from kept.storage.records import build_batch, headers
from kept.storage.types import IsolationLevel, LogConfig
from tests.support import partitions as tools
from tests.support.listener import RecordedListener

COMMITTED = IsolationLevel.READ_COMMITTED


def test_what_is_written_is_committed_and_read(tmp_path) -> None:
    partition = Partition(tools.open_log(Disk(), str(tmp_path / "t-0")), 0)
    tools.lead(partition)
    info = tools.produce(partition, 3)
    assert (info.base_offset, info.last_offset) == (0, 2)
    tools.produce(partition, 2)
    fetched = partition.fetch(0, 1 << 20)
    assert tools.offsets(partition, fetched) == [0, 1, 2, 3, 4]
    assert fetched[1:] == (5, 5, 0, None, None)
    partition.check_invariants()
    partition.log.close()


def test_staged_batches_are_not_read_before_write(partition) -> None:
    tools.produce(partition)
    partition.append(tools.checked(), tools.NOW)
    assert partition.high_watermark == 1 and partition.log_end_offset == 2
    assert tools.offsets(partition, partition.fetch(0, 1000)) == [0]
    partition.write()
    assert tools.offsets(partition, partition.fetch(0, 1000)) == [0, 1]


def test_sequences_are_checked(partition) -> None:
    first = tools.produce(partition, pid=7, sequence=0)
    again = tools.produce(partition, pid=7, sequence=0)
    assert again.duplicate and again.base_offset == first.base_offset
    with pytest.raises(OutOfOrderSequenceNumber):
        tools.produce(partition, pid=7, sequence=5)
    (view,) = partition.producers()
    assert (view.producer_id, view.producer_epoch, view.last_sequence) == (7, 0, 0)
    assert (view.coordinator_epoch, view.current_txn_start_offset) == (-1, -1)


# Reading, rule 38.


def test_offsets_out_of_range(partition) -> None:
    tools.produce(partition, 5)
    assert tools.offsets(partition, partition.fetch(5, 1000)) == []
    for offset in (-1, 6):
        with pytest.raises(OffsetOutOfRange):
            partition.fetch(offset, 1000)
    partition.delete_records(3)
    for read in (partition.fetch, partition.read_batches):
        with pytest.raises(OffsetOutOfRange, match="below the log start 3"):
            read(0, 1000)
    assert tools.offsets(partition, partition.fetch(3, 1000)) == [0, 1, 2, 3, 4], "a whole batch"


def test_between_high_watermark_and_log_end_is_empty_without_error(replicated) -> None:
    tools.produce(replicated, 4)
    assert (replicated.high_watermark, replicated.log_end_offset) == (0, 4)
    for offset in (0, 2, 4):
        fetched = replicated.fetch(offset, 1000)
        assert fetched.slice is None and fetched.high_watermark == 0
    assert tools.offsets(replicated, replicated.fetch(0, 1000, replica_id=2)) == [0, 1, 2, 3]
    with pytest.raises(OffsetOutOfRange):
        replicated.fetch(5, 1000)


def test_read_committed_stops_at_the_last_stable_offset(partition) -> None:
    tools.produce(partition, 2)
    producers = partition.log.producers
    producers.update(9, 0, 0, 1, 3, tools.NOW, True)
    tools.produce(partition, 2)
    assert partition.last_stable_offset == 2 and partition.high_watermark == 4
    stable = partition.fetch(0, 1000, isolation=COMMITTED)
    assert tools.offsets(partition, stable) == [0, 1]
    assert stable.aborted == [] and stable.last_stable_offset == 2
    assert partition.fetch(2, 1000, isolation=COMMITTED).slice is None
    assert tools.offsets(partition, partition.fetch(0, 1000)) == [0, 1, 2, 3]
    assert partition.readable_bytes(2, COMMITTED) == 0 < partition.readable_bytes(2)


@pytest.mark.parametrize("kind", [0, 1], ids=["aborted", "committed"])
def test_a_marker_that_is_not_committed_has_ended_nothing(replicated, kind) -> None:
    """The next leader may not have it: Apache Kafka's ``unreplicatedTxns``."""
    log = replicated.log
    log.append_as_follower(transactional(0, 9), tools.NOW)
    log.append_as_follower(transactional(2, 8), tools.NOW)
    log.append_as_follower(marker(4, 9, kind), tools.NOW)
    replicated.write()
    stable = []
    for fetched_to in range(1, 6):
        replicated.fetch(fetched_to, 1000, replica_id=1)
        committed = replicated.fetch(0, 1000, isolation=COMMITTED)
        assert replicated.high_watermark == fetched_to
        assert committed.last_stable_offset == replicated.last_stable_offset
        stable.append(replicated.last_stable_offset)
    assert stable == [0, 0, 0, 0, 2], "the transaction of 8 is open"
    log.append_as_follower(marker(5, 8, kind), tools.NOW)
    replicated.write()
    assert replicated.last_stable_offset == 2
    replicated.fetch(6, 1000, replica_id=1)
    assert replicated.last_stable_offset == 6


def test_a_follower_remembers_no_marker_that_is_committed(partition) -> None:
    partition.become_follower(1, 4, 1, (0, 1), (0, 1), tools.NOW)
    data = transactional(0, 9) + marker(2, 9, 1)
    partition.follower.append_fetched(data, 2, 0, tools.NOW)
    assert partition.last_stable_offset == 0
    partition.follower.append_fetched(transactional(3, 9), 3, 0, tools.NOW)
    assert partition.last_stable_offset == 3
    partition.follower.append_fetched(marker(5, 9, 0), 6, 0, tools.NOW)
    assert partition.last_stable_offset == 6 and not partition.log.producers._ended


def transactional(base_offset: int, producer_id: int, leader_epoch: int = 3) -> bytes:
    return build_batch(
        [(1000, b"k", b"v", ())] * 2,
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=base_offset,
        is_transactional=True,
        leader_epoch=leader_epoch,
    )


def marker(base_offset: int, producer_id: int, kind: int, leader_epoch: int = 3) -> bytes:
    return build_batch(
        [(1000, pack(">hh", 0, kind), pack(">hi", 0, 0), ())],
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
        leader_epoch=leader_epoch,
    )


def test_the_last_stable_offset_is_not_below_the_log_start(partition) -> None:
    """DeleteRecords may cut into an open transaction."""
    log = partition.log
    log.append_as_follower(transactional(0, 9, 0), tools.NOW)
    log.append_as_follower(transactional(2, 9, 0), tools.NOW)
    partition.write()
    tools.produce(partition)
    assert (partition.last_stable_offset, partition.high_watermark) == (0, 5)
    partition.delete_records(3)
    fetched = partition.fetch(3, 1000, isolation=COMMITTED)
    assert fetched.slice is None and fetched.aborted == []
    assert fetched.last_stable_offset == partition.last_stable_offset == 3
    assert partition.list_offset(-1, COMMITTED).offset == 3
    partition.delete_records(4)
    assert partition.last_stable_offset == 5, "nothing is left of the transaction"


def test_a_fetch_lists_the_aborted_transactions_of_what_it_returns(partition) -> None:
    log = partition.log
    for n in range(5):
        log.append_as_follower(transactional(3 * n, 9, 0), tools.NOW)
        log.append_as_follower(marker(3 * n + 2, 9, 0, 0), tools.NOW)
    partition.write()
    tools.produce(partition)
    for n in range(5):
        first = partition.fetch(3 * n, 1, isolation=COMMITTED)
        assert tools.offsets(partition, first) == [3 * n, 3 * n + 1]
        assert first.aborted == [(9, 3 * n)]
    assert partition.fetch(15, 1000, isolation=COMMITTED).aborted == []
    assert partition.fetch(16, 1000, isolation=COMMITTED).aborted == [], "nothing is returned"
    everything = partition.fetch(1, 10_000, isolation=COMMITTED)
    assert everything.aborted == [(9, 3 * n) for n in range(5)]
    assert partition.fetch(0, 1).aborted is None


def test_a_fetch_ends_before_very_many_aborted_transactions(partition, monkeypatch) -> None:
    monkeypatch.setattr(log_reader, "MOST_ABORTED", 4)
    count = 30
    for n in range(count):
        partition.log.append_as_follower(transactional(3 * n, 9, 0), tools.NOW)
        partition.log.append_as_follower(marker(3 * n + 2, 9, 0, 0), tools.NOW)
    partition.write()
    tools.produce(partition)
    offset, listed = 0, []
    while offset < partition.high_watermark:
        fetched = partition.fetch(offset, 1 << 20, isolation=COMMITTED)
        assert len(fetched.aborted) <= 5
        listed += fetched.aborted
        batches = [header for _, header in headers(partition.log.disk.pread(*fetched.slice))]
        assert batches[0].base_offset <= offset
        offset = batches[-1].next_offset
    assert sorted(set(listed)) == [(9, 3 * n) for n in range(count)]


def test_a_gap_before_very_many_aborted_transactions_is_no_end(partition, monkeypatch) -> None:
    """A pass took the records away, and its segment keeps what the index has of their end."""
    monkeypatch.setattr(log_reader, "MOST_ABORTED", 1)
    log = partition.log
    for base, producer in ((0, 9), (100, 8), (200, 7), (300, 6)):
        log.append_as_follower(transactional(base, producer, 0), tools.NOW)
    for base, producer in ((302, 9), (303, 8), (304, 7), (305, 6)):
        log.append_as_follower(marker(base, producer, 0, 0), tools.NOW)
    partition.write()
    tools.produce(partition)
    assert len(log.segments[0].aborted) == 4
    expected = {0: (0, 9), 2: (100, 8), 99: (100, 8), 150: (200, 7), 202: (300, 6)}
    for offset, (base, producer) in expected.items():
        fetched = partition.fetch(offset, 1 << 20, isolation=COMMITTED)
        assert fetched.slice is not None, offset
        assert tools.offsets(partition, fetched)[0] == base
        assert (producer, base) in fetched.aborted
        small = partition.fetch(offset, 1, isolation=COMMITTED, at_least_one=False)
        assert (small.slice, small.aborted) == (None, []), "too large is no gap to go beyond"
    end = partition.high_watermark
    assert partition.fetch(end, 1, isolation=COMMITTED).slice is None


def test_max_bytes_gives_whole_batches_but_one_at_least(partition) -> None:
    for _ in range(5):
        tools.produce(partition)
    size = partition.readable_bytes(4)
    assert tools.offsets(partition, partition.fetch(0, 1)) == [0]
    assert partition.fetch(0, 1, at_least_one=False).slice is None
    assert tools.offsets(partition, partition.fetch(0, size * 2 + 1, at_least_one=False)) == [0, 1]


def test_readable_bytes(partition) -> None:
    assert partition.readable_bytes(0) == 0
    tools.produce(partition)
    one = partition.readable_bytes(0)
    tools.produce(partition)
    assert (partition.readable_bytes(0), partition.readable_bytes(1)) == (2 * one, one)
    assert [partition.readable_bytes(offset) for offset in (2, 3, -1)] == [0, 0, 0]


def test_an_older_segment_has_plenty_to_read(partition) -> None:
    for _ in range(5):
        tools.produce(partition, 20)
    assert [segment.base_offset for segment in partition.segments()] == [0, 60]
    assert partition.readable_bytes(59) == partition.readable_bytes(0) == ENOUGH_BYTES
    assert partition.readable_bytes(60) == 2 * partition.readable_bytes(80) < ENOUGH_BYTES


def test_the_end_of_a_segment_is_no_reason_to_wait_for_more(replicated) -> None:
    for _ in range(4):
        tools.produce(replicated, 20)
    replicated.fetch(60, 1, replica_id=1)
    assert 0 < replicated.readable_bytes(0) < ENOUGH_BYTES, "nothing committed beyond it yet"
    replicated.fetch(80, 1, replica_id=1)
    assert replicated.readable_bytes(0) == ENOUGH_BYTES


def test_the_nodes_own_readers_get_bytes_up_to_the_high_watermark(replicated) -> None:
    tools.produce(replicated, 2)
    assert replicated.read_batches(0, 1000) == b""
    replicated.fetch(2, 1000, replica_id=1)
    assert len(replicated.read_batches(0, 1000)) == replicated.size_bytes
    replicated.resign()
    assert replicated.read_batches(0, 1000), "also where this node does not lead"


# Leader epochs, rules 25 and 26.


@pytest.mark.parametrize(
    "call",
    [
        lambda p, epoch: p.fetch(0, 1000, current_leader_epoch=epoch),
        lambda p, epoch: p.list_offset(-1, current_leader_epoch=epoch),
        lambda p, epoch: p.end_offset_for_epoch(epoch, 3),
    ],
    ids=["fetch", "list_offset", "end_offset_for_epoch"],
)
def test_the_peers_leader_epoch_is_checked(replicated, call) -> None:
    with pytest.raises(FencedLeaderEpoch, match="leader epoch 2, here 3"):
        call(replicated, 2)
    with pytest.raises(UnknownLeaderEpoch, match="leader epoch 4, here 3"):
        call(replicated, 4)
    call(replicated, 3)
    call(replicated, -1)
    replicated.resign()
    with pytest.raises(NotLeaderOrFollower):
        call(replicated, 3)


def test_a_reader_that_diverged_is_told_where(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    tools.lead(partition, 1)
    tools.produce(partition, 5)
    tools.lead(partition, 4)
    tools.produce(partition, 5)
    assert [partition.end_offset_for_epoch(4, e) for e in range(6)] == [
        (0, 0),
        (1, 5),
        (1, 5),
        (1, 5),
        (4, 10),
        (-1, -1),
    ]
    fetch = partition.fetch
    assert fetch(5, 1000, last_fetched_epoch=1).diverging is None
    told = fetch(7, 1000, last_fetched_epoch=1)
    assert told.diverging == (1, 5) and told.slice is None
    assert fetch(5, 1000, last_fetched_epoch=3).diverging == (1, 5)
    assert fetch(10, 1000, last_fetched_epoch=4).diverging is None
    with pytest.raises(OffsetOutOfRange, match="epoch 5 is not known"):
        fetch(5, 1000, last_fetched_epoch=5)
    partition.delete_records(6)
    with pytest.raises(OffsetOutOfRange, match="below the log start"):
        fetch(5, 1000, last_fetched_epoch=1)


def test_a_diverging_follower_moves_nothing(replicated) -> None:
    tools.produce(replicated, 5)
    told = replicated.fetch(9, 1000, replica_id=1, last_fetched_epoch=3)
    assert told.diverging == (3, 5)
    assert replicated.high_watermark == 0
    assert replicated.core.followers[1].log_end_offset == -1
    with pytest.raises(OffsetOutOfRange):
        replicated.fetch(9, 1000, replica_id=1)
    assert replicated.core.followers[1].log_end_offset == -1


# Waiting.


def test_waiters_hear_until_removed(partition) -> None:
    heard: list[int] = []

    def wake() -> None:
        heard.append(partition.high_watermark)

    partition.add_waiter(wake)
    tools.produce(partition)
    tools.produce(partition)
    partition.delete_records(1)
    partition.delete_records(1)
    assert heard == [1, 2, 2]
    partition.remove_waiter(wake)
    partition.remove_waiter(wake)
    tools.produce(partition)
    assert heard == [1, 2, 2]


def test_a_waiter_may_remove_itself_and_add_others(partition) -> None:
    heard: list[str] = []

    def once() -> None:
        heard.append("once")
        partition.remove_waiter(once)
        partition.add_waiter(later)

    def later() -> None:
        heard.append("later")

    partition.add_waiter(once)
    tools.produce(partition)
    assert heard == ["once"]
    tools.produce(partition)
    assert heard == ["once", "later"]


def test_waiters_hear_of_leadership(partition) -> None:
    heard: list[bool] = []
    partition.add_waiter(lambda: heard.append(partition.is_leader))
    partition.resign()
    partition.become_leader(1, 1, (0,), (0,), 0)
    assert heard == [False, True]


def test_a_follower_wakes_readers_when_the_high_watermark_moves(replicated) -> None:
    tools.produce(replicated, 3)
    heard: list[int] = []
    replicated.add_waiter(lambda: heard.append(replicated.high_watermark))
    replicated.fetch(0, 1000, replica_id=1)
    replicated.fetch(2, 1000, replica_id=1)
    replicated.fetch(2, 1000, replica_id=1)
    replicated.fetch(3, 1000, replica_id=1)
    assert heard == [2, 3]


def test_commits_are_told_in_order(replicated) -> None:
    told: list[str] = []
    tools.produce(replicated, 2)
    replicated.when_committed(2, lambda error: told.append(f"first {error}"))
    tools.produce(replicated, 2)
    replicated.when_committed(4, lambda error: told.append(f"second {error}"))
    replicated.when_committed(0, lambda error: told.append(f"at once {error}"))
    assert told == ["at once None"]
    replicated.fetch(2, 1000, replica_id=1)
    assert told[1:] == ["first None"]
    replicated.fetch(4, 1000, replica_id=1)
    assert told[2:] == ["second None"]


def test_alone_a_commit_is_told_at_once(partition) -> None:
    told = []
    info = tools.produce(partition, 3)
    partition.when_committed(info.last_offset + 1, told.append)
    assert told == [None]


def test_a_commit_that_was_forgotten_is_not_told(replicated) -> None:
    told = []
    tools.produce(replicated)
    token = replicated.when_committed(1, told.append)
    replicated.forget_commit(token)
    replicated.fetch(1, 1000, replica_id=1)
    assert told == []


def test_who_waits_hears_that_leadership_ended(replicated) -> None:
    told = []
    tools.produce(replicated)
    replicated.when_committed(1, told.append)
    replicated.resign()
    replicated.when_committed(1, told.append)
    assert [type(error) for error in told] == [NotLeaderOrFollower] * 2


def test_too_few_replicas(disk) -> None:
    config = LogConfig(min_insync_replicas=2)
    partition = Partition(tools.open_log(disk, config=config), 0)
    tools.lead(partition, 0, (0, 1), (0,))
    with pytest.raises(NotEnoughReplicas, match="below the minimum of 2"):
        partition.append(tools.checked(), tools.NOW, -1)
    assert partition.log_end_offset == 0
    partition.append(tools.checked(), tools.NOW, 1)
    partition.write()
    assert partition.high_watermark == 0
    told = []
    partition.when_committed(0, told.append)
    assert [type(error) for error in told] == [NotEnoughReplicasAfterAppend]
    partition.update_config(LogConfig(min_insync_replicas=1))
    assert partition.high_watermark == 1
    partition.append(tools.checked(), tools.NOW, -1)


# Leadership, rule 24.


def test_no_append_before_the_epoch_is_durable(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    with pytest.raises(NotLeaderOrFollower):
        partition.append(tools.checked(), tools.NOW)
    ticket = partition.become_leader(2, 0, (0,), (0,), tools.NOW)
    assert ticket is not None
    with pytest.raises(NotLeaderOrFollower, match="epoch 2 is not durable yet"):
        partition.append(tools.checked(), tools.NOW)
    assert partition.fetch(0, 1000).slice is None, "reads are answered"
    ticket.run()
    ticket.done()
    tools.produce(partition)
    for seed in range(5):
        survivor = disk.after_power_loss(seed)
        assert read_epochs(survivor, "/d/t-0/leader-epoch-checkpoint") == [(2, 0)]


def test_the_ticket_of_an_older_epoch_opens_nothing(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    old = partition.become_leader(1, 0, (0,), (0,), tools.NOW)
    old.run()
    new = partition.become_leader(2, 1, (0,), (0,), tools.NOW)
    old.done()
    with pytest.raises(NotLeaderOrFollower):
        partition.append(tools.checked(), tools.NOW)
    new.run()
    new.done()
    tools.produce(partition)


def test_leading_again_in_the_same_epoch_takes_the_new_isr(replicated) -> None:
    assert replicated.become_leader(3, 1, (0,), (0, 1, 2), 0) is None
    assert (replicated.isr, replicated.partition_epoch) == ((0,), 1)


def test_high_watermark_after_a_restart(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    tools.lead(partition)
    tools.produce(partition, 9)
    tools.produce(partition, 1)
    partition.log.close()

    def restored(**known) -> Partition:
        return Partition(tools.open_log(disk, clean=True), 0, **known)

    assert restored().high_watermark == 0
    assert restored(high_watermark=4).high_watermark == 4
    assert restored(high_watermark=4, applied_end=9).high_watermark == 9
    assert restored(high_watermark=50).high_watermark == 10, "not above the log end"
    again = restored(high_watermark=4)
    tools.lead(again, 1, (0, 1), (0, 1), 1)
    assert again.high_watermark == 4, "with others it waits for them"
    alone = restored(high_watermark=4)
    tools.lead(alone, 1)
    assert alone.high_watermark == 10


def test_effects_for_others_are_handed_on(disk) -> None:
    effects = []
    partition = Partition(tools.open_log(disk), 0, listener=RecordedListener(effects))
    tools.lead(partition, 1, (0, 1), (0,))
    partition.step(EligibleBrokersChanged(frozenset({1})), 0)
    partition.fetch(0, 1000, replica_id=1, now_ms=tools.NOW)
    assert effects == [ProposeIsr((0, 1), 1, 0)]
    partition.become_leader(1, 1, (0, 1), (0, 1), tools.NOW)
    partition.tick(tools.NOW + 20_000)
    tools.produce(partition)
    partition.tick(tools.NOW + 60_000)
    assert effects[1:] == [ProposeIsr((0,), 1, 1)]
    with pytest.raises(NotLeaderOrFollower, match="broker 8 is no replica"):
        partition.fetch(0, 1000, replica_id=8)


# Faults.


def test_a_failed_write_takes_the_partition_offline(disk) -> None:
    told, woken, listener = [], [], RecordedListener()
    partition = Partition(tools.open_log(disk), 0, listener=listener)
    tools.lead(partition, 0, (0, 1))
    tools.produce(partition, 2)
    partition.when_committed(2, told.append)
    partition.add_waiter(lambda: woken.append(partition.offline))
    partition.append(tools.checked(), tools.NOW)
    disk.fail("write", ".log", partial=True)
    with pytest.raises(KafkaStorageError, match="write failed"):
        partition.write()
    assert [error.client_message for error in listener.errors] == [partition.offline]
    assert [type(error) for error in told] == [KafkaStorageError]
    assert woken == [partition.offline]
    for call in (
        lambda: partition.append(tools.checked(), tools.NOW),
        lambda: partition.fetch(0, 1000),
        lambda: partition.list_offset(-1),
        lambda: partition.delete_records(0),
        lambda: partition.producers(),
        lambda: partition.become_leader(1, 1, (0,), (0,), 0),
        lambda: partition.read_batches(0, 1000),
    ):
        with pytest.raises(KafkaStorageError, match="write failed") as refused:
            call()
        assert partition.log.directory not in str(refused.value), "clients are told no path"
    partition.when_committed(1, told.append)
    assert type(told[-1]) is KafkaStorageError
    assert partition.retention(tools.NOW) == [] and not partition.maybe_roll(tools.NOW)
    again = Partition(tools.open_log(disk.after_kill()), 0)
    assert again.log_end_offset == 2, "what was staged is not there"


@pytest.mark.parametrize("change", ["delete records", "follow"])
def test_a_write_that_fails_before_a_change_takes_the_partition_offline(disk, change) -> None:
    told, listener = [], RecordedListener()
    partition = Partition(tools.open_log(disk), 0, listener=listener)
    tools.lead(partition)
    tools.produce(partition, 2)
    partition.append(tools.checked(), tools.NOW)
    partition.when_committed(3, told.append)
    disk.fail("write", ".log")
    with pytest.raises(KafkaStorageError, match="write failed"):
        if change == "follow":
            partition.become_follower(1, 1, 1, (0, 1), (0, 1), tools.NOW)
        else:
            partition.delete_records(1)
    assert [error.client_message for error in listener.errors] == [partition.offline]
    assert [type(error) for error in told] == [KafkaStorageError]
    assert not partition.is_leader and partition.log_start_offset == 0
    with pytest.raises(KafkaStorageError, match="write failed"):
        partition.write()


def test_who_follows_leads_no_more_though_what_is_staged_cannot_be_written(
    partition, monkeypatch
) -> None:
    def exhausted(_: Log) -> None:
        raise ResourceExhausted("/d", "open", OSError(24, "EMFILE"))

    monkeypatch.setattr(Log, "write", exhausted)
    with pytest.raises(ResourceExhausted):
        partition.become_follower(1, 1, 1, (0, 1), (0, 1), tools.NOW)
    assert not partition.is_leader and not partition.core.leading
    assert partition.offline is None


def test_a_batch_that_a_failed_roll_lost_is_not_acknowledged(disk) -> None:
    partition = Partition(tools.open_log(disk), 0)
    tools.lead(partition)
    tools.produce(partition, 10)
    partition.append(tools.checked(30), tools.NOW)
    disk.fail("write", ".log")
    with pytest.raises(KafkaStorageError, match="write failed"):
        partition.append(tools.checked(30), tools.NOW)
    assert partition.log_end_offset == 10, "the roll was to write the first of them"
    with pytest.raises(KafkaStorageError, match="write failed"):
        partition.write()


def test_offline_by_the_directory(partition) -> None:
    partition.mark_offline("directory /d is offline: EIO")
    partition.mark_offline("another reason")
    with pytest.raises(KafkaStorageError, match="t:0: directory /d is offline: EIO"):
        partition.fetch(0, 1000)
    assert not partition.is_leader


def test_a_failed_read_takes_the_partition_offline(disk, partition) -> None:
    tools.produce(partition, 3)
    disk.fail("read", ".log")
    with pytest.raises(KafkaStorageError):
        partition.read_batches(0, 1000)
    assert partition.offline is not None


@pytest.fixture
def followed(tmp_path) -> Partition:
    """Led here in epoch 3, with a record of it; broker 1 follows, with broker epoch 9."""
    partition = Partition(tools.open_log(Disk(), str(tmp_path / "t-0")), 0)
    ticket = partition.become_leader(3, 0, (0, 1), (0, 1), 0)
    assert ticket is not None
    ticket.run()
    ticket.done()
    partition.step(EligibleBrokersChanged(frozenset(), ((1, 9),)), 0)
    tools.produce(partition)
    return partition


AT_THE_END = FetchPartition(0, 1, 1, 3, 3, 0)
"""What broker 1 asks when it has the record."""


def has_all(followed: Partition, wanted: FetchPartition = AT_THE_END) -> bool:
    return followed.follower_has_all(1, 9, wanted, 50)


def test_a_follower_that_has_all_is_noted_as_by_a_fetch(followed) -> None:
    assert has_all(followed)
    follower = followed.core.followers[1]
    assert (followed.high_watermark, follower.log_end_offset, follower.caught_up_ms) == (1, 1, 50)
    followed.check_invariants()


@pytest.mark.parametrize(
    ("offset", "leader_epoch", "last_fetched_epoch"),
    [(0, 3, 3), (2, 3, 3), (1, 2, 3), (1, 4, 3), (1, -1, 3), (1, 3, 2), (1, 3, -1)],
)
def test_who_may_lack_something_is_not_taken_to_have_all(
    followed, offset, leader_epoch, last_fetched_epoch
) -> None:
    assert not has_all(followed, FetchPartition(0, offset, 1, leader_epoch, last_fetched_epoch, 0))
    assert followed.high_watermark == 0
    assert followed.core.followers[1].log_end_offset == UNKNOWN_OFFSET


def test_a_request_that_is_read_again_notes_nothing_and_is_of_a_replica(followed) -> None:
    fetched = followed.fetch(1, 1 << 20, replica_id=1, broker_epoch=9, now_ms=50, again=True)
    assert fetched.slice is None
    assert followed.high_watermark == 0
    assert followed.core.followers[1].log_end_offset == UNKNOWN_OFFSET
    for replica, broker_epoch in ((1, 8), (2, 9)):
        with pytest.raises(NotLeaderOrFollower):
            followed.fetch(1, 1 << 20, replica_id=replica, broker_epoch=broker_epoch, again=True)


def test_nobody_has_all_of_what_is_not_led_here(followed) -> None:
    followed.suspend()
    assert not has_all(followed)
    followed.resume()
    for replica, broker_epoch in ((1, 8), (2, 9)):
        with pytest.raises(NotLeaderOrFollower):
            followed.follower_has_all(replica, broker_epoch, AT_THE_END, 50)
    assert followed.high_watermark == 0


def test_who_waits_for_a_commit_and_appends_leaves_something_to_read(followed) -> None:
    followed.when_committed(1, lambda _: tools.produce(followed) and None)
    assert not has_all(followed)
    assert (followed.high_watermark, followed.log_end_offset) == (1, 2)
