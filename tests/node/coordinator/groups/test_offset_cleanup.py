"""Very many offsets are deleted in slices: each is one small batch, others come between, and a
crash on the way leaves what can be deleted again."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import PartitionRecord, TopicRecord
from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    EndMarker,
    Response,
    TransactionalProducer,
)
from kept.node.coordinator.common.log_loader import load
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups import offset_cleanup
from kept.node.coordinator.groups.coordinator import GroupCoordinator
from kept.node.coordinator.groups.core import RETRY_MS, GroupCore
from kept.node.coordinator.groups.offset_cleanup import SLICE_RECORDS, ExpirySweep
from kept.node.coordinator.groups.records import NO_TOPIC_ID, GroupMetadataKey, OffsetCommitKey
from kept.node.kafka.api import RequestContext
from kept.node.kafka.handlers.groups.group_offsets import PART, GroupOffsetsHandler
from kept.node.security.session import ALLOW_ALL, Session
from kept.steps import run_to_end
from kept.storage.records import headers
from kept.storage.records import records as read_records
from tests.support.coordinators import TOPIC_ID, ShardFixture, offsets
from tests.support.given import Given
from tests.support.loops import result, run, turns, until

MANY = 3 * SLICE_RECORDS + 1
NAMESAKE = uuid.UUID(int=6)


class World:
    """A core whose appends wait for the test, with a group of many offsets and one of a few."""

    def __init__(self) -> None:
        self.core = GroupCore(ev.GroupSettings(offsets_retention_minutes=1))
        self.appends: list[AppendRecords] = []
        self.answers: dict[int, Any] = {}
        self.sweeps = 0
        self.end_offset = 0
        self.now = 0
        run_to_end(self.core.loaded(0))
        self.step(commit(1, "large", range(MANY)))
        self.step(commit(2, "small", range(3)))
        self.commit(2)

    def step(self, event: Any) -> None:
        self.perform(self.core.step(event, self.now))

    def perform(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            if isinstance(effect, AppendRecords):
                self.appends.append(effect)
                self.end_offset += len(effect.records)
                self.step(AppendStaged(effect.append, self.end_offset))
            elif isinstance(effect, Response):
                self.answers[effect.request] = effect.result
            elif isinstance(effect, ev.MoreToSweep):
                self.sweeps += 1
        self.core.check_invariants()

    def commit(self, count: int = 1) -> None:
        for _ in range(count):
            self.step(AppendCommitted(self.appends.pop(0).append))

    def sweep(self) -> list[int]:
        """Sweep to the end; how many records each append had."""
        sizes = []
        while self.sweeps or self.appends:
            if self.sweeps:
                self.sweeps -= 1
                self.step(ev.SweepOn())
            if self.appends:
                sizes.append(len(self.appends[0].records))
                self.commit()
        return sizes

    def count(self, group: str) -> int:
        return len(offsets(self.core._offsets.fetch(ev.FetchOffsets(0, group, None))))


def commit(request: int, group: str, partitions: Any) -> ev.CommitOffsets:
    parts = tuple(ev.CommitPartition(number, 5) for number in partitions)
    return ev.CommitOffsets(request, group, (ev.CommitTopic("orders", TOPIC_ID, parts),))


def test_a_group_with_more_offsets_than_a_batch_holds_is_deleted() -> None:
    world = World()
    world.step(ev.DeleteGroups(3, ("small", "large", "none")))
    assert 3 not in world.answers
    sizes = world.sweep()
    assert sum(sizes) == MANY + 3 + 2 and max(sizes) == SLICE_RECORDS
    none = ErrorCode.none
    expected = ("small", none), ("large", none), ("none", ErrorCode.group_id_not_found)
    assert world.answers[3].groups == expected
    assert not world.core.groups and not dict(world.core.appended)


def test_the_tombstone_of_the_group_is_the_last() -> None:
    world = World()
    world.step(ev.DeleteGroups(3, ("large",)))
    records = []
    while world.appends:
        records += world.appends[0].records
        world.commit()
        world.step(ev.SweepOn())
    assert [r.key for r in records].index(GroupMetadataKey("large")) == len(records) - 1 == MANY


def test_nobody_uses_a_group_that_is_half_deleted() -> None:
    """He would begin where an offset is missing, and lose the group that he has just joined."""
    world = World()
    world.step(ev.DeleteGroups(3, ("large",)))
    world.commit()
    loading = ErrorCode.coordinator_load_in_progress
    join = ev.Join(4, "large", "", "app", "/::1", 6_000, 6_000, "consumer", (("range", b""),), "1")
    world.step(join)
    world.step(commit(5, "large", [0]))
    world.step(ev.FetchOffsets(6, "large", None))
    world.step(ev.DeleteGroups(7, ("large", "small")))
    assert [world.answers[n].error for n in (4, 5, 6)] == [loading] * 3
    world.step(commit(8, "small", [0]))
    world.step(ev.FetchOffsets(9, "small", None))
    world.sweep()
    assert world.answers[7].groups == (("large", loading), ("small", ErrorCode.none))
    assert world.answers[8].error is world.answers[9].error is ErrorCode.none
    world.step(join)
    assert world.answers[4].error is ErrorCode.member_id_required


@pytest.mark.parametrize("failure", [AppendRejected, AppendTimedOut])
def test_a_deletion_that_fails_on_the_way_can_be_made_again(failure: Any) -> None:
    world = World()
    world.step(ev.DeleteGroups(3, ("small", "large")))
    world.commit()
    if failure is AppendRejected:
        (effect,) = (e for e in world.core.step(ev.SweepOn(), 0) if isinstance(e, AppendRecords))
    else:
        world.step(ev.SweepOn())
        (effect,) = world.appends
    world.step(failure(effect.append, ErrorCode.coordinator_not_available))
    none, later = ErrorCode.none, ErrorCode.coordinator_not_available
    assert world.answers[3].groups == (("small", none), ("large", later))
    world.step(ev.DeleteGroups(4, ("small", "large")))
    world.sweep()
    missing = ErrorCode.group_id_not_found
    assert world.answers[4].groups == (("small", missing), ("large", none))


def test_who_waits_for_a_deletion_is_sent_on_when_another_node_leads() -> None:
    world = World()
    world.step(ev.DeleteGroups(3, ("small", "large")))
    world.commit()
    world.perform(world.core.unload())
    moved = ErrorCode.not_coordinator
    assert world.answers[3].groups == (("small", ErrorCode.none), ("large", moved))


def test_expiry_looks_at_so_many_offsets_at_a_stretch_also_if_none_is_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offset_cleanup, "SLICE_ITEMS", 100)
    world = World()
    sweep = ExpirySweep(world.core)
    assert not sweep.next_slice() and not sweep.records
    world.now = 61_000
    world.core.settings = ev.GroupSettings(offsets_retention_minutes=1)
    world.perform(world.core.tick(600_000))
    assert world.sweeps == 1 and not world.appends, "nothing is done at the timer itself"
    world.step(commit(3, "small", [1]))
    world.commit()
    world.now = 600_000
    sizes = world.sweep()
    assert max(sizes) <= SLICE_RECORDS + 1 and world.count("large") == 0
    assert "large" not in world.core.groups


def test_offsets_of_topics_that_are_deleted_go_in_slices_and_again_if_that_fails() -> None:
    world = World()
    other = ev.CommitTopic("users", NAMESAKE, (ev.CommitPartition(0, 9),))
    world.step(ev.CommitOffsets(3, "small", (other,)))
    world.commit()
    world.step(ev.TopicsDeleted((("orders", TOPIC_ID), ("users", TOPIC_ID))))
    assert world.sweeps == 1 and not world.appends
    world.sweeps = 0
    (effect,) = (e for e in world.core.step(ev.SweepOn(), 0) if isinstance(e, AppendRecords))
    world.step(AppendRejected(effect.append, ErrorCode.coordinator_not_available))
    assert world.count("large") == MANY and not world.sweeps
    world.step(ev.TopicsDeleted((("gone", TOPIC_ID),)))
    world.now = RETRY_MS
    world.perform(world.core.tick(world.now))
    sizes = world.sweep()
    assert sum(sizes) == MANY + 3 and max(sizes) == SLICE_RECORDS
    assert (world.count("large"), world.count("small")) == (0, 1), "a namesake's offset stays"


def commit_of(
    topic_id: uuid.UUID, offset: int, *, producer_id: int = -1, topic: str = "orders"
) -> ev.CommitOffsets:
    """A commit of a topic's partition 0 by the group g, in a producer's transaction or in none."""
    part = ev.CommitTopic(topic, topic_id, (ev.CommitPartition(0, offset),))
    if producer_id == -1:
        return ev.CommitOffsets(5, "g", (part,))
    producer = TransactionalProducer(producer_id, 0)
    return ev.CommitOffsets(5, "g", (part,), knows_missing_groups=False, producer=producer)


@pytest.mark.parametrize("in_transaction", ["the new topic's", "the old topic's"])
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_sweep_deletes_no_offset_of_a_topic_made_anew_with_those_of_the_old_one(
    in_transaction: str, is_commit: bool
) -> None:
    """A tombstone deletes both what is stored and what an open transaction commits: with offsets of
    both topics it waits for the transaction's end."""
    world = World()
    key = OffsetCommitKey("g", "orders", 0)
    new_in_transaction = in_transaction == "the new topic's"
    old, new = (-1, 7) if new_in_transaction else (7, -1)
    world.step(commit_of(TOPIC_ID, 9, producer_id=old))
    world.step(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    world.step(commit_of(NAMESAKE, 42, producer_id=new))
    world.commit(2)
    assert sum(world.sweep()) == MANY + 3, "offsets of the old topic alone"
    assert not world.sweeps, "it does not try again at once"
    assert world.core.appended.get(key) is not None and world.core.transactions.holds(key)
    world.step(ev.WriteTxnMarker(6, EndMarker(7, 0, 0, is_commit=is_commit)))
    world.commit()
    world.now = RETRY_MS
    world.perform(world.core.tick(world.now))
    old_alone_is_left = new_in_transaction and not is_commit
    assert sum(world.sweep()) == (1 if old_alone_is_left else 0)
    stored = world.core.committed.get(key)
    if old_alone_is_left:
        assert stored is None
    else:
        assert stored is not None and stored.value.offset == 42
    assert not world.core.transactions.holds(key)
    world.perform(world.core.tick(2 * RETRY_MS))
    assert not world.sweeps, "nothing is left to try"


def test_two_sweeps_that_leave_offsets_do_not_take_turns_without_a_rest() -> None:
    world = World()
    for producer_id, topic in ((7, "t1"), (8, "t2")):
        world.step(commit_of(TOPIC_ID, 9, topic=topic))
        world.step(commit_of(NAMESAKE, 9, topic=topic, producer_id=producer_id))
        world.commit(2)
    world.step(ev.TopicsDeleted((("t1", TOPIC_ID),)))
    world.step(ev.TopicsDeleted((("t2", TOPIC_ID),)))
    for now in (0, RETRY_MS):
        world.now = now
        world.perform(world.core.tick(now))
        turns_taken = 0
        while world.sweeps and turns_taken < 10:
            world.sweeps -= 1
            turns_taken += 1
            world.step(ev.SweepOn())
        assert turns_taken < 10 and not world.appends, "the rest waits for the timer"
    for producer_id in (7, 8):
        world.step(ev.WriteTxnMarker(6, EndMarker(producer_id, 0, 0, is_commit=False)))
        world.commit()
    world.perform(world.core.tick(2 * RETRY_MS))
    assert sum(world.sweep()) == 2 and world.count("g") == 0


def test_a_stream_of_topics_that_leave_offsets_does_not_put_off_the_first() -> None:
    world = World()
    for number in range(4):
        topic = f"t{number}"
        world.step(commit_of(TOPIC_ID, 9, topic=topic))
        world.step(commit_of(NAMESAKE, 9, topic=topic, producer_id=number))
        world.commit(2)
        world.now = number * RETRY_MS // 4
        world.perform(world.core.tick(world.now))
        world.step(ev.TopicsDeleted(((topic, TOPIC_ID),)))
        assert not world.sweep(), "what its transaction commits is a namesake's"
    world.step(ev.WriteTxnMarker(6, EndMarker(0, 0, 0, is_commit=False)))
    world.commit()
    assert world.count("g") == 4
    world.perform(world.core.tick(RETRY_MS))
    assert world.sweep() == [1] and world.count("g") == 3


def test_offsets_without_a_topic_id_go_with_no_offset_of_a_topic_made_since() -> None:
    world = World()
    world.step(ev.TopicsDeleted((("orders", NO_TOPIC_ID),)))
    world.step(commit_of(NAMESAKE, 42))
    world.commit()
    assert world.sweep() == [] and world.count("g") == 1


@run
async def test_a_shard_serves_others_while_very_many_offsets_go() -> None:
    f = ShardFixture()
    for begin in range(0, MANY, 100):
        f.shard.step(commit(0, "large", range(begin, min(begin + 100, MANY))))
    f.commit("small")
    await turns()
    before = len(f.partition.log)
    f.shard.notify(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    assert not f.partition.staged, "the notice alone does nothing"
    await until(lambda: len(f.partition.log) > before)
    joining = f.join("other")
    await until(lambda: not dict(f.shard.core.committed))
    assert (await result(joining)).generation == 1
    records = list(read_records(bytes(f.partition.log[before:])))
    deleted = [place for place, record in enumerate(records) if record.value is None]
    assert len(deleted) == MANY + 1
    assert deleted[-1] >= len(deleted), "the record of the group that was joined is in between"


@run
async def test_after_a_crash_on_the_way_the_group_can_be_deleted_again() -> None:
    f = ShardFixture()
    f.shard.step(commit(0, "large", range(MANY)))
    await turns()
    f.partition.hold = True
    waiting = f.shard.submit(lambda n: ev.DeleteGroups(n, ("large",)))
    await turns()
    f.partition.commit()
    assert not waiting.done()
    again = GroupCore(ev.GroupSettings())
    replay: Any = partial(GroupCoordinator.replay, again)
    run_to_end(load(f.partition, replay))  # type: ignore[arg-type]
    run_to_end(again.loaded(0))
    assert len(dict(again.appended)) == len(dict(again.committed)) == MANY - SLICE_RECORDS
    assert again.describe("large").state == "Empty"


@run
async def test_a_bug_in_one_shard_s_sweep_is_told_and_others_go_on(capfd: Any) -> None:
    f = ShardFixture()
    f.commit()
    await turns()
    broken = cast("Any", Given(tp="offsets-7", step=lambda _: 1 / 0))
    f.groups.perform(broken, ev.MoreToSweep())
    f.shard.notify(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    await until(lambda: not dict(f.shard.core.committed))
    assert "offsets not deleted" in capfd.readouterr().err
    f.groups.perform(broken, ev.MoreToSweep())
    await until(lambda: not f.groups._is_sweeping)


def test_committed_offsets_are_walked_while_they_change() -> None:
    """Metrics let others run between two offsets."""
    world = World()
    walk = world.core.committed.walk()
    first, _ = next(walk)
    world.step(ev.DeleteGroups(3, ("large", "small")))
    world.step(commit(4, "later", [0]))
    world.sweep()
    rest = [key for key, _ in walk]
    assert (first.group, {key.group for key in rest}) == ("large", {"large"})
    assert [key.group for key, _ in world.core.committed.walk()] == ["later"]


def handler_of(f: ShardFixture) -> GroupOffsetsHandler:
    """The handler of offsets whose groups are all in that shard."""
    nothing: Any = None
    link: Any = Given(may_be_fenced=False)
    shards = cast("Any", f.groups.shards)
    shards.submit = lambda _, make_event: f.shard.submit(make_event)
    shards.shard = lambda _: f.shard
    metadata = cast("Any", f.metadata)
    return GroupOffsetsHandler(
        f.runtime, f.groups.config, metadata, link, nothing, f.groups, nothing
    )


async def answered(f: ShardFixture, api: str, version: int, request: Any) -> Any:
    context = RequestContext(0, version, "c", Session(authorizer=ALLOW_ALL))
    steps = getattr(handler_of(f), api)(context, request)
    answer = await f.runtime.slices.finish(steps)
    return answer if isinstance(answer, dict) else await answer


@run
async def test_many_offsets_that_are_deleted_by_name_are_in_several_batches() -> None:
    f = ShardFixture()
    partitions = [PartitionRecord(TOPIC_ID, n, (0,), (0,), 0, 0, 0) for n in range(MANY)]
    f.metadata.image = f.metadata.image.apply(partitions)[0]
    f.shard.step(commit(0, "large", range(MANY)))
    await turns()
    before = len(f.partition.log)
    named = [Given(partition_index=n) for n in (*range(MANY), MANY)]
    request = Given(group_id="large", topics=[Given(name="orders", partitions=named)])
    answer = await answered(f, "offset_delete", 0, request)
    ((name, codes),) = [(t["name"], t["partitions"]) for t in answer["topics"]]
    assert (answer["error_code"], name) == (ErrorCode.none, "orders")
    unknown = ErrorCode.unknown_topic_or_partition
    expected = dict.fromkeys(range(MANY), ErrorCode.none) | {MANY: unknown}
    assert {p["partition_index"]: p["error_code"] for p in codes} == expected
    batches = [header.record_count for _, header in headers(f.partition.log[before:])]
    assert sum(batches) == MANY and max(batches) <= PART
    assert not dict(f.shard.core.committed)
    request = Given(group_id="none", topics=request.topics)
    answer = await answered(f, "offset_delete", 0, request)
    assert answer == {"error_code": ErrorCode.group_id_not_found, "topics": []}


@run
async def test_a_fetch_by_name_shows_no_offset_of_a_namesake_that_is_deleted() -> None:
    f = ShardFixture()
    assert (await result(f.commit("g", 7))).error is ErrorCode.none

    async def fetched(version: int, *, all_topics: bool) -> list[list[int]]:
        topic = Given(name="orders", partition_indexes=(0,))
        group = Given(group_id="g", topics=None if all_topics else (topic,))
        request = Given(groups=(group,), group_id="g", topics=group.topics, require_stable=False)
        (one,) = (await answered(f, "offset_fetch", version, request))["groups"]
        return [[p["committed_offset"] for p in t["partitions"]] for t in one["topics"]]

    assert await fetched(8, all_topics=False) == await fetched(8, all_topics=True) == [[7]]
    f.metadata.image = Image().apply([TopicRecord("orders", NAMESAKE)])[0]
    assert await fetched(8, all_topics=False) == [[-1]]
    assert await fetched(8, all_topics=True) == []
    f.metadata.image = Image()
    assert await fetched(8, all_topics=True) == [[7]]
