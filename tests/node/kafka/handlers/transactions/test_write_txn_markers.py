"""WriteTxnMarkers: what is written, when it is answered, and what is refused."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from kept.client.protocol import messages as protocol
from kept.cluster.metadata.image import Delta, PartitionChange, TopicImage
from kept.cluster.metadata.records import PartitionRecord
from kept.node.coordinator.common.events import EndMarker
from kept.node.coordinator.transactions.connection_order import ConnectionOrdinals
from kept.node.coordinator.transactions.marker_writer import MarkerWriter
from kept.node.kafka.handlers.transactions.write_txn_markers import WriteTxnMarkersHandler
from kept.node.runtime.time_slices import TimeSlices
from kept.replication.partition import Partition
from kept.steps import run_to_end
from kept.storage.errors import NetworkException
from kept.storage.records import EndTxnMarker
from kept.storage.types import IsolationLevel, TopicPartition
from tests.support import partitions as tools
from tests.support.given import Given
from tests.support.simulated_disk import SimulatedDisk

MARKERS = 27


def marker(*topics: tuple[str, tuple[int, ...]], **fields: Any) -> dict[str, Any]:
    return {
        "producer_id": 7,
        "producer_epoch": 3,
        "transaction_result": True,
        "coordinator_epoch": 4,
        "topics": [{"name": name, "partition_indexes": indexes} for name, indexes in topics],
        **fields,
    }


def codes(response: Any) -> list[list[str]]:
    return [
        [p.error_code.name for topic in one.topics for p in topic.partitions]
        for one in response.markers
    ]


def ask(lone: Any, *markers: dict[str, Any], version: int = 1) -> list[list[str]]:
    return codes(lone.ask(MARKERS, version, markers=list(markers)))


def test_markers_of_several_producers_and_partitions(lone):
    lone.create("t", 2)
    lone.create("u")
    first = marker(("t", (0, 1)), ("u", (0,)))
    second = marker(("t", (1,)), producer_id=8, transaction_result=False)
    assert ask(lone, first, second, version=2) == [["none"] * 3, ["none"]]
    table = lone.node.parts.table
    ends = [table.partition(TopicPartition(*tp)).log_end_offset for tp in (("t", 0), ("t", 1))]
    assert ends == [1, 2]
    (one, other) = table.partition(TopicPartition("t", 1)).producers()
    assert (one.producer_id, one.producer_epoch, one.coordinator_epoch) == (7, 3, 4)
    assert (other.producer_id, other.last_sequence) == (8, -1)
    assert ask(lone) == []


@pytest.mark.parametrize(
    ("version", "fields", "expected"),
    [
        (1, {}, "none"),
        (2, {}, "none"),
        (1, {"producer_epoch": 2}, "invalid_producer_epoch"),
        (1, {"coordinator_epoch": 3}, "transaction_coordinator_fenced"),
        (2, {"transaction_version": 2}, "none"),  # nothing is open: the same came twice
        (2, {"transaction_version": 2, "producer_epoch": 4}, "none"),
        (2, {"transaction_version": 2, "producer_epoch": 2}, "invalid_producer_epoch"),
    ],
)
def test_epochs(lone, version, fields, expected):
    lone.create("t")
    assert ask(lone, marker(("t", (0,)))) == [["none"]]
    assert ask(lone, marker(("t", (0,)), **fields), version=version) == [[expected]]


@pytest.mark.parametrize("fields", [{"producer_id": -1}, {"producer_epoch": -1}])
def test_a_marker_is_of_a_producer(lone, fields):
    """Without one it ends nothing for who reads the log again."""
    for topic in ("t", "__consumer_offsets"):
        lone.create(topic)
        assert ask(lone, marker((topic, (0,)), **fields)) == [["invalid_request"]]
        assert lone.node.parts.table.partition(TopicPartition(topic, 0)).log_end_offset == 0


def test_what_is_not_here(lone):
    lone.create("t")
    topics = (("missing", (0,)), ("t", (0, 9)))
    told = ask(lone, marker(*topics))
    assert told == [["unknown_topic_or_partition", "none", "unknown_topic_or_partition"]]


def test_a_transaction_is_read_once_its_marker_is_there(lone):
    lone.create("t")
    partition = lone.node.parts.table.partition(TopicPartition("t", 0))
    guard = partition.verification_guard(7, 3, 0, is_tv2=False, now_ms=tools.NOW)
    batch = tools.checked(2, pid=7, epoch=3, sequence=0, is_transactional=True)
    partition.append(batch, tools.NOW, -1, guard)
    partition.write()
    assert ask(lone, marker(("t", (0,)), transaction_result=False)) == [["none"]]
    fetched = partition.fetch(0, 1000, isolation=IsolationLevel.READ_COMMITTED)
    assert (fetched.aborted, fetched.last_stable_offset) == ([(7, 0)], 3)


def test_what_markers_held_is_freed_without_a_collection_of_garbage(lone, request):
    """25,000 have outlived the collections that are frequent: 100,000 objects a request."""
    lone.create("t", 2)
    assert ask(lone, marker(("t", (0,)))) == [["none"]]
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    assert ask(lone, marker(("t", (0, 1)), ("missing", (0, 1)))) == [
        ["none"] * 2 + ["unknown_topic_or_partition"] * 2
    ]
    left = [type(one).__name__ for one in gc.get_objects()]
    assert left.count("_Write") == 0


class Groups:
    """The group coordinator, as far as markers go there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.ended: list[tuple[int, EndMarker]] = []
        self.code = ErrorCode.none

    def end_transaction(self, number: int, marker: EndMarker) -> asyncio.Future[ErrorCode]:
        self.ended.append((number, marker))
        done: asyncio.Future[ErrorCode] = self.loop.create_future()
        done.set_result(self.code)
        return done


