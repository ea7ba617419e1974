"""Transactions at a partition's leader: guards, markers, what read_committed consumers see."""

from __future__ import annotations

import pytest

from kept.replication.partition import Partition
from kept.storage.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OutOfOrderSequenceNumber,
    TransactionCoordinatorFenced,
)
from kept.storage.records import EndTxnMarker
from kept.storage.types import AppendOrigin, IsolationLevel
from tests.support import partitions as tools
from tests.support.simulated_disk import SimulatedDisk

COMMITTED = IsolationLevel.READ_COMMITTED
COMMIT, ABORT = EndTxnMarker(True, 4), EndTxnMarker(False, 4)


def verified(partition: Partition, pid: int = 7, epoch: int = 0, sequence: int = 0, **fields):
    fields = {"is_tv2": False, "now_ms": tools.NOW, **fields}
    return partition.verification_guard(pid, epoch, sequence, **fields)


def send(
    partition: Partition,
    sequence: int = 0,
    count: int = 1,
    *,
    pid: int = 7,
    epoch: int = 0,
    guard=None,
    **rest,
):
    batch = tools.checked(count, pid=pid, sequence=sequence, epoch=epoch, is_transactional=True)
    info = partition.append(batch, tools.NOW, -1, guard, **rest)
    partition.write()
    return info


def end(partition: Partition, marker: EndTxnMarker, *, pid: int = 7, epoch: int = 0, **rest):
    info = partition.append_marker(marker, pid, epoch, tools.NOW, **rest)
    partition.write()
    return info


def read(partition: Partition, offset: int = 0):
    return partition.fetch(offset, 1 << 20, isolation=COMMITTED)


def test_a_transaction_begins_with_a_guard_and_ends_with_a_marker(partition) -> None:
    guard = verified(partition)
    assert send(partition, count=2, guard=guard).base_offset == 0
    assert verified(partition, sequence=2) is None, "it is open here"
    assert send(partition, 2).base_offset == 2
    (view,) = partition.producers()
    assert (view.current_txn_start_offset, view.coordinator_epoch) == (0, -1)
    assert read(partition).slice is None and partition.last_stable_offset == 0
    assert end(partition, ABORT).base_offset == 3
    fetched = read(partition)
    assert (fetched.aborted, fetched.last_stable_offset) == ([(7, 0)], 4)
    (view,) = partition.producers()
    assert (view.current_txn_start_offset, view.coordinator_epoch) == (-1, 4)
    assert verified(partition, sequence=2) is None, "that is there already"
    with pytest.raises(InvalidTxnState, match="no transaction open"):
        send(partition, 3)
    send(partition, 3, guard=verified(partition, sequence=3))
    end(partition, COMMIT)
    assert read(partition).aborted == [(7, 0)] and partition.last_stable_offset == 6
    assert read(partition, 4).aborted == []
    partition.check_invariants()


def test_an_abort_of_nothing_leaves_no_trace_in_the_index(partition) -> None:
    """Consumers would skip what the same producer commits behind it (librdkafka)."""
    end(partition, ABORT)
    assert partition.log.aborted_transactions(0, 9) == [] and partition.last_stable_offset == 1
    send(partition, guard=verified(partition))
    end(partition, ABORT)
    end(partition, ABORT)  # the same, sent again
    assert [t[1:3] for t in partition.log.aborted_transactions(0, 9)] == [(1, 2)]


def test_an_answer_of_an_ended_transaction_does_not_begin_the_next(partition) -> None:
    held = verified(partition)
    end(partition, ABORT)
    with pytest.raises(InvalidTxnState):
        send(partition, guard=held)
    anew = verified(partition)
    assert anew is not held
    send(partition, guard=anew)


