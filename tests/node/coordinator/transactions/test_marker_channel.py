"""Markers as WriteTxnMarkers: sent, answered, tried again, and their leadership confirmed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import redirect_stderr
from io import StringIO
from types import MappingProxyType
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.node.coordinator.common.events import EndMarker
from kept.node.coordinator.transactions.events import MarkersWritten, WriteMarkers
from kept.node.coordinator.transactions.marker_channel import MarkerChannel
from kept.node.coordinator.transactions.marker_writer import Marked
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.runtime.logging import bugs
from kept.node.runtime.runtime import Runtime
from kept.node.runtime.time_slices import IN_PLACE_STEPS
from kept.steps import Steps
from kept.storage.disk import Disk
from kept.storage.errors import NetworkException
from kept.storage.types import TopicPartition
from tests.support.given import Given
from tests.support.loops import run, turns, until
from tests.support.metadata import HeldBarrier

ORDERS, BILLS = TopicPartition("orders", 0), TopicPartition("bills", 3)
MARKER = EndMarker(7, 1, 5, True, 2)
NONE, MOVED = ErrorCode.none, ErrorCode.not_leader_or_follower


class Leaders:
    """Nodes 1 and 2, which answer what the test says, in order; and an image."""

    def __init__(self, *answers: dict[TopicPartition, ErrorCode] | Exception) -> None:
        self.answers = list(answers)
        self.leaders = {ORDERS: 1, BILLS: 1, TopicPartition("__transaction_state", 4): 0}
        self.asked: list[tuple[int, Any]] = []
        self.done: list[MarkersWritten] = []
        self.barrier = HeldBarrier()
        self.answered = asyncio.Event()
        metadata: Any = Given(image=self)
        identity = NodeIdentity(0, "cluster", 9)
        barrier: Any = self.barrier
        writer: Any = Given(write=self.write_here)
        self.staged: list[tuple[list[Any], CompletableFuture[Marked]]] = []
        self.channel = MarkerChannel(Runtime(Disk()), metadata, identity, barrier, self, writer)
        self.channel.on_written = self.written
        self.channel.image_changed(self)  # type: ignore[arg-type]

    def partition(self, topic: str, partition: int) -> Any:
        leader = self.leaders.get(TopicPartition(topic, partition))
        return None if leader is None else Given(leader=leader)

    def written(self, event: MarkersWritten) -> None:
        self.done.append(event)
        self.answered.set()

    def write(self, *partitions: TopicPartition, marker: EndMarker = MARKER) -> None:
        self.channel.write(WriteMarkers(4, marker, frozenset(partitions)))

    def write_here(self, marks: Any) -> Steps[CompletableFuture[Marked]]:
        """As the writer of this node's own partitions: the test says when, and what."""
        marked: CompletableFuture[Marked] = CompletableFuture()
        yield from (None for _ in marks)
        self.staged.append((list(marks), marked))
        return marked

    async def call(
        self, node_id: int, api_key: ApiKey, version: int, values: dict[str, Any], timeout_s: float
    ) -> Any:
        request = protocol.build(
            protocol.message_type(api_key, version, EntityType.request), values
        )
        self.asked.append((node_id, request))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        markers = [
            {
                "producer_id": m.producer_id,
                "topics": [
                    {
                        "name": t.name,
                        "partitions": [
                            {"partition_index": p, "error_code": answer[TopicPartition(t.name, p)]}
                            for p in t.partition_indexes
                        ],
                    }
                    for t in m.topics
                ],
            }
            for m in request.markers
        ]
        return protocol.build(
            protocol.message_type(api_key, version, EntityType.response), {"markers": markers}
        )

    async def close(self) -> None:
        """Nothing is open."""

    async def until_written(self, *partitions: TopicPartition) -> None:
        async with asyncio.timeout(30):
            while {tp for event in self.done for tp in event.partitions} != set(partitions):
                self.answered.clear()
                await self.answered.wait()


ALL = MappingProxyType({ORDERS: NONE, BILLS: NONE})


