"""Producer state: duplicates, sequences that wrap, epochs, expiry, transactions, snapshots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import DamagedData, InvalidProducerEpoch, OutOfOrderSequenceNumber
from kept.storage.producers import producer_states as producers
from kept.storage.producers import snapshots
from kept.storage.producers.producer_states import BATCHES_KEPT, ProducerQuota, ProducerStates
from kept.storage.segments import txn_index
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import MAX_INT32


def send(states: ProducerStates, offset: int, sequence: int, count: int = 1, *, epoch: int = 0,
         pid: int = 1, now: int = 0, txn: bool = False):  # fmt: skip
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
    several[2].clear(7)
    assert room.used == len(several[0])
    several.clear()
    states = None
    assert room.used == 0


def test_five_batches_are_remembered() -> None:
    states = ProducerStates(1000)
    for n in range(8):
        send(states, 10 * n, n)
    for n in range(8 - BATCHES_KEPT, 8):
        assert send(states, 999, n).first_offset == 10 * n
    with pytest.raises(OutOfOrderSequenceNumber):
        send(states, 999, 8 - BATCHES_KEPT - 1)
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


@given(
    st.dictionaries(
        st.integers(0, 2**63 - 1),
        st.tuples(
            st.integers(0, 2**15 - 1), st.integers(0, MAX_INT32), st.integers(0, 2**62),
            st.integers(0, 1000), st.integers(-1, 2**62), st.booleans(),
        ),
        max_size=5,
    )
)  # fmt: skip
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


def test_a_snapshot_of_nothing_has_ten_bytes() -> None:
    data = snapshots.encode(ProducerStates(1))
    assert data.hex() == "0001" + "48674bc7" + "00000000"
    assert snapshots.decode("x", data) == []


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
    for pid, state in snapshots.decode("x", snapshots.encode(states)):
        copied.put(pid, state)
    with pytest.raises(OutOfOrderSequenceNumber):
        copied.check(2, 5, 9, 1)
    assert copied.check(2, 5, 0, 1) is None
