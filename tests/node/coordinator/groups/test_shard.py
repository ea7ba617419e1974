"""The shell of a core: appends, timers, loading, failures; over a partition that does as it is
told."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.cluster.metadata.image import Image
from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRejected,
    AppendStaged,
    TransactionalProducer,
)
from kept.node.coordinator.common.log_loader import LOAD_SLICE_BYTES, load, replay_batches
from kept.node.coordinator.common.shard import STALL_MS, coordinator_error
from kept.node.coordinator.common.timers import Timers
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.coordinator import GroupCoordinator
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kept.node.runtime.time_slices import LOAD_TURN_S
from kept.steps import run_to_end
from kept.storage.errors import (
    CorruptMessage,
    InvalidProducerEpoch,
    KafkaStorageError,
    MessageTooLarge,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)
from kept.storage.records import (
    CheckRules,
    build_batch,
    headers,
)
from kept.storage.records import records as read_records
from tests.support.coordinators import (
    PARTITIONS,
    TOPIC_ID,
    FakeNode,
    FakePartition,
    ShardFixture,
    filled,
    image_of,
    offsets,
)
from tests.support.loops import result, run, turns, until
from tests.support.metadata import HeldBarrier


@run
async def test_commits_of_one_turn_are_written_together() -> None:
    f = ShardFixture()
    waiting = [f.commit(offset=i, partition=i) for i in range(5)]
    assert not any(w.done() for w in waiting)
    results = [await result(w) for w in waiting]
    assert all(r.error is ErrorCode.none for r in results)
    assert f.partition.writes == 1
    assert sorted(offsets(await result(f.fetch()))) == [0, 1, 2, 3, 4]
    kept = [r.key for r in read_records(bytes(f.partition.log))]
    assert len(kept) == 5


@run
async def test_nothing_is_answered_before_it_is_committed() -> None:
    f = ShardFixture()
    f.partition.hold = True
    waiting, joining = f.commit(), f.join("other")
    await turns()
    stable = f.fetch(stable=True)
    assert f.partition.writes == 1
    assert not waiting.done() and not stable.done()
    assert offsets(await result(f.fetch())) == []
    f.partition.commit()
    assert (await result(waiting)).error is ErrorCode.none
    assert offsets(await result(stable)) == [1]
    assert (await result(joining)).generation == 1


@run
async def test_a_member_that_was_told_it_left_has_left_after_a_crash() -> None:
    """``consumer.close()``, then kill -9: a successor that reads the log must not find the member,
    or the group's next consumer waits for its session to end."""
    f = ShardFixture()
    member = (await result(f.join())).member
    synced = f.shard.submit(lambda n: ev.Sync(n, "g", member, 1, ((member, b"1"),)))
    assert (await result(synced)).assignment == b"1"
    f.partition.hold = True
    left = f.shard.submit(lambda n: ev.Leave(n, "g", ((member, None),)))
    again = f.shard.submit(lambda n: ev.Leave(n, "g", ((member, None),)))
    await turns()
    assert not left.done() and not again.done(), "answered before its record is committed"
    f.partition.commit()
    assert (await result(left)).members == ((member, None, ErrorCode.none),)
    assert (await result(again)).members == ((member, None, ErrorCode.unknown_member_id),)
    successor = GroupCore(ev.GroupSettings())
    replay: Any = partial(GroupCoordinator.replay, successor)
    run_to_end(load(f.partition, replay))  # type: ignore[arg-type]
    assert not successor.groups["g"].members


@run
async def test_a_transaction_is_in_the_log_as_kafka_writes_it_and_is_read_again() -> None:
    f = ShardFixture()
    producer = TransactionalProducer(7, 3)
    done = [f.commit(offset=1), f.commit(offset=5, producer=producer), f.commit(offset=6)]
    done.append(f.commit(offset=8, partition=1, producer=producer))
    assert [(await result(d)).error.name for d in done] == ["none"] * 4
    assert offsets(await result(f.fetch())) == [6]
    assert (await result(f.end(7, is_commit=True))).error is ErrorCode.none
    assert offsets(await result(f.fetch(stable=True))) == [6, 8]
    written = [
        (h.producer_id, h.producer_epoch, h.base_sequence, h.is_transactional, h.is_control)
        for _, h in headers(f.partition.log)
    ]
    plain, inside = (-1, -1, -1, False, False), (7, 3, 0, True, False)
    assert written == [plain, inside, plain, inside, (7, 3, -1, True, True)]
    again = ShardFixture(f.partition)
    await until(lambda: again.shard.is_active)
    assert dict(again.shard.core.appended) == dict(f.shard.core.appended)
    f.partition.refuse = InvalidProducerEpoch("a newer producer is known")
    refused = [f.commit(producer=producer), f.end(7, is_commit=True)]
    assert [(await result(r)).error.name for r in refused] == ["invalid_producer_epoch"] * 2


