from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.controller import broker_lifecycle as life
from kept.cluster.controller import topics
from kept.cluster.controller.broker_lifecycle import (
    BrokerLifecycle,
    BrokerState,
    Exit,
    LifecycleSettings,
    Register,
    ResumeServing,
    SendHeartbeat,
    StopServing,
)
from kept.cluster.controller.brokers import (
    RegisterRequest,
    fence_brokers,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from kept.cluster.controller.heartbeats import HeartbeatReply
from kept.cluster.controller.topics import create_topic
from kept.cluster.metadata.image import Image, ImageApplied
from kept.cluster.metadata.records import Endpoint
from kept.storage.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    InvalidRequest,
    InvariantViolation,
    NotController,
    StaleBrokerEpoch,
)

MINE = UUID(int=100)
"""The log directory of every process that runs here, one after the other."""
ME = RegisterRequest(1, UUID(int=11), (), log_dirs=(MINE,))
DEAD = RegisterRequest(1, UUID(int=10), (), log_dirs=(UUID(int=101), MINE))
"""A process that ran here before."""
HERE = Endpoint("NODE", "PLAINTEXT", "elsewhere", 10092)


class Broker:
    """A lifecycle, the image that the test decides on, and a clock."""

    def __init__(self, **times) -> None:
        self.core = BrokerLifecycle(ME, LifecycleSettings(**times))
        self.image = Image()
        self.now_ms = 5_000
        self.effects: list[life.Effect] = []

    def step(self, event, *fields):
        return self.performed(self.core.step(event(*fields), self.now_ms))

    def performed(self, effects):
        self.effects = list(effects)
        self.core.check_invariants()
        return self.effects

    def beats(self) -> list[SendHeartbeat]:
        return [effect for effect in self.effects if isinstance(effect, SendHeartbeat)]

    def apply(self, records, tell=True):
        self.image, _ = self.image.apply(records)
        return self.step(ImageApplied, self.image) if tell else []

    def may_serve(self, after_ms: int = 0) -> bool:
        """Whether leadership may be acted on at that moment."""
        return self.now_ms + after_ms < self.core.valid_until_ms

    def tick(self, ms: int = 0):
        self.now_ms += ms
        return self.performed(self.core.tick(self.now_ms))

    def answer(self, number: int, fenced=False, stop=False, index=None):
        index = self.image.index if index is None else index
        return self.step(
            life.HeartbeatResponseReceived, number, HeartbeatReply(fenced, stop, index)
        )

    @property
    def epoch(self) -> int:
        return self.image.brokers[1].broker_epoch


def registered(**times) -> Broker:
    b = Broker(**times)
    b.step(life.Started)
    b.apply(register_broker(b.image, ME), tell=False)
    b.step(life.Registered, b.epoch)
    return b


def running(**times) -> Broker:
    """Registered, unfenced, nothing outstanding; its next heartbeat is number 3."""
    b = registered(**times)
    b.step(life.LogsRecovered)
    b.step(ImageApplied, b.image)
    b.answer(1, fenced=True)
    b.apply(unfence_broker(b.image, 1, b.epoch))
    b.answer(2)
    assert b.core.state is BrokerState.RUNNING and b.may_serve()
    return b


def test_from_start_to_running() -> None:
    b = Broker()
    assert b.tick() == [] and b.core.state is BrokerState.INITIAL
    assert b.step(life.Started) == [Register(ME)]
    assert b.core.state is BrokerState.REGISTERING and not b.may_serve()
    b.apply(register_broker(b.image, ME), tell=False)
    (first,) = b.step(life.Registered, b.epoch)
    assert first == SendHeartbeat(1, 1, b.epoch, 0, wants_fence=True, wants_shutdown=False)
    assert b.core.state is BrokerState.FENCED and not b.may_serve()
    assert b.step(ImageApplied, b.image) == [ResumeServing()]
    assert b.step(life.LogsRecovered) == [], "one heartbeat at a time"
    (second,) = b.answer(1, fenced=True)
    assert second.applied_index == b.image.index and not second.wants_fence
    b.apply(unfence_broker(b.image, 1, b.epoch))
    assert b.core.state is BrokerState.RUNNING


def test_heartbeats_go_out_at_their_interval() -> None:
    b = running()
    assert b.tick(1900) == []
    (beat,) = b.tick(100)
    assert beat.number == 3
    assert b.tick(1900) == [], "one is outstanding"
    (again,) = b.tick(1200)
    assert again.number == 4, "no answer: another one"
    b.answer(3)
    assert b.core._outstanding == (4, b.now_ms), "the late answer is not its answer"


def test_a_lost_answer_to_the_registration_is_read_from_the_image() -> None:
    b = Broker()
    b.step(life.Started)
    b.apply(register_broker(b.image, ME))
    assert b.core.state is BrokerState.FENCED and b.core.broker_epoch == b.epoch


