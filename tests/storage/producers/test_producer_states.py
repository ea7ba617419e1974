"""Producer state: duplicates, sequences that wrap, epochs, expiry, transactions, snapshots."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import (
    DamagedData,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequenceNumber,
    TransactionCoordinatorFenced,
)
from kept.storage.producers import producer_states as producers
from kept.storage.producers import snapshots, verification
from kept.storage.producers.producer_states import ProducerQuota, ProducerStates
from kept.storage.producers.verification import VerificationGuard
from kept.storage.records.checksum import crc32c
from kept.storage.segments import txn_index
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import MAX_INT32

NO_PRODUCERS = bytes.fromhex("0001" + "48674bc7" + "00000000")
"""A snapshot."""


def guard(
    states: ProducerStates,
    epoch: int = 0,
    sequence: int = 0,
    *,
    pid: int = 1,
    is_tv2: bool = False,
    leader_epoch: int = 0,
    now: int = 0,
) -> VerificationGuard:
    return states.guards.obtain(
        pid, epoch, sequence, is_tv2=is_tv2, leader_epoch=leader_epoch, now_ms=now
    )


def send(
    states: ProducerStates,
    offset: int,
    sequence: int,
    count: int = 1,
    *,
    epoch: int = 0,
    pid: int = 1,
    now: int = 0,
    txn: bool = False,
):
    if txn:
        proof = guard(states, epoch, sequence, pid=pid)
        again = states.check_transactional(pid, epoch, sequence, count, proof)
    else:
        again = states.check(pid, epoch, sequence, count)
    if again is None:
        states.update(pid, epoch, sequence, count - 1, offset + count - 1, now, txn)
    states.check_invariants()
    return again


def test_sequences_follow_one_another_and_wrap() -> None:
    states = ProducerStates(1000)
    assert send(states, 0, MAX_INT32 - 2, 3) is None
    assert send(states, 3, 0, 2) is None
    assert send(states, 9, MAX_INT32 - 2, 3).first_offset == 0
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 5, 3)
    assert send(states, 5, 2) is None
    crossing = ProducerStates(1000)
    assert send(crossing, 0, MAX_INT32 - 1, 4) is None
    assert crossing.get(1).last_sequence == 1
    assert send(crossing, 9, MAX_INT32 - 1, 4).first_sequence == MAX_INT32 - 1


def test_a_log_remembers_so_many_producers_and_forgets_who_is_silent(monkeypatch) -> None:
    monkeypatch.setattr(producers, "MOST_OF_A_LOG", 50)
    states = ProducerStates(1000, ProducerQuota())
    for n in range(200):
        send(states, 2 * n, n, pid=0, now=n)  # one that goes on
        send(states, 2 * n + 1, 0, pid=1000 + n, now=n)
        assert len(states) <= 50
    assert 0 in states and 1199 in states and 1000 not in states


def test_open_transactions_do_not_keep_others_from_being_forgotten(monkeypatch) -> None:
    """However many there are, and wherever they are in the table."""
    monkeypatch.setattr(producers, "MOST_OF_A_LOG", 50)
    states = ProducerStates(1000, ProducerQuota())
    several = range(2 * producers.CANDIDATES)
    for pid in several:
        send(states, pid, 0, pid=pid, txn=True)
    for n in range(100):
        send(states, 100 + n, 0, pid=1000 + n, now=n)
    assert len(states) == 50 and all(pid in states for pid in several)
    for pid in several:  # then they may go as well
        states.update_marker(pid, 0, 200 + pid, 0, 0, False)
    for n in range(100):
        send(states, 300 + n, 0, pid=2000 + n, now=1000 + n)
    assert len(states) == 50 and not any(pid in states for pid in several)
    for pid in range(3000, 3060):  # more than are remembered otherwise
        send(states, pid, 0, pid=pid, txn=True)
    for pid in (1, 2):
        send(states, 9000 + pid, 0, pid=pid)
    assert len(states) == 61 and 2 in states, "each takes the place of the one before"


def test_logs_share_the_room_for_producers_and_give_it_back() -> None:
    room = ProducerQuota(30)
    several = [ProducerStates(1000, room) for _ in range(3)]
    send(several[0], 0, 0, txn=True, pid=1)
    for n in range(100):
        for states in several:
            send(states, n + 1, 0, pid=10 + n, now=n)
    assert room.used == sum(map(len, several)) <= 30 + len(several)
    assert 1 in several[0], "its transaction is open"
    several[1].expire(10_000)
    several[2].clear()
    for states in several:
        states.check_invariants()
    assert room.used == len(several[0])
    several.clear()
    states = None
    assert room.used == 0


def test_five_batches_are_remembered() -> None:
    states = ProducerStates(1000)
    for n in range(8):
        send(states, 10 * n, n)
    for n in range(3, 8):  # clients have no more in flight
        assert send(states, 999, n).first_offset == 10 * n
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 999, 2)
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 999, 6, 2)


def test_epochs() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, epoch=3)
    with pytest.raises(InvalidProducerEpoch):
        send(states, 1, 1, epoch=2)
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 1, 1, epoch=4)
    assert send(states, 1, 0, epoch=4) is None
    assert send(states, 9, 0, epoch=4).first_offset == 1


def test_a_producer_without_state_may_start_anywhere() -> None:
    states = ProducerStates(1000)
    assert send(states, 0, 12345) is None


def test_expiry_spares_open_transactions() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, pid=1, now=0)
    send(states, 1, 0, pid=2, now=500)
    send(states, 2, 0, pid=3, now=0, txn=True)
    assert states.expire(999) == 0
    assert states.expire(1000) == 1
    assert 1 not in states and 2 in states and 3 in states
    assert states.first_unstable_offset == 2


def test_a_producer_whose_last_act_is_a_marker_expires_from_that_on() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, now=0, txn=True)
    states.update_marker(1, 0, 1, 500, 0, aborted=False)
    assert states.expire(1499) == 0
    assert states.expire(1500) == 1


def test_a_transaction_below_the_log_start_keeps_its_producer_no_longer() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, 5, txn=True)
    states.truncate_from_start(4)
    assert states.first_unstable_offset == 0
    states.truncate_from_start(5)
    states.check_invariants()
    assert states.first_unstable_offset is None and states.expire(1000) == 1


def test_open_transactions_are_counted_by_the_age_of_their_last_batch() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, pid=1, now=100, txn=True)
    send(states, 1, 0, pid=2, now=200, txn=True)
    send(states, 2, 0, pid=3, now=100)
    send(states, 3, 1, pid=1, now=300, txn=True)
    assert [states.count_open_before(t) for t in (200, 201, 300, 301)] == [0, 1, 1, 2]


def test_transactions() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, 5, pid=1, txn=True)
    send(states, 5, 0, 5, pid=2, txn=True)
    send(states, 10, 5, 5, pid=1, txn=True)
    assert states.first_unstable_offset == 0
    done = states.update_marker(1, 0, 15, 0, 7, True)
    assert done == (1, 0, 15, True) and states.first_unstable_offset == 5
    assert states.get(1).coordinator_epoch == 7
    assert states.update_marker(2, 0, 16, 0, 7, False) == (2, 5, 16, False)
    assert states.first_unstable_offset is None
    assert states.update_marker(9, 1, 17, 0, 7, False) is None, "it had no data here"
    assert states.get(9).last_sequence == -1
    states.check_invariants()


def test_a_transaction_is_undecided_until_its_marker_is_committed() -> None:
    """The next leader may not have the marker."""
    states = ProducerStates(1000)
    assert states.first_undecided_offset(0, 0) is None
    for pid in (1, 2, 3):
        send(states, pid, 0, pid=pid, txn=True)
    states.update_marker(2, 0, 10, 0, 7, False)
    states.update_marker(1, 0, 11, 0, 7, False)
    states.update_marker(3, 0, 12, 0, 7, False)
    assert states.first_unstable_offset is None
    found = [states.first_undecided_offset(hw, 0) for hw in (10, 11, 12, 13)]
    assert found == [1, 1, 3, None]
    send(states, 13, 1, pid=2, txn=True)
    states.update_marker(2, 0, 14, 0, 7, False)
    send(states, 15, 1, pid=3, txn=True)
    states.update_marker(3, 0, 16, 0, 7, False)
    found = [states.first_undecided_offset(hw, start) for hw, start in ((14, 0), (14, 14), (15, 0))]
    assert found == [13, 14, 15]


def test_a_snapshots_producers_count_against_the_room_for_all() -> None:
    room = ProducerQuota()
    states, others = ProducerStates(1000, room), ProducerStates(1000)
    send(states, 0, 0, pid=9)
    for pid in range(5):
        send(others, pid, 0, pid=pid)
    states.replace(others)
    assert room.used == len(states) == 5


@given(
    st.dictionaries(
        st.integers(0, 2**63 - 1),
        st.tuples(
            st.integers(0, 2**15 - 1),
            st.integers(0, MAX_INT32),
            st.integers(0, 2**62),
            st.integers(0, 1000),
            st.integers(-1, 2**62),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_snapshots_come_back(producers) -> None:
    states = ProducerStates(1000)
    for pid, (epoch, sequence, offset, delta, timestamp, txn) in producers.items():
        states.update(pid, epoch, sequence, delta, offset + delta, timestamp, txn)
    data = snapshots.encode(states)
    assert len(data) == 10 + 46 * len(producers)
    found = dict(snapshots.decode("x", data))
    assert found.keys() == producers.keys()
    for pid, state in states.items():
        other = found[pid]
        assert other.batches == state.batches and other.epoch == state.epoch
        assert other.txn_first_offset == state.txn_first_offset
        assert other.last_timestamp == state.last_timestamp


def test_a_snapshot_has_the_last_batch_of_each_producer() -> None:
    states = ProducerStates(1000)
    send(states, 0, 0, 3)
    send(states, 3, 3)
    ((pid, state),) = snapshots.decode("x", snapshots.encode(states))
    assert pid == 1 and state.batches == states.get(1).batches[-1:]


def test_a_snapshot_of_nothing_has_ten_bytes() -> None:
    assert snapshots.encode(ProducerStates(1)) == NO_PRODUCERS
    assert snapshots.decode("x", NO_PRODUCERS) == []


@given(position=st.integers(0, 55), bit=st.integers(0, 7))
def test_damaged_snapshots_are_refused(position, bit) -> None:
    states = ProducerStates(1000)
    send(states, 0, 0)
    data = bytearray(snapshots.encode(states))
    data[position] ^= 1 << bit
    with pytest.raises(DamagedData):
        snapshots.decode("x", data)
    with pytest.raises(DamagedData):
        snapshots.decode("x", data[:-1])


@pytest.mark.parametrize(
    ("data", "position", "why"),
    [
        (NO_PRODUCERS[:-1], 0, "9 bytes are no snapshot"),
        (b"\0\2" + NO_PRODUCERS[2:], 0, "version 2, expected 1"),
        (NO_PRODUCERS + b"\0", 2, "the CRC does not match"),
        (b"\0\1" + crc32c(b"\0\0\0\1").to_bytes(4, "big") + b"\0\0\0\1", 6, "do not hold 1"),
    ],
)
def test_where_a_snapshot_is_damaged_is_told(data, position, why) -> None:
    with pytest.raises(DamagedData, match=why) as error:
        snapshots.decode("x", data)
    assert (error.value.path, error.value.position, error.value.offset) == ("x", position, -1)


def test_the_transaction_index() -> None:
    entries = [AbortedTxn(1, 0, 10, 5), AbortedTxn(2, 5, 20, 21)]
    data = txn_index.encode(entries)
    assert len(data) == 68 and data[:10].hex() == "0000" + "0000000000000001"
    assert txn_index.decode("x", data) == entries
    for damage in (data[:-1], b"\x01" + data[1:], txn_index.encode(entries[::-1])):
        with pytest.raises(DamagedData):
            txn_index.decode("x", damage)
    with pytest.raises(DamagedData):
        txn_index.decode("x", data, 11)


def test_sequences_begin_at_zero_after_a_marker() -> None:
    """Apache Kafka's ``checkSequence``: an epoch with a marker and no batch stands at -1."""
    states = ProducerStates(1000)
    send(states, 0, 0, 3, txn=True)
    states.update_marker(1, 0, 3, 0, 7, True)
    assert send(states, 4, 3, txn=True) is None, "the epoch is the same: its sequences go on"
    states.update_marker(1, 1, 5, 0, 7, True)
    for sequence in (1, 4, MAX_INT32):
        with pytest.raises(OutOfOrderSequenceNumber, match="expected 0"):
            send(states, 6, sequence, epoch=1)
    with pytest.raises(InvalidProducerEpoch):
        send(states, 6, 4, epoch=0)
    assert send(states, 6, 0, epoch=1) is None
    states.update_marker(2, 5, 7, 0, 7, False)
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 8, 9, epoch=5, pid=2)
    copied = ProducerStates(1000)
    copied.restore(snapshots.decode("x", snapshots.encode(states)))
    with pytest.raises(OutOfOrderSequenceNumber):
        copied.check(2, 5, 9, 1)
    assert copied.check(2, 5, 0, 1) is None


