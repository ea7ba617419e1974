from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kept.cluster.controller import partition_election, reassignment, topics
from kept.cluster.controller.broker_decisions import Fence
from kept.cluster.controller.broker_decisions import decide as records_of
from kept.cluster.controller.broker_sessions import (
    TIMEOUT,
    BrokerSessions,
    ConnectionLost,
    ControllerElected,
    ControllerResigned,
    Decide,
    DecisionCompleted,
    HeartbeatRequest,
    Probe,
    ProbeCompleted,
    SessionSettings,
    SettingsChanged,
)
from kept.cluster.controller.brokers import RegisterRequest, register_broker
from kept.cluster.controller.features import SECURITY, Feature, check_security
from kept.cluster.controller.heartbeats import HeartbeatReply, ReplicaLog
from kept.cluster.controller.partition_election import alter_isr
from kept.cluster.controller.topics import create_topic
from kept.cluster.metadata.image import Image, ImageApplied
from kept.cluster.metadata.records import NO_LEADER, FeatureRecord
from kept.storage.errors import (
    BrokerIdNotRegistered,
    KeptError,
    NotController,
    StaleBrokerEpoch,
    UnsupportedVersion,
)

TOPIC = UUID(int=7)
KEY = (TOPIC, 0)
OTHER = UUID(int=999)


