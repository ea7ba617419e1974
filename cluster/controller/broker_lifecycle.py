"""The broker's side of its membership: register, heartbeat, serve, stop in order. Pure.

A state machine (:mod:`kept.state_machine`)::

    INITIAL --Start--> REGISTERING --Registered--> FENCED --image: unfenced--> RUNNING
                            ^                        ^----image: fenced----------'
                            '--- unregistered, or the process before it was registered late
    any --ShutDown--> SHUTTING_DOWN --may stop, or out of patience--> STOPPED
    any --a process elsewhere has the id, or the registration is refused--> STOPPED

One heartbeat is outstanding at a time; it leaves at once when there is something to report (a new
controller, the image caught up, a log to report), else every ``heartbeat_interval_ms``.

ResumeServing is the first leave to serve (the image shows this very process registered) as well as
the end of a suspension; nothing is served before it.

**Stalls.** A process that was stopped (SIGSTOP, a paused machine) may have been fenced meanwhile,
and must not act on what it led. ``valid_until_ms`` is renewed by each tick; whoever is about to act
on leadership compares it with the clock first, since the wake-up may run a request before the tick.
A tick that comes later than that suspends serving until a heartbeat *sent after* it was answered
and the image has come as far as the controller's. ``stall_ms`` + ``heartbeat_interval_ms`` is less
than the session timeout, so a process that is fenced in its sleep always notices. (Silence of the
controllers alone suspends nothing: a deposed leader that runs cannot acknowledge for its ISR.)

**Another process in its place.** A Register may be under way for long, so that of the process
before may be taken after this one's. Both name the same log directories, which this one has locked:
the other is dead, and this one registers again. A process that names others holds the id elsewhere,
and lives, or this one's Register would have been refused: this one ends. (Of two that run on copies
of one directory, the one that is heard stays, and the other's registration is refused.)

After ``BrokerLifecycleManager``; stalls and displacement by a dead process are ours. ``now_ms`` is
of a monotonic clock.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct

from kept.cluster.controller.brokers import RegisterRequest, address_of
from kept.cluster.controller.heartbeats import MAX_LOGS_PER_HEARTBEAT, HeartbeatReply, PartitionKey
from kept.cluster.controller.unclean_recovery import partitions_awaiting
from kept.cluster.metadata.image import BrokerImage, Image, ImageApplied
from kept.storage.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    InvariantViolation,
    KeptError,
    PeerError,
    StaleBrokerEpoch,
)

SUSPENDED: Final = -1
"""``valid_until_ms`` while nothing may be served."""


class BrokerState(Enum):
    """Where a broker is in its life."""

    INITIAL = "initial"
    REGISTERING = "registering"
    FENCED = "fenced"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting down"
    STOPPED = "stopped"


class LifecycleSettings(Struct, frozen=True):
    """Times of a broker's life, in ms.

    ``stall_ms``: a gap between ticks that is taken for a stall. ``answer_timeout_ms``: an
    unanswered request is sent again. ``retry_ms``: pause after a failure, and between heartbeats of
    a broker that is fenced or shuts down. ``shutdown_timeout_ms``: how long a shutdown waits for
    its partitions to move. A registration is tried for ever while nobody answers; that of an id
    whose holder is alive is given up after two session timeouts of one controller: one is enough to
    find a dead one.
    """

    heartbeat_interval_ms: int = 2000
    session_timeout_ms: int = 9000
    stall_ms: int = 2000
    answer_timeout_ms: int = 3000
    retry_ms: int = 100
    shutdown_timeout_ms: int = 30_000

    def __post_init__(self) -> None:
        if self.stall_ms + self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise InvariantViolation(
                f"a stall of {self.stall_ms} ms and a heartbeat interval of "
                f"{self.heartbeat_interval_ms} ms do not fit a session of "
                f"{self.session_timeout_ms} ms: a fenced broker could serve"
            )


# Events.


class Started(Struct, frozen=True):
    """Begin: the process is up and follows the metadata log."""


class Registered(Struct, frozen=True):
    """The controller has registered this process."""

    broker_epoch: int


class RegistrationFailed(Struct, frozen=True):
    """A Register came to nothing."""

    error: KeptError


class HeartbeatResponseReceived(Struct, frozen=True):
    """The answer to heartbeat ``number``."""

    number: int
    reply: HeartbeatReply


class HeartbeatFailed(Struct, frozen=True):
    """Heartbeat ``number`` came to nothing."""

    number: int
    error: KeptError


class ControllerChanged(Struct, frozen=True):
    """Another controller leads, or the stream to it is new: it has heard nothing of us."""


class LogsRecovered(Struct, frozen=True):
    """The logs are open and recovered: this broker could lead."""


class ShutdownRequested(Struct, frozen=True):
    """Stop in order (TERM)."""


class QuorumLost(Struct, frozen=True):
    """No node leads, and none will: a broker that shuts down need not wait any longer."""

    reason: str


Event = (
    Started
    | Registered
    | RegistrationFailed
    | HeartbeatResponseReceived
    | HeartbeatFailed
    | ImageApplied
    | ControllerChanged
    | LogsRecovered
    | ShutdownRequested
    | QuorumLost
)

# Effects.


class Register(Struct, frozen=True):
    """Have the active controller register this process; report Registered or RegistrationFailed."""

    registration: RegisterRequest


class SendHeartbeat(Struct, frozen=True):
    """Send a heartbeat to the active controller; report HeartbeatResponseReceived or
    HeartbeatFailed.

    ``report`` names partitions whose logs' lengths go with it (:class:`.heartbeats.ReplicaLog`,
    read when it is sent).
    """

    number: int
    broker_id: int
    broker_epoch: int
    applied_index: int
    wants_fence: bool
    wants_shutdown: bool
    report: tuple[PartitionKey, ...] = ()


class StopServing(Struct, frozen=True):
    """Refuse clients and followers (NotLeaderOrFollower) until ResumeServing."""

    reason: str


class ResumeServing(Struct, frozen=True):
    """Serve again what the image of now says."""


class Exit(Struct, frozen=True):
    """End the process: close the logs, leave the clean mark. ``failed``: exit code 1."""

    reason: str
    failed: bool


Effect = Register | SendHeartbeat | StopServing | ResumeServing | Exit


class BrokerLifecycle:
    """One broker process's membership: it registers, sends heartbeats, serves and stops."""

    def __init__(self, registration: RegisterRequest, settings: LifecycleSettings) -> None:
        self.registration = registration
        self.settings = settings
        self.state = BrokerState.INITIAL
        self.broker_epoch = -1
        self.valid_until_ms = SUSPENDED
        self.image = Image()
        self._serving = False
        self._logs_open = False
        self._running_until_ms = SUSPENDED  # the last tick + stall_ms
        self._effects: list[Effect] = []  # of the step that is under way
        self._number = 0  # of the last heartbeat
        self._outstanding: tuple[int, int] | None = None  # (number, sent at)
        self._next_ms = 0  # when the next request is due
        self._resend = False  # there is news since the last one was sent
        self._give_up_ms: int | None = None  # of a refused registration, or of a shutdown
        self._resume_from: int | None = None  # the answer to this or a later number ends a stall
        self._resume_index: int | None = None  # it was answered: how far the image must come
        self._reported: dict[PartitionKey, int] = {}  # -> leader epoch
        self._report: dict[PartitionKey, int] = {}  # sent with the outstanding heartbeat

    @property
    def suspended(self) -> bool:
        """After a stall, until the controller has answered."""
        return self._resume_from is not None

    def step(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event; returns what to do, in order."""
        return self._turn(event, now_ms)

    def tick(self, now_ms: int) -> tuple[Effect, ...]:
        """Time passes; at least four times per ``stall_ms``."""
        return self._turn(None, now_ms)

    def _turn(self, event: Event | None, now_ms: int) -> tuple[Effect, ...]:
        if self.state is BrokerState.STOPPED:
            return ()
        self._notice_stall(now_ms)
        if event is None:
            self._tick(now_ms)
        else:
            self._handle(event, now_ms)
        self._send_when_due(now_ms)
        effects = tuple(self._effects)
        self._effects.clear()
        return effects

    def _handle(self, event: Event, now_ms: int) -> None:
        match event:
            case HeartbeatResponseReceived():
                self._heartbeat_answered(event, now_ms)
            case HeartbeatFailed():
                self._heartbeat_failed(event, now_ms)
            case ImageApplied():
                self._image_applied(event.image, now_ms)
            case Started():
                self._start(now_ms)
            case Registered():
                self._registered(event.broker_epoch, now_ms)
            case RegistrationFailed():
                self._registration_failed(event, now_ms)
            case ControllerChanged():
                self._outstanding = None
                if self.state is BrokerState.REGISTERING:
                    self._give_up_ms = None  # it takes everybody for alive at first
                self._reported.clear()
                self._next_ms = now_ms
            case LogsRecovered():
                self._logs_open = True
                self._send_soon(now_ms)
            case ShutdownRequested():
                self._shut_down(now_ms)
            case QuorumLost():
                if self.state is BrokerState.SHUTTING_DOWN:
                    self._exit(event.reason)

    # Time.

    def _notice_stall(self, now_ms: int) -> None:
        if self._running_until_ms == SUSPENDED or now_ms < self._running_until_ms:
            return
        slept = now_ms - self._running_until_ms + self.settings.stall_ms
        self._running_until_ms = now_ms + self.settings.stall_ms
        if self.state in (BrokerState.INITIAL, BrokerState.REGISTERING):
            return
        self._resume_from, self._resume_index = self._number + 1, None
        self._outstanding = None
        self._next_ms = now_ms
        self._update_serving(f"this process stood still for {slept} ms")

    def _tick(self, now_ms: int) -> None:
        self._running_until_ms = now_ms + self.settings.stall_ms
        if self._serving:
            self.valid_until_ms = self._running_until_ms
        if (
            self.state is BrokerState.SHUTTING_DOWN
            and self._give_up_ms is not None
            and now_ms >= self._give_up_ms
        ):
            waited = self.settings.shutdown_timeout_ms
            self._exit(f"stopped without the controller's leave after {waited} ms")

    def _send_soon(self, now_ms: int) -> None:
        """Send a heartbeat now, or as soon as the outstanding request is answered."""
        self._next_ms = min(self._next_ms, now_ms)
        self._resend = True

    # Serving.

    def _is_registered(self) -> bool:
        """The image shows this very process registered."""
        mine = self.image.brokers.get(self.registration.broker_id)
        return (
            mine is not None
            and mine.incarnation == self.registration.incarnation
            and self.state
            not in (BrokerState.INITIAL, BrokerState.REGISTERING, BrokerState.STOPPED)
        )

    def _update_serving(self, reason: str) -> None:
        """Stop or resume serving when what may be served has changed."""
        may = self._is_registered() and not self.suspended
        if may and not self._serving:
            self._effects.append(ResumeServing())
        elif self._serving and not may:
            self._effects.append(StopServing(reason))
        self._serving = may
        self.valid_until_ms = self._running_until_ms if may else SUSPENDED

    def _resume_when_current(self) -> None:
        if self._resume_index is not None and self.image.index >= self._resume_index:
            self._resume_from = self._resume_index = None
            self._update_serving("")

    def _exit(self, reason: str, failed: bool = False) -> None:
        self.state = BrokerState.STOPPED
        self._update_serving(reason)
        self._effects.append(Exit(reason, failed))

    # Registration.

    def _start(self, now_ms: int) -> None:
        if self.state is not BrokerState.INITIAL:
            raise InvariantViolation(f"broker started twice: it is {self.state.value}")
        self.state = BrokerState.REGISTERING
        self._running_until_ms = now_ms + self.settings.stall_ms
        self._next_ms = now_ms

    def _registered(self, broker_epoch: int, now_ms: int) -> None:
        if self.state is not BrokerState.REGISTERING:
            return  # the image said so before
        self.state = BrokerState.FENCED
        self.broker_epoch = broker_epoch
        self._outstanding, self._give_up_ms = None, None
        self._next_ms = now_ms

    def _registration_failed(self, event: RegistrationFailed, now_ms: int) -> None:
        if self.state is not BrokerState.REGISTERING:
            return
        self._outstanding = None
        self._next_ms = now_ms + self.settings.retry_ms
        if not isinstance(event.error, PeerError):
            return
        if isinstance(event.error, DuplicateBrokerRegistration):
            if self._give_up_ms is None:
                self._give_up_ms = now_ms + 2 * self.settings.session_timeout_ms
            if now_ms < self._give_up_ms:
                return
        self._exit(f"registration refused: {event.error}", failed=True)

    def _reregister(self, reason: str, now_ms: int) -> None:
        self.state = BrokerState.REGISTERING
        self._outstanding, self._give_up_ms = None, None
        self._resume_from = self._resume_index = None
        self._next_ms = now_ms
        self._update_serving(reason)

    # The image.

    def _image_applied(self, image: Image, now_ms: int) -> None:
        before, self.image = self.image, image
        broker_id = self.registration.broker_id
        mine = image.brokers.get(broker_id)
        if mine is not None and mine.incarnation == self.registration.incarnation:
            self._registered(mine.broker_epoch, now_ms)  # when its answer was lost
            if self.state is BrokerState.SHUTTING_DOWN:
                if mine.fenced:
                    self._exit("fenced: nothing is led any more")
            elif self.state in (BrokerState.FENCED, BrokerState.RUNNING):
                self.state = BrokerState.FENCED if mine.fenced else BrokerState.RUNNING
                if mine.fenced or self._unreported() or _any_shutting_down(before, image):
                    self._send_soon(now_ms)
        elif image.index >= self.broker_epoch and self.state not in (
            BrokerState.INITIAL,
            BrokerState.REGISTERING,
        ):
            self._displaced(mine, now_ms)
        self._update_serving("not registered")
        self._resume_when_current()

    def _displaced(self, other: BrokerImage | None, now_ms: int) -> None:
        """The cluster knows nothing of this process any more, or another one in its place."""
        reason = "unregistered"
        if other is not None:
            if not set(other.directories) & set(self.registration.log_dirs):
                where = address_of(other.endpoints)
                why = f"another process, at {where}, has registered as broker {other.broker_id}"
                self._exit(f"{why}: each needs its own node.id", failed=True)
                return
            reason = "the process before this one was registered late"
        if self.state is BrokerState.SHUTTING_DOWN:
            self._exit(reason)
        else:
            self._reregister(reason, now_ms)

    def _suspend_until_known(self, now_ms: int) -> None:
        """The controller knows a later process of this id: the image will show which."""
        self._resume_from, self._resume_index = self._number + 1, None
        self._update_serving("the controller knows another process with this id")
        self._next_ms = now_ms + self.settings.retry_ms

    def _unreported(self) -> dict[PartitionKey, int]:
        """Partitions whose logs the controller asks for and did not get."""
        return {
            state.key: state.leader_epoch
            for state in partitions_awaiting(self.image, self.registration.broker_id)
            if self._reported.get(state.key) != state.leader_epoch
        }

    # Heartbeats.

    def _send_when_due(self, now_ms: int) -> None:
        if self.state in (BrokerState.INITIAL, BrokerState.STOPPED):
            return
        if self._outstanding is not None:
            if now_ms < self._outstanding[1] + self.settings.answer_timeout_ms:
                return
        elif now_ms < self._next_ms:
            return
        if self.state is BrokerState.REGISTERING:
            self._outstanding = (0, now_ms)
            self._effects.append(Register(self.registration))
            return
        self._number += 1
        self._outstanding = (self._number, now_ms)
        self._resend = False
        report = self._unreported() if self._logs_open else {}
        if not report:
            self._reported.clear()  # sent again with the next one: the controller may be new
        self._report = dict(list(report.items())[:MAX_LOGS_PER_HEARTBEAT])
        self._effects.append(
            SendHeartbeat(
                self._number,
                self.registration.broker_id,
                self.broker_epoch,
                self.image.index,
                wants_fence=not self._logs_open,
                wants_shutdown=self.state is BrokerState.SHUTTING_DOWN,
                report=tuple(self._report),
            )
        )

    def _heartbeat_answered(self, event: HeartbeatResponseReceived, now_ms: int) -> None:
        if self._outstanding is None or self._outstanding[0] != event.number:
            return
        self._outstanding = None
        self._reported.update(self._report)
        if self.state is BrokerState.SHUTTING_DOWN and event.reply.should_shut_down:
            self._exit("stopped in order")
            return
        pause = self.settings.heartbeat_interval_ms
        if self.state is not BrokerState.RUNNING:
            pause = min(pause, self.settings.retry_ms)
        self._next_ms = now_ms + (0 if self._resend else pause)
        if self._resume_from is not None and event.number >= self._resume_from:
            self._resume_index = event.reply.index
            self._resume_when_current()
        if len(self._report) == MAX_LOGS_PER_HEARTBEAT:
            self._next_ms = now_ms

    def _heartbeat_failed(self, event: HeartbeatFailed, now_ms: int) -> None:
        if self._outstanding is None or self._outstanding[0] != event.number:
            return
        self._outstanding = None
        self._next_ms = now_ms + self.settings.retry_ms
        if isinstance(event.error, StaleBrokerEpoch):
            self._suspend_until_known(now_ms)
        elif isinstance(event.error, BrokerIdNotRegistered):
            self._displaced(None, now_ms)

    def _shut_down(self, now_ms: int) -> None:
        if self.state is BrokerState.RUNNING:
            self.state = BrokerState.SHUTTING_DOWN
            self._give_up_ms = now_ms + self.settings.shutdown_timeout_ms
            self._send_soon(now_ms)
        elif self.state is not BrokerState.SHUTTING_DOWN:
            self._exit("nothing was led")

    def check_invariants(self) -> None:
        """Raises InvariantViolation when the state contradicts itself."""
        if self._serving != (self.valid_until_ms != SUSPENDED):
            raise InvariantViolation(f"serving {self._serving}, valid to {self.valid_until_ms}")
        if self._serving and (self.suspended or not self._is_registered()):
            raise InvariantViolation(f"serving while {self.state.value}, suspended or no member")
        if self._resume_index is not None and self._resume_from is None:
            raise InvariantViolation("an answer is awaited that ends no stall")


def _any_shutting_down(before: Image, after: Image) -> bool:
    """A broker shuts down: it waits until all others know who leads in its place."""
    return before.brokers is not after.brokers and any(
        broker.in_controlled_shutdown for broker in after.brokers.values()
    )