FENCED, SEQUENCE, STATE, COORDINATOR = (
    InvalidProducerEpoch,
    OutOfOrderSequenceNumber,
    InvalidTxnState,
    TransactionCoordinatorFenced,
)

UNKNOWN = ()
OPEN = (("data", 3, 0),)
"""Epoch 3 with sequence 0, its transaction open."""
ENDED = (("data", 3, 0), ("marker", 3, 7))
"""The same, ended in version 1 by coordinator epoch 7."""
BUMPED = (("data", 3, 0), ("marker", 4, 7))
"""Ended in version 2."""
EXHAUSTED = (("data", 32767, 0),)


def built(history: tuple[tuple[str, int, int], ...]) -> ProducerStates:
    """Producer 1 after batches (epoch, sequence) and markers (epoch, coordinator epoch)."""
    states = ProducerStates(1000)
    for offset, (kind, epoch, number) in enumerate(history):
        if kind == "data":
            send(states, offset, number, epoch=epoch, txn=True)
        else:
            states.update_marker(1, epoch, offset, 0, number, False)
    states.check_invariants()
    return states


@pytest.mark.parametrize(
    ("history", "epoch", "sequence", "asked", "expected"),
    [
        # asked: None nobody was, else (epoch, sequence, version 2) of the guard that is shown.
        (UNKNOWN, 3, 0, None, STATE),
        (UNKNOWN, 3, 0, (3, 0, False), None),
        (UNKNOWN, 3, 9, (3, 9, False), None),  # KIP-360: its records may be gone
        (UNKNOWN, 3, 9, (3, 9, True), SEQUENCE),
        (UNKNOWN, 3, 9, (3, 4, False), SEQUENCE),  # one before it was refused meanwhile
        (OPEN, 3, 1, None, None),
        (OPEN, 3, 2, None, SEQUENCE),
        (OPEN, 2, 1, (2, 1, False), FENCED),
        (OPEN, 4, 0, None, STATE),
        (OPEN, 4, 0, (4, 0, True), None),  # joins what is open
        (OPEN, 4, 1, (4, 1, True), SEQUENCE),
        (ENDED, 3, 1, None, STATE),
        (ENDED, 3, 1, (3, 1, False), None),
        (ENDED, 3, 2, (3, 2, False), SEQUENCE),
        (ENDED, 2, 1, None, FENCED),  # before it is said that nothing is open
        (BUMPED, 3, 1, None, FENCED),
        (BUMPED, 4, 0, (4, 0, True), None),
        (BUMPED, 4, 1, (4, 1, True), SEQUENCE),
        (BUMPED, 4, 0, None, STATE),
    ],
)
def test_the_first_batch_of_a_transaction(history, epoch, sequence, asked, expected) -> None:
    states = built(history)
    proof = None if asked is None else guard(states, *asked[:2], is_tv2=asked[2])
    if expected is None:
        assert states.check_transactional(1, epoch, sequence, 1, proof) is None
    else:
        with pytest.raises(expected):
            states.check_transactional(1, epoch, sequence, 1, proof)