def test_a_guard_is_of_one_leader_epoch(replicated) -> None:
    held = verified(replicated)
    assert verified(replicated) is held
    tools.lead(replicated, 5, (0, 1, 2), (0, 1))
    with pytest.raises(NotLeaderOrFollower, match="verified in leader epoch 3, here 5"):
        send(replicated, guard=held)
    assert verified(replicated) is not held
    replicated.become_follower(1, 6, 1, (0, 1, 2), (0, 1), tools.NOW)
    assert len(replicated.log.producers.guards) == 0
    for call in (lambda: verified(replicated), lambda: end(replicated, ABORT)):
        with pytest.raises(NotLeaderOrFollower):
            call()


def test_what_is_asked_before_a_coordinator_is(partition) -> None:
    send(partition, count=2, epoch=3, guard=verified(partition, epoch=3))
    end(partition, COMMIT, epoch=3)
    assert verified(partition, epoch=3, sequence=0, record_count=2) is None, "a duplicate"
    again = send(partition, count=2, epoch=3)
    assert again.duplicate and again.base_offset == 0
    with pytest.raises(InvalidProducerEpoch):
        verified(partition, epoch=2)
    guard = verified(partition, epoch=3, sequence=4)
    assert verified(partition, epoch=3, sequence=2) is guard
    with pytest.raises(OutOfOrderSequenceNumber):
        send(partition, 4, epoch=3, guard=guard)
    send(partition, 2, epoch=3, guard=guard)


def test_a_coordinators_batches_have_no_sequences(partition) -> None:
    guard = verified(partition, sequence=-1)
    for _ in range(3):
        send(partition, guard=guard, origin=AppendOrigin.COORDINATOR)
        assert verified(partition, sequence=-1) is None
    end(partition, COMMIT)
    with pytest.raises(InvalidTxnState):
        send(partition, guard=guard, origin=AppendOrigin.COORDINATOR)
    assert partition.log_end_offset == 4


def test_which_markers_a_leader_takes(replicated) -> None:
    with pytest.raises(NotEnoughReplicas):
        replicated.update_config(tools.config(min_insync_replicas=3))
        replicated.become_leader(3, 9, (0, 1), (0, 1, 2), tools.NOW)
        end(replicated, COMMIT)
    replicated.update_config(tools.config(min_insync_replicas=1))
    end(replicated, COMMIT, epoch=3)
    with pytest.raises(InvalidProducerEpoch):
        end(replicated, COMMIT, epoch=2)
    with pytest.raises(TransactionCoordinatorFenced):
        end(replicated, EndTxnMarker(True, 3), epoch=3)
    assert replicated.log_end_offset == 1
    assert end(replicated, COMMIT, epoch=4, is_tv2=True).base_offset == 1


def test_a_marker_of_a_predecessor_of_who_was_asked_is_late(replicated) -> None:
    """It would end the transaction that its successor let begin."""
    send(replicated, guard=verified(replicated))
    replicated.note_coordinator_epoch(7, 5)
    with pytest.raises(TransactionCoordinatorFenced, match=r"epoch 2 says .*, known is 5"):
        replicated.note_coordinator_epoch(7, 2)
    (view,) = replicated.producers()
    assert view.coordinator_epoch == 5, "who ends it by hand must know"
    for pid in (7, 8):
        replicated.note_coordinator_epoch(pid, 5)
        with pytest.raises(TransactionCoordinatorFenced, match="epoch 4, known is 5"):
            end(replicated, ABORT, pid=pid)
    end(replicated, EndTxnMarker(True, 5))
    replicated.resign()
    tools.lead(replicated, 5, (0, 1, 2), (0, 1))
    end(replicated, ABORT, pid=8)


def test_records_are_deleted_through_an_open_transaction_which_may_go_on(partition) -> None:
    woken = []
    partition.add_waiter(lambda: woken.append(partition.last_stable_offset))
    send(partition, count=2, guard=verified(partition))
    tools.produce(partition)
    partition.delete_records(2)
    assert woken[-1] == partition.last_stable_offset == 3, "its records are gone"
    with pytest.raises(InvalidTxnState):
        send(partition, 2)
    send(partition, 2, guard=verified(partition, sequence=2))
    assert partition.last_stable_offset == 3
    end(partition, ABORT)
    assert read(partition, 2).aborted == [(7, 3)]


