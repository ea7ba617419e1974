"""How manifests travel: bodies inline and in pieces, what is damaged, who is told again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from kept.compaction.manifest import manifest_store
from kept.compaction.manifest.manifest import Manifest
from kept.node.internode import manifest_rpc as calls
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas.local_replica import LocalReplica, LocalTopic
from kept.node.replicas.manifests import notify, replicate
from kept.node.replicas.manifests.status import ref_of
from kept.node.replicas.replica_table import ReplicaTable
from kept.replication import manifests_events as ev
from kept.replication.events import (
    BecameLeader,
    EligibleBrokersChanged,
    FollowerFetched,
    ManifestAcknowledged,
    ManifestApplied,
    ManifestOffered,
)
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import (
    FencedLeaderEpoch,
    InvariantViolation,
    NetworkException,
    NotLeaderOrFollower,
)
from kept.storage.types import Generation, TopicPartition
from tests.support.given import Given
from tests.support.listener import RecordedListener
from tests.support.logs import TOPIC_ID
from tests.support.replicas import InlineRuntime, RecordedPeers, local_replica
from tests.support.replicas import manifest as manifest_of

TP = TopicPartition("t", 0)
LEADER = 1


def manifest(generation: int) -> Manifest:
    return manifest_of(Generation(3, generation))


class LeaderShell:
    """What the leader's replica says."""

    def __init__(self, *manifests: Manifest) -> None:
        self.bodies = {ref_of(one): manifest_store.encode(one) for one in manifests}
        self.asked: list[ev.PullRequest] = []
        self.error: Exception | None = None
        self.reads = 0
        self.core = ManifestCore(LEADER)
        self.says_complete = self.says_outside_isr = False

    def receive_pull(self, request: ev.PullRequest) -> ev.PullResponse:
        if self.error is not None:
            raise self.error
        self.asked.append(request)
        newest = next(iter(self.bodies))
        return ev.PullResponse(
            newest, None, tuple(self.bodies), self.says_complete, self.says_outside_isr
        )

    async def encoded(self, ref: ManifestRef) -> bytes:
        self.reads += 1
        return self.bodies[ref]


class FollowerShell:
    """What the follower's replica is told."""

    def __init__(self) -> None:
        self.core = ManifestCore(2)
        self.told: list[ev.Event] = []
        self.bodies: dict[ManifestRef, Manifest] = {}
        self.numbers = iter(range(1, 100))
        self.complete = False
        self.answers: list[ev.PullResponse] = []
        self.done = asyncio.Event()

    def start_pull(self) -> ev.PullRequest:
        self.core.in_flight = ev.PullRequest(
            2, 5, 3, next(self.numbers), None, None, True, 400, (), self.complete
        )
        return self.core.in_flight

    def receive_pull_response(self, asked, answer, bodies) -> None:
        assert asked == self.core.in_flight
        self.core.in_flight = None
        self.answers.append(answer)
        self.bodies = bodies
        self.done.set()

    def step(self, event: ev.Event) -> None:
        self.told.append(event)
        self.core.in_flight = None
        self.done.set()

    def schedule_pull(self) -> None:
        raise AssertionError("nothing is held: it waits for news")


def hosted(shell, leads: bool) -> LocalReplica:
    found = local_replica(manifests=shell.core)
    found.manifests = shell
    found.partition.leader_id, found.partition._leading = LEADER, leads
    found.partition.core.leader_epoch = 3
    return found