def test_batches_of_a_coordinator_have_no_sequences_and_no_duplicates() -> None:
    states = built(OPEN)
    states.check_transactional(1, 3, -1, 1, None)
    with pytest.raises(STATE):
        states.check_transactional(2, 0, -1, 1, None)
    states.check_transactional(2, 0, -1, 1, guard(states, 0, -1, pid=2))
    with pytest.raises(FENCED):
        states.check_transactional(1, 2, -1, 1, None)


@pytest.mark.parametrize(
    ("history", "epoch", "sequence", "expected"),
    [
        (OPEN, 3, 1, STATE),
        (OPEN, 4, 0, STATE),
        (OPEN, 3, 2, SEQUENCE),
        (OPEN, 2, 1, FENCED),
        (ENDED, 3, 1, None),
        (BUMPED, 4, 0, None),
    ],
)
def test_a_plain_batch_inside_a_transaction(history, epoch, sequence, expected) -> None:
    states = built(history)
    if expected is None:
        assert states.check(1, epoch, sequence, 1) is None
    else:
        with pytest.raises(expected):
            states.check(1, epoch, sequence, 1)


def test_duplicates_are_known_before_anybody_is_asked() -> None:
    for history in (OPEN, ENDED):
        states = built(history)
        assert states.find_duplicate(1, 3, 0, 1).first_offset == 0
        assert states.check_transactional(1, 3, 0, 1, None).first_offset == 0
        assert (
            states.find_duplicate(1, 3, 1, 1) is None and states.find_duplicate(2, 0, 0, 1) is None
        )
    with pytest.raises(FENCED):
        built(BUMPED).find_duplicate(1, 3, 0, 1)