class World:
    """The handler over one partition with a follower, and what the test decides."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        disk = SimulatedDisk()
        disk.mkdir("/d")
        disk.fsync_dir("/")
        self.partition = Partition(tools.open_log(disk), 0)
        tools.lead(self.partition, 3, (0, 1), (0, 1))
        self.flushes: list[Any] = []
        self.hosted = Given(
            partition=self.partition,
            sync=False,
            flush=lambda _end, callback: self.flushes.append(callback),
        )
        self.questions: list[Any] = []
        self.groups = Groups(self.loop)
        offsets = TopicPartition("__consumer_offsets", 5)
        self.slices = TimeSlices(self.loop)
        here: dict[str, Any] = {
            "runtime": Given(loop=self.loop, now_ms=lambda: tools.NOW),
            "identity": Given(node_id=0),
            "table": Given(replicas={tools.TP: self.hosted, offsets: self.hosted}),
            "barrier": Given(confirm=self.questions.append),
            "groups": self.groups,
            "ordinals": (ordinals := ConnectionOrdinals()),
        }
        self.ordinals = ordinals
        self.writer = MarkerWriter(**here)
        self.handler = WriteTxnMarkersHandler(self.writer)

    def ask(
        self, *markers: dict[str, Any], connection: int | None = None
    ) -> asyncio.Task[list[list[str]]]:
        """``connection``: of a node; None: they come from a client."""
        ctx: Any = Given(session=Given(is_node=connection is not None), connection=connection)
        values = {"markers": list(markers)}
        request = protocol.build(
            protocol.message_type(MARKERS, 1, protocol.EntityType.request), values
        )

        async def respond() -> list[list[str]]:
            work = self.handler.write_txn_markers(ctx, request)
            answer = run_to_end(await (await self.slices.finish(work)))
            frame = protocol.encode_response(MARKERS, 1, 7, answer)
            return codes(protocol.decode_response(MARKERS, 1, frame[4:])[1])

        task = self.loop.create_task(respond())
        self.run(0.0)
        return task

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def world():
    made = World()
    yield made
    made.loop.close()


def test_it_is_answered_when_the_marker_is_committed_and_durable_where_that_counts(world):
    world.hosted.sync = True
    task = world.ask(marker(("t", (0,))))
    world.run(0.01)
    assert not task.done() and world.partition.log_end_offset == 1
    world.partition.fetch(1, 1000, replica_id=1)
    world.run(0.01)
    assert not task.done()
    world.flushes.pop()(None)
    assert world.loop.run_until_complete(task) == [["none"]]


def test_what_is_not_committed_in_time_is_said_to_be_late(world, monkeypatch):
    monkeypatch.setattr("kept.node.coordinator.transactions.marker_writer.TIMEOUT_S", 0.01)
    task = world.ask(marker(("t", (0,))))
    assert world.loop.run_until_complete(task) == [["request_timed_out"]]
    world.partition.fetch(1, 1000, replica_id=1)


def test_a_leader_that_resigns_has_not_written_it(world):
    task = world.ask(marker(("t", (0,))))
    world.partition.become_follower(1, 4, 1, (0, 1), (0, 1), tools.NOW)
    assert world.loop.run_until_complete(task) == [["not_leader_or_follower"]]
    task = world.ask(marker(("t", (0,))))
    assert world.loop.run_until_complete(task) == [["not_leader_or_follower"]]


def test_what_was_staged_in_an_earlier_epoch_is_not_taken_for_committed(world):
    """A request that takes slices of time: what is at its offset now may be another one's."""
    values = {"markers": [marker(("t", (0,)), ("missing", (0,)))]}
    kind = protocol.message_type(MARKERS, 1, protocol.EntityType.request)
    ctx: Any = Given(session=Given(is_node=False))
    steps = world.handler.write_txn_markers(ctx, protocol.build(kind, values))
    next(steps)
    world.partition.become_follower(1, 4, 1, (0, 1), (0, 1), tools.NOW)
    tools.lead(world.partition, 5, (0, 1), (0, 1))
    world.partition.append_marker(EndTxnMarker(True, 4), 8, 0, tools.NOW)
    world.partition.write()
    end_offset = world.partition.log_end_offset
    world.partition.fetch(end_offset, 1000, replica_id=1)
    assert world.partition.high_watermark == end_offset
    next(steps)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    answer = run_to_end(ended.value.value.result())
    first, _ = answer["markers"][0]["topics"]
    assert ErrorCode(first["partitions"][0]["error_code"]) is ErrorCode.not_leader_or_follower