class Controller:
    """Sessions, an image, and a clock; decisions are made at once unless they are held."""

    def __init__(self, nodes=(1, 2, 3), unclean=False, **times) -> None:
        self.image = Image()
        self.now_ms = 1_000_000
        self.held: list[Decide] | None = None
        self.made: list[str] = []
        self.probes: list[int] = []
        self.sessions = BrokerSessions(SessionSettings(unclean_default=unclean, **times))
        self.step(ControllerElected(self.image))
        for node in nodes:
            self.register(node)
            self.heartbeat(node)
        if nodes:
            self.apply(create_topic(self.image, topics.CreateTopic("t", TOPIC, 1, len(nodes))))
        self.made.clear()

    @property
    def state(self):
        return self.image.partition(TOPIC, 0)

    def epoch(self, node: int) -> int:
        return self.image.brokers[node].broker_epoch

    def fenced(self, node: int) -> bool:
        return self.image.brokers[node].fenced

    def apply(self, records) -> None:
        if records:
            self.image, _ = self.image.apply(records)
            self.step(ImageApplied(self.image))

    def step(self, event) -> HeartbeatReply | None:
        return self.run(self.sessions.step(event, self.now_ms))

    def tick(self) -> None:
        self.run(self.sessions.tick(self.now_ms))

    def run(self, effects) -> HeartbeatReply | None:
        answer = None
        for effect in effects:
            if isinstance(effect, Probe):
                self.probes.append(effect.broker_id)
            elif isinstance(effect, HeartbeatReply):
                answer = effect
            elif self.held is not None:
                self.held.append(effect)
            else:
                self.make(effect)
        self.sessions.check_invariants()
        return answer

    def make(self, effect: Decide, error: KeptError | None = None) -> None:
        if error is None:
            records = records_of(self.image, self.sessions.complete_decision(effect.decision))
            if records:
                self.made.append(f"{effect.decision.name} {effect.decision.broker_id}")
            self.apply(records)
        self.step(DecisionCompleted(effect.decision, error))

    def register(self, node: int, incarnation: int | None = None) -> None:
        number = incarnation or node
        who = RegisterRequest(node, UUID(int=number), ())
        live = self.sessions.is_live(node, self.now_ms)
        self.apply(register_broker(self.image, who, session_live=live))

    def heartbeat(self, node: int, *, applied=None, stop=False, **more):
        applied = self.image.index if applied is None else applied
        return self.step(
            HeartbeatRequest(node, self.epoch(node), applied, wants_shutdown=stop, **more)
        )

    def lost(self, node: int) -> None:
        self.step(ConnectionLost(node))

    def probed(self, node: int, result, epoch=None) -> None:
        self.step(ProbeCompleted(node, result, epoch))

    def pass_time(self, ms: int, beating=(), step=100) -> None:
        for _ in range(ms // step):
            self.now_ms += step
            for node in beating:
                self.heartbeat(node)
            self.tick()


def test_a_refused_probe_fences_at_once() -> None:
    c = Controller()
    leader = c.state.leader
    c.lost(leader)
    assert c.probes == [leader] and not c.fenced(leader), "a lost connection alone proves nothing"
    c.probed(leader, None, c.epoch(leader))
    assert c.fenced(leader) and c.made == [f"fence {leader}"]
    assert c.state.leader not in (leader, NO_LEADER)


def test_another_incarnation_in_its_place_fences_at_once() -> None:
    c = Controller()
    c.lost(2)
    c.probed(2, OTHER, c.epoch(2))
    assert c.fenced(2)


def test_the_same_incarnation_is_waited_for() -> None:
    c = Controller()
    c.lost(2)
    c.probed(2, UUID(int=2), c.epoch(2))
    assert not c.fenced(2)
    c.pass_time(600, beating=(1, 3))
    assert c.probes == [2, 2], "probed again while it has no connection"
    c.heartbeat(2)
    c.probed(2, None, c.epoch(2))
    assert not c.fenced(2), "it is connected: the probe is of yesterday"
    c.pass_time(2000, beating=(1, 2, 3))
    assert c.probes == [2, 2] and not c.made


def test_silence_is_judged_by_the_session_timeout() -> None:
    c = Controller()
    c.lost(2)
    c.probed(2, TIMEOUT, c.epoch(2))
    c.pass_time(9000, beating=(1, 3))
    assert not c.fenced(2)
    c.pass_time(200, beating=(1, 3))
    assert c.fenced(2) and c.made == ["fence 2"]


def test_a_probe_of_the_process_before_says_nothing_of_the_new_one() -> None:
    c = Controller()
    c.lost(2)
    c.probed(2, OTHER, c.epoch(2))
    old = c.epoch(2)
    c.register(2, incarnation=22)
    c.heartbeat(2)
    c.lost(2)
    c.probed(2, None, old)
    assert not c.fenced(2) and c.sessions.is_live(2, c.now_ms)
    c.probed(2, None, c.epoch(2))
    assert c.fenced(2)


def test_a_controller_that_stood_still_fences_nobody() -> None:
    c = Controller()
    c.now_ms += 60_000
    c.tick()
    assert not c.made
    c.pass_time(8900)
    assert not c.made, "everybody has a whole session again"
    c.pass_time(300)
    assert c.made == ["fence 1"], "one decision for all that are silent"
    assert all(c.fenced(node) for node in (1, 2, 3))


def test_who_is_heard_of_before_the_decision_is_made_is_not_fenced() -> None:
    c = Controller()
    c.held = []
    c.pass_time(9200, beating=(1, 3))
    (fence,) = c.held
    assert fence.decision == Fence(2, c.epoch(2), False) and "silent for" in fence.reason
    c.held = None
    c.heartbeat(2)
    c.make(fence)
    assert not c.fenced(2)
    c.pass_time(9200, beating=(1, 3))
    assert c.fenced(2), "the next silence counts"


def test_a_decision_is_asked_for_once_and_again_when_it_failed() -> None:
    c = Controller()
    c.lost(2)
    c.held = []
    c.probed(2, None, c.epoch(2))
    c.pass_time(1000, beating=(1, 3))
    (fence,) = c.held
    c.make(fence, NotController("somebody else leads"))
    c.pass_time(400, beating=(1, 3))
    assert len(c.held) == 1
    c.pass_time(300, beating=(1, 3))
    assert len(c.held) == 2


def test_a_new_controller_probes_whoever_takes_part() -> None:
    c = Controller()
    c.lost(3)
    c.probed(3, None, c.epoch(3))
    fresh = BrokerSessions(SessionSettings())
    effects = fresh.step(ControllerElected(c.image), 5)
    assert effects == (Probe(1, c.epoch(1)), Probe(2, c.epoch(2))), "3 is fenced"
    assert fresh.step(ProbeCompleted(1, None, c.epoch(1)), 6) == (), "2 may have died with it"
    with pytest.raises(NotController):
        fresh.is_live(2, 6)
    (fence,) = fresh.step(ProbeCompleted(2, UUID(int=2), c.epoch(2)), 6)
    assert isinstance(fence, Decide) and fence.decision == Fence(1, c.epoch(1), False)
    with pytest.raises(NotController):
        fresh.is_live(1, 6)
    fresh.step(DecisionCompleted(fence.decision), 6)
    assert fresh.is_live(2, 6) and not fresh.is_live(3, 6) and not fresh.is_live(1, 6)
    assert not fresh.is_live(99, 6)
    fresh.step(ControllerResigned(), 7)
    fresh.check_invariants()
    assert (
        fresh.tick(7)
        == fresh.step(ConnectionLost(1), 7)
        == fresh.step(ProbeCompleted(1, None), 7)
        == ()
    )
    with pytest.raises(NotController):
        fresh.step(HeartbeatRequest(1, 1, 1), 8)


def test_a_new_controller_forgives_no_silence_that_another_one_would_not_have() -> None:
    """The old one may have been cut off for seconds before it was deposed."""
    c = Controller()
    c.step(ControllerResigned())
    c.step(ControllerElected(c.image))
    c.pass_time(7000, beating=(1, 3))
    assert not c.fenced(2)
    c.pass_time(100, beating=(1, 3))
    assert c.fenced(2), "a session of 9 s that began with a heartbeat 2 s before"
    assert c.made == ["fence 2"]


@pytest.mark.parametrize(("silent_ms", "left_ms"), [(0, 7000), (3100, 5900), (60_000, 5000)])
def test_the_controller_before_is_judged_by_when_it_was_heard_last(silent_ms, left_ms) -> None:
    """Not by more than two intervals: this node may have heard less of it than others did."""
    c = Controller()
    c.step(ControllerResigned())
    c.step(ControllerElected(c.image, {2: silent_ms}))
    c.pass_time(left_ms, beating=(1, 3))
    assert not c.fenced(2)
    c.pass_time(100, beating=(1, 3))
    assert c.fenced(2) and c.made == ["fence 2"]


def test_who_presents_itself_to_a_new_controller_has_a_whole_session() -> None:
    c = Controller()
    c.step(ControllerResigned())
    c.step(ControllerElected(c.image))
    c.heartbeat(2)
    c.pass_time(9000, beating=(1, 3))
    assert not c.fenced(2)
    c.pass_time(100, beating=(1, 3))
    assert c.fenced(2)


def test_heartbeats_of_the_wrong_process() -> None:
    c = Controller()
    with pytest.raises(StaleBrokerEpoch):
        c.step(HeartbeatRequest(1, c.epoch(1) - 1, 5))
    with pytest.raises(BrokerIdNotRegistered):
        c.step(HeartbeatRequest(9, 1, 5))


def test_a_broker_may_know_of_its_registration_before_the_controller_has_applied_it() -> None:
    c = Controller()
    with pytest.raises(NotController):
        c.step(HeartbeatRequest(1, c.image.index + 1, c.image.index + 1))
    with pytest.raises(NotController):
        c.step(HeartbeatRequest(9, c.image.index + 1, c.image.index + 1))


def test_unfenced_when_caught_up_and_ready() -> None:
    c = Controller()
    c.register(4)
    answer = c.heartbeat(4, applied=c.image.index - 1)
    assert answer.fenced and c.fenced(4), "its own registration is news to it"
    c.heartbeat(4, wants_fence=True)
    assert c.fenced(4), "its logs are not open"
    c.heartbeat(4)
    assert not c.fenced(4)
    c.lost(4)
    c.probed(4, None, c.epoch(4))
    was_fenced_at = c.image.index
    c.apply(create_topic(c.image, topics.CreateTopic("u", UUID(int=8), 1, 1)))
    c.heartbeat(4, applied=was_fenced_at - 1)
    assert c.fenced(4), "it does not know yet that it was fenced"
    c.heartbeat(4, applied=was_fenced_at)
    assert not c.fenced(4)


def test_a_shutdown_waits_until_others_lead_and_know_it() -> None:
    c = Controller()
    leader = c.state.leader
    others = [node for node in (1, 2, 3) if node != leader]
    before = c.image.index
    for node in others:
        c.heartbeat(node, applied=before)
    assert not c.heartbeat(leader, stop=True).should_shut_down
    assert c.made == [f"shut-down {leader}"]
    assert c.state.leader in others and leader not in c.state.isr
    assert not c.heartbeat(leader, stop=True).should_shut_down, "nobody has applied it"
    c.heartbeat(others[0])
    assert not c.heartbeat(leader, stop=True).should_shut_down
    c.heartbeat(others[1])
    assert c.heartbeat(leader, stop=True).should_shut_down


def alone_in_isr(c: Controller) -> int:
    state = c.state
    request = partition_election.AlterIsr(
        TOPIC,
        0,
        state.leader,
        c.epoch(state.leader),
        state.leader_epoch,
        state.partition_epoch,
        ((state.leader, -1),),
    )
    c.apply(alter_isr(c.image, request))
    return state.leader


def test_the_last_of_an_isr_goes_on_until_another_has_caught_up() -> None:
    c = Controller()
    leader = alone_in_isr(c)
    for _ in range(3):
        assert not c.heartbeat(leader, stop=True).should_shut_down
    assert c.state.leader == leader
    follower = next(node for node in (1, 2, 3) if node != leader)
    state = c.state
    request = partition_election.AlterIsr(
        TOPIC,
        0,
        leader,
        c.epoch(leader),
        state.leader_epoch,
        state.partition_epoch,
        ((leader, -1), (follower, -1)),
    )
    c.apply(alter_isr(c.image, request))
    assert c.state.leader == follower and c.state.isr == (follower,)
    c.heartbeat(leader, stop=True)
    for node in (1, 2, 3):
        if node != leader:
            c.heartbeat(node)
    assert c.heartbeat(leader, stop=True).should_shut_down


def test_the_last_of_an_isr_stops_when_nobody_else_lives() -> None:
    c = Controller()
    leader = alone_in_isr(c)
    for node in (1, 2, 3):
        if node != leader:
            c.lost(node)
            c.probed(node, None, c.epoch(node))
    c.heartbeat(leader, stop=True)
    assert c.heartbeat(leader, stop=True).should_shut_down
    assert c.state.leader == NO_LEADER and c.state.isr == (leader,)


def test_a_fenced_broker_may_stop_at_once() -> None:
    c = Controller()
    c.register(4)
    assert c.heartbeat(4, stop=True).should_shut_down and c.fenced(4)


def test_the_elr_is_cleared_once_its_leader_was_heard() -> None:
    c = Controller(clear_elr_after_ms=1000)
    gone = c.state.leader
    rest = [node for node in (1, 2, 3) if node != gone]
    c.lost(gone)
    c.probed(gone, None, c.epoch(gone))
    assert c.state.elr == (gone,)
    behind = c.image.index - 1
    for _ in range(30):
        c.pass_time(100)
        for node in rest:
            c.heartbeat(node, applied=behind)
    assert c.state.elr == (gone,), "the leader may not know of it yet"
    c.pass_time(1500, beating=[node for node in rest if node != c.state.leader])
    assert c.state.elr == (gone,), "only the leader counts"
    c.pass_time(1500, beating=rest)
    assert c.state.elr == () and c.made[-1] == "clear-elr -1"


def all_restart(c: Controller) -> None:
    for node in (3, 1, 2):
        c.lost(node)
        c.probed(node, None, c.epoch(node))
    for node in (2, 1):
        c.register(node, incarnation=10 + node)
        c.heartbeat(node)


def report(c: Controller, node: int, end: int) -> None:
    log = ReplicaLog(*KEY, c.state.leader_epoch, 0, end)
    c.heartbeat(node, logs=[log])


def test_a_whole_isr_that_restarted_waits_for_all_of_it() -> None:
    c = Controller()
    all_restart(c)
    report(c, 1, 10)
    report(c, 2, 20)
    c.pass_time(29_000, beating=(1, 2))
    (waiting,) = c.sessions.waiting()
    assert waiting.missing == (3,) and not waiting.overdue
    c.pass_time(2000, beating=(1, 2))
    (waiting,) = c.sessions.waiting()
    assert waiting.overdue and "node(s) 3" in str(waiting) and "--unclean" in str(waiting)
    assert str(waiting).count(f"{waiting.topic}:0") == 2 and f"{waiting.topic}-0" not in str(
        waiting
    )
    assert c.state.leader == NO_LEADER
    c.register(3, incarnation=13)
    c.heartbeat(3)
    report(c, 3, 15)
    assert c.state.leader == 2 and not c.state.unclean
    assert c.sessions.waiting() == ()


def test_a_report_that_came_before_the_broker_was_unfenced_counts_then() -> None:
    c = Controller()
    all_restart(c)
    c.register(3, incarnation=13)
    for node, end in ((1, 10), (2, 20)):
        report(c, node, end)
    log = ReplicaLog(*KEY, c.state.leader_epoch, 0, 30)
    c.heartbeat(3, applied=0, logs=[log])
    assert c.fenced(3) and c.state.leader == NO_LEADER
    c.heartbeat(3)
    assert c.state.leader == 3


def test_where_losses_are_allowed_the_wait_ends() -> None:
    c = Controller(unclean=True)
    all_restart(c)
    report(c, 1, 10)
    report(c, 2, 20)
    c.pass_time(25_000, beating=(1, 2))
    assert c.state.leader == NO_LEADER
    c.pass_time(6000, beating=(1, 2))
    assert c.state.leader == 2 and c.state.unclean


def test_a_partition_whose_last_member_is_away_names_it() -> None:
    c = Controller()
    for node in (1, 2, 3):
        c.lost(node)
        c.probed(node, None, c.epoch(node))
    for node in (1, 2):
        c.heartbeat(node)
    c.pass_time(1000, beating=(1, 2))
    (waiting,) = c.sessions.waiting()
    assert waiting.missing == (3,) and not waiting.recovering
    assert "the last member of its ISR is not there" in str(waiting)
    c.heartbeat(3)
    c.pass_time(1000, beating=(1, 2, 3))
    assert c.state.leader == 3 and c.sessions.waiting() == ()


def test_preferred_leaders_come_back() -> None:
    c = Controller(imbalance_check_ms=1000)
    leader = c.state.leader
    c.lost(leader)
    c.probed(leader, None, c.epoch(leader))
    c.heartbeat(leader)
    state = c.state
    request = partition_election.AlterIsr(
        TOPIC,
        0,
        state.leader,
        c.epoch(state.leader),
        state.leader_epoch,
        state.partition_epoch,
        tuple((b, -1) for b in state.replicas),
    )
    c.apply(alter_isr(c.image, request))
    assert c.state.leader != leader
    c.pass_time(1100, beating=(1, 2, 3))
    assert c.state.leader == leader and c.made[-1] == "balance -1"
    off = Controller(imbalance_check_ms=1000, auto_leader_rebalance=False)
    off.apply(reassignment.reassign(off.image, "t", 0, off.state.replicas[::-1]))
    off.pass_time(1100, beating=(1, 2, 3))
    assert off.state.leader != off.state.replicas[0]


def test_losses_may_be_allowed_after_the_fact() -> None:
    c = Controller()
    leader = alone_in_isr(c)
    c.lost(leader)
    c.probed(leader, None, c.epoch(leader))
    rest = [node for node in (1, 2, 3) if node != leader]
    c.pass_time(1000, beating=rest)
    assert c.state.leader == NO_LEADER
    c.step(SettingsChanged(SessionSettings(unclean_default=True)))
    c.pass_time(1000, beating=rest)
    assert c.state.leader in rest and c.state.unclean


events = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "beat",
                "beat",
                "lose",
                "refused",
                "other",
                "same",
                "timeout",
                "wait",
                "sleep",
                "register",
                "stop",
                "restart",
            ]
        ),
        st.sampled_from([1, 2, 3]),
    ),
    max_size=50,
)