@pytest.mark.parametrize(
    ("history", "epoch", "coordinator", "is_tv2", "expected"),
    [
        (UNKNOWN, 0, 0, False, None),
        (UNKNOWN, 0, 0, True, None),
        (OPEN, 3, 7, False, None),
        (OPEN, 2, 7, False, FENCED),
        (OPEN, 4, 7, False, None),  # fenced: the epoch grew by that
        (OPEN, 3, 7, True, FENCED),  # it ended the one before
        (OPEN, 4, 7, True, None),
        (ENDED, 3, 7, True, None),
        (BUMPED, 4, 7, True, None),  # the same once more
        (BUMPED, 3, 7, True, FENCED),
        (BUMPED, 4, 6, True, COORDINATOR),
        (BUMPED, 3, 6, False, FENCED),
        (ENDED, 3, 6, False, COORDINATOR),
        (ENDED, 4, 8, False, None),
        (EXHAUSTED, 32767, 7, True, None),
    ],
)
def test_which_markers_are_taken(history, epoch, coordinator, is_tv2, expected) -> None:
    states = built(history)
    if expected is None:
        states.check_marker(1, epoch, coordinator, is_tv2=is_tv2)
    else:
        with pytest.raises(expected):
            states.check_marker(1, epoch, coordinator, is_tv2=is_tv2)