@run
async def test_with_flush_messages_an_answer_waits_for_the_fsync() -> None:
    f = ShardFixture()
    f.hosted.sync = True
    waiting = f.commit()
    await turns()
    assert f.partition.writes == 1 and len(f.flushes) == 1 and not waiting.done()
    f.flushes.pop()(None)
    assert (await result(waiting)).error is ErrorCode.none


@run
async def test_what_is_not_committed_in_time_is_told_and_may_still_come() -> None:
    f = ShardFixture(offsets_commit_timeout_ms="20")
    f.partition.hold = True
    assert (await result(f.commit())).error is ErrorCode.coordinator_not_available
    assert offsets(await result(f.fetch())) == []
    f.partition.commit()
    assert offsets(await result(f.fetch())) == [1]


@run
async def test_a_refused_append_changes_nothing() -> None:
    f = ShardFixture()
    await result(f.commit(offset=1))
    for error, code in (
        (NotEnoughReplicas("isr"), ErrorCode.coordinator_not_available),
        (NotLeaderOrFollower("moved"), ErrorCode.not_coordinator),
        (KafkaStorageError("offline"), ErrorCode.not_coordinator),
        (MessageTooLarge("big"), ErrorCode.unknown_server_error),
    ):
        f.partition.refuse = error
        assert (await result(f.commit(offset=2))).error is code
        assert coordinator_error(error) is code
    f.partition.refuse = None
    assert offsets(await result(f.fetch())) == [1]
    f.shard.core.check_invariants()


@run
async def test_a_batch_above_the_topics_limit_is_refused() -> None:
    f = ShardFixture()
    f.hosted.rules = CheckRules(max_batch_bytes=300)
    assert (await result(f.commit())).error is ErrorCode.none
    many = tuple(ev.CommitPartition(p, 1) for p in range(10))
    topic = ev.CommitTopic("orders", TOPIC_ID, many)
    refused = f.shard.submit(lambda n: ev.CommitOffsets(n, "g", (topic,)))
    assert (await result(refused)).error is ErrorCode.unknown_server_error
    assert offsets(await result(f.fetch())) == [1]


@run
async def test_a_failed_write_sends_everybody_away() -> None:
    f = ShardFixture()
    joined = await result(f.join("busy"))
    syncing = f.shard.submit(lambda n: ev.Sync(n, "busy", "nobody", 1))
    assert (await result(syncing)).error is ErrorCode.unknown_member_id
    f.partition.broken = KafkaStorageError("no space left on device")
    waiting = f.commit()
    assert (await result(waiting)).error is ErrorCode.not_coordinator
    assert f.shard.failed == "no space left on device" and not f.shard.is_active
    assert joined.generation == 1


@run
async def test_unloading_writes_what_is_staged_and_answers_all() -> None:
    f = ShardFixture()
    f.partition.hold = True
    waiting = f.commit()
    f.shard.unload()
    assert (await result(waiting)).error is ErrorCode.not_coordinator
    assert len(list(read_records(bytes(f.partition.log)))) == 1
    f.partition.commit()
    f.shard.unload()


@run
async def test_what_an_unloaded_shard_held_is_freed_in_slices() -> None:
    partition = await filled(3000)
    f = ShardFixture(partition)
    await until(lambda: f.read)
    memory, core = f.shard.core.memory, f.shard.core
    assert len(core.groups) == 50 and memory.used_bytes > 0
    f.shard.unload()
    assert not core.groups and memory.used_bytes > 0
    await until(lambda: not memory.used_bytes)


