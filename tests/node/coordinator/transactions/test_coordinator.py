"""The coordinator of a node: what is loaded when, what it draws, what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from kept.client.protocol.api_keys import ApiKey
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import FeatureRecord, TopicRecord
from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendStaged,
    Response,
)
from kept.node.coordinator.common.shard import Shard
from kept.node.coordinator.transactions import events as ev
from kept.node.coordinator.transactions.connection_order import ConnectionOrdinals
from kept.node.coordinator.transactions.coordinator import TransactionCoordinator
from kept.node.coordinator.transactions.core import TransactionCore
from kept.node.coordinator.transactions.records import (
    TransactionMetadata,
    TransactionRecord,
    TransactionState,
    decode_record,
)
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.runtime import Runtime
from kept.node.runtime.time_slices import LOAD_TURN_S, SLICE_S
from kept.steps import run_to_end
from kept.storage.disk import Disk
from kept.storage.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    KafkaStorageError,
    KeptError,
)
from kept.storage.records import build_batch, records
from kept.storage.types import TopicPartition
from tests.support.coordinators import TOPIC, FakePartition, FakeReplica, partition_record
from tests.support.loops import run, turns, until
from tests.support.metadata import HeldBarrier, KnownMetadata
from tests.support.replicas import live_config

STATE = TopicPartition("__transaction_state", 3)
ORDERS = TopicPartition("orders", 0)


class Markers:
    """What is to be written; nothing ever is."""

    def __init__(self) -> None:
        self.wanted: list[ev.WriteMarkers] = []
        self.dropped: list[int] = []
        self.on_written: Callable[[ev.MarkersWritten], None]

    def write(self, event: ev.WriteMarkers) -> None:
        self.wanted.append(event)

    def unloaded(self, state_partition: int) -> None:
        self.dropped.append(state_partition)

    def image_changed(self, image: Image) -> None:
        """Nothing is sent anywhere."""


class World:
    """A coordinator, and shards that step their core and keep what it said."""

    def __init__(self, level: int = 2, drawn: int | KeptError = 7) -> None:
        image, _ = Image().apply([FeatureRecord("transaction.version", level)])
        self.metadata = KnownMetadata(image)
        self.barrier, self.markers, self.fenced = HeldBarrier(), Markers(), False
        self.drawn, self.ordinals = drawn, ConnectionOrdinals()
        anything: Any = self
        self.coordinator = TransactionCoordinator(
            runtime=Runtime(Disk()),
            config=live_config(),
            metadata=self.metadata,  # type: ignore[arg-type]
            identity=NodeIdentity(0),
            table=ReplicaTable(),
            barrier=self.barrier,  # type: ignore[arg-type]
            cluster_link=anything,
            producer_ids=anything,
            markers=self.markers,  # type: ignore[arg-type]
            ordinals=self.ordinals,
        )

    @property
    def may_be_fenced(self) -> bool:
        return self.fenced

    async def next(self) -> int:
        if isinstance(self.drawn, KeptError):
            raise self.drawn
        return self.drawn


class FakeShard:
    """A core whose appends are committed at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tp = STATE
        self.core: TransactionCore = world.coordinator.new_core(STATE, 5)
        self.responses: list[Any] = []
        self.answered = asyncio.Event()
        self.load_started_s = asyncio.get_running_loop().time()

    def step(self, event: Any) -> None:
        for effect in self.core.step(event, 1):
            if isinstance(effect, AppendRecords):
                self.step(AppendStaged(effect.append, 0))
                self.step(AppendCommitted(effect.append))
            elif hasattr(effect, "result"):
                self.responses.append(effect.result)
                self.answered.set()
            else:
                self.world.coordinator.perform(self, effect)  # type: ignore[arg-type]


def ongoing() -> TransactionRecord:
    state = TransactionMetadata(9, 0, 60_000, TransactionState.ONGOING, frozenset({ORDERS}), 1, 1)
    return TransactionRecord("bank", state)


@run
async def test_a_partition_that_the_image_lacks_is_waited_for_at_load() -> None:
    """Else its transaction would count it as deleted, and leave it without a marker."""
    world = World()
    shard: Any = FakeShard(world)
    await world.coordinator.prepare(shard)
    shard.core.replay(ongoing())
    loading = asyncio.ensure_future(world.coordinator.prepare(shard))
    while not world.barrier.waiting:
        await asyncio.sleep(0)
    assert not loading.done()
    assert world.coordinator.load_seconds.count == 1
    world.barrier.waiting.pop()(True)
    await loading
    assert world.coordinator.load_seconds.count == 2