def test_a_predecessors_marker_where_the_producer_was_forgotten() -> None:
    """Its last marker tells, then whoever was asked, but only to the node that leads since."""
    states = ProducerStates(1000)
    states.update_marker(1, 3, 0, 0, 7, False)
    with pytest.raises(COORDINATOR):
        states.check_marker(1, 3, 6, is_tv2=False)
    assert states.expire(1000) == 1
    states.guards.note_coordinator_epoch(1, 7)
    send(states, 1, 5, epoch=3, txn=True)
    with pytest.raises(COORDINATOR):
        states.check_marker(1, 3, 6, is_tv2=False)
    states.guards.clear()
    states.check_marker(1, 3, 6, is_tv2=False)
    assert states.is_open(1, 3)


def test_what_lets_a_guard_go() -> None:
    """An answer that was on its way when its transaction ended is not of the next one."""
    states = built(ENDED)
    held = guard(states, 3, 1)
    assert guard(states, 3, 4) is held and held.lowest_sequence == 1
    assert guard(states, 3, 0) is held and held.lowest_sequence == 0
    states.update_marker(1, 3, 5, 0, 7, False)
    for sequence in (-1, 1):
        with pytest.raises(STATE):
            states.check_transactional(1, 3, sequence, 1, held)
    assert guard(states, 3, 1) is not held
    held = guard(states, 3, 1)
    assert guard(states, 4, 0) is not held, "of a newer epoch"
    assert guard(states, 3, 1).epoch == 4, "an older one asks with it, and is told so"
    held = guard(states, 4, 0)
    assert guard(states, 4, 0, leader_epoch=1) is not held
    states.update(1, 4, 0, 0, 6, 0, True)
    assert states.guards.get(1) is None
    for is_tv2, epoch, stays in ((False, 5, False), (True, 5, True), (True, 6, False)):
        held = guard(states, 5, 0, is_tv2=is_tv2)
        states.update_marker(1, epoch, 7, 0, 7, False)
        assert (states.guards.get(1) is held) is stays, (is_tv2, epoch)
        states.guards.clear()
    guard(states, 6, 0, now=500)
    states.expire(1499)
    assert len(states.guards) == 1
    states.expire(1500)
    assert len(states.guards) == 0