def test_nothing_is_served_on_the_registration_of_the_process_before() -> None:
    b = Broker()
    before = RegisterRequest(1, UUID(int=10), ())
    b.step(life.Started)
    b.apply(register_broker(b.image, before, fenced=False))
    b.tick(100)
    assert b.core.state is BrokerState.REGISTERING and not b.may_serve()


def test_registration_is_tried_until_somebody_answers() -> None:
    b = Broker()
    b.step(life.Started)
    for _ in range(100):
        b.step(life.RegistrationFailed, NotController("who?"))
        assert b.effects == []
        assert b.tick(100) == [Register(ME)]
    b.tick(1000)
    b.tick(1000)
    assert b.tick(1000) == [Register(ME)], "an unanswered one is sent again"


def test_an_id_whose_holder_lives_is_given_up() -> None:
    b = Broker()
    b.step(life.Started)
    for _ in range(179):
        b.step(life.RegistrationFailed, DuplicateBrokerRegistration("broker 1 lives at x:1"))
        b.tick(100)
    assert b.core.state is BrokerState.REGISTERING
    b.tick(100)
    (out,) = b.step(life.RegistrationFailed, DuplicateBrokerRegistration("broker 1 lives at x:1"))
    assert out.failed and "broker 1 lives at x:1" in out.reason


def test_a_new_controller_has_time_to_find_the_holder_dead() -> None:
    b = Broker()
    b.step(life.Started)
    b.step(life.RegistrationFailed, DuplicateBrokerRegistration("broker 1 lives at x:1"))
    b.tick(17_900)
    b.step(life.ControllerChanged)
    b.tick(1000)
    b.step(life.RegistrationFailed, DuplicateBrokerRegistration("broker 1 lives at x:1"))
    assert b.core.state is BrokerState.REGISTERING


def test_a_refused_registration_ends_the_process() -> None:
    b = Broker()
    b.step(life.Started)
    (out,) = b.step(life.RegistrationFailed, InvalidRequest("another cluster id"))
    assert out == Exit("registration refused: another cluster id", failed=True)
    assert b.core.tick(10**9) == (), "stopped is stopped"


def test_a_stall_suspends_until_a_heartbeat_sent_after_it_is_answered() -> None:
    b = running()
    (old,) = b.tick(1999) or b.tick(1)
    b.now_ms += 30_000
    assert not b.may_serve(), "before any event runs"
    stop, new = b.answer(old.number)
    assert isinstance(stop, StopServing) and "stood still" in stop.reason
    assert new.number > old.number and not b.may_serve()
    assert b.answer(old.number) == [], "sent before the stall"
    b.tick(100)
    assert not b.may_serve(), "a tick does not end it"
    ahead = b.image.index + 1
    assert b.answer(new.number, index=ahead) == []
    assert not b.may_serve(), "the controller knows more"
    b.apply(create_topic(b.image, topics.CreateTopic("t", UUID(int=7), 1, 1)), tell=False)
    assert b.step(ImageApplied, b.image) == [ResumeServing()]
    assert b.may_serve()


def test_a_second_stall_voids_the_answer_to_the_first() -> None:
    b = running()
    b.now_ms += 10_000
    first = b.tick()[-1]
    b.now_ms += 10_000
    effects = b.answer(first.number)
    assert b.core.suspended and not any(isinstance(e, ResumeServing) for e in effects)
    (second,) = b.beats()
    assert b.answer(second.number) == [ResumeServing()]


def test_ticks_in_time_are_no_stall() -> None:
    b = running()
    for _ in range(200):
        b.tick(500)
        assert b.may_serve(after_ms=1900) and not b.core.suspended
        for beat in b.beats():
            b.step(life.HeartbeatFailed, beat.number, NotController("gone"))
    assert b.core.state is BrokerState.RUNNING, "silence of the controllers suspends nothing"


def test_times_that_let_a_fenced_broker_serve_are_refused() -> None:
    with pytest.raises(InvariantViolation, match="fenced broker could serve"):
        LifecycleSettings(stall_ms=7000)


def test_a_fenced_broker_asks_to_be_let_in_again() -> None:
    b = running()
    (beat,) = b.apply(fence_brokers(b.image, {1: b.epoch}))
    assert b.core.state is BrokerState.FENCED and beat.applied_index == b.image.index


@pytest.mark.parametrize("directories", [(), (UUID(int=101),)])
def test_another_process_with_this_id_elsewhere_ends_this_one(directories) -> None:
    b = running()
    other = RegisterRequest(1, UUID(int=99), (HERE,), log_dirs=directories)
    stop, out = b.apply(register_broker(b.image, other))
    assert isinstance(stop, StopServing) and out.failed
    assert "elsewhere:10092" in out.reason and "own node.id" in out.reason