@settings(max_examples=300, deadline=None)
@example([("restart", 1), ("refused", 1), ("same", 1), ("wait", 1)])
@given(events)
def test_nobody_is_fenced_without_evidence_or_silence(history) -> None:
    c = Controller()
    quiet = dict.fromkeys((1, 2, 3), 0)  # ms of silence while the controller was awake
    evidence: set[int] = set()
    heard: set[int] = set()  # in this controller's time
    for kind, node in history:
        before = {n for n in (1, 2, 3) if c.fenced(n)}
        # The result of a probe that nobody awaits says nothing.
        answers = kind == "same" and c.sessions._sessions[node].probing
        heard |= {node} if kind in ("beat", "stop") or answers else set()
        if not c.sessions._examining:
            evidence = set()
        match kind:
            case "beat" | "stop":
                evidence.discard(node)
                c.heartbeat(node, stop=kind == "stop")
                quiet[node] = 0
            case "lose":
                c.lost(node)
            case "refused" | "other" | "same" | "timeout":
                evidence |= {node} if kind in ("refused", "other") else set()
                found = {"refused": None, "other": OTHER, "timeout": TIMEOUT}
                same = c.image.brokers[node].incarnation
                c.probed(node, found.get(kind, same), c.epoch(node))
            case "wait":
                c.pass_time(3000)
                quiet = {n: ms + 3000 for n, ms in quiet.items()}
            case "sleep":
                c.now_ms += 30_000
                c.tick()
                quiet = dict.fromkeys(quiet, 0)
            case "register" if not c.sessions._examining and not c.sessions.is_live(node, c.now_ms):
                c.register(node, incarnation=c.now_ms + c.image.index)
                evidence, quiet[node] = {node}, 0
                heard.discard(node)
            case "restart":
                evidence, heard = set(), set()
                c.step(ControllerElected(c.image))
                quiet = dict.fromkeys(quiet, 0)
        newly = {n for n in (1, 2, 3) if c.fenced(n)} - before
        assert not heard - before or all(n in evidence or quiet[n] >= 9000 for n in newly)
        assert all(c.fenced(n) for n in quiet if quiet[n] > 9100)