@run
async def test_a_new_id_gets_a_producer_id_that_was_drawn_for_it() -> None:
    world = World(drawn=4711)
    shard = FakeShard(world)
    shard.step(ev.InitProducerId(1, "bank", 60_000))
    await shard.answered.wait()
    assert shard.responses == [ev.InitProducerIdResult(ErrorCode.none, 4711, 0)]


@run
async def test_without_producer_ids_the_client_hears_to_come_again() -> None:
    world = World(drawn=CoordinatorLoadInProgress("no controller"))
    shard = FakeShard(world)
    shard.step(ev.InitProducerId(1, "bank", 60_000))
    await shard.answered.wait()
    assert shard.responses == [ev.InitProducerIdResult(ErrorCode.coordinator_load_in_progress)]


@run
async def test_ends_and_counts_outlive_the_shard() -> None:
    world = World()
    shard: Any = FakeShard(world)
    shard.core.replay(ongoing())
    run_to_end(shard.core.loaded(1))
    shard.step(ev.EndTransaction(1, "bank", 9, 0, True))
    assert [w.partitions for w in world.markers.wanted] == [frozenset({ORDERS})]
    shard.step(ev.MarkersWritten(3, world.markers.wanted[0].marker, frozenset({ORDERS})))
    world.coordinator.unloaded(shard)
    assert world.markers.dropped == [3]
    assert world.coordinator.counts()["committed"] == world.coordinator.end_seconds.count == 1


class ShardWorld(World):
    """A shard of the coordinator, with its log; no marker is written but by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.partition = FakePartition()
        hosted: Any = FakeReplica(self.partition, [])
        self.shard = Shard(Runtime(Disk()), self.coordinator, STATE, hosted, 0)
        self.shard.load(lambda: None)

    async def transaction(self) -> None:
        """One, up to its completion."""
        for event in (
            ev.AddPartitions(0, "bank", 7, 0, frozenset({ORDERS})),
            ev.EndTransaction(0, "bank", 7, 0, is_commit=True),
        ):
            assert (await self.ask(event)).error is ErrorCode.none
        marker = self.markers.wanted.pop().marker
        self.shard.step(ev.MarkersWritten(STATE.partition, marker, frozenset({ORDERS})))

    def ask(self, event: Any) -> asyncio.Future[Any]:
        return self.shard.submit(lambda number: replace(event, request=number))

    def states(self) -> list[str]:
        """Those of ``bank`` in the log."""
        kept = records(bytes(self.partition.log))
        found = [decode_record(r.key, r.value) for r in kept if r.key is not None]
        return [r.metadata.state.kafka_name for r in found if r is not None and r.metadata]


@run
async def test_a_completion_is_written_with_the_next_transaction() -> None:
    world = ShardWorld()
    await world.ask(ev.InitProducerId(0, "bank", 60_000))
    await world.transaction()
    assert world.partition.writes == 3
    world.partition.hold = True
    added = world.ask(ev.AddPartitions(0, "bank", 7, 0, frozenset({ORDERS})))
    await turns()
    assert world.partition.writes == 4
    assert world.states()[2:] == ["PrepareCommit", "CompleteCommit", "Ongoing"]
    assert not added.done(), "answered before it is committed"
    world.partition.commit()
    assert (await added).error is ErrorCode.none


@run
async def test_a_completion_that_nothing_follows_is_written_soon() -> None:
    world = ShardWorld()
    await world.ask(ev.InitProducerId(0, "bank", 60_000))
    for count in (4, 7):
        await world.transaction()
        assert world.partition.writes == count - 1
        await until(lambda count=count: world.partition.writes == count)
        assert world.states()[-1] == "CompleteCommit"
    await world.transaction()
    world.shard.unload()
    assert (world.partition.writes, world.states()[-1]) == (10, "CompleteCommit")


class LoadedWorld(World):
    """Partition 3 of ``__transaction_state``, which this node leads once told, keeps so many
    transactions that were ending; the last ``without`` of them have no partitions. Each marker that
    is asked for takes a hundredth of a turn.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, level: int = 2, *, without: int = 0
    ) -> None:
        self.clock_s = 0.0
        monkeypatch.setattr("kept.node.runtime.time_slices.perf_counter", lambda: self.clock_s)
        super().__init__(level)
        self.partition = FakePartition()
        rows: list[Any] = []
        for number in range(count):
            partitions = frozenset({ORDERS}) if number < count - without else frozenset()
            key, value = prepared(number, partitions).encode()
            rows.append((1, key, value, ()))
        self.partition.stage(bytearray(build_batch(rows)), len(rows))
        self.partition.write()
        hosted: Any = FakeReplica(self.partition)
        self.coordinator.table.replicas[STATE] = hosted
        numbers = range(STATE.partition + 1)
        self.apply(TopicRecord(STATE.topic, TOPIC), *(partition_record(n, 1, 0) for n in numbers))
        monkeypatch.setattr(self.markers, "write", self.timed(self.markers.write))

    def timed(self, write: Any) -> Any:
        def timed(event: ev.WriteMarkers) -> None:
            self.clock_s += LOAD_TURN_S / 100
            write(event)

        return timed

    def apply(self, *records: Any) -> None:
        self.metadata.image, delta = self.metadata.image.apply(records)
        self.coordinator.metadata_changed(self.metadata.image, delta)

    def lead(self, leader: int, epoch: int) -> None:
        """As roles do, then as the image says."""
        self.partition.is_leader, self.partition.leader_epoch = leader == 0, epoch
        self.apply(partition_record(STATE.partition, leader, epoch))

    @property
    def shard(self) -> Shard[TransactionCore]:
        (shard,) = self.coordinator.shards
        return shard

    async def until_wanted(self, count: int) -> None:
        """Until so many markers are asked for, by loads whose images are current."""
        while len(self.markers.wanted) < count:
            await asyncio.sleep(0)
            if self.barrier.waiting:
                self.barrier.waiting.pop()(True)

    def written(self, event: ev.WriteMarkers) -> ev.MarkersWritten:
        return ev.MarkersWritten(STATE.partition, event.marker, event.partitions)


