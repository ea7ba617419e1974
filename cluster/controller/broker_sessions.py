"""Which brokers live, as the active controller sees it, and what it decides because of that. Pure.

A state machine (:mod:`kept.state_machine`). A controller that has become ready gives it
:class:`ControllerElected`, from then on every event, and :class:`ControllerResigned` when it leads
no more. Effects are
:class:`Probe` (connect to the broker's node listener and find out which process is there),
:class:`Decide` (queue a decision) and :class:`~.heartbeats.HeartbeatReply` (the reply to a
heartbeat). When the turn of a decision has come, the shell gives it to
:meth:`BrokerSessions.complete_decision`, proposes what :func:`~.broker_decisions.decide` makes of
that on the newest image, and reports :class:`DecisionCompleted`.

**Evidence before silence.** A process that dies closes its connections. So a lost connection is
followed by a probe at once: *refused* means nobody listens, and *another incarnation* answers that
the one we know is gone; either fences immediately. The same incarnation is alive and will come
back; an unanswered probe proves nothing. Both leave the judgement to ``session_timeout_ms`` without
a heartbeat, and are probed again meanwhile. A new controller has no connections to lose, so it
probes every unfenced broker when it starts, and takes it that each was heard of one heartbeat
interval ago; the controller before it, whose silence ended its lead, when it was heard last, if
that is not longer ago than two: no silence is forgiven because the controller was lost with it.

**Who died together is fenced together.** A new controller fences and registers nobody until its
first probes are answered (``examine_ms`` at most), and one decision fences all that are gone. One
after the other would leave only the last of them in an ISR, and all would wait for that one. So is
who is silent by then, where a broker is dead and none was heard of: its machine is dark, or it will
be unfenced with its next heartbeat.

**No false fencing.** Silence counts only while the controller itself was awake: after a gap in its
own events longer than ``stall_ms`` every session starts afresh. A decision to fence looks again
when its turn comes, and does nothing if the broker was heard of meanwhile.

Also decided here, because it depends on who lives: unfencing, controlled shutdown, clearing of
ELRs and election by length (``kept.cluster.controller.unclean_recovery``), unclean election
where configured, completion of reassignments, preferred leaders. ``now_ms`` is a monotonic clock.
After ``BrokerHeartbeatManager``; evidence, recovery and the fresh start are ours.

Long because every event of a broker's life touches the same sessions and pending decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import replace

from kept.cluster.controller import (
    brokers,
    features,
    partition_election,
    reassignment,
    unclean_recovery,
)
from kept.cluster.controller.broker_decisions import (
    MAX_PARTITIONS_PER_DECISION,
    BalanceLeaders,
    ClearElr,
    Decision,
    ElectUnclean,
    Fence,
    FinalizeFeatures,
    FinishReassignments,
    Recover,
    ShutDown,
    Unfence,
    decide,
)
from kept.cluster.controller.heartbeats import (
    FORESTALLED_INTERVALS,
    HeartbeatReply,
    HeartbeatRequest,
    PartitionKey,
    ReplicaLog,
)
from kept.cluster.controller.partition_election import unclean_allowed_by
from kept.cluster.metadata.image import BrokerImage, Image, ImageApplied
from kept.cluster.metadata.records import NO_LEADER
from kept.storage.errors import (
    BrokerIdNotRegistered,
    InvariantViolation,
    KeptError,
    NotController,
    StaleBrokerEpoch,
)

TIMEOUT: Final = "timeout"
"""A probe that nobody answered, nor refused."""

ProbeResult = UUID | str | None
"""The incarnation that answered; :data:`TIMEOUT`; None: the connection was refused."""


class SessionSettings(Struct, frozen=True):
    """Times in ms, and what may be decided without a request.

    ``session_timeout_ms``: ``broker.session.timeout.ms``. ``heartbeat_interval_ms``: how old the
    last word of a broker that lives may be. ``stall_ms``: a gap in this controller's own events
    that is taken for its own stall. ``probe_interval_ms``: how often a broker without connection is
    probed. ``examine_ms``: how long a new controller waits, at most, for the probes that it began
    with. ``scan_ms``: how often pending partitions are examined. ``clear_elr_after_ms``: ELRs that
    their leader is about to take back cost no record of their own. ``recovery_wait_ms``:
    ``kept.unclean.recovery.wait.ms``. ``decision_timeout_ms``: a decision of which nothing was
    reported is due again. ``unclean_default``: whether topics that do not say may elect a leader
    outside of the ISR. The rest are Kafka's ``auto.leader.rebalance.enable`` and
    ``leader.imbalance.*``.
    """

    session_timeout_ms: int = 9000
    heartbeat_interval_ms: int = 2000
    stall_ms: int = 1500
    probe_interval_ms: int = 500
    examine_ms: int = 500
    scan_ms: int = 500
    clear_elr_after_ms: int = 5000
    recovery_wait_ms: int = 30_000
    decision_timeout_ms: int = 30_000
    auto_leader_rebalance: bool = True
    imbalance_check_ms: int = 300_000
    imbalance_percentage: int = 10
    unclean_default: bool = False


# Events.


class ControllerElected(Struct, frozen=True):
    """This node leads and has applied an entry of its own term.

    ``silent_ms``: for how long the controller before this one was not heard, by its id.
    """

    image: Image
    silent_ms: Mapping[int, int] = field(default_factory=dict)


class ControllerResigned(Struct, frozen=True):
    """This node leads no more: everything it knew of lives is void."""


class SettingsChanged(Struct, frozen=True):
    """Settings were changed while the node runs."""

    settings: SessionSettings


class ConnectionLost(Struct, frozen=True):
    """The broker's control stream broke, or there is other evidence that its process died."""

    broker_id: int


