"""Random histories of a core: whatever clients do, its state makes sense and everybody is answered.

Clients here are careless: wrong generations, ids of others, protocols that nobody shares, silence.
Appends commit late, are rejected, time out; the node restarts.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from kio.schema.errors import ErrorCode

from kept.client.admin.groups import encode_subscription
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.group import STABLE
from kept.node.coordinator.groups.offsets import LIVE_RECORD_OFFSET
from kept.node.coordinator.groups.records import NO_TOPIC_ID, GroupRecord, decode_record
from kept.node.coordinator.sharding.events import Append, AppendCommitted, AppendRejected, Response

GROUPS = ("alpha", "beta")
TOPICS = ("orders", "users")
INSTANCES = (None, None, None, "one", "two")
HISTORIES = int(os.environ.get("KEPT_GROUP_HISTORIES", "150"))


PROTOCOLS = (
    (("range", encode_subscription(["orders"])),),
    (("range", encode_subscription(["orders", "users"])), ("sticky", b"not a subscription")),
    (("sticky", encode_subscription(["users"])), ("range", encode_subscription(["orders"]))),
    (("sticky", encode_subscription([])),),
)


class Simulation:
    """One seed: a core, its log, and the requests that wait."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1_000_000
        self.requests: dict[int, ev.Event] = {}
        self.answers: Counter[int] = Counter()
        self.ids: dict[str, list[str]] = {group: ["", "stranger"] for group in GROUPS}
        self.written: list[GroupRecord] = []
        self.committed = 0
        self.in_flight: list[Append] = []
        self.settings = ev.GroupSettings(
            group_initial_rebalance_delay_ms=self.random.choice((0, 3_000)),
            group_max_size=self.random.choice((2, 100)),
            offsets_retention_minutes=10,
            offsets_retention_check_interval_ms=60_000,
        )
        self.core = GroupCore(self.settings)

    def perform(self, effects: tuple[ev.Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Response):
                assert effect.request in self.requests, "an answer to nobody"
                self.answers[effect.request] += 1
                assert self.answers[effect.request] == 1, "answered twice"
                self.learn(effect)
            elif isinstance(effect, Append):
                self.append(effect)
        self.core.check_invariants()

    def append(self, effect: Append) -> None:
        if self.random.random() < 0.1:
            error = ErrorCode.coordinator_not_available
            self.perform(self.core.step(AppendRejected(effect.append, error), self.now))
            return
        self.written += effect.records
        self.in_flight.append(effect)
        if self.random.random() < 0.7:
            self.commit()

    def commit(self) -> None:
        while self.in_flight:
            effect = self.in_flight.pop(0)
            self.committed += len(effect.records)
            self.perform(self.core.step(AppendCommitted(effect.append), self.now))

    def learn(self, answer: Response) -> None:
        if isinstance(answer.result, ev.JoinResult):
            request = self.requests[answer.request]
            assert isinstance(request, ev.Join)
            result = answer.result
            if result.error in (ErrorCode.none, ErrorCode.member_id_required):
                self.ids[request.group].append(result.member)
            if result.error is ErrorCode.none:
                assert result.protocol in [name for name, _ in request.protocols]
                leads = result.leader == result.member
                assert leads == bool(result.members)
                assert not leads or result.member in [m.member for m in result.members]

    def event(self) -> ev.Event:
        choose = self.random.choice
        group = choose(GROUPS)
        member, instance = choose([*self.ids[group][-6:], ""]), choose(INSTANCES)
        present = self.core.groups.get(group)
        generation = choose((-1, 1, present.generation if present else 2))
        if present and present.members and self.random.random() < 0.6:
            member = choose(list(present.members))
            instance, generation = present.members[member].group_instance_id, present.generation
        number = len(self.requests) + 1
        kind = self.random.random()
        if kind < 0.30:
            return ev.Join(
                number, group, member, "app", "/127.0.0.1", choose((6_000, 30_000)),
                choose((5_000, 60_000)), choose(("consumer",) * 9 + ("connect",)),
                choose(PROTOCOLS), str(number), instance, self.random.random() < 0.7,
                self.random.random() < 0.7,
            )  # fmt: skip
        if kind < 0.50:
            assignments = tuple((m, m.encode()) for m in self.ids[group][-5:])
            return ev.Sync(number, group, member, generation, assignments, instance)
        if kind < 0.62:
            return ev.Heartbeat(number, group, member, generation, instance)
        if kind < 0.70:
            return ev.Leave(number, group, ((member, instance), ("", choose(INSTANCES))))
        if kind < 0.86:
            offsets = tuple(ev.CommitPartition(p, number) for p in (0, choose((1, 2))))
            topic = ev.CommitTopic(choose(TOPICS), NO_TOPIC_ID, offsets)
            return ev.CommitOffsets(number, group, (topic,), member, generation, instance)
        if kind < 0.92:
            asked = (ev.FetchTopic("orders", (0, 1)),) if self.random.random() < 0.5 else None
            return ev.FetchOffsets(number, group, asked, self.random.random() < 0.5)
        if kind < 0.96:
            return ev.DeleteOffsets(number, group, ((choose(TOPICS), (0, 1)),))
        return ev.DeleteGroups(number, GROUPS)

    def request(self) -> None:
        event = self.event()
        self.requests[event.request] = event
        self.perform(self.core.step(event, self.now))

    def pass_time(self, duration_ms: int) -> None:
        until = self.now + duration_ms
        while (due := self.core.next_deadline_ms) is not None and due <= until:
            self.now = max(self.now, due)
            self.perform(self.core.tick(self.now))
            self.commit()
        self.now = until

    def restart(self) -> None:
        """Die with some appends in flight: a prefix of the log is what is left."""
        kept = self.random.randint(self.committed, len(self.written))
        self.written = self.written[:kept]
        self.committed = kept
        self.in_flight.clear()
        for number in self.requests:
            self.answers[number] = 1
        self.core = self.rebuilt()
        self.perform(self.core.loaded(self.now))

    def rebuilt(self) -> GroupCore:
        core = GroupCore(self.settings)
        for offset, record in enumerate(self.written):
            core.replay(decode_record(*record.encode()), offset)
        return core

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.random.random()
            if kind < 0.80:
                self.request()
            elif kind < 0.90:
                self.commit()
            elif kind < 0.97:
                self.pass_time(self.random.choice((1, 500, 4_000, 9_000)))
            elif kind < 0.99:
                self.perform(self.core.step(ev.TopicsDeleted((("users", NO_TOPIC_ID),)), self.now))
            else:
                self.restart()


@pytest.mark.parametrize("chunk", range(6))
def test_everybody_is_answered_and_the_log_tells_the_state(chunk: int) -> None:
    for seed in range(chunk * HISTORIES // 6, (chunk + 1) * HISTORIES // 6):
        simulation = Simulation(seed)
        simulation.run(120)
        simulation.commit()
        # Then silence: sessions end, rebalances end, and nobody is left waiting.
        simulation.pass_time(700_000)
        simulation.commit()
        unanswered = set(simulation.requests) - set(simulation.answers)
        assert not unanswered, (seed, [simulation.requests[r] for r in unanswered])
        again = simulation.rebuilt()
        found = {key: stored.value for key, stored in again.appended}
        assert found == {key: stored.value for key, stored in simulation.core.appended}, seed


def test_a_stable_group_is_what_its_record_says() -> None:
    stable = 0
    for seed in range(HISTORIES):
        simulation = Simulation(seed)
        simulation.run(60)
        simulation.commit()
        again = simulation.rebuilt()
        for group_id, group in simulation.core.groups.items():
            if group.state is not STABLE:
                continue
            stable += 1
            loaded = again.groups[group_id]
            # Members may have left since, which starts a rebalance; until then they are the same.
            assert loaded.generation == group.generation, seed
            assert set(loaded.members) == set(group.members), seed
            for member_id, member in group.members.items():
                assert loaded.members[member_id].assignment == member.assignment
                assert loaded.members[member_id].metadata(group.protocol) == member.metadata(
                    group.protocol
                )
    assert stable > HISTORIES // 10, "the histories are too wild to test anything"


def test_offsets_appended_live_count_as_newer_than_all_that_was_loaded() -> None:
    assert LIVE_RECORD_OFFSET == 2**63 - 1