def test_the_stable_offset_never_goes_back_while_the_leader_stays(replicated) -> None:
    stable = [replicated.last_stable_offset]

    def note() -> None:
        stable.append(replicated.last_stable_offset)
        assert stable[-1] <= replicated.high_watermark

    for n in range(20):
        pid = 7 + n % 3
        if n % 4 == 3:
            end(replicated, ABORT if n % 8 == 3 else COMMIT, pid=pid)
        else:
            state = replicated.log.producers.get(pid)
            sequence = 0 if state is None else state.last_sequence + 1
            send(replicated, sequence, pid=pid, guard=verified(replicated, pid, sequence=sequence))
        note()
        replicated.fetch(max(0, replicated.log_end_offset - n % 5), 1000, replica_id=1)
        note()
    assert stable == sorted(stable) and stable[-1] > 5


@pytest.fixture
def second() -> Partition:
    """It follows ``replicated``, and has nothing yet."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    disk.fsync_dir("/")
    made = Partition(tools.open_log(disk), 1)
    made.become_follower(0, 3, 0, (0, 1), (0, 1, 2), tools.NOW)
    return made


def replicate(leader: Partition, follower: Partition) -> None:
    """One fetch; the high watermark follows with the next one."""
    fetched = leader.fetch(follower.log_end_offset, 1 << 20, replica_id=follower.node_id)
    data = b"" if fetched.slice is None else leader.log.disk.pread(*fetched.slice)
    start = fetched.log_start_offset
    follower.follower.append_fetched(data, fetched.high_watermark, start, tools.NOW)


def fail_over(leader: Partition, follower: Partition) -> None:
    """The follower leads, and the leader follows: what it had more is cut."""
    tools.lead(follower, 4, (0, 1, 2), (0, 1), version=1)
    leader.become_follower(1, 4, 1, (0, 1), (0, 1, 2), tools.NOW)
    leader.log.truncate_to(min(leader.log_end_offset, follower.log_end_offset))


def test_who_leads_next_without_the_first_batch_has_no_transaction_open(replicated, second) -> None:
    """Its producer sends the batch again, and the coordinator is asked again."""
    send(replicated, guard=verified(replicated))
    assert (replicated.log_end_offset, replicated.high_watermark) == (1, 0)
    fail_over(replicated, second)
    with pytest.raises(InvalidTxnState):
        send(second)
    send(second, guard=verified(second))
    for _ in range(2):
        replicate(second, replicated)
    for replica in (second, replicated):
        assert replica.log.producers.is_open(7, 0)
        assert (replica.high_watermark, replica.last_stable_offset) == (1, 0)


@pytest.mark.parametrize("reached", [False, True])
def test_a_marker_that_was_not_committed_is_written_by_who_leads_next(
    replicated, second, reached
) -> None:
    """Whether that one has it or not: the stable offset has not passed it, the transaction ends
    once, and both replicas know.
    """
    send(replicated, guard=verified(replicated))
    for _ in range(2):
        replicate(replicated, second)
    end(replicated, ABORT)
    assert (replicated.high_watermark, replicated.last_stable_offset) == (1, 0)
    if reached:
        replicate(replicated, second)
    fail_over(replicated, second)
    assert second.last_stable_offset == 0
    end(second, ABORT)
    for _ in range(2):
        replicate(second, replicated)
    for replica in (second, replicated):
        assert replica.last_stable_offset == replica.high_watermark == 2 + reached
        assert [t[1:3] for t in replica.log.aborted_transactions(0, 9)] == [(0, 1)]
    assert read(second).aborted == [(7, 0)]
