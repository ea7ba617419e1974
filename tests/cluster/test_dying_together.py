"""All nodes die together and two of three come back: they must not wait for the third (rule 33)."""

from __future__ import annotations

from itertools import permutations
from uuid import UUID

import pytest
from msgspec.structs import replace

from kept.cluster.controller import partition_election, topics
from kept.cluster.controller.broker_decisions import decide as records_of
from kept.cluster.controller.broker_sessions import (
    TIMEOUT,
    BrokerSessions,
    ControllerElected,
    Decide,
    DecisionCompleted,
    HeartbeatRequest,
    Probe,
    ProbeCompleted,
    SessionSettings,
)
from kept.cluster.controller.brokers import RegisterRequest, register_broker, unfence_broker
from kept.cluster.controller.partition_election import AlterIsr
from kept.cluster.controller.topics import create_topic
from kept.cluster.metadata.image import Image, ImageApplied
from kept.cluster.metadata.records import NO_LEADER
from kept.storage.errors import NotController

TOPIC = UUID(int=77)
NODES = (1, 2, 3)


class Together:
    """Three brokers with one partition that all of them have in sync; then all are killed, and a
    new controller begins. Its decisions are made in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self.image = Image()
        for node in NODES:
            self.apply(register_broker(self.image, self._process(node, node)))
            self.apply(unfence_broker(self.image, node, self.epoch(node)))
        self.apply(create_topic(self.image, topics.CreateTopic("t", TOPIC, 1, 3)))
        self.epochs = {node: self.epoch(node) for node in NODES}
        self.now_ms = 1000
        self.sessions = BrokerSessions(SessionSettings())
        self.probes = self.step(ControllerElected(self.image))

    @staticmethod
    def _process(node, number, clean_epoch=-1):
        return RegisterRequest(node, UUID(int=number), (), None, clean_epoch)

    @property
    def state(self):
        return self.image.partition(TOPIC, 0)

    def epoch(self, node):
        return self.image.brokers[node].broker_epoch

    def apply(self, records) -> None:
        if records:
            self.image, _ = self.image.apply(records)

    def step(self, event):
        return self.perform(self.sessions.step(event, self.now_ms))

    def perform(self, effects):
        """Make what was decided; the probes are returned."""
        queue, probes = list(effects), []
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Probe):
                probes.append(effect.broker_id)
            if not isinstance(effect, Decide):
                continue
            records = records_of(self.image, self.sessions.complete_decision(effect.decision))
            self.apply(records)
            if records:
                queue += self.sessions.step(ImageApplied(self.image), self.now_ms)
            queue += self.sessions.step(DecisionCompleted(effect.decision), self.now_ms)
        self.sessions.check_invariants()
        return probes

    def answers(self, node, found) -> None:
        self.step(ProbeCompleted(node, found, self.epochs[node]))

    def comes_back(self, node, *, lost_nothing) -> None:
        """It registers, and is unfenced."""
        live = self.sessions.is_live(node, self.now_ms)
        clean_epoch = self.epochs[node] if lost_nothing else -1
        process = self._process(node, 10 + node, clean_epoch)
        self.apply(register_broker(self.image, process, session_live=live))
        self.step(ImageApplied(self.image))
        self.step(HeartbeatRequest(node, self.epoch(node), self.image.index))

    def joins_isr(self, node) -> None:
        """The leader has seen that it caught up."""
        members = tuple((b, self.epoch(b)) for b in (*self.state.isr, node))
        state, leader = self.state, self.state.leader
        self.apply(
            partition_election.alter_isr(
                self.image,
                AlterIsr(
                    TOPIC,
                    0,
                    leader,
                    self.epoch(leader),
                    state.leader_epoch,
                    state.partition_epoch,
                    members,
                ),
            )
        )


@pytest.mark.parametrize("order", [*permutations(NODES)])
@pytest.mark.parametrize("away", NODES)
def test_two_that_lost_nothing_go_on_without_the_third(order, away) -> None:
    """In whatever order the controller hears of the dead. No time passes: nothing waits for a
    session's end, nor for who is away.
    """
    c = Together()
    assert c.probes == list(NODES)
    for node in order:
        c.answers(node, None if node == away else UUID(int=10 + node))
    assert c.state.leader == NO_LEADER
    assert set(c.state.isr) == set(NODES), "each of them has all that is acknowledged"
    first, second = (node for node in order if node != away)
    c.comes_back(first, lost_nothing=True)
    assert c.state.leader == first and c.state.isr == (first,)
    c.comes_back(second, lost_nothing=True)
    c.joins_isr(second)
    assert set(c.state.isr) == {first, second} and c.state.leader == first
    assert c.now_ms == 1000


@pytest.mark.parametrize("order", [*permutations(NODES)])
def test_who_may_have_lost_something_waits_for_all(order) -> None:
    """Power was lost: no two of them need have what the third has."""
    c = Together()
    for node in NODES:
        c.answers(node, None)
    for node in order[:2]:
        c.comes_back(node, lost_nothing=False)
        assert c.state.leader == NO_LEADER
    c.comes_back(order[2], lost_nothing=False)
    assert c.state.recovering, "the longest of the three logs is to be found"


@pytest.mark.parametrize("order", [*permutations((1, 2))])
def test_who_lost_nothing_leads_whoever_is_back_before(order) -> None:
    """1 lost power, 2 was only killed, 3 stays away."""
    c = Together()
    for node in NODES:
        c.answers(node, None)
    for node in order:
        c.comes_back(node, lost_nothing=node == 2)
    assert c.state.leader == 2 and 1 not in c.state.isr


def test_nobody_is_fenced_or_registered_before_all_probes_are_answered() -> None:
    c = Together()
    c.answers(1, UUID(int=11))
    c.answers(2, UUID(int=12))
    assert not any(c.image.brokers[node].fenced for node in NODES)
    with pytest.raises(NotController):
        c.comes_back(1, lost_nothing=True)
    c.answers(3, None)
    assert all(c.image.brokers[node].fenced for node in NODES)
    assert len({c.image.brokers[node].fenced for node in NODES}) == 1


@pytest.mark.parametrize("hears", ["nothing", "a timeout", "an answer", "a heartbeat"])
@pytest.mark.parametrize("order", [*permutations(NODES)])
def test_a_silent_broker_holds_up_the_others_not_for_long(hears, order) -> None:
    """A machine that is dark is taken for dead with those that are, so that two of three go on
    without it; who is heard of leads.
    """
    c = Together()
    for node in order:
        if node < 3:
            c.answers(node, UUID(int=10 + node) if node == 1 else None)
        elif hears == "a timeout":
            c.answers(3, TIMEOUT)
        elif hears == "an answer":
            c.answers(3, UUID(int=3))
        elif hears == "a heartbeat":
            c.step(HeartbeatRequest(3, c.epoch(3), c.image.index))
    if hears == "nothing":
        for _ in range(c.sessions.settings.examine_ms // 100):
            assert not c.image.brokers[1].fenced
            c.now_ms += 100
            c.perform(c.sessions.tick(c.now_ms))
    assert c.image.brokers[1].fenced and c.image.brokers[2].fenced
    if hears in ("an answer", "a heartbeat"):
        assert not c.image.brokers[3].fenced and c.state.leader == 3
        return
    assert c.image.brokers[3].fenced and c.state.leader == NO_LEADER
    assert set(c.state.isr) == set(NODES)
    for node in (1, 2):
        c.comes_back(node, lost_nothing=True)
    assert c.state.leader == 1
    c.joins_isr(2)
    assert set(c.state.isr) == {1, 2}
    before = c.state
    c.step(HeartbeatRequest(3, c.epoch(3), c.image.index))
    assert not c.image.brokers[3].fenced and c.state.leader == before.leader, (
        "it lived, and follows"
    )


def test_who_is_silent_lives_on_where_somebody_is_heard_of_or_nobody_died() -> None:
    c = Together()
    for node in NODES:
        c.answers(node, TIMEOUT)
    assert not any(c.image.brokers[node].fenced for node in NODES), "nobody is known to be dead"
    c = Together()
    c.answers(1, UUID(int=1))
    c.answers(2, None)
    c.answers(3, TIMEOUT)
    assert [c.image.brokers[node].fenced for node in NODES] == [False, True, False]


def test_an_answer_that_comes_late_shows_that_a_silent_broker_lives() -> None:
    c = Together()
    c.answers(1, UUID(int=11))
    c.answers(2, None)
    effects = c.sessions.step(ProbeCompleted(3, TIMEOUT, c.epochs[3]), c.now_ms)
    assert [e.decision.broker_id for e in effects if isinstance(e, Decide)] == [1, 2, 3]
    c.now_ms += c.sessions.settings.probe_interval_ms
    again = c.sessions.tick(c.now_ms)
    assert Probe(3, c.epochs[3]) in again
    c.answers(3, UUID(int=3))
    c.perform(effects)
    assert [c.image.brokers[node].fenced for node in NODES] == [True, True, False]
    assert c.state.leader == 3


def test_a_whole_isr_that_is_down_goes_on_with_those_that_are_back() -> None:
    """Who is away is a suspect: it may have all that is acknowledged, and joins anew."""
    c = Together()
    for node in NODES:
        c.answers(node, None)
    c.comes_back(2, lost_nothing=True)
    assert set(c.state.elr) == {1, 3}
    before = c.state
    assert before.leader_epoch == c.state.leader_epoch
    c.comes_back(3, lost_nothing=True)
    c.joins_isr(3)
    assert c.state == replace(
        before, isr=c.state.isr, elr=(), partition_epoch=before.partition_epoch + 1
    )