def serving(level):
    return (Feature("transaction.version", level),)


def test_a_feature_is_finalized_when_every_registered_broker_serves_it():
    c = Controller()
    c.heartbeat(1, features=serving(2))
    c.heartbeat(2, features=serving(2))
    assert c.image.features == {}
    c.heartbeat(3, features=serving(1))
    assert (c.image.features, c.made) == ({"transaction.version": 1}, ["finalize-features -1"])
    c.heartbeat(3, features=serving(2))
    assert c.image.features == {"transaction.version": 2}
    c.heartbeat(3, features=serving(1))
    assert c.image.features == {"transaction.version": 2}, "never lowered"


def test_records_of_security_wait_for_every_broker_and_the_refusal_names_who_is_missing():
    c = Controller()
    new = (*serving(2), Feature(SECURITY, 1))
    c.heartbeat(1, features=new)
    c.heartbeat(2, features=serving(2))
    assert c.sessions.brokers_without_feature(SECURITY, 1) == (2, 3)
    with pytest.raises(UnsupportedVersion, match=r"kept.security 1, but node\(s\) 2, 3 have not"):
        check_security(c.image, c.sessions.brokers_without_feature(SECURITY, 1))
    c.heartbeat(2, features=new)
    c.heartbeat(3, features=new)
    assert c.sessions.brokers_without_feature(SECURITY, 1) == ()
    check_security(c.image, ())