class Pair:
    """A follower's Pulls and a leader's Answers, with calls that may fail between them."""

    def __init__(self, leader: LeaderShell) -> None:
        topic = LocalTopic("t", TOPIC_ID, 1)
        topic.partitions[0] = hosted(leader, True)
        at_leader = ReplicaTable()
        at_leader.by_id[TOPIC_ID.bytes] = topic
        runtime: Any = InlineRuntime()
        self.answers = replicate.PullServer(runtime, at_leader)
        self.calls: list[str] = []
        self.fails = 0
        self.damages = False

        self.follower = FollowerShell()
        peers: Any = RecordedPeers(self.call)
        self.pulls = replicate.ManifestReplicator(
            runtime, NodeIdentity(2, "cluster", 5), ReplicaTable(), peers
        )

    async def call(self, node_id, method, request, timeout_s):
        assert node_id == LEADER
        self.calls.append(method)
        if self.fails:
            self.fails -= 1
            raise NetworkException("broken")
        if method == "PullManifests":
            return await self.answers.pull(request)
        reply = await self.answers.chunk(request)
        if self.damages:
            return calls.ManifestChunkReply(reply.data[:-1] + b"x", reply.crc)
        return reply

    async def go(self) -> None:
        self.pulls.schedule(hosted(self.follower, False))
        async with asyncio.timeout(60):
            await self.follower.done.wait()
        await self.pulls.stop()


def run(leader: LeaderShell, change=lambda pair: None) -> Pair:
    async def go() -> Pair:
        pair = Pair(leader)
        change(pair)
        await pair.go()
        return pair

    return asyncio.run(go())


def test_small_bodies_come_with_the_answer():
    one, two = manifest(1), manifest(2)
    pair = run(LeaderShell(two, one))
    assert pair.calls == ["PullManifests"]
    assert {ref: found.generation for ref, found in pair.follower.bodies.items()} == {
        ref_of(one): one.generation,
        ref_of(two): two.generation,
    }


@pytest.mark.parametrize("complete", [True, False])
def test_who_is_complete_is_said_both_ways(*, complete: bool):
    leader = LeaderShell(manifest(1))
    leader.says_complete = complete
    pair = run(leader, lambda pair: setattr(pair.follower, "complete", complete))
    assert [asked.complete for asked in leader.asked] == [complete]
    assert [answer.complete for answer in pair.follower.answers] == [complete]


@pytest.mark.parametrize("outside_isr", [True, False])
def test_a_follower_hears_whether_its_leader_counts_it(*, outside_isr: bool):
    leader = LeaderShell(manifest(1))
    leader.says_outside_isr = outside_isr
    pair = run(leader)
    assert [answer.outside_isr for answer in pair.follower.answers] == [outside_isr]