def led(tp: TopicPartition, leader: int, epoch: int, before: int | None = None) -> PartitionChange:
    """The metadata says who leads, in which leader epoch; ``before``: the one until then."""
    topic_id = UUID(int=1)
    old = None
    if before is not None:
        old = PartitionRecord(topic_id, tp.partition, (0, 1), (0, 1), 1, before, before)
    new = PartitionRecord(topic_id, tp.partition, (0, 1), (0, 1), leader, epoch, 9)
    return PartitionChange(tp, old, new)


def test_markers_over_a_connection_older_than_the_leadership_are_late(world):
    """Its coordinator gave it up, and wrote the marker at the node that led meanwhile: it would end
    the next transaction. One that still waits comes again over a new connection.
    """
    offsets = TopicPartition("__consumer_offsets", 5)
    other, old = marker(("__consumer_offsets", (5,))), next(world.ordinals)
    both = marker(("t", (0,)), ("__consumer_offsets", (5,)))
    world.writer.metadata_changed(Delta(partitions=(led(tools.TP, 0, 3, before=2),)))

    def is_closed(*markers: dict[str, Any], connection: int) -> bool:
        end_offset, ended = world.partition.log_end_offset, len(world.groups.ended)
        task = world.ask(*markers, connection=connection)
        world.run(0.01)
        if not task.done() or task.exception() is None:
            world.partition.fetch(world.partition.log_end_offset, 1000, replica_id=1)
            assert world.loop.run_until_complete(task)
            return False
        assert isinstance(task.exception(), NetworkException)
        assert (world.partition.log_end_offset, len(world.groups.ended)) == (end_offset, ended)
        return True

    assert is_closed(other, marker(("t", (0,))), connection=old), "nothing of it is written"
    assert is_closed(both, connection=old)
    assert not is_closed(other, connection=old), "this node has led that one since it started"
    assert not is_closed(marker(("t", (0,))), connection=(new := next(world.ordinals)))
    world.writer.metadata_changed(Delta(partitions=(led(tools.TP, 0, 3, before=3),)))
    assert not is_closed(both, connection=new), "the ISR changed, not the leader"
    world.writer.metadata_changed(Delta(partitions=(led(offsets, 0, 0),)))
    assert is_closed(other, connection=new), "there may have been another one of that name"
    world.writer.metadata_changed(Delta(partitions=(led(offsets, 1, 1, before=0),)))
    assert not is_closed(other, connection=new), "who leads will say so"
    gone = TopicImage("t", UUID(int=1), (led(tools.TP, 0, 3).after,))
    world.writer.metadata_changed(Delta(topics_deleted=(gone,)))
    assert not is_closed(marker(("t", (0,))), connection=old), "nothing is kept of it"