class ProbeCompleted(Struct, frozen=True):
    """The result of a probe. ``broker_epoch`` is that of the :class:`Probe`: one sent before the
    broker registered anew proves nothing of the new process; None: of the present one.
    """

    broker_id: int
    result: ProbeResult
    broker_epoch: int | None = None


class DecisionCompleted(Struct, frozen=True):
    """A decision was made and its records, if any, are applied; or it failed with ``error``."""

    decision: Decision
    error: KeptError | None = None


Event = (
    ControllerElected
    | ControllerResigned
    | SettingsChanged
    | ImageApplied
    | HeartbeatRequest
    | ConnectionLost
    | ProbeCompleted
    | DecisionCompleted
)

# Effects.


class Probe(Struct, frozen=True):
    """Find out which incarnation is at the broker's node listener; :class:`ProbeCompleted` says."""

    broker_id: int
    broker_epoch: int


class Decide(Struct, frozen=True):
    """Make a decision in its turn, report :class:`DecisionCompleted`; ``reason`` is for the log."""

    decision: Decision
    reason: str


Effect = Probe | Decide | HeartbeatReply


class WaitingPartition(Struct, frozen=True):
    """A partition that has no leader until ``missing`` have come back (rule 33).

    ``recovering``: all of its ISR restarted unclean; else its last member is not there.
    """

    topic: str
    partition: int
    missing: tuple[int, ...]
    waited_ms: int
    overdue: bool
    recovering: bool

    def __str__(self) -> str:
        names = ", ".join(map(str, self.missing)) or "nobody"
        why = (
            "all of its ISR restarted without a clean shutdown"
            if self.recovering
            else "the last member of its ISR is not there"
        )
        return (
            f"{self.topic}:{self.partition}: {why}; offline until node(s) {names} are back, or "
            f"`kept cluster elect {self.topic}:{self.partition} --unclean` gives up what they have"
        )


@dataclass(slots=True)
class _Session:
    """One broker process that is registered. ``unfence_at``: how far it must have applied."""

    broker_epoch: int
    incarnation: UUID
    last_contact_ms: int
    unfence_at: int
    applied_index: int = -1
    features: tuple[features.Feature, ...] = ()
    connected: bool = False
    contacted: bool = False  # a heartbeat of this process arrived in this controller's time
    answered: bool = False  # it answered a probe in that time
    dead: str = ""  # the evidence of its death
    probing: bool = False
    probe_at_ms: int | None = None  # the next probe is due then
    wants_shutdown: bool = False
    shutdown_index: int = -1  # its leaders had moved by then


