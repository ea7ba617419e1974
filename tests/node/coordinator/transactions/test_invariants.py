"""What the self-checks of a core, and of the sender of markers, refuse; and limits of both."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    EndMarker,
    Response,
)
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions import markers as mk
from kept.node.coordinator.transactions import transaction as txn
from kept.node.coordinator.transactions.connection_order import ConnectionOrder
from kept.node.coordinator.transactions.core import (
    ABORTS_PER_TICK,
    IDS_PER_TICK,
    NEXT_IDS_MS,
    TransactionCore,
)
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
    decode_record,
)
from kept.node.coordinator.transactions.transactional_id import (
    IdMemory,
    TransactionalId,
    TransactionalIds,
    size_bytes,
)
from kept.steps import run_to_end
from kept.storage.errors import InvariantViolation
from kept.storage.types import TopicPartition
from tests.node.coordinator.transactions.histories import History, Image
from tests.support.allocations import freed_by_steps, traced

P0, P1, P2 = (TopicPartition("orders", n) for n in range(3))


def history(*lines: str) -> History:
    told = History()
    for line in lines:
        told.run(line)
    return told


def broken(told: History, **changes: object) -> None:
    """Change what is committed of ``bank``."""
    held = told.core.ids.hold("bank")
    assert held.committed is not None
    held.committed = replace(held.committed, **changes)


OPEN = ("init bank", "init shop", "add bank as 7/0 orders-0")
ENDING = ("hold markers", *OPEN, "commit bank as 7/0")


@pytest.mark.parametrize(
    ("lines", "changes", "why"),
    [
        (OPEN, {"producer_id": 8}, "share a producer id"),
        (OPEN, {"state": txn.PREPARE_COMMIT}, "ending are"),
        (OPEN, {"state": txn.EMPTY}, "is empty, yet"),
        (OPEN, {"state": txn.COMPLETE_ABORT}, "wrong deadline"),
        (OPEN, {"timeout_ms": 2**31 - 1}, "wrong deadline"),
        (OPEN, {"next_producer_id": 99}, "has a next producer id"),
        (ENDING, {"partitions": frozenset()}, "writes markers in PREPARE_COMMIT"),
        (ENDING, {"next_producer_id": 99}, "has a next producer id"),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    lines: tuple[str, ...], changes: dict[str, object], why: str
) -> None:
    told = history(*lines)
    broken(told, **changes)
    with pytest.raises(InvariantViolation, match=why):
        told.core.check_invariants()


def test_pending_transitions_without_their_append_are_refused() -> None:
    told = history("hold appends", "init bank")
    told.core.pending.clear()
    with pytest.raises(InvariantViolation, match="pending appends and pending transitions"):
        told.core.check_invariants()
    told = history(*OPEN)
    told.core.ids.hold("bank").parked = (ev.AddPartitions(1, "bank", 7, 0, frozenset({P0}), 2),)
    with pytest.raises(InvariantViolation, match="parked for nothing"):
        told.core.check_invariants()
    told.core.ids["none"] = TransactionalId()
    del told.core.ids["bank"]
    with pytest.raises(InvariantViolation, match="without a state"):
        told.core.check_invariants()


class Unwalked(TransactionalIds):
    """Many ids."""

    def walk(self) -> Any:
        raise AssertionError("all ids are walked at once")

    __iter__ = items = values = active = states = walk


def test_ids_without_a_transaction_cost_no_time() -> None:
    """Neither a load nor the search for those that time out walks all ids."""
    told = history("init shop", *OPEN[:1], OPEN[2].replace("7/0", "8/0"))
    core = TransactionCore(told.core.settings, 0, 2)
    for record in told.log:
        core.replay(record)
    unwalked = Unwalked()
    unwalked.update({"bank": core.ids["bank"], "shop": core.ids["shop"]})
    core.ids = unwalked
    run_to_end(core.loaded(0))
    core.restart_timeouts(1_000)
    effects = core.tick(2 * 60_000)
    (append,) = [e for e in effects if isinstance(e, AppendRecords)]
    assert [(r.transactional_id, r.metadata.state) for r in append.records] == [
        ("bank", txn.PREPARE_ABORT)
    ]


def packed(ids: TransactionalIds) -> set[str]:
    return {name for name, held in ids._held.items() if isinstance(held, bytes)}


def test_an_id_that_rests_is_packed_also_one_that_was_read_back() -> None:
    """A million of them take little memory, whatever they did before."""
    told = history(*OPEN)
    assert packed(told.core.ids) == {"shop"}
    told.run("commit bank as 7/0")
    assert packed(told.core.ids) == {"bank", "shop"}
    told.run("hold appends")
    told.run("init bank")
    assert packed(told.core.ids) == {"shop"}
    told.run("reject append coordinator_not_available")
    assert packed(told.core.ids) == {"bank", "shop"}
    again = TransactionCore(told.core.settings, 0, 2)
    for record in told.log:
        again.replay(record)
    run_to_end(again.loaded(0))
    assert packed(again.ids) == {"bank", "shop"}
    newest = {record.transactional_id: record.metadata for record in told.log}
    assert {name: held.committed for name, held in again.ids.items()} == newest
    assert {name: held.committed for name, held in told.core.ids.items()} == newest
    assert sorted(again.ids.states()) == [txn.EMPTY, txn.COMPLETE_COMMIT]


def test_a_packed_id_is_what_it_was() -> None:
    """To the ends of what its record can hold; what would be lost is not packed."""
    ends = [
        TransactionMetadata(p, e, t, txn.COMPLETE_ABORT, frozenset(), u, u, p, -1, e, v)
        for p, e, t, u, v in ((2**63 - 1, 2**15 - 1, 2**31 - 1, 2**63 - 1, 2), (0, -1, 0, -1, 0))
    ]
    ids = TransactionalIds()
    for metadata in ends:
        ids["bank"] = TransactionalId(metadata, counted=0)
        assert packed(ids) == {"bank"} and ids["bank"].committed == metadata
    for odd in (
        replace(ends[0], state=txn.ONGOING),
        replace(ends[0], next_producer_id=8),
        replace(ends[0], partitions=frozenset({P0})),
    ):
        ids["bank"] = TransactionalId(odd, counted=0)
        assert not packed(ids) and ids["bank"].committed == odd


def test_memory_of_ids_is_limited_and_given_back() -> None:
    told, memory = History(), IdMemory()
    told.settings["ids_max_bytes"] = 9 * size_bytes("bank", 0) - 1
    told.core = TransactionCore(
        ev.TransactionSettings(**told.settings), 0, 1, told.connections, memory=memory
    )
    (staged, refused) = ("append bank Empty 7/0", "answer #9: coordinator_not_available")
    assert told.run("init bank")[0] == staged
    assert memory.used_bytes == size_bytes("bank", 0)
    for number in range(7):
        told.run(f"init sho{number}")
    assert refused in told.run("init more")
    assert "more" not in told.core.ids
    # Who is there goes on, with an eighth of the limit for partitions.
    assert "answer #10: none" in told.run("add bank as 7/0 orders-0 orders-1")
    assert "answer #11: coordinator_not_available" in told.run(
        " ".join(["add bank as 7/0", *(f"orders-{n}" for n in range(2, 12))])
    )
    assert "answer #12: none 7/0" in told.run("commit bank as 7/0")
    assert "answer #13: none 7/1" in told.run("init bank")
    used = memory.used_bytes
    again = TransactionCore(told.core.settings, 0, 2, memory=memory)
    for record in told.log:
        again.replay(record)
    assert memory.used_bytes == 2 * used
    for core in (again, told.core):
        core.unload()
        run_to_end(core.release())
    assert memory.used_bytes == 0


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("partitions", [0, 1, 3, 20])
def test_memory_of_ids_is_counted_as_it_is(partitions: int, is_used: bool) -> None:
    """At least three quarters of it. A resting id that nobody uses holds less than is counted."""
    ids, state = range(1000), txn.ONGOING if partitions else txn.COMPLETE_COMMIT
    records = []
    for n in ids:
        joined = frozenset(TopicPartition("orders-of-today", p) for p in range(partitions))
        metadata = TransactionMetadata(
            70_000 + n, 300, 60_000, state, joined, 10**12 + n if partitions else -1, 10**12 + n
        )
        records.append(TransactionRecord(_name(n), metadata).encode())
    memory, order = IdMemory(), ConnectionOrder()
    settings = ev.TransactionSettings(**History().settings)
    core = TransactionCore(settings, 0, 1, order, memory=memory)
    gc.collect()  # what lies on free lists is not counted when it is used again
    tracemalloc.start()
    try:
        for key, value in records:
            record = decode_record(key, value)
            assert record is not None
            core.replay(record)
        run_to_end(core.loaded(0))
        if is_used:
            for n in ids:
                for api in (ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.END_TXN):
                    connection = ev.ClientConnection(1000 + 2 * n + (api is ApiKey.END_TXN), api)
                    order.is_stale(_name(n), (70_000 + n, 300), connection)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    least = 0.35 if not (partitions or is_used) else 0.75
    assert least < held_bytes / memory.used_bytes < 4 / 3


@pytest.mark.parametrize("state", [txn.ONGOING, txn.COMPLETE_COMMIT])
def test_what_a_partition_held_is_freed_a_little_at_a_time(state) -> None:
    """There may be a million ids."""
    with traced():
        memory, many = IdMemory(), 3000
        settings = ev.TransactionSettings(**History().settings)
        core = TransactionCore(settings, 0, 1, memory=memory)
        joined = frozenset({P0}) if state is txn.ONGOING else frozenset()
        for n in range(many):
            start_ms = 1 if joined else -1
            metadata = TransactionMetadata(n, 3, 60_000, state, joined, start_ms, 1)
            core.replay(TransactionRecord(_name(n), metadata))
            del metadata
        run_to_end(core.loaded(0))
        core.unload()
        assert not core.ids and memory.used_bytes > 300 * many
        steps = core.release()
        next(steps)
        core.unload()  # a second time, as by a load that fails later
        total, largest = freed_by_steps(steps)
        assert total > 90 * many and largest < total // 4
        assert memory.used_bytes == 0 and len(core.timers) == 0
        core.check_invariants()


def test_requests_that_wait_for_another_are_refused_as_the_partition_goes() -> None:
    """They are found without a look at all ids."""
    told = history("init bank", "add bank as 7/0 orders-0", "hold appends")
    told.run("commit bank as 7/0")
    told.run("add bank as 7/0 orders-1")
    (parked,) = told.core.ids["bank"].parked
    effects = told.core.unload()
    results = {e.request: e.result for e in effects if isinstance(e, Response)}
    assert results[parked.request].error is ErrorCode.not_coordinator


def _name(n: int) -> str:
    return f"transactional-id-{n:08}"


def test_a_beginning_that_is_refused_behind_a_completion_counts_what_that_holds() -> None:
    """The completion is staged, and leaves no partition: those before it are not counted again."""
    told = history("init bank", "add bank as 7/0 orders-0 orders-1", "hold markers")
    told.run("commit bank as 7/0")
    told.run("hold appends")
    told.run("markers 1")
    held = told.core.ids["bank"]
    assert held.committed is not None and held.committed.state is txn.PREPARE_COMMIT
    assert held.counted == 0
    now_ms, epoch = told.core.now_ms, held.committed.epoch
    again = ev.AddPartitions(90, "bank", 7, epoch, frozenset({P0}), 0)
    (append,) = [e for e in told.core.step(again, now_ms) if isinstance(e, AppendRecords)]
    assert held.counted == 1
    told.core.step(AppendRejected(append.append, ErrorCode.coordinator_not_available), now_ms)
    assert held.counted == 0
    told.core.check_invariants()
    held.counted = 2
    with pytest.raises(InvariantViolation, match="'bank' is counted with 2 partitions"):
        told.core.check_invariants()


def test_expired_ids_are_forgotten_some_at_a_time() -> None:
    order = ConnectionOrder()
    core = TransactionCore(history().core.settings, 0, 1, order)
    for number in range(2 * IDS_PER_TICK + 1):
        empty = txn.prepare_first(number, 60_000, 0)
        core.replay(TransactionRecord(f"id{number}", empty, 1))
    core.wall_offset_ms = core.settings.transactional_id_expiration_ms + 1
    run_to_end(core.loaded(0))
    older, newer = ev.ClientConnection(4, 26), ev.ClientConnection(5, 26)
    assert not order.is_stale("id7", (7, 0), newer) and order.is_stale("id7", (7, 0), older)
    now, forgotten = core.settings.remove_expired_interval_ms, []
    for _ in range(3):
        appends = [e for e in core.tick(now) if isinstance(e, AppendRecords)]
        forgotten.append(sum(len(append.records) for append in appends))
        for append in appends:
            core.step(AppendCommitted(append.append), now)
        now += NEXT_IDS_MS
    assert forgotten == [IDS_PER_TICK, IDS_PER_TICK, 1]
    assert core.ids == {}
    assert not order.is_stale("id7", (7, 0), older), "its connections are forgotten, too"


@pytest.mark.parametrize("refused", [False, True])
def test_transactions_that_time_out_together_are_aborted_some_at_a_time(refused: bool) -> None:
    """One that the log refuses waits for the next time, and hinders no other one."""
    core = TransactionCore(history().core.settings, 0, 1)
    count = 2 * ABORTS_PER_TICK + 1
    for number in range(count):
        partitions = frozenset({P0})
        opened = TransactionMetadata(number, 0, 60_000, txn.ONGOING, partitions, 0, 0)
        core.replay(TransactionRecord(f"id{number}", opened, 1))
    run_to_end(core.loaded(0))
    now = core.settings.abort_timed_out_interval_ms
    while now <= 60_000:
        assert not core.tick(now)
        now = core.timers.deadline(("abort-timed-out",))
    aborted = []
    for _ in range(3):
        appends = [e for e in core.tick(now) if isinstance(e, AppendRecords)]
        aborted.append(sum(len(append.records) for append in appends))
        for append in appends:
            if refused:
                error = ErrorCode.coordinator_not_available
                core.step(AppendRejected(append.append, error), now)
            else:
                core.step(AppendCommitted(append.append), now)
        now += NEXT_IDS_MS
    assert aborted == [ABORTS_PER_TICK, ABORTS_PER_TICK, 1]
    assert core.counts["timed_out"] == count
    next_ms = now - NEXT_IDS_MS + core.settings.abort_timed_out_interval_ms
    assert core.timers.deadline(("abort-timed-out",)) == next_ms


def test_a_marker_that_waits_nowhere_is_refused() -> None:
    told = history(*ENDING)
    told.sender._in_flight.clear()
    with pytest.raises(InvariantViolation, match="wanted are"):
        told.sender.check_invariants()


def test_a_request_has_only_so_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mk, "PARTITIONS_PER_REQUEST", 2)
    sender = mk.MarkerSender()
    first, second = (EndMarker(pid, 0, 1, is_commit=True) for pid in (7, 8))
    # Nothing is sent before the first image.
    assert sender.step(ev.WriteMarkers(0, first, frozenset({P0, P1, P2})), 0) == ()
    assert sender.step(ev.WriteMarkers(0, second, frozenset({P0})), 0) == ()
    assert sender.without_leader == sender.pending == 4
    (sent,) = sender.step(mk.ImageChanged(Image({})), 0)
    assert sent == mk.SendMarkers(1, (mk.MarkerEntry(first, frozenset({P0, P1})),))
    effects = sender.step(
        mk.MarkersResponseReceived(1, ((7, P0, ev.NO_ERROR), (7, P1, ev.NO_ERROR))), 0
    )
    assert effects == (
        ev.MarkersWritten(0, first, frozenset({P0, P1})),
        mk.SendMarkers(
            1, (mk.MarkerEntry(first, frozenset({P2})), mk.MarkerEntry(second, frozenset({P0})))
        ),
    )
    assert (sender.pending, sender.without_leader) == (2, 0)
    # A partition of which the answer says nothing gets the marker again.
    effects = sender.step(mk.MarkersResponseReceived(1, ((8, P0, ev.NO_ERROR),)), 0)
    assert ev.MarkersWritten(0, second, frozenset({P0})) in effects
    assert sender.tick(20) == (mk.SendMarkers(1, (mk.MarkerEntry(first, frozenset({P2})),)),)


def test_connections_of_forgotten_ids_are_forgotten() -> None:
    order = ConnectionOrder()
    assert not order.is_stale("bank", (7, 0), ev.ClientConnection(5, 26))
    assert order.is_stale("bank", (7, 0), ev.ClientConnection(4, 26))
    assert not order.is_stale("bank", (7, 0), ev.ClientConnection(4, 24))
    assert not order.is_stale("shop", (8, 0), ev.ClientConnection(6, 26))
    steps = order.retain({"shop"})
    assert [next(steps, "end") for _ in range(3)] == [None, None, "end"], "an id a step"
    assert not order.is_stale("bank", (7, 0), ev.ClientConnection(4, 26))