@pytest.mark.parametrize("topic", ["t", "__consumer_offsets"])
def test_a_leadership_that_goes_and_returns_within_one_request_makes_its_markers_late(world, topic):
    """They take slices of time, and another node may have written the marker in between."""
    number = 5 if topic == "__consumer_offsets" else 0
    values = {"markers": [marker(("missing", (0,)), (topic, (number,)))]}
    kind = protocol.message_type(MARKERS, 1, protocol.EntityType.request)
    ctx: Any = Given(session=Given(is_node=True), connection=next(world.ordinals))
    steps = world.handler.write_txn_markers(ctx, protocol.build(kind, values))
    for _ in range(3):
        next(steps)  # both are looked at, and the first is staged
    tp = TopicPartition(topic, number)
    world.writer.metadata_changed(Delta(partitions=(led(tp, 1, 4, before=3),)))
    world.writer.metadata_changed(Delta(partitions=(led(tp, 0, 5, before=4),)))
    end_offset = world.partition.log_end_offset
    with pytest.raises(StopIteration) as ended:
        while True:
            next(steps)
    answer = run_to_end(ended.value.value.result())
    _, late = answer["markers"][0]["topics"]
    assert ErrorCode(late["partitions"][0]["error_code"]) is ErrorCode.not_leader_or_follower
    assert world.partition.log_end_offset == end_offset and not world.groups.ended


def test_an_operators_markers_come_over_any_connection(world):
    next(world.ordinals)
    world.writer.metadata_changed(Delta(partitions=(led(tools.TP, 0, 3, before=2),)))
    task = world.ask(marker(("t", (0,)), coordinator_epoch=0))
    world.partition.fetch(1, 1000, replica_id=1)
    assert world.loop.run_until_complete(task) == [["none"]]


@pytest.mark.parametrize("why", ["", "nobody answers", "another leads", "it was elected anew"])
def test_what_is_final_is_said_by_a_proven_leader_only(world, why):
    """Its coordinator would stop sending the marker, and the transaction hang."""
    world.partition.append_marker(EndTxnMarker(True, 4), 7, 5, tools.NOW)
    task = world.ask(marker(("t", (0,))))
    world.run(0.01)
    assert not task.done()
    if why == "another leads":
        world.partition.resign()
    elif why:
        tools.lead(world.partition, 4, (0, 1), (0, 1))
    (then,) = world.questions
    then(why != "nobody answers")
    expected = "not_leader_or_follower" if why else "invalid_producer_epoch"
    assert world.loop.run_until_complete(task) == [[expected]]


@pytest.mark.parametrize(
    ("code", "heard"),
    [
        ("none", "none"),
        ("not_coordinator", "not_leader_or_follower"),
        ("coordinator_load_in_progress", "not_leader_or_follower"),
        ("coordinator_not_available", "not_leader_or_follower"),
        ("invalid_producer_epoch", "invalid_producer_epoch"),
        ("transaction_coordinator_fenced", "transaction_coordinator_fenced"),
        ("unknown_server_error", "unknown_server_error"),
    ],
)
def test_markers_of_offsets_go_through_the_group_coordinator(world, code, heard):
    world.groups.code = ErrorCode[code]
    task = world.ask(marker(("__consumer_offsets", (5,))))
    world.run(0.01)
    for then in world.questions:
        then(True)
    assert world.loop.run_until_complete(task) == [[heard]]
    assert world.groups.ended == [(5, EndMarker(7, 3, 4, is_commit=True))]
    assert bool(world.questions) == (
        code in ("invalid_producer_epoch", "transaction_coordinator_fenced")
    )
    assert world.partition.log_end_offset == 0