class BrokerSessions:
    """The active controller's view of the brokers: who lives, and what to decide because of it."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.image = Image()
        self.active = False
        self.reports: dict[PartitionKey, dict[int, tuple[int, ReplicaLog]]] = {}
        self._effects: list[Effect] = []  # of the step that is under way
        self._sessions: dict[int, _Session] = {}
        self._pending: dict[tuple[str, int], int] = {}  # decisions that are due -> since
        self._examined: set[int] = set()  # brokers whose first probe is under way
        self._examine_until_ms = 0
        self._now_ms = 0
        self._scan_at_ms = 0
        self._balance_at_ms = 0
        self._seen: dict[PartitionKey, tuple[int, int, int]] = {}
        """Pending partition -> (partition epoch, image index, time) when it was seen first."""
        self._leaderless_since: dict[PartitionKey, int] = {}

    def step(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event. While this node does not lead, only ControllerElected and
        SettingsChanged do anything.

        A heartbeat raises NotController (also when the broker is ahead: its image may show a
        registration that is committed and not applied here yet), BrokerIdNotRegistered,
        StaleBrokerEpoch; else the last effect is its answer.
        """
        match event:
            case ControllerElected():
                self._start(event, now_ms)
            case ControllerResigned():
                self._stop()
            case SettingsChanged():
                self.settings = event.settings
            case HeartbeatRequest() if not self.active:
                raise NotController("this node does not lead the controllers")
            case DecisionCompleted():
                self._decided(event, now_ms)
            case _ if self.active:
                self._awake(now_ms)
                self._step(event)
        return self._drain_effects()

    def _step(self, event: Event) -> None:
        match event:
            case ImageApplied(image):
                before = self.image
                self._follow(image)
                if image.recovering and before.brokers is not image.brokers:
                    self._recover()
            case HeartbeatRequest():
                self._heartbeat(event, self._session_of(event))
            case ConnectionLost(broker_id):
                session = self._sessions.get(broker_id)
                if session is not None:
                    session.connected = False
                    self._probe(broker_id, session)
            case ProbeCompleted():
                self._probed(event)

    def _drain_effects(self) -> tuple[Effect, ...]:
        effects = tuple(self._effects)
        self._effects.clear()
        return effects

    # Life of the controller.

    def _start(self, event: ControllerElected, now_ms: int) -> None:
        """Probe every broker that takes part."""
        self._stop()
        self.active = True
        self._now_ms = now_ms
        self._scan_at_ms = now_ms
        self._balance_at_ms = now_ms + self.settings.imbalance_check_ms
        self._follow(event.image)
        interval_ms = self.settings.heartbeat_interval_ms
        for broker_id, session in self._sessions.items():
            known_ms = event.silent_ms.get(broker_id, 0)
            most_ms = FORESTALLED_INTERVALS * interval_ms
            session.last_contact_ms -= min(max(known_ms, interval_ms), most_ms)
            if not event.image.brokers[broker_id].fenced:
                self._probe(broker_id, session)
                self._examined.add(broker_id)
        self._examine_until_ms = now_ms + self.settings.examine_ms

    def _stop(self) -> None:
        self.active = False
        self.image = Image()
        for known in (self._sessions, self._pending, self._seen, self._leaderless_since):
            known.clear()
        self.reports.clear()
        self._examined.clear()

    def _follow(self, image: Image) -> None:
        before, self.image = self.image, image
        if before.brokers is image.brokers:
            return
        for broker_id in self._sessions.keys() - image.brokers.keys():
            del self._sessions[broker_id]
        for broker_id, broker in image.brokers.items():
            session = self._sessions.get(broker_id)
            if session is None or session.broker_epoch != broker.broker_epoch:
                self._sessions[broker_id] = _Session(
                    broker.broker_epoch, broker.incarnation, self._now_ms, image.index
                )
                continue
            known = before.brokers.get(broker_id)
            if broker.fenced and known is not None and not known.fenced:
                session.unfence_at = image.index

    def _awake(self, now_ms: int) -> None:
        """Every session starts afresh when this controller itself stood still."""
        if now_ms - self._now_ms > self.settings.stall_ms:
            for session in self._sessions.values():
                session.last_contact_ms = now_ms
        self._now_ms = max(self._now_ms, now_ms)

    # What is heard of brokers.

    def _session_of(self, beat: HeartbeatRequest) -> _Session:
        if beat.broker_epoch > self.image.index:
            raise NotController(
                f"broker {beat.broker_id} was registered by entry {beat.broker_epoch}, this node "
                f"is at {self.image.index}"
            )
        session = self._sessions.get(beat.broker_id)
        if session is None:
            raise BrokerIdNotRegistered(f"Broker ID {beat.broker_id} is not currently registered")
        if session.broker_epoch != beat.broker_epoch:
            raise StaleBrokerEpoch(
                f"broker {beat.broker_id} has epoch {session.broker_epoch}, not {beat.broker_epoch}"
            )
        return session

    def _heartbeat(self, beat: HeartbeatRequest, session: _Session) -> None:
        session.last_contact_ms = self._now_ms
        session.connected = session.contacted = True
        session.dead, session.probe_at_ms = "", None
        session.applied_index = max(session.applied_index, beat.applied_index)
        session.wants_shutdown = beat.wants_shutdown
        self._probe_concluded(beat.broker_id)
        session.features = beat.features
        self._record_reports(beat)
        self._finalize_features()
        broker = self.image.brokers[beat.broker_id]
        may_stop = False
        if broker.fenced:
            may_stop = beat.wants_shutdown
            ready = beat.applied_index >= session.unfence_at and not beat.wants_fence
            if ready and not beat.wants_shutdown:
                default = self.settings.unclean_default
                unfence = Unfence(beat.broker_id, broker.broker_epoch, default)
                self._decide(unfence, "caught up")
        elif beat.wants_shutdown:
            may_stop = self._shut_down(broker, session)
        self._effects.append(HeartbeatReply(broker.fenced, may_stop, self.image.index))

    def _finalize_features(self) -> None:
        """Once every registered broker has said what it serves."""
        sessions = self._sessions
        if all(session.contacted for session in sessions.values()):
            levels = features.common_levels(session.features for session in sessions.values())
            if features.raise_levels(self.image, levels):
                epochs = {b: session.broker_epoch for b, session in sessions.items()}
                self._decide(FinalizeFeatures(levels, epochs), str(levels))

    def brokers_without_feature(self, feature: str, level: int) -> tuple[int, ...]:
        """The registered brokers that have not told this controller in its time that they serve a
        feature at a level; none while it does not lead.
        """
        return tuple(
            broker_id
            for broker_id, session in sorted(self._sessions.items())
            if not session.contacted
            or features.common_levels([session.features]).get(feature, 0) < level
        )

    def _probed(self, event: ProbeCompleted) -> None:
        broker_id, result = event.broker_id, event.result
        session = self._sessions.get(broker_id)
        if session is None or not session.probing:
            return
        if event.broker_epoch not in (None, session.broker_epoch):
            return
        session.probing = False
        if session.connected:
            return
        if result is None:
            session.dead = "its connection broke and nobody listens on its node port"
        elif isinstance(result, UUID) and result != session.incarnation:
            session.dead = "another process answers in its place"
        else:
            if result == session.incarnation:
                session.answered, session.dead = True, ""
            session.probe_at_ms = self._now_ms + self.settings.probe_interval_ms
        self._examined.discard(broker_id)
        self._fence_gone()

    def _probe_concluded(self, broker_id: int) -> None:
        """This controller has heard of a broker that it began with."""
        if broker_id in self._examined:
            self._examined.discard(broker_id)
            if not self._examined:
                self._fence_gone()

    @property
    def _examining(self) -> bool:
        """Whether the probes that this controller began with are under way."""
        return bool(self._examined) and self._now_ms < self._examine_until_ms

    def is_live(self, broker_id: int, now_ms: int) -> bool:
        """Whether the process registered with that id is taken to be alive (``session_live`` of
        :func:`kept.cluster.controller.brokers.register_broker`). Raises NotController while it is
        not known who lives, or who is dead is still to be fenced.
        """
        if self._examining or any(name == "fence" for name, _ in self._pending):
            raise NotController("this controller still finds out which brokers live")
        session = self._sessions.get(broker_id)
        broker = self.image.brokers.get(broker_id)
        if session is None or broker is None:
            return False
        self._awake(now_ms)
        return (session.contacted or not broker.fenced) and not self._gone(session)

    def _decided(self, event: DecisionCompleted, now_ms: int) -> None:
        """One that failed is due again after ``probe_interval_ms``, if its reason holds."""
        key = (event.decision.name, event.decision.broker_id)
        if self._pending.pop(key, None) is not None and event.error is not None:
            pause_ms = self.settings.decision_timeout_ms - self.settings.probe_interval_ms
            self._pending[key] = now_ms - pause_ms

    # Time.

    def tick(self, now_ms: int) -> tuple[Effect, ...]:
        """Time passes; some ten times per second."""
        if not self.active:
            return ()
        self._awake(now_ms)
        self._fence_gone()
        for broker_id, session in self._sessions.items():
            if session.probe_at_ms is not None and now_ms >= session.probe_at_ms:
                self._probe(broker_id, session)
        if now_ms >= self._scan_at_ms:
            self._scan_at_ms = now_ms + self.settings.scan_ms
            self._scan()
        if now_ms >= self._balance_at_ms:
            self._balance_at_ms = now_ms + self.settings.imbalance_check_ms
            self._balance()
        return self._drain_effects()

    def waiting(self) -> tuple[WaitingPartition, ...]:
        """The partitions without a leader, and for whom they wait."""
        waiting: list[WaitingPartition] = []
        for key, since_ms in self._leaderless_since.items():
            state = self.image.partition(*key)
            if state is not None and state.leader == NO_LEADER:
                waited_ms = self._now_ms - since_ms
                missing = unclean_recovery.missing_candidates(self.image, state, self.reports)
                if not state.recovering:
                    missing = tuple(
                        b for b in state.isr if not partition_election.is_active(self.image, b)
                    )
                waiting.append(
                    WaitingPartition(
                        self.image.topics_by_id[key[0]].name,
                        key[1],
                        missing,
                        waited_ms,
                        waited_ms >= self.settings.recovery_wait_ms,
                        state.recovering,
                    )
                )
        return tuple(sorted(waiting, key=lambda w: (w.topic, w.partition)))

    # Life and death.

    def _probe(self, broker_id: int, session: _Session) -> None:
        session.probe_at_ms = None
        if not session.probing:
            session.probing = True
            self._effects.append(Probe(broker_id, session.broker_epoch))

    def _gone(self, session: _Session) -> bool:
        silent_ms = self._now_ms - session.last_contact_ms
        return bool(session.dead) or silent_ms > self.settings.session_timeout_ms

    def _fence_gone(self) -> None:
        if self._examining:
            return
        brokers = self.image.brokers
        unfenced = [s for b, s in self._sessions.items() if not brokers[b].fenced]
        if not any(s.contacted or s.answered for s in unfenced) and any(s.dead for s in unfenced):
            for session in unfenced:
                session.dead = session.dead or "silent, and others are dead"
        for broker_id, session in self._sessions.items():
            self._fence_if_gone(broker_id, session)

    def _fence_if_gone(self, broker_id: int, session: _Session) -> None:
        if self.image.brokers[broker_id].fenced or not self._gone(session):
            return
        reason = session.dead or f"silent for {self._now_ms - session.last_contact_ms} ms"
        fence = Fence(broker_id, session.broker_epoch, self.settings.unclean_default)
        self._decide(fence, reason)

    def complete_decision(self, decision: Decision) -> Decision:
        """A decision whose turn has come, with who is gone by now and what logs were reported."""
        if isinstance(decision, Recover):
            return replace(decision, reports=self.reports)
        if not isinstance(decision, Fence):
            return decision
        gone = {b: s.broker_epoch for b, s in self._sessions.items() if self._gone(s)}
        named = gone.get(decision.broker_id) == decision.broker_epoch
        return replace(decision, gone=gone if named else {})

    def _shut_down(self, broker: BrokerImage, session: _Session) -> bool:
        """Move what it leads; True when it may stop, and all others know who leads."""
        if not broker.in_controlled_shutdown or brokers.leads_any_partition(
            self.image, broker.broker_id
        ):
            session.shutdown_index = -1
            self._decide(ShutDown(broker.broker_id, broker.broker_epoch), "it asked for it")
            return False
        if session.shutdown_index < 0:
            session.shutdown_index = self.image.index
        return all(
            session.shutdown_index <= other.applied_index
            for other_id, other in self._sessions.items()
            if self.image.brokers[other_id].active
        )

    def _decide(self, decision: Decision, reason: str) -> None:
        """A decision is due, unless the same one is waiting for its turn."""
        key = (decision.name, decision.broker_id)
        since_ms = self._pending.get(key)
        if since_ms is None or self._now_ms - since_ms > self.settings.decision_timeout_ms:
            self._pending[key] = self._now_ms
            self._effects.append(Decide(decision, reason))

    # Partitions that await a decision.

    def _record_reports(self, beat: HeartbeatRequest) -> None:
        for log in beat.logs:
            if log.key in self.image.recovering:
                self.reports.setdefault(log.key, {})[beat.broker_id] = (beat.broker_epoch, log)
        if beat.logs:
            self._recover()

    def _recover(self) -> None:
        """Elect by length what is complete; what is overdue where a topic allows losses."""
        complete: list[PartitionKey] = []
        given_up: list[PartitionKey] = []
        allowed = unclean_allowed_by(self.image, self.settings.unclean_default)
        for key in self.image.recovering:
            state = self.image.partition(*key)
            if state is None:
                continue
            since_ms = self._leaderless_since.setdefault(key, self._now_ms)
            if not unclean_recovery.missing_candidates(self.image, state, self.reports):
                complete.append(key)
            elif self._now_ms - since_ms >= self.settings.recovery_wait_ms and allowed(
                self.image.topics_by_id[key[0]].name
            ):
                given_up.append(key)
        if complete or given_up:
            self._decide(Recover(tuple(complete), tuple(given_up)), "whole ISRs restarted unclean")

    def _scan(self) -> None:
        """Examine every pending partition once."""
        image = self.image
        for known in (self._seen, self._leaderless_since, self.reports):
            for key in [key for key in known if key not in image.pending]:
                del known[key]
        if image.recovering:
            self._recover()
        proven: dict[PartitionKey, int] = {}
        leaderless = reassigning = False
        for key in image.pending:
            state = image.partition(*key)
            if state is None:
                continue
            evidence = self._seen.get(key)
            if evidence is None or evidence[0] != state.partition_epoch:
                evidence = (state.partition_epoch, image.index, self._now_ms)
                self._seen[key] = evidence
            if state.leader == NO_LEADER:
                self._leaderless_since.setdefault(key, self._now_ms)
                leaderless = leaderless or not state.recovering
            elif state.elr and self._leader_lives(state.leader, evidence):
                proven[key] = state.partition_epoch
            reassigning = reassigning or state.reassigning
            if state.leader != NO_LEADER:
                self._leaderless_since.pop(key, None)
        self._decide_scanned(proven, leaderless, reassigning)

    def _leader_lives(self, leader: int, seen: tuple[int, int, int]) -> bool:
        """The leader was heard of after it had applied what made the others ELRs."""
        session = self._sessions.get(leader)
        return (
            self._now_ms - seen[2] >= self.settings.clear_elr_after_ms
            and session is not None
            and session.contacted
            and session.applied_index >= seen[1]
        )

    def _decide_scanned(
        self, proven: dict[PartitionKey, int], leaderless: bool, reassigning: bool
    ) -> None:
        if proven:
            some = dict(list(proven.items())[:MAX_PARTITIONS_PER_DECISION])
            self._decide(ClearElr(some), f"{len(some)} partitions")
        default = self.settings.unclean_default
        if leaderless:
            allowed = unclean_allowed_by(self.image, default)
            if partition_election.elect_offline(self.image, allowed, limit=1):
                self._decide(ElectUnclean(default), "partitions without a leader")
        if reassigning and reassignment.finish_reassignments(self.image, limit=1):
            self._decide(FinishReassignments(), "all replicas are in sync")

    def _balance(self) -> None:
        balance = BalanceLeaders(self.settings.imbalance_percentage)
        if self.settings.auto_leader_rebalance and decide(self.image, balance):
            self._decide(balance, "preferred leaders are back")

    def check_invariants(self) -> None:
        """Raises InvariantViolation when the state contradicts itself."""
        if not self.active:
            if self._sessions or self._pending or self.reports:
                raise InvariantViolation("a controller that does not lead remembers lives")
            return
        if self._sessions.keys() != self.image.brokers.keys():
            raise InvariantViolation("sessions are not those of the registered brokers")
        for broker_id, session in self._sessions.items():
            if session.broker_epoch != self.image.brokers[broker_id].broker_epoch:
                raise InvariantViolation(f"broker {broker_id}: a session of another epoch")
            if session.last_contact_ms > self._now_ms:
                raise InvariantViolation(f"broker {broker_id} was heard of in the future")
            if session.connected and session.dead:
                raise InvariantViolation(f"broker {broker_id} is connected and dead")