def prepared(number: int, partitions: frozenset[TopicPartition]) -> TransactionRecord:
    ending = TransactionState.PREPARE_COMMIT
    return TransactionRecord(
        f"id{number}", TransactionMetadata(number, 0, 60_000, ending, partitions, 1, 1)
    )


@run
async def test_very_many_transactions_that_were_ending_go_on_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a load; a marker that is written meanwhile is heard of once that is over."""
    world, told = LoadedWorld(monkeypatch, 1_000), False
    world.lead(0, 1)
    shard = world.shard
    while not shard.is_active:
        before = world.clock_s
        await asyncio.sleep(0)
        assert world.clock_s - before <= LOAD_TURN_S * 1.02
        if world.barrier.waiting:
            world.barrier.waiting.pop()(True)
        if world.markers.wanted and not told:
            told = True
            world.markers.on_written(world.written(world.markers.wanted[0]))
            assert not shard.core.pending
    assert len(world.markers.wanted) == 1_000
    await until(lambda: shard.core.counts["committed"] == 1)
    shard.core.check_invariants()
    shard.unload()


@run
async def test_nothing_else_happens_to_a_core_while_its_load_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Completions of the load are committed in the middle of it, and a timer is due."""
    world = LoadedWorld(monkeypatch, 1_000, without=300)
    world.lead(0, 1)
    shard, core, happened, early = world.shard, world.shard.core, [], []
    monkeypatch.setattr(core, "settings", replace(core.settings, abort_timed_out_interval_ms=1))
    long_ago = shard._now_ms() - 60_000
    monkeypatch.setattr(shard, "_now_ms", lambda: long_ago)
    step, tick, append = core.step, core.tick, shard._append

    def stepped(event: Any, now_ms: int) -> Any:
        if not isinstance(event, AppendStaged):
            happened.append(type(event))
        return step(event, now_ms)

    def ticked(now_ms: int) -> Any:
        happened.append(("tick", shard.is_active))
        return tick(now_ms)

    def appended(effect: AppendRecords) -> None:
        world.clock_s += LOAD_TURN_S / 100
        append(effect)
        early.extend(happened)

    monkeypatch.setattr(core, "step", stepped)
    monkeypatch.setattr(core, "tick", ticked)
    monkeypatch.setattr(shard, "_append", appended)
    monkeypatch.setattr("kept.node.coordinator.common.shard.LAZY_S", 0.0)
    await world.until_wanted(700)
    await until(lambda: shard.is_active)
    assert world.partition.writes > 1, "nothing was committed before its end"
    await until(lambda: core.counts["committed"] == 300)
    assert not early and happened[0] is AppendCommitted
    assert ("tick", False) not in happened and ("tick", True) in happened
    core.check_invariants()
    shard.unload()