@run
async def test_a_marker_goes_to_all_partitions_of_a_leader_at_once() -> None:
    leaders = Leaders(dict(ALL))
    leaders.write(ORDERS, BILLS)
    await leaders.until_written(ORDERS, BILLS)
    ((node, request),) = leaders.asked
    (marker,) = request.markers
    assert node == 1
    assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (7, 1, True)
    assert (marker.coordinator_epoch, marker.transaction_version) == (5, 2)
    assert {(t.name, t.partition_indexes) for t in marker.topics} == {
        ("orders", (0,)),
        ("bills", (3,)),
    }
    assert leaders.done == [MarkersWritten(4, MARKER, frozenset({ORDERS, BILLS}))]
    await leaders.channel.close()


@pytest.mark.parametrize("count", [1, 100])
@run
async def test_markers_of_this_nodes_partitions_are_no_request(count: int) -> None:
    """They are written in a turn of their own: what was answered before goes out first."""
    leaders = Leaders()
    partitions = [TopicPartition("own", n) for n in range(count)]
    leaders.leaders |= dict.fromkeys(partitions, 0)
    leaders.write(*partitions)
    assert not leaders.staged
    await until(lambda: leaders.staged)
    (((marker, tps),), marked) = leaders.staged.pop()
    assert (marker, tps) == (MARKER, partitions)
    assert not leaders.done
    marked.set_result([(MARKER, [(tp, MOVED if tp.partition else NONE) for tp in partitions])])
    await until(lambda: leaders.done)
    assert leaders.done == [MarkersWritten(4, MARKER, frozenset(partitions[:1]))]
    if count > 1:
        await until(lambda: leaders.staged)
        assert leaders.staged[0][0] == [(MARKER, partitions[1:])]
    await leaders.channel.close()
    assert not leaders.asked


@pytest.mark.parametrize("leader", [0, 1])
@run
async def test_markers_of_many_transactions_are_answered_some_at_a_time(leader: int) -> None:
    """Others have their turns of the loop between two answers, of this node or another one."""
    leaders = Leaders(*[dict(ALL)] * 4)
    leaders.leaders[ORDERS] = leader
    written_in_turn: Counter[int] = Counter()
    turn, is_over = 0, False

    async def count_turns() -> None:
        nonlocal turn
        while not is_over:
            turn += 1
            await asyncio.sleep(0)

    leaders.channel.on_written = lambda _: written_in_turn.update([turn])
    turns_counted = asyncio.create_task(count_turns())
    await turns()
    for producer_id in range(1_201):  # the first one is under way before others come
        leaders.write(ORDERS, marker=EndMarker(producer_id, 1, 5, True, 2))
    while leaders.channel.sender.pending:
        await turns()
        if leaders.staged:
            marks, marked = leaders.staged.pop()
            marked.set_result([(marker, [(tp, NONE) for tp in tps]) for marker, tps in marks])
        leaders.channel.sender.check_invariants()
    assert sorted(written_in_turn.values()) == [1, 200, 500, 500]
    is_over = True
    await turns_counted
    await leaders.channel.close()


@pytest.mark.parametrize("steps", [0, IN_PLACE_STEPS])
@run
async def test_markers_whose_writing_was_cancelled_are_written_again(monkeypatch, steps) -> None:
    """As where it takes the result of a future that was: or the node would get no marker more."""
    leaders = Leaders()
    partitions = [TopicPartition("own", n) for n in range(100)]
    leaders.leaders |= dict.fromkeys(partitions, 0)
    tries: list[Any] = []
    reported: list[BaseException] = []

    def write(marks: Any) -> Steps[CompletableFuture[Marked]]:
        tries.append(marks)
        if len(tries) > 1:
            return (yield from leaders.write_here(marks))
        yield from (None for _ in range(steps))
        raise asyncio.CancelledError

    monkeypatch.setattr(leaders.channel, "_writer", Given(write=write))
    monkeypatch.setattr(bugs, "report", lambda _what, error, **_: reported.append(error))
    leaders.write(*partitions)
    await until(lambda: leaders.staged)
    assert len(tries) == 2 and tries[0] == tries[1]
    assert [type(error) for error in reported] == [asyncio.CancelledError]
    await leaders.channel.close()


@run
async def test_it_is_sent_again_to_who_leads_by_then() -> None:
    leaders = Leaders({ORDERS: NONE, BILLS: MOVED}, NetworkException("gone"), dict(ALL))
    leaders.write(ORDERS, BILLS)
    await leaders.until_written(ORDERS)
    leaders.leaders[BILLS] = 2
    leaders.channel.image_changed(leaders)  # type: ignore[arg-type]
    await until(lambda: leaders.barrier.waiting)
    leaders.barrier.waiting.pop()(True)
    await leaders.until_written(ORDERS, BILLS)
    assert [node for node, _ in leaders.asked] == [1, 2, 2]
    await leaders.channel.close()


