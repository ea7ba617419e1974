"""Which brokers live, as the active controller sees it, and what it decides because of that. Pure.

A controller that has become ready calls :meth:`BrokerSessions.start`, from then on every event, and
:meth:`BrokerSessions.stop` when it leads no more. Every event returns effects: :class:`Probe`
(connect to the broker's node listener and ask who is there) and :class:`Decide` (queue a decision:
run it on the newest image, propose what it returns, then call :meth:`BrokerSessions.decided`).

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
after the other would leave only the last of them in an ISR, and all would wait for that one.

**No false fencing.** Silence counts only while the controller itself was awake: after a gap in its
own events longer than ``stall_ms`` every session starts afresh. A decision to fence looks again
when its turn comes, and does nothing if the broker was heard of meanwhile.

Also decided here, because it depends on who lives: unfencing, controlled shutdown, settling of
suspects and election by length (``kept.cluster.controller.unclean_recovery``), unclean election
where configured, completion of reassignments, preferred leaders. ``now_ms`` is a monotonic clock.
After ``BrokerHeartbeatManager``; evidence, recovery and the fresh start are ours.

Long because every event of a broker's life touches the same sessions and pending decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

from kept.cluster.controller import brokers, partition_election, reassignment, unclean_recovery
from kept.cluster.controller.heartbeats import (
    FORESTALLED_INTERVALS,
    HeartbeatAnswer,
    PartitionKey,
    ReplicaLog,
)
from kept.cluster.controller.partition_election import UncleanAllowed, never_unclean
from kept.cluster.metadata.image import BrokerImage, Image
from kept.cluster.metadata.records import NO_LEADER, MetadataRecord
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

MAX_PARTITIONS_PER_DECISION: Final = 1000
"""Of decisions that can wait (settling, balance): bounds one entry of the log to some 100 KB."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Times in ms, and what may be decided unasked.

    ``session_timeout_ms``: ``broker.session.timeout.ms``. ``heartbeat_interval_ms``: how old the
    last word of a broker that lives may be. ``stall_ms``: a gap in this controller's own events
    that is taken for its own stall. ``probe_again_ms``: how often a broker without
    connection is probed. ``examine_ms``: how long a new controller waits, at most, for the probes
    that it began with. ``scan_ms``: how often unsettled partitions are looked at.
    ``settle_after_ms``: suspects that their leader is about to take back cost no record of their
    own. ``recovery_wait_ms``: ``kept.unclean.recovery.wait.ms``. ``decision_timeout_ms``: a
    decision of which nothing was heard is asked for again. The rest are Kafka's
    ``auto.leader.rebalance.enable`` and ``leader.imbalance.*``.
    """

    session_timeout_ms: int = 9000
    heartbeat_interval_ms: int = 2000
    stall_ms: int = 1500
    probe_again_ms: int = 500
    examine_ms: int = 500
    scan_ms: int = 500
    settle_after_ms: int = 5000
    recovery_wait_ms: int = 30_000
    decision_timeout_ms: int = 30_000
    auto_leader_rebalance: bool = True
    imbalance_check_ms: int = 300_000
    imbalance_percentage: int = 10


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the broker's node listener which incarnation is there; answer with ``probed``."""

    broker_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Run ``decide`` on the newest image in its turn and propose the records it returns.

    Answer with ``decided``, also when it raised or returned nothing. ``name`` is one of fence,
    unfence, shut-down, settle, recover, elect-unclean, reassign, balance; ``broker_id`` -1 where no
    broker is meant; ``reason`` is for the log.
    """

    name: str
    broker_id: int
    reason: str
    decide: Callable[[Image], list[MetadataRecord]] = field(compare=False)


Effect = Probe | Decide


@dataclass(frozen=True, slots=True)
class Waiting:
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
            f"{self.topic}-{self.partition}: {why}; offline until node(s) {names} are back, or "
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
    connected: bool = False
    heard: bool = False  # a heartbeat of this process arrived in this controller's time
    dead: str = ""  # the evidence of its death
    probing: bool = False
    probe_at_ms: int | None = None  # the next probe is due then
    wants_shutdown: bool = False
    shutdown_index: int = -1  # its leaders had moved by then


class BrokerSessions:
    """The active controller's view of the brokers' lives. See the module's description."""

    def __init__(
        self,
        settings: SessionSettings,
        unclean_allowed: Callable[[Image], UncleanAllowed] = lambda _: never_unclean,
    ) -> None:
        self.settings = settings
        self.image = Image()
        self.active = False
        self.reports: dict[PartitionKey, dict[int, tuple[int, ReplicaLog]]] = {}
        self._unclean_allowed = unclean_allowed
        self._sessions: dict[int, _Session] = {}
        self._pending: dict[tuple[str, int], int] = {}  # decisions asked for -> since
        self._examined: set[int] = set()  # brokers of whom the first probe is to tell
        self._examine_until_ms = 0
        self._now_ms = 0
        self._scan_at_ms = 0
        self._balance_at_ms = 0
        self._seen: dict[PartitionKey, tuple[int, int, int]] = {}
        """Unsettled partition -> (partition epoch, image index, time) when it was seen first."""
        self._leaderless_since: dict[PartitionKey, int] = {}

    # Life of the controller.

    def start(
        self, image: Image, now_ms: int, unheard_ms: Mapping[int, int] | None = None
    ) -> list[Effect]:
        """This node leads and has applied an entry of its own term: probe whoever takes part.

        ``unheard_ms``: for how long the controller before this one was not heard, by its id.
        """
        self.stop()
        self.active = True
        self._now_ms = now_ms
        self._scan_at_ms = now_ms
        self._balance_at_ms = now_ms + self.settings.imbalance_check_ms
        effects: list[Effect] = []
        self._follow(image)
        interval_ms = self.settings.heartbeat_interval_ms
        for broker_id, session in self._sessions.items():
            known_ms = (unheard_ms or {}).get(broker_id, 0)
            most_ms = FORESTALLED_INTERVALS * interval_ms
            session.last_contact_ms -= min(max(known_ms, interval_ms), most_ms)
            if not image.brokers[broker_id].fenced:
                self._probe(broker_id, session, effects)
                self._examined.add(broker_id)
        self._examine_until_ms = now_ms + self.settings.examine_ms
        return effects

    def stop(self) -> None:
        """This node leads no more: everything it knew of lives is void."""
        self.active = False
        self.image = Image()
        for known in (self._sessions, self._pending, self._seen, self._leaderless_since):
            known.clear()
        self.reports.clear()
        self._examined.clear()

    def image_changed(self, image: Image, now_ms: int) -> list[Effect]:
        """The image moved on."""
        effects: list[Effect] = []
        if self.active:
            self._awake(now_ms)
            before = self.image
            self._follow(image)
            if image.recovering and before.brokers is not image.brokers:
                self._recover(effects)
        return effects

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

    def heartbeat(
        self,
        broker_id: int,
        broker_epoch: int,
        applied_index: int,
        wants_shutdown: bool,
        now_ms: int,
        *,
        wants_fence: bool = False,
        logs: Sequence[ReplicaLog] = (),
    ) -> tuple[HeartbeatAnswer, list[Effect]]:
        """A broker is alive. ``wants_fence``: its logs are not open yet.

        Raises NotController (also when the broker is ahead: its image may show a registration that
        is committed and not applied here yet), BrokerIdNotRegistered, StaleBrokerEpoch.
        """
        if not self.active:
            raise NotController("this node does not lead the controllers")
        self._awake(now_ms)
        if broker_epoch > self.image.index:
            raise NotController(
                f"broker {broker_id} was registered by entry {broker_epoch}, this node is at "
                f"{self.image.index}"
            )
        session = self._sessions.get(broker_id)
        if session is None:
            raise BrokerIdNotRegistered(f"Broker ID {broker_id} is not currently registered")
        if session.broker_epoch != broker_epoch:
            raise StaleBrokerEpoch(
                f"broker {broker_id} has epoch {session.broker_epoch}, not {broker_epoch}"
            )
        session.last_contact_ms = now_ms
        session.connected = session.heard = True
        session.dead, session.probe_at_ms = "", None
        session.applied_index = max(session.applied_index, applied_index)
        session.wants_shutdown = wants_shutdown
        effects: list[Effect] = []
        self._known(broker_id, effects)
        self._take_reports(broker_id, broker_epoch, logs, effects)
        broker = self.image.brokers[broker_id]
        may_stop = False
        if broker.fenced:
            may_stop = wants_shutdown
            if not wants_shutdown and not wants_fence and applied_index >= session.unfence_at:
                self._unfence(broker, effects)
        elif wants_shutdown:
            may_stop = self._shut_down(broker, session, effects)
        return HeartbeatAnswer(broker.fenced, may_stop, self.image.index), effects

    def connection_lost(self, broker_id: int, now_ms: int) -> list[Effect]:
        """The broker's control stream broke: look who is there."""
        effects: list[Effect] = []
        if self.active:
            self._awake(now_ms)
            session = self._sessions.get(broker_id)
            if session is not None:
                session.connected = False
                self._probe(broker_id, session, effects)
        return effects

    def probed(
        self, broker_id: int, result: ProbeResult, now_ms: int, broker_epoch: int | None = None
    ) -> list[Effect]:
        """What a probe found. ``broker_epoch`` is that of the :class:`Probe`, so that one that
        was sent before the broker registered anew says nothing of the new process.
        """
        effects: list[Effect] = []
        if not self.active:
            return effects
        self._awake(now_ms)
        session = self._sessions.get(broker_id)
        if session is None or not session.probing:
            return effects
        if broker_epoch not in (None, session.broker_epoch):
            return effects
        session.probing = False
        if session.connected:
            return effects
        if result is None:
            session.dead = "its connection broke and nobody listens on its node port"
        elif isinstance(result, UUID) and result != session.incarnation:
            session.dead = "another process answers in its place"
        else:
            session.probe_at_ms = now_ms + self.settings.probe_again_ms
        self._fence_if_gone(broker_id, session, effects)
        self._known(broker_id, effects)
        return effects

    def _known(self, broker_id: int, effects: list[Effect]) -> None:
        """This controller has heard of a broker that it began with."""
        if broker_id in self._examined:
            self._examined.discard(broker_id)
            if not self._examined:
                self._fence_gone(effects)

    @property
    def _examining(self) -> bool:
        """Whether the probes that this controller began with are under way."""
        return bool(self._examined) and self._now_ms < self._examine_until_ms

    def live(self, broker_id: int, now_ms: int) -> bool:
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
        return (session.heard or not broker.fenced) and not self._gone(session)

    def decided(self, effect: Decide, now_ms: int, error: KeptError | None = None) -> list[Effect]:
        """A decision was made and its records, if any, are applied; or it failed.

        One that failed is asked for again after ``probe_again_ms``, if it is still due.
        """
        key = (effect.name, effect.broker_id)
        if self._pending.pop(key, None) is not None and error is not None:
            pause_ms = self.settings.decision_timeout_ms - self.settings.probe_again_ms
            self._pending[key] = now_ms - pause_ms
        return []

    # Time.

    def tick(self, now_ms: int) -> list[Effect]:
        """Time passes; some ten times per second."""
        effects: list[Effect] = []
        if not self.active:
            return effects
        self._awake(now_ms)
        self._fence_gone(effects)
        for broker_id, session in self._sessions.items():
            if session.probe_at_ms is not None and now_ms >= session.probe_at_ms:
                self._probe(broker_id, session, effects)
        if now_ms >= self._scan_at_ms:
            self._scan_at_ms = now_ms + self.settings.scan_ms
            self._scan(effects)
        if now_ms >= self._balance_at_ms:
            self._balance_at_ms = now_ms + self.settings.imbalance_check_ms
            self._balance(effects)
        return effects

    def waiting(self) -> tuple[Waiting, ...]:
        """The partitions without a leader, and for whom they wait."""
        found: list[Waiting] = []
        for key, since_ms in self._leaderless_since.items():
            state = self.image.partition(*key)
            if state is not None and state.leader == NO_LEADER:
                waited_ms = self._now_ms - since_ms
                missing = unclean_recovery.missing(self.image, state, self.reports)
                if not state.recovering:
                    missing = tuple(
                        b for b in state.isr if not partition_election.active(self.image, b)
                    )
                found.append(
                    Waiting(
                        self.image.topics_by_id[key[0]].name,
                        key[1],
                        missing,
                        waited_ms,
                        waited_ms >= self.settings.recovery_wait_ms,
                        state.recovering,
                    )
                )
        return tuple(sorted(found, key=lambda w: (w.topic, w.partition)))

    # Life and death.

    def _probe(self, broker_id: int, session: _Session, effects: list[Effect]) -> None:
        session.probe_at_ms = None
        if not session.probing:
            session.probing = True
            effects.append(Probe(broker_id, session.broker_epoch))

    def _gone(self, session: _Session) -> bool:
        silent_ms = self._now_ms - session.last_contact_ms
        return bool(session.dead) or silent_ms > self.settings.session_timeout_ms

    def _fence_gone(self, effects: list[Effect]) -> None:
        for broker_id, session in self._sessions.items():
            self._fence_if_gone(broker_id, session, effects)

    def _fence_if_gone(self, broker_id: int, session: _Session, effects: list[Effect]) -> None:
        if self._examining or self.image.brokers[broker_id].fenced or not self._gone(session):
            return
        reason = session.dead or f"silent for {self._now_ms - session.last_contact_ms} ms"
        decide = partial(self._fence, broker_id, session.broker_epoch)
        self._decide("fence", broker_id, reason, decide, effects)

    def _fence(self, broker_id: int, broker_epoch: int, image: Image) -> list[MetadataRecord]:
        session = self._sessions.get(broker_id)
        if session is None or session.broker_epoch != broker_epoch or not self._gone(session):
            return []  # it was heard of while the decision waited for its turn
        gone = {
            other_id: other.broker_epoch
            for other_id, other in self._sessions.items()
            if self._gone(other) and image.brokers[other_id].broker_epoch == other.broker_epoch
        }
        return brokers.fence_brokers(image, gone, self._unclean_allowed(image))

    def _unfence(self, broker: BrokerImage, effects: list[Effect]) -> None:
        broker_id, broker_epoch = broker.broker_id, broker.broker_epoch

        def unfence(image: Image) -> list[MetadataRecord]:
            allowed = self._unclean_allowed(image)
            return brokers.unfence_broker(image, broker_id, broker_epoch, allowed)

        self._decide("unfence", broker_id, "caught up", unfence, effects)

    def _shut_down(self, broker: BrokerImage, session: _Session, effects: list[Effect]) -> bool:
        """Move what it leads; True when it may stop, and all others know who leads."""
        broker_id, broker_epoch = broker.broker_id, broker.broker_epoch
        if not broker.in_controlled_shutdown or brokers.leads(self.image, broker_id):
            session.shutdown_index = -1

            def shut_down(image: Image) -> list[MetadataRecord]:
                return brokers.shut_down_broker(image, broker_id, broker_epoch)

            self._decide("shut-down", broker_id, "it asked for it", shut_down, effects)
            return False
        if session.shutdown_index < 0:
            session.shutdown_index = self.image.index
        return all(
            session.shutdown_index <= other.applied_index
            for other_id, other in self._sessions.items()
            if self.image.brokers[other_id].active
        )

    def _decide(
        self,
        name: str,
        broker_id: int,
        reason: str,
        decide: Callable[[Image], list[MetadataRecord]],
        effects: list[Effect],
    ) -> None:
        """Ask for a decision, unless the same one is waiting for its turn."""
        since_ms = self._pending.get((name, broker_id))
        if since_ms is None or self._now_ms - since_ms > self.settings.decision_timeout_ms:
            self._pending[name, broker_id] = self._now_ms
            effects.append(Decide(name, broker_id, reason, decide))

    # Partitions that await a decision.

    def _take_reports(
        self,
        broker_id: int,
        broker_epoch: int,
        logs: Sequence[ReplicaLog],
        effects: list[Effect],
    ) -> None:
        for log in logs:
            if log.key in self.image.recovering:
                self.reports.setdefault(log.key, {})[broker_id] = (broker_epoch, log)
        if logs:
            self._recover(effects)

    def _recover(self, effects: list[Effect]) -> None:
        """Elect by length what is complete; what is overdue where a topic allows losses."""
        complete: list[PartitionKey] = []
        given_up: list[PartitionKey] = []
        allowed = self._unclean_allowed(self.image)
        for key in self.image.recovering:
            state = self.image.partition(*key)
            if state is None:
                continue
            since_ms = self._leaderless_since.setdefault(key, self._now_ms)
            if not unclean_recovery.missing(self.image, state, self.reports):
                complete.append(key)
            elif self._now_ms - since_ms >= self.settings.recovery_wait_ms and allowed(
                self.image.topics_by_id[key[0]].name
            ):
                given_up.append(key)

        def recover(image: Image) -> list[MetadataRecord]:
            whole = unclean_recovery.elect_longest(image, complete, self.reports)
            return whole + unclean_recovery.elect_longest(
                image, given_up, self.reports, incomplete=True
            )

        if complete or given_up:
            self._decide("recover", -1, "whole ISRs restarted unclean", recover, effects)

    def _scan(self, effects: list[Effect]) -> None:
        """Look at every unsettled partition once."""
        image = self.image
        for known in (self._seen, self._leaderless_since, self.reports):
            for key in [key for key in known if key not in image.unsettled]:
                del known[key]
        if image.recovering:
            self._recover(effects)
        settled: dict[PartitionKey, int] = {}
        leaderless = reassigning = False
        for key in image.unsettled:
            state = image.partition(*key)
            if state is None:
                continue
            seen = self._seen.get(key)
            if seen is None or seen[0] != state.partition_epoch:
                seen = (state.partition_epoch, image.index, self._now_ms)
                self._seen[key] = seen
            if state.leader == NO_LEADER:
                self._leaderless_since.setdefault(key, self._now_ms)
                leaderless = leaderless or not state.recovering
            elif state.suspects and self._proven(state.leader, seen):
                settled[key] = state.partition_epoch
            reassigning = reassigning or state.reassigning
            if state.leader != NO_LEADER:
                self._leaderless_since.pop(key, None)
        self._ask(settled, leaderless, reassigning, effects)

    def _proven(self, leader: int, seen: tuple[int, int, int]) -> bool:
        """The leader was heard of after it had applied what made the others suspects."""
        session = self._sessions.get(leader)
        return (
            self._now_ms - seen[2] >= self.settings.settle_after_ms
            and session is not None
            and session.heard
            and session.applied_index >= seen[1]
        )

    def _ask(
        self,
        settled: dict[PartitionKey, int],
        leaderless: bool,
        reassigning: bool,
        effects: list[Effect],
    ) -> None:
        if settled:
            some = dict(list(settled.items())[:MAX_PARTITIONS_PER_DECISION])
            decide = partial(_settle, some)
            self._decide("settle", -1, f"{len(some)} partitions", decide, effects)
        if leaderless:
            allowed = self._unclean_allowed(self.image)
            if partition_election.elect_offline(self.image, allowed, limit=1):

                def elect(image: Image) -> list[MetadataRecord]:
                    return partition_election.elect_offline(image, self._unclean_allowed(image))

                self._decide("elect-unclean", -1, "partitions without a leader", elect, effects)
        if reassigning and reassignment.finish_reassignments(self.image, limit=1):
            finish = reassignment.finish_reassignments
            self._decide("reassign", -1, "all replicas are in sync", finish, effects)

    def _balance(self, effects: list[Effect]) -> None:
        if not self.settings.auto_leader_rebalance:
            return
        balance = partial(
            partition_election.balance_preferred,
            percentage=self.settings.imbalance_percentage,
            limit=MAX_PARTITIONS_PER_DECISION,
        )
        if balance(self.image):
            self._decide("balance", -1, "preferred leaders are back", balance, effects)

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


def _settle(known: dict[PartitionKey, int], image: Image) -> list[MetadataRecord]:
    return unclean_recovery.settle(image, known)