@run
async def test_markers_that_are_written_as_they_are_asked_for_are_heard_of_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A marker for a partition that is gone counts as written within the call."""
    world = LoadedWorld(monkeypatch, 500)
    asked = world.markers.write

    def write(event: ev.WriteMarkers) -> None:
        asked(event)
        world.markers.on_written(world.written(event))

    monkeypatch.setattr(world.markers, "write", write)
    world.lead(0, 1)
    shard = world.shard
    await world.until_wanted(500)
    await until(lambda: shard.core.counts["committed"] == 500)
    kept = records(bytes(world.partition.log))
    found = [decode_record(r.key, r.value) for r in kept if r.key is not None]
    completed = [r.transactional_id for r in found[500:] if r is not None]
    assert completed == [f"id{number}" for number in range(500)]
    assert not shard._held_back
    shard.unload()


@run
async def test_a_load_that_is_overtaken_asks_for_no_more_markers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another node leads in between; what this one asked for in its first epoch ends nothing of the
    load in its second.
    """
    world = LoadedWorld(monkeypatch, 1_000)
    world.lead(0, 1)
    first = world.shard
    await world.until_wanted(1)
    stale = [world.written(event) for event in world.markers.wanted]
    world.markers.on_written(stale[0])
    assert not first.is_active and first._held_back
    world.lead(1, 2)
    asked = len(world.markers.wanted)
    assert asked < 1_000 and world.markers.dropped == [3] and not first._held_back
    world.markers.on_written(stale[0])  # nobody is here
    first.notify(stale[0])
    await turns()
    assert len(world.markers.wanted) == asked and not first.is_active and not first._held_back
    world.markers.wanted.clear()
    world.lead(0, 3)
    second = world.shard
    world.markers.on_written(stale[0])
    await world.until_wanted(1_000)
    await until(lambda: second.is_active)
    assert {event.marker.coordinator_epoch for event in world.markers.wanted} == {3}
    assert not second.core.pending and not second.core.counts["committed"]
    for event in world.markers.wanted:
        world.markers.on_written(world.written(event))
    await until(lambda: second.core.counts["committed"] == 1_000)
    assert not first.core.counts["committed"] and len(world.markers.wanted) == 1_000
    second.unload()