def test_larger_ones_come_in_pieces_and_are_read_once(monkeypatch):
    monkeypatch.setattr(replicate, "INLINE_BYTES", 0)
    monkeypatch.setattr(replicate, "CHUNK_BYTES", 64)
    one = manifest(1)
    leader = LeaderShell(one)
    pair = run(leader)
    pieces = -(-len(manifest_store.encode(one)) // 64)
    assert pieces > 1
    assert pair.calls == ["PullManifests"] + ["ManifestChunk"] * pieces
    assert leader.reads == 1
    assert pair.follower.bodies[ref_of(one)].segments == one.segments


def test_bodies_that_several_fetch_side_by_side_are_read_once_and_let_go(monkeypatch):
    monkeypatch.setattr(replicate, "INLINE_BYTES", 0)
    monkeypatch.setattr(replicate, "CHUNK_BYTES", 64)
    several = [manifest(generation) for generation in range(1, 6)]
    leader = LeaderShell(*several)

    async def go() -> None:
        answers = Pair(leader).answers
        for position in range(0, len(manifest_store.encode(several[0])), 64):
            for one in several:
                name = ref_of(one)
                await answers.chunk(calls.ManifestChunkRequest(TOPIC_ID, 0, 3, name, position))
        assert leader.reads == len(several)
        monkeypatch.setattr(replicate, "KEPT_BYTES", 1)
        await answers.chunk(calls.ManifestChunkRequest(TOPIC_ID, 0, 3, name, 0))
        assert len(answers._sending) == len(several), "it was there"
        answers._sending.popitem()
        monkeypatch.setattr(replicate, "KEPT_S", 0.01)
        await answers.chunk(calls.ManifestChunkRequest(TOPIC_ID, 0, 3, name, 0))
        assert list(answers._sending.values()) == [manifest_store.encode(several[-1])], (
            "memory is bounded"
        )
        async with asyncio.timeout(60):
            while answers._sending:
                await asyncio.sleep(0.01)

    asyncio.run(go())


def test_a_damaged_piece_is_no_answer(monkeypatch):
    monkeypatch.setattr(replicate, "INLINE_BYTES", 0)
    pair = run(LeaderShell(manifest(1)), lambda pair: setattr(pair, "damages", True))
    (event,) = pair.follower.told
    assert isinstance(event, ev.PullFailed) and pair.follower.bodies == {}


@pytest.mark.parametrize("foreign", [{"topic_id": UUID(int=8)}, {"partition": 1}])
def test_a_manifest_of_another_partition_is_refused_by_name(foreign, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(replicate.log, "warning", lambda _, **told: said.append(told["error"]))
    pair = run(LeaderShell(replace(manifest(1), **foreign)))
    (event,) = pair.follower.told
    assert isinstance(event, ev.PullFailed) and pair.follower.bodies == {}
    (why,) = said
    assert f"topic id {TOPIC_ID}; it is of partition {foreign.get('partition', 0)} of" in why


def test_a_refusal_is_of_one_partition():
    leader = LeaderShell(manifest(1))
    leader.error = FencedLeaderEpoch("epoch 3, now it is 4")
    pair = run(leader)
    assert isinstance(pair.follower.told[0], ev.PullFailed)


def test_a_call_that_fails_is_made_again(monkeypatch):
    monkeypatch.setattr(replicate, "BACKOFF_S", 0.001)
    leader = LeaderShell(manifest(1))

    async def go() -> Pair:
        pair = Pair(leader)
        pair.fails = 2
        pair.pulls.schedule(hosted(pair.follower, False))
        async with asyncio.timeout(60):
            while not pair.follower.bodies:
                await asyncio.sleep(0.001)
        await pair.pulls.stop()
        return pair

    pair = asyncio.run(go())
    assert pair.calls == ["PullManifests"] * 3
    assert [asked.number for asked in leader.asked] == [3], "each try is a request of its own"
    assert all(isinstance(event, ev.PullFailed) for event in pair.follower.told)


def test_a_chunk_of_another_epoch_is_refused():
    async def go() -> None:
        pair = Pair(LeaderShell(manifest(1)))
        name = ref_of(manifest(1))
        with pytest.raises(NotLeaderOrFollower):
            await pair.answers.chunk(calls.ManifestChunkRequest(TOPIC_ID, 0, 2, name, 0))

    asyncio.run(go())


@pytest.mark.parametrize(("fails", "responded"), [(0, True), (1, False)])
def test_whether_a_leader_responded(fails, responded):
    async def go() -> None:
        pair = Pair(LeaderShell(manifest(1)))
        pair.fails = fails
        assert await pair.pulls._pull(LEADER, [hosted(pair.follower, False)]) is responded

    asyncio.run(go())


class RepeatingShell(FollowerShell):
    """A follower that is to pull again."""

    def __init__(self, held: ManifestRef | None, lost: bool) -> None:
        super().__init__()
        self.core.held, self.core.lost = held, lost
        self.scheduled = 0

    def schedule_pull(self) -> None:
        self.scheduled += 1


@pytest.mark.parametrize(("held", "lost"), [(False, False), (True, False), (False, True)])
def test_who_holds_something_or_lost_it_pulls_again_after_a_refusal(monkeypatch, held, lost):
    monkeypatch.setattr(replicate, "REFUSED_S", 0.0)

    async def go() -> int:
        pair = Pair(LeaderShell(manifest(1)))
        shell = RepeatingShell(ref_of(manifest(1)) if held else None, lost)
        request = shell.start_pull()
        pair.pulls._refused(hosted(shell, False), request, FencedLeaderEpoch("5"))
        await asyncio.sleep(0.01)
        assert shell.told == [ev.PullFailed(request)]
        return shell.scheduled

    assert asyncio.run(go()) == (held or lost)


@pytest.mark.parametrize("missing", [7, None])
def test_who_lacks_a_record_pulls_again_after_an_answer(monkeypatch, *, missing):
    """Its leader counts it still, or files of its log are in use. One pull for several answers."""
    monkeypatch.setattr(replicate, "REFUSED_S", 0.0)

    async def go() -> int:
        pair = Pair(LeaderShell(manifest(1)))
        shell = RepeatingShell(ref_of(manifest(1)), False)
        shell.core.missing = missing
        replica = hosted(shell, False)
        for again in (1, 2):
            for _ in range(3):
                assert await pair.pulls._pull(LEADER, [replica])
            await asyncio.sleep(0.01)
            assert shell.scheduled == (0 if missing is None else again)
        return shell.scheduled

    assert asyncio.run(go()) == (0 if missing is None else 2)


class FailingShell(RepeatingShell):
    """What the leader answered cannot be acted on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(ref_of(manifest(1)), False)
        self.error = error

    def receive_pull_response(self, asked, answer, bodies) -> None:
        super().receive_pull_response(asked, answer, bodies)
        raise self.error


@pytest.mark.parametrize("error", [NotLeaderOrFollower("not now"), InvariantViolation("a bug")])
def test_an_answer_that_one_partition_fails_at_is_not_lost_to_others(monkeypatch, error):
    """And that one pulls again."""
    monkeypatch.setattr(replicate, "REFUSED_S", 0.0)
    bugs: list[Exception] = []
    monkeypatch.setattr(replicate.log, "exception", lambda _, bug, **said: bugs.append(bug))

    async def go() -> None:
        pair = Pair(LeaderShell(manifest(1)))
        failing = FailingShell(error)
        batch = [hosted(failing, False), hosted(pair.follower, False)]
        assert await pair.pulls._pull(LEADER, batch)
        assert list(pair.follower.bodies) == [ref_of(manifest(1))] and pair.follower.told == []
        async with asyncio.timeout(60):
            while not failing.scheduled:
                await asyncio.sleep(0)
        assert bugs == ([error] if isinstance(error, InvariantViolation) else [])

    asyncio.run(go())


@pytest.mark.parametrize("refused", [False, True])
def test_a_pull_that_cannot_even_fail_ends_no_other(monkeypatch, *, refused):
    """None would be made again: each waits for its answer."""
    bugs: list[Exception] = []
    monkeypatch.setattr(replicate.log, "exception", lambda _, bug, **said: bugs.append(bug))
    error = InvariantViolation("the high watermark is above the log's end")

    class Unfailing(RepeatingShell):
        def step(self, event: ev.Event) -> None:
            super().step(event)
            raise error

    async def go() -> None:
        leader = LeaderShell(manifest(1))
        pair = Pair(leader)
        if refused:
            leader.error = FencedLeaderEpoch("epoch 3, now it is 4")
        else:
            pair.fails = 1
        first, second = Unfailing(None, False), RepeatingShell(None, False)
        batch = [hosted(first, False), hosted(second, False)]
        assert await pair.pulls._pull(LEADER, batch) is refused
        assert [type(event) for event in second.told] == [ev.PullFailed] and bugs == [error]
        await pair.pulls.stop()

    asyncio.run(go())


def test_a_replica_whose_cut_the_disk_failed_ends_no_pull_of_others():
    """Its log has become shorter, its high watermark has not."""
    replica = local_replica(end=10)
    partition = replica.partition
    partition.core.high_watermark = 10
    partition.log.truncate_fully_and_start_at(4)
    with pytest.raises(InvariantViolation):
        partition.step(ev.RetryTriggered(), 0)
    partition.mark_offline("a disk failed")
    partition.step(ev.RetryTriggered(), 0)


@pytest.mark.parametrize(
    ("topic_id", "partition", "leader", "pulls"),
    [
        (TOPIC_ID, 0, LEADER, 1),
        (TOPIC_ID, 0, 3, 0),
        (TOPIC_ID, 7, LEADER, 0),
        (UUID(int=1), 0, LEADER, 0),
    ],
)
def test_news_are_of_replicas_that_are_here_and_follow_that_leader(
    topic_id, partition, leader, pulls
):
    async def go() -> int:
        pair = Pair(LeaderShell(manifest(1)))
        shell, topic = RepeatingShell(None, False), LocalTopic("t", TOPIC_ID, 1)
        topic.partitions[0] = hosted(shell, False)
        pair.pulls._table.by_id[TOPIC_ID.bytes] = topic
        news = calls.ManifestNewsRequest(leader, (calls.ManifestNews(topic_id, partition, 3),))
        await pair.pulls.receive_news(news)
        return shell.scheduled

    assert asyncio.run(go()) == pulls


# News.


class Told:
    """A leader's News, and what it sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None) -> None:
        if monkeypatch is not None:
            monkeypatch.setattr(notify, "REVIEW_S", 0.01)
        self.hosted = local_replica(end=10)
        self.core = self.hosted.partition.core
        self.core.step(BecameLeader(3, 1, (1, 2), (1, 2), 10), 0)
        self.core.step(EligibleBrokersChanged(frozenset({1, 2}), ((1, 4), (2, 5))), 0)
        self.sent: list[int] = []
        runtime: Any = InlineRuntime()
        peers: Any = RecordedPeers(self.call)
        self.table = ReplicaTable()
        self.table.replicas[TP] = self.hosted
        self.news = notify.ManifestNotifier(runtime, NodeIdentity(LEADER), self.table, peers)

    async def call(self, broker, method, request, timeout_s) -> None:
        assert method == "ManifestNews" and len(request.news) == 1
        self.sent.append(broker)

    async def over(self) -> None:
        async with asyncio.timeout(60):
            while self.news._running:
                await asyncio.sleep(0.005)


def test_a_follower_is_told_until_it_has_applied_what_is_published(monkeypatch):
    async def go() -> None:
        told = Told(monkeypatch)
        core = told.core
        core.step(ManifestOffered((3, 1)), 0)
        told.news.announce(told.hosted)
        await asyncio.sleep(0.05)
        assert told.sent == [], "what it says would not count before it has fetched"
        core.step(FollowerFetched(2, 10, 5), 0)
        async with asyncio.timeout(60):
            while len(told.sent) < 3:
                await asyncio.sleep(0.005)
        core.step(ManifestAcknowledged(2, (3, 1), 5), 0)
        assert core.published == (3, 1)
        before = len(told.sent)
        async with asyncio.timeout(60):
            while len(told.sent) == before:
                await asyncio.sleep(0.005)
        core.step(ManifestApplied(2, (3, 1), 5), 0)
        await told.over()
        after = len(told.sent)
        await asyncio.sleep(0.05)
        assert len(told.sent) == after, "where all have everything nothing is sent"

    asyncio.run(go())


def test_one_that_came_back_with_less_is_told(monkeypatch):
    async def go() -> None:
        told = Told(monkeypatch)
        core = told.core
        core.step(FollowerFetched(2, 10, 5), 0)
        core.step(ManifestOffered((3, 1)), 0)
        core.step(ManifestApplied(2, (3, 1), 5), 0)
        told.news.announce(told.hosted)
        await told.over()
        assert told.sent == []
        core.step(EligibleBrokersChanged(frozenset({1, 2}), ((1, 4), (2, 6))), 0)
        told.news.announce(told.hosted)
        await asyncio.sleep(0.03)
        core.step(FollowerFetched(2, 0, 6), 0)
        async with asyncio.timeout(60):
            while not told.sent:
                await asyncio.sleep(0.005)
        await told.news.stop()

    asyncio.run(go())


def test_one_whose_fetch_came_late_is_told_until_it_says_anew_what_it_applied(monkeypatch):
    """The partition was open no more, and the follower, which nobody cut, has no reason to pull."""

    class Listener(RecordedListener):
        def __init__(self, told: Told) -> None:
            super().__init__()
            self.told = told

        def perform(self, effect: Any) -> None:
            if effect == ev.AnnounceManifest():
                self.told.news.announce(self.told.hosted)

    async def go() -> None:
        told = Told(monkeypatch)
        partition = told.hosted.partition
        partition.listener = Listener(told)
        told.core.step(FollowerFetched(2, 10, 5), 0)
        told.core.step(ManifestOffered((3, 1)), 0)
        told.core.step(ManifestAcknowledged(2, (3, 1), 5), 0)
        told.core.step(ManifestApplied(2, (3, 1), 5), 0)
        told.news.announce(told.hosted)
        await told.over()
        assert told.sent == []
        for offset in (8, 10):
            partition.step(FollowerFetched(2, offset, 5), 0)
        async with asyncio.timeout(60):
            while not told.sent:
                await asyncio.sleep(0)
        partition.step(ManifestApplied(2, (3, 1), 5), 0)
        await told.over()
        partition.step(FollowerFetched(2, 10, 5), 0)
        assert not told.news._running, "it is told no more"

    asyncio.run(go())


def test_news_of_a_partition_that_was_closed_meanwhile_ends_nothing(monkeypatch):
    """It is announced once more while others have their turn, and then nobody lacks it."""

    async def go() -> None:
        monkeypatch.setattr(notify, "YIELD_EVERY", 2)
        told = Told(monkeypatch)
        others = [Told(monkeypatch).hosted for _ in range(3)]
        hosted = told.table.replicas
        for number, one in enumerate([told.hosted, *others]):
            one.partition.core.step(FollowerFetched(2, 10, 5), 0)
            one.partition.core.step(ManifestOffered((3, 1)), 0)
            one.partition.topic_partition = TopicPartition("t", number)
            hosted[one.partition.topic_partition] = one
        for one in others:
            one.partition.core.step(ManifestAcknowledged(2, (3, 1), 5), 0)
            one.partition.core.step(ManifestApplied(2, (3, 1), 5), 0)
        for one in (told.hosted, *others):
            told.news.announce(one)
        look, again = told.news._collect, [others[-1]]

        def looked(one, found) -> bool:
            if again:
                asyncio.get_running_loop().call_soon(told.news.announce, again.pop())
            return look(one, found)

        monkeypatch.setattr(told.news, "_collect", looked)
        async with asyncio.timeout(60):
            while len(told.sent) < 3:
                assert told.news._running
                await asyncio.sleep(0.005)
        await told.news.stop()

    asyncio.run(go())


def test_a_bug_does_not_keep_all_later_news_back(monkeypatch):
    async def go() -> None:
        told = Told(monkeypatch)
        told.core.step(FollowerFetched(2, 10, 5), 0)
        told.core.step(ManifestOffered((3, 1)), 0)
        look = told.news._collect
        monkeypatch.setattr(told.news, "_collect", lambda *_: 1 // 0)
        told.news.announce(told.hosted)
        await told.over()
        monkeypatch.setattr(told.news, "_collect", look)
        told.news.announce(told.hosted)
        async with asyncio.timeout(60):
            while not told.sent:
                await asyncio.sleep(0.005)
        await told.news.stop()

    asyncio.run(go())


@pytest.mark.parametrize(("offered", "held"), [(True, True), (True, False), (False, True)])
def test_brokers_that_come_and_go_are_told_of_what_is_held_and_offered(monkeypatch, offered, held):
    async def go() -> list[LocalReplica]:
        told = Told(monkeypatch)
        core = told.core.manifests
        core.held = ref_of(manifest(1)) if held else None
        core.has_offered = offered
        announced: list[LocalReplica] = []
        monkeypatch.setattr(told.news, "announce", announced.append)
        told.news.brokers_changed()
        assert announced in ([], [told.hosted])
        return announced

    assert bool(asyncio.run(go())) == (offered and held)


def test_what_is_being_sent_has_ended_when_the_news_have(monkeypatch):
    async def go() -> list[str]:
        told, happened = Told(monkeypatch), []

        async def call(*_) -> None:
            happened.append("called")
            try:
                await asyncio.Event().wait()
            finally:
                happened.append("ended")

        monkeypatch.setattr(told, "call", call)
        told.news._peers = RecordedPeers(call)  # type: ignore[assignment]
        told.core.step(FollowerFetched(2, 10, 5), 0)
        told.core.step(ManifestOffered((3, 1)), 0)
        told.news.announce(told.hosted)
        async with asyncio.timeout(60):
            while not happened:
                await asyncio.sleep(0)
        await told.news.stop()
        return list(happened)  # as it is now: the loop's end would end it, too

    assert asyncio.run(go()) == ["called", "ended"]


def test_news_of_several_partitions_are_one_call(monkeypatch):
    async def go() -> list[int]:
        told, other, sizes = Told(monkeypatch), Told(monkeypatch), []

        async def call(_broker, _method, request, _timeout_s) -> None:
            sizes.append(len(request.news))

        told.news._peers = RecordedPeers(call)  # type: ignore[assignment]
        other.hosted.partition.topic_partition = TopicPartition("t", 1)
        told.table.replicas[TopicPartition("t", 1)] = other.hosted
        for one in (told, other):
            one.core.step(FollowerFetched(2, 10, 5), 0)
            one.core.step(ManifestOffered((3, 1)), 0)
            told.news.announce(one.hosted)
        async with asyncio.timeout(60):
            while not sizes:
                await asyncio.sleep(0)
        await told.news.stop()
        return sizes[:1]

    assert asyncio.run(go()) == [2]


def test_news_are_repeated_after_longer_and_longer_waits_and_at_once_when_there_are_others():
    async def go() -> None:
        told = Told(None)
        core, now = told.core, [100.0]
        told.news._runtime = Given(loop=Given(time=lambda: now[0]))  # type: ignore[assignment]
        core.step(FollowerFetched(2, 10, 5), 0)
        core.step(ManifestOffered((3, 1)), 0)

        def is_sent() -> bool:
            news: dict[int, list[LocalReplica]] = {}
            assert told.news._collect(told.hosted, news), "it lacks something"
            return news == {2: [told.hosted]}

        wait_s = notify.REVIEW_S
        assert is_sent()
        for _ in range(20):
            now[0] += wait_s - 0.001
            assert not is_sent()
            now[0] += 0.001
            assert is_sent()
            wait_s = min(2 * wait_s, notify.RESEND_MAX_S)
        assert wait_s == notify.RESEND_MAX_S
        core.step(ManifestAcknowledged(2, (3, 1), 5), 0)
        assert is_sent(), "what it lacks is something else now"
        assert not is_sent()
        core.step(ManifestApplied(2, (3, 1), 5), 0)
        core.step(FollowerFetched(2, 8, 5), 0)
        core.step(FollowerFetched(2, 10, 5), 0)
        core.step(ManifestAcknowledged(2, (3, 1), 5), 0)
        told.core.followers[2].applied = (2, 9)
        assert is_sent(), "it has applied something else"
        told.core.followers[2].applied = None
        assert is_sent() and not is_sent(), "it has applied nothing any more"

    asyncio.run(go())