def test_a_new_controller_waits_for_the_word_of_all_before_it_finalizes():
    c = Controller()
    c.heartbeat(1, features=serving(2))
    c.heartbeat(2, features=serving(2))
    c.step(ControllerElected(c.image))
    c.heartbeat(3, features=serving(2))
    assert c.image.features == {}
    c.heartbeat(1, features=serving(2))
    c.heartbeat(2, features=serving(2))
    assert c.image.features == {"transaction.version": 2}


def test_a_broker_that_registers_before_the_decision_is_heard_first():
    c = Controller(nodes=(1,))
    c.held = []
    c.heartbeat(1, features=serving(2))
    (decision,) = c.held
    c.held = None
    c.register(2)
    c.make(decision)
    assert c.image.features == {}
    c.heartbeat(2)
    c.heartbeat(1, features=serving(2))
    assert c.image.features == {}


def test_the_first_broker_finalizes_before_it_takes_part():
    c = Controller(nodes=())
    c.register(1)
    c.heartbeat(1, features=serving(2))
    assert c.made == ["finalize-features -1", "unfence 1"]


@pytest.mark.parametrize("level", [0, 1])
def test_who_does_not_serve_what_is_finalized_is_not_registered(level):
    c = Controller()
    c.apply([FeatureRecord("transaction.version", 2)])
    who = RegisterRequest(4, UUID(int=4), (), features=serving(level)[: level + 1])
    with pytest.raises(UnsupportedVersion, match=r"broker 4 does not serve transaction.version"):
        register_broker(c.image, who)
    assert register_broker(c.image, replace(who, features=serving(2)))