@run
async def test_a_load_whose_append_finds_the_disk_broken_asks_for_nothing_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The directory goes offline within the append, and the partition with it."""
    world = LoadedWorld(monkeypatch, 3, without=3)
    world.lead(0, 1)
    shard, appends = world.shard, []

    def broken(*_: Any) -> Any:
        appends.append(1)
        world.coordinator.shards.partition_gone(STATE)
        raise KafkaStorageError("no such device")

    monkeypatch.setattr(world.partition, "append", broken)
    await until(lambda: appends)
    await turns()
    assert len(appends) == 1 and not shard.is_active and not tuple(world.coordinator.shards)


@run
async def test_a_feature_that_is_finalized_while_a_partition_loads_counts_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = LoadedWorld(monkeypatch, 500, level=1)
    world.lead(0, 1)
    await world.until_wanted(1)
    shard = world.shard
    assert not shard.is_active and shard.core.settings.transaction_version == 1
    world.apply(FeatureRecord("transaction.version", 2))
    assert shard.core.settings.transaction_version == 2
    await until(lambda: shard.is_active)
    shard.unload()


@run
async def test_partitions_of_very_many_transactions_are_looked_up_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = LoadedWorld(monkeypatch, 1)
    looked = 0

    class Known:
        @staticmethod
        def partition(*_: Any) -> bool:
            nonlocal looked
            looked += 1
            world.clock_s += SLICE_S / 10
            return True

    shard: Any = FakeShard(world)
    for number in range(500):
        shard.core.replay(prepared(number, frozenset({ORDERS})))
    monkeypatch.setattr(world.metadata, "image", Known())
    preparing = asyncio.ensure_future(world.coordinator.prepare(shard))
    while not preparing.done():
        before = world.clock_s
        await asyncio.sleep(0)
        assert world.clock_s - before <= SLICE_S * 1.2
    assert looked == 500 and not world.barrier.waiting


@run
async def test_connections_of_before_another_node_may_have_led_are_stale() -> None:
    """An EndTxn that sat in one would end a transaction that its client began elsewhere."""
    world = World()
    before, after = (ev.ClientConnection(n, ApiKey.END_TXN) for n in range(2))
    assert next(world.ordinals) == 0
    first = world.coordinator.new_core(STATE, 5)
    first.replay(ongoing())
    run_to_end(first.loaded(1))
    next(world.ordinals)
    stale = (Response(1, ev.StaleConnection()),)
    ended = [
        ev.EndTransaction(1, "bank", 9, 0, is_commit=True, connection=one)
        for one in (before, after)
    ]
    again = world.coordinator.new_core(STATE, 7)
    again.replay(ongoing())
    run_to_end(again.loaded(1))
    assert again.step(ended[0], 2) == again.step(ended[1], 2) == stale
    newest = ev.ClientConnection(next(world.ordinals), ApiKey.END_TXN)
    (append,) = again.step(replace(ended[0], connection=newest), 2)
    assert isinstance(append, AppendRecords)
    for epoch, is_stale in ((0, False), (1, True)):
        other = world.coordinator.new_core(TopicPartition(STATE.topic, 1 + epoch), epoch)
        other.replay(ongoing())
        run_to_end(other.loaded(1))
        effects = other.step(ended[0], 2)
        assert (effects == stale) is is_stale, "nobody has led before the first epoch"


@pytest.mark.parametrize(("level", "served"), [(0, False), (1, False), (2, True)])
def test_it_serves_when_the_feature_is_finalized(level: int, served: bool) -> None:
    async def check() -> None:
        world = World(level)
        assert world.coordinator.is_served is served
        assert world.coordinator.settings().transaction_version == level

    asyncio.run(check())


FINAL = [
    # The successor may have let the next transaction begin: it is not committed.
    (ev.EndTransaction(0, "bank", 7, 0, is_commit=True), "none"),
    (ev.EndTransaction(0, "bank", 7, 0, is_commit=False), "invalid_txn_state"),
    (ev.EndTransaction(0, "bank", 7, 1, is_commit=True), "producer_fenced"),
    (ev.AddPartitions(0, "bank", 8, 0, frozenset({ORDERS})), "invalid_producer_id_mapping"),
    (ev.InitProducerId(0, "bank", 60_000, 7, 5), "producer_fenced"),
    (ev.VerifyPartitions(0, "bank", 7, 1, frozenset({ORDERS})), "producer_fenced"),
]


@pytest.mark.parametrize(("event", "says"), FINAL)
@run
async def test_what_is_final_and_said_from_memory_needs_a_proof(event: Any, says: str) -> None:
    world = ShardWorld()
    await world.ask(ev.InitProducerId(0, "bank", 60_000))
    await world.transaction()
    for led, proven in ((True, True), (True, False), (False, True)):
        answer = world.ask(event)
        await turns()
        assert not answer.done()
        world.partition.leader_epoch = 0 if led else 2  # it is led here again: another led in 1
        world.barrier.waiting.pop()(proven)
        assert (await answer).error.name == (says if led and proven else "not_coordinator")
        world.partition.leader_epoch = 0


@run
async def test_partitions_that_are_in_it_already_need_a_proof_and_new_ones_none() -> None:
    world = ShardWorld()
    await world.ask(ev.InitProducerId(0, "bank", 60_000))
    adding = ev.AddPartitions(0, "bank", 7, 0, frozenset({ORDERS}), 2)
    assert (await world.ask(adding)).error is ErrorCode.none
    again = world.ask(adding)
    await turns()
    assert not again.done()
    world.barrier.waiting.pop()(False)
    assert (await again).error is ErrorCode.not_coordinator
    verified = await world.ask(ev.VerifyPartitions(0, "bank", 7, 0, frozenset({ORDERS})))
    assert verified.is_yes and world.barrier.waiting == []


@run
async def test_who_may_be_fenced_confirms_no_partition() -> None:
    world = World()
    world.fenced = True
    with pytest.raises(CoordinatorNotAvailable):
        world.coordinator.verify("bank", 9, 0, frozenset({ORDERS}))