def test_a_log_has_so_many_guards(monkeypatch) -> None:
    monkeypatch.setattr(verification, "MOST_OF_A_LOG", 3)
    states = ProducerStates(1000)
    held = [guard(states, pid=pid) for pid in range(5)]
    assert [states.guards.get(pid) for pid in range(5)] == [None, None, *held[2:]]
    for pid in range(5):
        states.guards.note_coordinator_epoch(pid, pid)
    assert [states.guards.coordinator_epoch(pid) for pid in range(5)] == [-1, -1, 2, 3, 4]


def test_all_logs_of_a_node_have_so_many_guards_together() -> None:
    """Whoever writes to many logs with made-up producers ends the oldest of all: who asks now is
    answered before.
    """
    quota = ProducerQuota()
    quota.verifications.limit = 5
    first, second = ProducerStates(1000, quota), ProducerStates(1000, quota)
    held = [guard(states, pid=pid) for pid in range(3) for states in (first, second)]
    assert [first.guards.get(pid) for pid in range(3)] == [None, held[2], held[4]]
    assert [second.guards.get(pid) for pid in range(3)] == [held[1], held[3], held[5]]
    first.guards.note_coordinator_epoch(7, 1)
    assert second.guards.get(0) is None and first.guards.coordinator_epoch(7) == 1
    first.guards.note_coordinator_epoch(7, 2)
    assert guard(first, pid=1) is held[2], "asked once more, so young again"
    assert len(quota.verifications) == 5
    guard(second, epoch=1, pid=1)  # asked anew, so the youngest
    assert len(quota.verifications) == 5
    guard(first, pid=9)
    assert first.guards.get(2) is None and first.guards.get(1) is held[2]
    assert second.guards.get(1) is not None
    second.update(1, 1, 0, 0, 6, 0, True)
    second.update_marker(2, 0, 7, 0, 7, False)
    assert len(second.guards) == 0 and len(quota.verifications) == 3
    guard(second, pid=3)
    del second
    gc.collect()
    assert len(quota.verifications) == 3, "a log that is gone counts no more"
    first.expire(5000)
    assert len(first.guards) == 0 and len(quota.verifications) == 1
    first.guards.clear()
    assert len(quota.verifications) == 0