def test_a_dead_process_that_is_registered_late_is_displaced_again() -> None:
    b = running()
    stop, again = b.apply(register_broker(b.image, DEAD))
    assert isinstance(stop, StopServing) and again == Register(ME)
    assert not b.may_serve()
    b.apply(register_broker(b.image, ME), tell=False)
    b.step(life.Registered, b.epoch)
    assert not b.may_serve(), "the image still shows the dead one"
    assert b.step(ImageApplied, b.image) == [ResumeServing()]
    assert b.core.state is BrokerState.FENCED and b.core.broker_epoch == b.epoch


def test_a_dead_process_that_is_registered_late_does_not_keep_a_shutdown_waiting() -> None:
    b = running()
    b.step(life.ShutdownRequested)
    stop, out = b.apply(register_broker(b.image, DEAD))
    assert isinstance(stop, StopServing) and not out.failed


def test_a_stale_epoch_stops_serving_until_the_image_shows_who_is_registered() -> None:
    b = running()
    b.tick(1000)
    b.tick(1000)
    (stop,) = b.step(life.HeartbeatFailed, 3, StaleBrokerEpoch("newer"))
    assert isinstance(stop, StopServing) and not b.may_serve()
    (beat,) = b.tick(100)
    assert beat.number == 4 and b.step(life.HeartbeatFailed, 4, StaleBrokerEpoch("newer")) == []
    assert b.apply(register_broker(b.image, DEAD)) == [Register(ME)]


def test_unregistered_it_registers_again() -> None:
    b = running()
    effects = b.apply(unregister_broker(b.image, 1))
    assert effects == [StopServing("unregistered"), Register(ME)]
    b.apply(register_broker(b.image, ME))
    assert b.core.state is BrokerState.FENCED and b.core.broker_epoch == b.epoch
    b.tick(100)
    b.step(life.HeartbeatFailed, b.core._number, BrokerIdNotRegistered("who?"))
    assert b.core.state is BrokerState.REGISTERING


def test_a_new_controller_hears_of_it_at_once() -> None:
    b = running()
    (beat,) = b.step(life.ControllerChanged)
    assert beat.number == 3
    (again,) = b.step(life.ControllerChanged)
    assert again.number == 4, "what went to the old one is lost"


def test_shutdown_in_order() -> None:
    b = running()
    (beat,) = b.step(life.ShutdownRequested)
    assert beat.wants_shutdown and b.core.state is BrokerState.SHUTTING_DOWN
    assert b.answer(beat.number) == [] and b.may_serve(), "it still leads"
    assert b.step(life.ShutdownRequested) == []
    (beat,) = b.tick(100)
    assert beat.wants_shutdown
    stop, out = b.answer(beat.number, stop=True)
    assert isinstance(stop, StopServing) and out == Exit("stopped in order", failed=False)
    assert not b.may_serve()


def test_shutdown_without_leave_ends_too() -> None:
    b = running()
    b.step(life.ShutdownRequested)
    for _ in range(300):
        assert not any(isinstance(e, Exit) for e in b.effects)
        b.tick(100)
    assert isinstance(b.effects[-1], Exit) and not b.effects[-1].failed


def test_shutdown_asks_no_longer_when_nobody_will_lead() -> None:
    b = running()
    before = b.core.state
    assert b.step(life.QuorumLost, "all gone") == []
    assert b.core.state is before, "who does not stop goes on"
    b.step(life.ShutdownRequested)
    stop, out = b.step(life.QuorumLost, "all gone")
    assert isinstance(stop, StopServing) and out == Exit("all gone", failed=False)


def test_shutdown_of_who_takes_no_part_is_immediate() -> None:
    for b in (Broker(), registered()):
        assert isinstance(b.step(life.ShutdownRequested)[-1], Exit)
    b = running()
    b.step(life.ShutdownRequested)
    assert isinstance(b.apply(fence_brokers(b.image, {1: b.epoch}))[-1], Exit)


def test_others_say_at_once_that_they_know_who_leads_for_a_leaving_one() -> None:
    b = running()
    other = RegisterRequest(2, UUID(int=2), ())
    b.apply(register_broker(b.image, other, fenced=False))
    assert b.beats() == []
    b.apply(shut_down_broker(b.image, 2, b.image.brokers[2].broker_epoch))
    (beat,) = b.beats()
    assert beat.applied_index == b.image.index