@pytest.mark.parametrize("leads", [True, False])
@run
async def test_what_was_not_answered_waits_for_a_proof_of_who_coordinates(leads: bool) -> None:
    """Where a leader has forgotten the producer, nothing else keeps a predecessor's marker out."""
    leaders = Leaders(NetworkException("late"), dict(ALL))
    leaders.write(ORDERS)
    for proven in (False, True):
        await until(lambda: leaders.barrier.waiting)
        leaders.write(BILLS, marker=EndMarker(8, 0, 6, False))
        await turns()
        assert len(leaders.asked) == 1, "the node gets nothing meanwhile"
        if proven and not leads:
            leaders.channel.unloaded(4)
            leaders.channel.write(WriteMarkers(5, EndMarker(8, 0, 6, False), frozenset({BILLS})))
        leaders.barrier.waiting.pop()(proven)
    await leaders.until_written(*([ORDERS, BILLS] if leads else [BILLS]))
    again = [m.producer_id for _, request in leaders.asked[1:] for m in request.markers]
    assert sorted(again) == ([7, 8] if leads else [8])
    await leaders.channel.close()


@pytest.mark.parametrize("leads", [True, False])
@run
async def test_a_refusal_that_names_a_later_coordinator_is_confirmed_first(leads: bool) -> None:
    leaders = Leaders({ORDERS: ErrorCode.transaction_coordinator_fenced}, dict(ALL))
    leaders.write(ORDERS)
    while not leaders.barrier.waiting:
        await asyncio.sleep(0)
    assert len(leaders.asked) == 1
    if not leads:
        leaders.leaders[TopicPartition("__transaction_state", 4)] = 1
    leaders.barrier.waiting.pop()(True)
    if leads:
        await leaders.until_written(ORDERS)
    else:
        leaders.write(BILLS, marker=EndMarker(8, 0, 6, False))
        await leaders.until_written(BILLS)
        assert all(m.producer_id != 7 for _, request in leaders.asked[1:] for m in request.markers)
    await leaders.channel.close()


@run
async def test_who_coordinates_no_more_sends_nothing_more() -> None:
    leaders = Leaders({ORDERS: MOVED}, dict(ALL))
    leaders.write(ORDERS)
    while not leaders.asked:
        await asyncio.sleep(0)
    leaders.channel.unloaded(4)
    leaders.write(BILLS, marker=EndMarker(8, 0, 6, False))
    await leaders.until_written(BILLS)
    assert [m.producer_id for _, request in leaders.asked for m in request.markers] == [7, 8]
    assert leaders.channel.sender.pending == 0
    await leaders.channel.close()


@pytest.mark.parametrize("count", [1, 100])
@run
async def test_a_bug_of_the_writer_here_does_not_stop_later_markers(count: int) -> None:
    """At once, or in a later slice: they are written when it is tried again."""
    leaders = Leaders()
    partitions = [TopicPartition("own", n) for n in range(count)]
    leaders.leaders |= dict.fromkeys(partitions, 0)
    broken: list[int] = []

    def fail(_: Any) -> Steps[CompletableFuture[Marked]]:
        yield from (None for _ in range(count - 1))
        broken.append(count)
        raise KeyError("a bug of ours")

    leaders.channel._writer.write = fail  # type: ignore[method-assign]
    told = StringIO()
    with redirect_stderr(told):
        leaders.write(*partitions)
        await until(lambda: broken)
        leaders.channel._writer.write = leaders.write_here  # type: ignore[method-assign]
        await until(lambda: leaders.staged)
    assert 'event="markers failed"' in told.getvalue()
    ((_, marked),) = leaders.staged
    marked.set_result([(MARKER, [(tp, NONE) for tp in partitions])])
    await until(lambda: leaders.done)
    assert leaders.done == [MarkersWritten(4, MARKER, frozenset(partitions))]
    await leaders.channel.close()


@run
async def test_a_bug_behind_a_request_does_not_stop_later_markers() -> None:
    leaders = Leaders(KeyError("a bug of ours"), dict(ALL))
    leaders.write(ORDERS)
    await leaders.until_written(ORDERS)
    await leaders.channel.close()