@run
async def test_timers_fire_on_the_loop() -> None:
    f = ShardFixture()
    joined = await result(f.join(session_ms=30))
    assert joined.generation == 1
    while f.shard.core.groups["g"].members:
        await asyncio.sleep(0.005)
    assert f.shard.core.groups["g"].generation == 2


@run
async def test_timestamps_are_wall_clock() -> None:
    f = ShardFixture()
    before = f.runtime.now_ms()
    await result(f.commit())
    ((_, stored),) = f.shard.core.committed
    assert before <= stored.value.commit_timestamp <= f.runtime.now_ms()
    record = next(iter(read_records(bytes(f.partition.log))))
    assert before <= record.timestamp <= f.runtime.now_ms()


@run
async def test_many_tombstones_are_spread_over_batches() -> None:
    f = ShardFixture()
    for start in range(0, 20_000, 2_000):
        parts = tuple(ev.CommitPartition(p, 1) for p in range(start, start + 2_000))
        topic = ev.CommitTopic("orders", TOPIC_ID, parts)
        done = f.shard.submit(lambda n, t=topic: ev.CommitOffsets(n, "g", (t,)))
        assert (await result(done)).error is ErrorCode.none
    batches = len(list(headers(f.partition.log)))
    f.shard.notify(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    await until(lambda: not dict(f.shard.core.committed))
    sizes = [header.size_bytes for _, header in headers(f.partition.log)][batches:]
    assert len(sizes) > 1 and max(sizes) < 1_000_000


# Loading.


class LoadClock:
    """Each record that is replayed takes so many seconds, and nothing else takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record_s: float) -> None:
        self.now, self.record_s = 0.0, record_s
        self.replay: Any = GroupCoordinator.replay
        monkeypatch.setattr(GroupCoordinator, "replay", staticmethod(self.timed))
        monkeypatch.setattr("kept.node.runtime.time_slices.perf_counter", lambda: self.now)

    def timed(self, *args: Any) -> None:
        self.now += self.record_s
        self.replay(*args)


@run
async def test_loading_gives_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = await filled(3_000)
    assert len(partition.log) > 3 * LOAD_SLICE_BYTES
    clock = LoadClock(monkeypatch, record_s=LOAD_TURN_S / 100)
    f = ShardFixture(partition)
    turns = 0
    while not f.shard.is_active:
        assert not f.read
        turns += 1
        before = clock.now
        await asyncio.sleep(0)
        assert clock.now - before <= LOAD_TURN_S + clock.record_s
    assert turns >= 30 and f.shard.is_active
    assert len(f.shard.core.groups) == 50
    f.shard.core.check_invariants()
    found = [offsets(await result(f.fetch(f"group-{i}"))) for i in range(50)]
    assert sum(map(len, found)) == 3_000


@run
async def test_shards_that_load_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty of them in each turn of the loop would hold it for a tenth of a second; and where other
    work takes long in each turn, the time that is theirs has to be used, by all that there are.
    """
    clock, first = LoadClock(monkeypatch, record_s=LOAD_TURN_S / 50), FakeNode()
    nodes, sizes = (first, FakeNode(first.runtime)), (2_000, 130, 7, 1)
    for node in nodes:
        for number, count in enumerate(sizes):
            node.host(number, await filled(count))
        node.apply(*node.created())
    turns = 0
    while sum(sum(1 for _ in node.groups.shards.serving()) for node in nodes) < 2 * PARTITIONS:
        turns += 1
        before = clock.now
        await asyncio.sleep(0)
        assert clock.now - before <= LOAD_TURN_S + clock.record_s
    assert clock.now >= 2 * sum(sizes) * clock.record_s * 0.99
    assert turns <= clock.now / LOAD_TURN_S + 5


def many_members(count: int, session_ms: int = 60_000) -> GroupRecord:
    """A stable group of so many members."""
    members = tuple(
        MemberMetadata(f"m-{n}", None, "c", "/h", 60_000, session_ms, b"", b"")
        for n in range(count)
    )
    return GroupRecord(GroupMetadataKey("g"), GroupMetadataValue("x", 1, "p", "m-0", 0, members))


@run
async def test_sessions_of_very_many_members_begin_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, real = LoadClock(monkeypatch, record_s=0.0), Timers.set

    def timed(*args: Any) -> None:
        clock.now += LOAD_TURN_S / 100
        real(*args)

    monkeypatch.setattr(Timers, "set", timed)
    partition = FakePartition()
    partition.stage(bytearray(plain(0, many_members(2_000).encode())), 1)
    partition.write()
    f = ShardFixture(partition)
    while not f.shard.is_active:
        before = clock.now
        await asyncio.sleep(0)
        assert clock.now - before <= LOAD_TURN_S * 1.01
    assert clock.now >= 20 * LOAD_TURN_S
    f.shard.core.check_invariants()


def test_of_very_many_timeouts_one_begins_anew_or_ends_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, set_at = loaded(plain(0, many_members(50, 10_000).encode())), []
    real = Timers.set

    def counted(timers: Any, key: Any, deadline_ms: int, timer: Any) -> None:
        set_at.append(deadline_ms)
        real(timers, key, deadline_ms, timer)

    monkeypatch.setattr(Timers, "set", counted)
    assert core.restart_timeouts(9_000) == () and not set_at
    for number in range(50):
        assert core.next_deadline_ms == 10_000
        assert core.tick(10_000) == () and set_at == [19_000] * (number + 1)
    members = core.groups["g"].members
    for number in range(50):
        assert core.next_deadline_ms == 19_000 and len(members) == 50 - number
        core.tick(19_000)
    assert not members


@run
async def test_a_node_that_ends_very_many_sessions_did_not_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last is ended long after its time: nobody gets that back."""
    f = ShardFixture()
    core, began_ms, ticks = f.shard.core, f.shard._now_ms(), 0
    real = core.tick

    def slow(now_ms: int) -> Any:
        nonlocal ticks
        ticks += 1
        return real(now_ms)

    monkeypatch.setattr(core, "tick", slow)
    monkeypatch.setattr(f.shard, "_now_ms", lambda: began_ms + 1 + ticks * STALL_MS // 20)
    monkeypatch.setattr("kept.node.coordinator.common.shard.SLICE_S", 0.0)
    core.now_ms = began_ms
    core.replay(many_members(50, 1), 0)
    run_to_end(core.membership.loaded(core.groups["g"]))
    f.shard._schedule_tick()
    await until(lambda: not core.groups["g"].members)
    assert ticks >= 50 and core.restarted_ms < began_ms


async def elected(count: int = 6, known: int = 2) -> ShardFixture:
    """A shard on a new leader that has ``count`` commits, of which it knows ``known`` committed."""
    partition = await filled(count)
    partition.epoch_start_offset = partition.log_end_offset
    partition.high_watermark, partition.leader_epoch, partition.hold = known, 1, True
    return ShardFixture(partition, leader_epoch=1)


@run
async def test_what_an_earlier_leader_acknowledged_is_read_though_hw_lags() -> None:
    """The high watermark of a follower is older than what its leader acknowledged."""
    f = await elected()
    await turns()
    assert not f.shard.is_active, "commits above the high watermark were left out"
    f.partition.commit()
    await turns()
    assert f.shard.is_active
    found = [offsets(await result(f.fetch(f"group-{i}"))) for i in range(6)]
    assert found == [[i] for i in range(6)]


@run
async def test_a_load_waits_for_the_election_s_end_only() -> None:
    f = await elected()
    f.partition.high_watermark = f.partition.epoch_start_offset
    f.partition.log_end_offset += 5  # somebody's record that is not committed
    g = ShardFixture(f.partition, leader_epoch=1)
    await turns()
    assert g.shard.is_active and len(g.shard.core.groups) == 6


@run
async def test_too_small_an_isr_does_not_stop_the_load_of_what_is_committed() -> None:
    f = await elected()
    await turns()
    f.partition.commit(NotEnoughReplicasAfterAppend("the ISR is small"))
    await turns()
    assert f.shard.is_active and f.shard.failed is None


@run
async def test_resigning_while_loading_ends_the_load() -> None:
    f = await elected()
    await turns()
    f.partition.resign()
    await turns()
    assert not f.shard.is_active and f.shard.failed is not None
    f.shard.unload()


@run
async def test_a_resigned_leader_does_not_call_its_last_appends_committed() -> None:
    f = ShardFixture()
    assert (await result(f.commit(offset=1))).error is ErrorCode.none
    f.partition.hold = True
    waiting = f.commit(offset=2)
    await turns()
    f.partition.resign()
    assert (await result(waiting)).error is ErrorCode.not_coordinator
    assert [stored.value.offset for _, stored in f.shard.core.committed] == [1]
    assert not f.shard.leads


@run
async def test_members_outlive_a_process_that_stood_still() -> None:
    f = ShardFixture()
    await result(f.join(session_ms=200))
    core, now_ms = f.shard.core, f.shard._now_ms()
    f.shard._timer_due_ms = now_ms - STALL_MS - 1  # the loop called so much too late
    time.sleep(0.21)
    f.shard._tick()
    assert core.groups["g"].members
    while core.groups["g"].members:
        await asyncio.sleep(0.005)


@run
async def test_members_outlive_a_load_that_takes_longer_than_their_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody could hear their heartbeats meanwhile."""
    partition = FakePartition()
    partition.stage(bytearray(plain(0, many_members(50, 10_000).encode())), 1)
    partition.write()
    f = ShardFixture(partition)
    core = f.shard.core
    began_ms = now_ms = f.shard._now_ms()
    step = core.step

    def slow(event: Any, event_ms: int) -> Any:
        nonlocal now_ms
        now_ms += 20_000 * isinstance(event, ev.TopicsDeleted)
        return step(event, event_ms)

    monkeypatch.setattr(core, "step", slow)
    monkeypatch.setattr(f.shard, "_now_ms", lambda: now_ms)
    f.shard.notify(ev.TopicsDeleted((("other", TOPIC_ID),)))
    await until(lambda: f.shard.is_active)
    while (core.next_deadline_ms or now_ms) <= began_ms + 20_000:
        f.shard._tick()
    assert len(core.groups["g"].members) == 50
    f.shard.unload()


@run
async def test_topics_deleted_while_loading_are_not_forgotten() -> None:
    f = ShardFixture(await filled(500))
    assert not f.shard.is_active
    f.shard.notify(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    await until(lambda: f.shard.is_active)
    await until(lambda: not dict(f.shard.core.committed))
    assert offsets(await result(f.fetch("group-1", stable=True))) == []


@run
async def test_topics_deleted_while_nobody_led_are_forgotten() -> None:
    """A namesake's offsets would have consumers of the new topic skip its first records."""
    partition = await filled(50)
    f = ShardFixture(partition)
    f.metadata.image = image_of(uuid.UUID(int=6))
    await until(lambda: f.shard.is_active and not dict(f.shard.core.committed))
    assert offsets(await result(f.fetch("group-1", stable=True))) == []
    fresh = ev.CommitTopic("orders", uuid.UUID(int=6), (ev.CommitPartition(1, 7),))
    done = f.shard.submit(lambda n: ev.CommitOffsets(n, "group-1", (fresh,)))
    assert (await result(done)).error is ErrorCode.none
    f.shard.unload()
    again = ShardFixture(partition)
    again.metadata.image = image_of(uuid.UUID(int=6))
    await until(lambda: again.shard.is_active)
    assert offsets(await result(again.fetch("group-1", stable=True))) == [7]
    again.shard.unload()
    last = ShardFixture(partition)
    last.metadata.image = Image()
    await until(lambda: last.shard.is_active and not dict(last.shard.core.committed))
    assert offsets(await result(last.fetch("group-1", stable=True))) == []


@run
async def test_offsets_of_a_topic_are_forgotten_behind_a_read_barrier_only() -> None:
    """The image may be older than a commit: the topic was made again, and others know it."""
    partition = await filled(50)
    barrier = HeldBarrier()
    asked = barrier.waiting
    f = ShardFixture(partition, barrier=barrier)
    whole = f.metadata.image
    f.metadata.image = Image()
    for _ in range(2):  # at first nobody can say
        await until(lambda: asked)
        assert not f.shard.is_active, "it would show the offsets of a namesake"
        asked.pop()(False)
    await until(lambda: asked)
    f.metadata.image = whole
    log_before = bytes(partition.log)
    asked.pop()(True)
    await until(lambda: f.shard.is_active)
    assert offsets(await result(f.fetch("group-1", stable=True))) != []
    assert bytes(partition.log) == log_before and not partition.staged
    f.shard.unload()
    gone = ShardFixture(partition, barrier=barrier)
    gone.metadata.image = Image()
    await until(lambda: asked)
    asked.pop()(True)
    await until(lambda: gone.shard.is_active and not dict(gone.shard.core.committed))
    assert offsets(await result(gone.fetch("group-1", stable=True))) == []


@run
async def test_a_shard_that_waits_for_its_image_is_unloaded() -> None:
    barrier = HeldBarrier()
    asked = barrier.waiting
    f = ShardFixture(await filled(50), barrier=barrier)
    f.metadata.image = Image()
    await until(lambda: asked)
    f.shard.unload()
    await until(lambda: f.read)
    asked.pop()(True)  # too late, and no fault
    assert not f.shard.is_active


@run
async def test_an_unloaded_shard_stops_loading() -> None:
    f = ShardFixture(await filled(3_000))
    await asyncio.sleep(0)
    f.shard.unload()
    await until(lambda: f.read)
    assert not f.shard.is_active and f.shard.failed is None


@run
async def test_records_that_do_not_decode_fail_the_load_and_say_why() -> None:
    partition = FakePartition()
    newer = b"\0\x09" + b"from a newer Kafka"
    key = GroupRecord(GroupMetadataKey("g"), None).encode()[0]
    partition.log += build_batch([(0, key, newer, ())])
    partition.log_end_offset = partition.high_watermark = 1
    f = ShardFixture(partition)
    await until(lambda: f.read)
    assert f.shard.failed is not None and "version 9" in f.shard.failed


@run
async def test_a_bug_that_a_load_shows_fails_it_and_is_in_the_log() -> None:
    """Clients would be told for ever that it loads."""
    f = ShardFixture(await filled(50))

    def fail(*_: Any) -> None:
        raise KeyError("no such member")

    f.shard.core.replay = fail  # type: ignore[method-assign]
    told = StringIO()
    with redirect_stderr(told):
        await until(lambda: f.read)
    assert f.shard.failed is not None and f.shard.failed.startswith("KeyError; ")
    assert not f.shard.is_active
    assert "Traceback" in told.getvalue() and "no such member" in told.getvalue()


@run
async def test_a_core_that_is_loaded_by_half_steps_no_more() -> None:
    f = ShardFixture(await filled(50))
    core = f.shard.core
    loaded, stepped, before = core.loaded, [], len(f.partition.log)

    def fail(now_ms: int) -> Any:
        loaded(now_ms)
        f.shard.submit(lambda n: ev.CommitOffsets(n, "g", (ONE,)))
        f.shard.submit(lambda n: ev.CommitOffsets(n, "h", (ONE,)))
        raise KeyError("a bug of ours")

    core.loaded = fail  # type: ignore[method-assign]
    with redirect_stderr(StringIO()):
        await until(lambda: f.read)
    core.step = lambda *given: stepped.append(given)  # type: ignore[method-assign,assignment]
    await turns()
    f.shard.notify(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    f.shard.step(ev.TopicsDeleted((("orders", TOPIC_ID),)))
    assert not stepped and not f.shard._held_back and not f.shard.is_active
    assert len(f.partition.log) > before and not f.partition.staged, "what it appended is lost"
    f.shard.unload()


ONE = ev.CommitTopic("orders", TOPIC_ID, (ev.CommitPartition(0, 1),))


def offset_record(offset: int, topic: str = "orders") -> tuple[bytes, bytes | None]:
    value = OffsetCommitValue(offset, "", 0)
    return GroupRecord(OffsetCommitKey("g", topic, 0), value).encode()


def transactional(base: int, producer_id: int, *kv: tuple[bytes, bytes | None]) -> bytes:
    return build_batch(
        [(0, key, value, ()) for key, value in kv],
        base_offset=base,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
    )


def marker(base: int, producer_id: int, *, commit: bool) -> bytes:
    key = b"\0\0" + (1 if commit else 0).to_bytes(2, "big")
    return build_batch(
        [(0, key, b"\0\0\0\0\0\0", ())],
        base_offset=base,
        producer_id=producer_id,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
    )


def plain(base: int, *kv: tuple[bytes, bytes | None]) -> bytes:
    return build_batch([(0, key, value, ()) for key, value in kv], base_offset=base)


def loaded(*batches: bytes) -> GroupCore:
    core = GroupCore(ev.GroupSettings())
    run_to_end(replay_batches(b"".join(batches), partial(GroupCoordinator.replay, core)))
    run_to_end(core.loaded(0))
    core.check_invariants()
    return core


def fetched(core: GroupCore, *, stable: bool = False) -> list[tuple[int, str]]:
    (answer,) = core.step(ev.FetchOffsets(1, "g", None, stable), 0)
    return [(f.offset, f.error.name) for _, _, found in answer.result.topics for f in found]


def test_offsets_of_apache_kafkas_transactions() -> None:
    """Committed ones count from their marker on, aborted ones never, open ones are unstable."""
    first = plain(0, offset_record(1))
    inside = transactional(1, 7, offset_record(5))
    assert fetched(loaded(first, inside, marker(2, 7, commit=True))) == [(5, "none")]
    assert fetched(loaded(first, inside, marker(2, 7, commit=False))) == [(1, "none")]
    open_one = loaded(first, inside)
    assert fetched(open_one) == [(1, "none")]
    assert fetched(open_one, stable=True) == [(-1, "unstable_offset_commit")]
    # A later plain commit wins over an earlier transactional one, whenever that commits.
    later = plain(2, offset_record(9))
    assert fetched(loaded(first, inside, later, marker(3, 7, commit=True))) == [(9, "none")]
    # A tombstone voids what open transactions have committed.
    gone = plain(2, (offset_record(0)[0], None))
    assert fetched(loaded(first, inside, gone, marker(3, 7, commit=True))) == []


@pytest.mark.parametrize("rejected", [False, True])
def test_a_rejected_tombstone_voids_nothing_of_an_open_transaction(rejected: bool) -> None:
    core = loaded(plain(0, offset_record(1)), transactional(1, 7, offset_record(5)))
    (append,) = core.step(ev.DeleteGroups(1, ("g",)), 0)
    if rejected:
        core.step(AppendRejected(append.append, ErrorCode.not_coordinator), 0)
    else:
        core.step(AppendStaged(append.append, 2), 0)
        core.step(AppendCommitted(append.append), 0)
    core.end_transaction(7, is_commit=True)
    stored = core.appended.get(OffsetCommitKey("g", "orders", 0))
    assert (stored.value.offset if stored else None) == (5 if rejected else None)


def test_apache_kafkas_partition_loads() -> None:
    data = (Path(__file__).parent / "data" / "kafka-4.3.0-consumer-offsets.log").read_bytes()
    core = loaded(data)
    assert [g.group for g in core.list_groups()] == ["readers"]
    group = core.describe("readers")
    assert (group.state, group.protocol, len(group.members)) == ("Stable", "range", 1)
    (answer,) = core.step(ev.FetchOffsets(1, "readers", None), 0)
    found = {f.partition: (f.offset, f.metadata) for f in answer.result.topics[0][2]}
    assert found == {0: (3, "note é\0"), 1: (4, "note é\0")}


def test_records_of_other_types_are_passed_over() -> None:
    other = (b"\0\x05" + b"member of a new consumer group", b"\0\0anything")
    assert fetched(loaded(plain(0, other, offset_record(3)))) == [(3, "none")]


@pytest.mark.parametrize("cut", [1, 30])
def test_damage_is_reported(cut: int) -> None:
    key, value = offset_record(3)
    core = GroupCore(ev.GroupSettings())
    with pytest.raises(CorruptMessage):
        log = plain(0, (key, (value or b"")[:-cut]))
        run_to_end(replay_batches(log, partial(GroupCoordinator.replay, core)))


@run
async def test_a_load_reads_committed_records_only() -> None:
    partition = await filled(10)
    partition.high_watermark = 4
    core = GroupCore(ev.GroupSettings())
    replay: Any = partial(GroupCoordinator.replay, core)
    found = run_to_end(load(partition, replay))  # type: ignore[arg-type]
    assert 4 <= found <= 10 and found == len(core.groups)