def test_logs_that_an_election_waits_for_are_reported() -> None:
    b = Broker()
    image, topic = Image(), UUID(int=7)
    for node in (1, 2):
        who = RegisterRequest(node, UUID(int=node), ())
        image, _ = image.apply(register_broker(image, who, fenced=False))
    image, _ = image.apply(create_topic(image, topics.CreateTopic("t", topic, 1, 2)))
    for node in (2, 1):
        image, _ = image.apply(fence_brokers(image, {node: image.brokers[node].broker_epoch}))
    image, _ = image.apply(register_broker(image, ME))
    assert image.partition(topic, 0).recovering
    b.image = image
    b.step(life.Started)
    b.step(ImageApplied, image)
    assert b.beats()[0].report == (), "its logs are not open"
    b.step(life.LogsRecovered)
    (beat,) = b.answer(1, fenced=True)
    assert beat.report == ((topic, 0),)
    b.answer(2, fenced=True)
    assert [x.report for x in b.beats()] in ([], [()]), "told once"
    b.step(life.ControllerChanged)
    assert b.beats()[0].report == ((topic, 0),), "the new controller knows nothing"


events = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "tick",
                "tick",
                "sleep",
                "answer",
                "old",
                "fail",
                "stale",
                "unknown",
                "image",
                "fence",
                "unfence",
                "unregister",
                "register",
                "other",
                "dead",
                "controller",
                "logs",
                "start",
                "stop",
            ]
        ),
        st.integers(0, 3000),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(events)
def test_it_serves_only_awake_and_registered(history) -> None:
    b = Broker()
    tick_at = None
    slept_at: int | None = None
    sent: dict[int, int] = {}
    serving = False
    for kind, number in history:
        if kind == "start" and b.core.state is not BrokerState.INITIAL:
            continue
        b.now_ms += number % 400
        mine = b.image.brokers.get(1)
        try_apply = {
            "register": lambda: register_broker(b.image, ME),
            "fence": lambda m=mine: fence_brokers(b.image, {1: m.broker_epoch}) if m else [],
            "unfence": lambda m=mine: unfence_broker(b.image, 1, m.broker_epoch) if m else [],
            "unregister": lambda m=mine: unregister_broker(b.image, 1) if m else [],
            "dead": lambda: register_broker(b.image, DEAD),
            "other": lambda rare=number < 100: (
                register_broker(b.image, RegisterRequest(1, UUID(int=5), ())) if rare else []
            ),
        }
        if kind == "sleep":
            b.now_ms += 20_000
        if tick_at is not None and b.now_ms >= tick_at + 2000:
            slept_at = b.now_ms
            assert not b.may_serve(), "it has not run for too long"
        match kind:
            case "tick" | "sleep":
                tick_at = b.now_ms if b.core.state is not BrokerState.INITIAL else None
                b.tick()
            case "answer":
                b.answer(b.core._number, stop=number < 300)
            case "old":
                b.answer(max(0, b.core._number - 1))
            case "fail":
                b.step(life.HeartbeatFailed, b.core._number, NotController("?"))
            case "stale" if number < 100:
                b.step(life.HeartbeatFailed, b.core._number, StaleBrokerEpoch("?"))
            case "unknown" if number < 300:
                b.step(life.HeartbeatFailed, b.core._number, BrokerIdNotRegistered("?"))
            case "start":
                tick_at = b.now_ms
                b.step(life.Started)
            case "controller":
                b.step(life.ControllerChanged)
            case "logs":
                b.step(life.LogsRecovered)
            case "stop" if number < 300:
                b.step(life.ShutdownRequested)
            case "image" | "register" | "fence" | "unfence" | "unregister" | "other" | "dead":
                b.apply(try_apply.get(kind, list)())
        tick_at = b.now_ms if slept_at == b.now_ms and tick_at is not None else tick_at
        for effect in b.effects:
            if isinstance(effect, SendHeartbeat):
                assert effect.number not in sent, "every heartbeat has its own number"
                sent[effect.number] = b.now_ms
            elif isinstance(effect, ResumeServing | StopServing):
                assert serving != isinstance(effect, ResumeServing), "they alternate"
                serving = isinstance(effect, ResumeServing)
        b.effects = []
        if b.may_serve():
            now = b.image.brokers.get(1)
            assert serving and now is not None and now.incarnation == ME.incarnation


def test_the_answer_to_the_registration_outruns_the_image() -> None:
    """Until the image shows this process, it shows what the one before led."""
    b = Broker()
    b.step(life.Started)
    before = RegisterRequest(1, UUID(int=10), ())
    b.apply(register_broker(b.image, before, fenced=False))
    led_by_the_old_one = b.image
    b.apply(register_broker(b.image, ME), tell=False)
    b.step(life.Registered, b.epoch)
    b.step(ImageApplied, led_by_the_old_one)
    b.tick(100)
    assert not b.may_serve()
    b.step(ImageApplied, b.image)
    assert b.core.state is BrokerState.FENCED and b.may_serve()
