"""One replica of a partition as a state machine: epochs, ISR, high watermark, manifests.

:meth:`PartitionCore.step` takes an event and returns effects, which the shell performs in order. No
clock, no disk, no log: offsets come in, tokens go out. Methods named after events are the same
without the event object, for the path of every produce and fetch request; both give the same
effects.

:attr:`PartitionCore.manifests` decides on manifests; what it says of them is noted here, and what
is published here goes to it, within the same step. So a step is whole: the shell sees no state in
which one of the two knows what the other does not.

What holds (semantics.md, rules 14, 15, 30, 33; ``Partition.scala``):

- HW = min LEO over the *maximal* ISR and the caught-up, eligible replicas about to join; it never
  goes back, and stands still while the ISR is below the effective minimum,
  min(``min.insync.replicas``, replicas).
- A proposed ISR counts in both directions until it is decided: the maximal ISR is the union of the
  confirmed and the proposed one. An unknown outcome stays proposed.
- A replica enters the ISR with LEO >= HW and >= start of the leader's epoch, as an unfenced broker
  with the right broker epoch. It has applied the manifest that the leader last published in this
  epoch; or it holds that one, with a log that is complete for it and was not cut in this epoch
  (rule 15).
- A member leaves when it was not caught up, or did not acknowledge the manifest offered, for
  ``replica.lag.time.max.ms``.
- Manifests are generations only here; None until there are any. Below the effective minimum the
  ISR's holding one is not enough to publish it at once: whoever comes back meanwhile takes it
  unpublished, and so joins without applying it first (rule 15).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kept.replication import events, manifests_events
from kept.replication.events import (
    UNKNOWN_OFFSET,
    Acknowledge,
    Appended,
    BecameLeader,
    CommitAdvanced,
    CommitAwaited,
    EligibleBrokersChanged,
    FollowerFetched,
    HighWatermarkMoved,
    IsrChanged,
    IsrProposalRejected,
    ManifestAcknowledged,
    ManifestApplied,
    ManifestLost,
    ManifestOffered,
    ManifestPublished,
    MinIsrChanged,
    ProposeIsr,
    StoppedLeading,
    Token,
    WaitCancelled,
)
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import (
    AnnounceManifest,
    GenerationPublished,
    NoteManifest,
    TruncationCompleted,
)
from kept.replication.progress import LONG_AGO, CommitQueue, ReplicaProgress
from kept.storage.errors import (
    InvariantViolation,
    KeptError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)
from kept.storage.types import Generation

Event = events.Event | manifests_events.Event
Effect = events.Effect | manifests_events.Effect
Effects = tuple[Effect, ...]

MEMBERS_WAIT_MS: Final = 600_000
"""A manifest that this leader made is held back so long at most, from when the ISR fell below its
minimum: nothing but acks=all waits for a replica that stays away."""

HIGH_WATERMARK_MOVED: Final = HighWatermarkMoved()
_MOVED: Final = (HIGH_WATERMARK_MOVED,)


@dataclass(slots=True)
class PartitionCore:
    """One partition's replica here, whether it leads or follows. Fields are read by the shell and
    moved only by events.

    ``alone``: it leads, and there is no other replica: HW is LEO. ``pending_epochs``: the broker
    epochs of the members proposed, as they were then: what was known of a member that has restarted
    since says nothing of it (KIP-903).
    """

    node_id: int
    lag_time_max_ms: int = 30_000
    min_insync_replicas: int = 1
    leading: bool = False
    leader_epoch: int = -1
    partition_epoch: int = -1
    replicas: tuple[int, ...] = ()
    isr: tuple[int, ...] = ()
    pending_isr: tuple[int, ...] | None = None
    pending_epochs: tuple[int, ...] = ()
    log_end_offset: int = 0
    high_watermark: int = 0
    epoch_start_offset: int = 0
    followers: dict[int, ReplicaProgress] = field(default_factory=dict)
    eligible: frozenset[int] = frozenset()
    broker_epochs: dict[int, int] = field(default_factory=dict)
    offered: Generation | None = None
    published: Generation | None = None
    awaits_offer: bool = False
    _offered_ms: int = 0
    _below_min_isr_since_ms: int | None = None
    _now_ms: int = 0
    _refused_until_ms: int = 0
    alone: bool = False
    manifests: ManifestCore = field(init=False)
    _waiting: CommitQueue = field(default_factory=CommitQueue)

    def __post_init__(self) -> None:
        self.manifests = ManifestCore(self.node_id)

    def step(self, event: Event, now_ms: int) -> Effects:
        """Take one event; returns what the shell must do, in order."""
        match event:
            case BecameLeader():
                return self.become_leader(event, now_ms)
            case Appended():
                return self.appended(event.log_end_offset)
            case FollowerFetched():
                return self.fetched(
                    event.replica_id, event.log_end_offset, now_ms, event.broker_epoch
                )
            case CommitAdvanced():
                return self.commit_known(event.offset)
            case IsrChanged():
                return self._isr_decided(event)
            case IsrProposalRejected():
                return self._isr_refused(event)
            case CommitAwaited():
                return self.commit_awaited(event.token, event.end_offset)
            case WaitCancelled():
                self._waiting.forget(event.token)
                return ()
            case MinIsrChanged():
                self.min_insync_replicas = event.min_insync_replicas
                self._note_minimum()
                return self._advance()
            case EligibleBrokersChanged():
                self.eligible = event.eligible
                self.broker_epochs = dict(event.epochs)
                self._refused_until_ms = 0
                return _joined(self._expand_known(), self._advance())
            case ManifestOffered():
                return self._manifest_offered(event, now_ms)
            case ManifestAcknowledged() | ManifestApplied():
                return self._manifest_acknowledged(event)
            case ManifestLost():
                self.awaits_offer = True
                return ()
            case StoppedLeading():
                return self.resigned()
            case TruncationCompleted():
                cut = min(self.high_watermark, event.log_end_offset)
                self.high_watermark = max(cut, event.log_start_offset)
                return self._note(self.manifests.step(event, now_ms), now_ms)
            case _:
                return self._note(self.manifests.step(event, now_ms), now_ms)

    def tick(self, now_ms: int) -> Effects:
        """Time passed: members that lag leave the ISR."""
        self._now_ms = max(self._now_ms, now_ms)
        proposal: Effects = ()
        if self.leading and self.pending_isr is None:
            staying = frozenset(replica for replica in self.isr if not self._lags(replica))
            if staying != frozenset(self.isr):
                proposal = self._propose(staying)
        return _joined(proposal, self._advance())

    def _note(self, effects: manifests_events.Effects, now_ms: int) -> Effects:
        """Take note of what :attr:`manifests` says of them; the rest is the shell's."""
        done: Effects = ()
        for effect in effects:
            if isinstance(effect, NoteManifest):
                done += self.step(effect.event, now_ms)
                if (
                    isinstance(effect.event, ManifestOffered)
                    and effect.event.generation is not None
                ):
                    done += (AnnounceManifest(),)
            else:
                done += (effect,)
        return done

    # Leadership.

    def become_leader(self, event: BecameLeader, now_ms: int) -> Effects:
        """Begin a term (or a new one right after the last)."""
        if event.leader_epoch < self.leader_epoch:
            raise InvariantViolation(f"leader epoch {event.leader_epoch} after {self.leader_epoch}")
        if event.leader_epoch == self.leader_epoch and self.leading:
            return self._isr_decided(IsrChanged(event.partition_epoch, event.replicas, event.isr))
        self.leading = True
        self.leader_epoch = event.leader_epoch
        self.partition_epoch = event.partition_epoch
        self.epoch_start_offset = event.log_end_offset
        self.log_end_offset = event.log_end_offset
        self.pending_isr = None
        self.offered = self.published = None
        self.awaits_offer = event.awaits_offer
        self._now_ms = now_ms
        self._below_min_isr_since_ms = None
        self.followers = {}
        self._members(event.replicas, event.isr)
        return self._advance()

    def _members(self, replicas: tuple[int, ...], isr: tuple[int, ...]) -> None:
        self.replicas, self.isr = replicas, isr
        self.followers = {
            replica: self.followers.get(replica)
            or ReplicaProgress(caught_up_ms=self._now_ms if replica in isr else LONG_AGO)
            for replica in replicas
            if replica != self.node_id
        }
        self.alone = not self.followers and isr == (self.node_id,)
        self._note_minimum()

    def _note_minimum(self) -> None:
        """The ISR or its minimum changed."""
        if not self.below_min_isr:
            self._below_min_isr_since_ms = None
        elif self._below_min_isr_since_ms is None:
            self._below_min_isr_since_ms = self._now_ms

    def resigned(self, error: type[KeptError] = NotLeaderOrFollower) -> Effects:
        """End the term: who waits hears ``error``."""
        self.leading = self.alone = False
        self.pending_isr = None
        self.followers = {}
        return tuple(Acknowledge(token, error) for token in self._waiting.drain())

    def follow(
        self,
        leader_epoch: int,
        partition_epoch: int,
        replicas: tuple[int, ...],
        isr: tuple[int, ...],
    ) -> None:
        """Another node leads: remember what the image says."""
        self.leader_epoch, self.partition_epoch = leader_epoch, partition_epoch
        self.replicas, self.isr = replicas, isr

    def pull_response(self, request: manifests_events.PullRequest) -> manifests_events.PullResponse:
        """The response to a pull, after :class:`.manifests_events.PullRequestReceived`."""
        outside_isr = request.replica_id not in self.maximal_isr
        return self.manifests.pull_response(request, outside_isr=outside_isr)

    # High watermark and acks.

    @property
    def effective_min_isr(self) -> int:
        """Members that the ISR must have for acks=all."""
        return min(self.min_insync_replicas, len(self.replicas))

    @property
    def below_min_isr(self) -> bool:
        """acks=all is refused and HW stands still."""
        members = len(self.isr)  # as effective_min_isr has it, asked at each fetch and append
        return (
            members < self.min_insync_replicas and members < len(self.replicas) and not self.alone
        )

    @property
    def all_published(self) -> bool:
        """Nothing that this leader holds is left to be published in its epoch."""
        return self.published == self.offered and not self.awaits_offer

    @property
    def lacks_members(self) -> bool:
        """The ISR is below its minimum, and has not been for MEMBERS_WAIT_MS."""
        since_ms = self._below_min_isr_since_ms
        return since_ms is not None and self._now_ms - since_ms < MEMBERS_WAIT_MS

    @property
    def awaits_members(self) -> bool:
        """What is offered is held back, for the ISR is below its minimum; see MEMBERS_WAIT_MS.

        Not what another epoch left: nobody may join before that is published. It ends with the
        first replica outside the ISR that holds it, and whose log reaches what is committed,
        whoever else is away.
        """
        offered = self.offered
        if offered is None or offered == self.published or not self.lacks_members:
            return False
        if offered.leader_epoch != self.leader_epoch:
            return False
        return not any(
            follower.held == offered
            and replica not in self.isr
            and self._reaches(follower)
            and self._is_eligible(replica, follower)
            for replica, follower in self.followers.items()
        )

    @property
    def unacknowledged_replicas(self) -> tuple[int, ...]:
        """Replicas that have not acknowledged what is offered, though its publication waits."""
        return tuple(
            replica
            for replica, follower in self.followers.items()
            if follower.held != self.offered and self._holds_back(replica, follower)
        )

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Confirmed and proposed members together."""
        return frozenset(self.isr) | frozenset(self.pending_isr or ())

    def appended(self, log_end_offset: int) -> Effects:
        """The log is readable up to ``log_end_offset``."""
        self.log_end_offset = log_end_offset
        if not self.alone:
            return self._advance()
        if log_end_offset <= self.high_watermark:
            return ()
        self.high_watermark = log_end_offset
        return (*_MOVED, *self._acknowledge()) if self._waiting else _MOVED

    def commit_known(self, offset: int) -> Effects:
        """Everything below ``offset`` is committed, as a manifest or the leader says."""
        if offset <= self.high_watermark:
            return ()
        self.high_watermark = offset
        return (*_MOVED, *self._acknowledge()) if self._waiting else _MOVED

    def commit_awaited(self, token: Token, end_offset: int) -> Effects:
        """Somebody waits for ``end_offset``; answered at once when HW is there."""
        if not self.leading:
            return (Acknowledge(token, NotLeaderOrFollower),)
        if self.high_watermark >= end_offset:
            return (self._acknowledgement(token),)
        self._waiting.add(token, end_offset)
        return ()

    def _acknowledgement(self, token: Token) -> Acknowledge:
        return Acknowledge(token, NotEnoughReplicasAfterAppend if self.below_min_isr else None)

    def _acknowledge(self) -> Effects:
        reached = self._waiting.reached(self.high_watermark)
        return tuple(self._acknowledgement(token) for token in reached)

    def _holds_back(self, replica: int, follower: ReplicaProgress) -> bool:
        """Its LEO bounds HW: a member of the maximal ISR, or about to join."""
        if replica in self.isr or (self.pending_isr is not None and replica in self.pending_isr):
            return True
        return self._caught_up(follower) and self._may_join(replica)

    def _caught_up(self, follower: ReplicaProgress) -> bool:
        if follower.log_end_offset == UNKNOWN_OFFSET:
            return False
        at_the_end = follower.log_end_offset == self.log_end_offset
        return at_the_end or self._now_ms - follower.caught_up_ms <= self.lag_time_max_ms

    def _may_join(self, replica: int) -> bool:
        """Rules 15 and 30, but for the offsets."""
        if not self.all_published:
            return False
        follower = self.followers[replica]
        complete = follower.complete and follower.held == self.published
        return (follower.applied == self.published or complete) and self._is_eligible(
            replica, follower
        )

    def _is_eligible(self, replica: int, follower: ReplicaProgress) -> bool:
        """An unfenced broker that follows, and the process that the image knows."""
        if replica not in self.eligible or not follower.follows:
            return False
        known = self.broker_epochs.get(replica, -1)
        return -1 in (known, follower.broker_epoch) or known == follower.broker_epoch

    def _reaches(self, follower: ReplicaProgress) -> bool:
        """It has everything that is committed, and what was there as this leader was elected."""
        return follower.log_end_offset >= max(self.high_watermark, self.epoch_start_offset)

    def _advance(self) -> Effects:
        """Move HW as far as the replicas allow, then answer who waited, then publish."""
        if not self.leading:
            return ()
        effects: Effects = ()
        if not self.below_min_isr:
            lowest = self.log_end_offset
            for replica, follower in self.followers.items():
                if follower.log_end_offset < lowest and self._holds_back(replica, follower):
                    lowest = follower.log_end_offset
            if lowest > self.high_watermark:
                self.high_watermark = lowest
                effects = _MOVED
        if self._waiting.reaches(self.high_watermark):
            effects += self._acknowledge()
        return effects if self.offered == self.published else effects + self._publish()

    # Followers and the ISR.

    def fetched(
        self, replica_id: int, log_end_offset: int, now_ms: int, broker_epoch: int = -1
    ) -> Effects:
        """A follower's fetch, accepted: not diverging, in range, in this epoch. Raises as
        :meth:`follower_of`.
        """
        follower = self.follower_of(replica_id, broker_epoch)
        self._now_ms = max(self._now_ms, now_ms)
        # It may have come late: a replica whose log was never cut has no other reason to pull.
        forgot = follower.fetched(log_end_offset, self.log_end_offset, now_ms, broker_epoch)
        asks: Effects = (AnnounceManifest(),) if forgot else ()
        if replica_id in self.isr:
            return _joined(asks, self._advance())
        return _joined(_joined(asks, self._expand(replica_id, follower)), self._advance())

    def follower_of(self, replica_id: int, broker_epoch: int) -> ReplicaProgress:
        """Who fetches. Raises NotLeaderOrFollower for a broker that is no replica, and for a broker
        epoch other than the image's: an earlier life of that broker must move nothing, and of a
        later one the image tells within moments. Until then the follower tries again (KIP-903).
        Whoever makes up an epoch can so neither move the high watermark nor lock the real replica
        out.
        """
        follower = self.followers.get(replica_id)
        if follower is None:
            raise NotLeaderOrFollower(f"broker {replica_id} is no replica: {self.replicas}")
        known = self.broker_epochs.get(replica_id, -1)
        if broker_epoch != known:
            raise NotLeaderOrFollower(
                f"a fetch of broker {replica_id} with broker epoch {broker_epoch}: it is {known}"
            )
        return follower

    def log_starts(self, replica_id: int, log_start_offset: int) -> bool:
        """A follower told where its log starts; whether that is news."""
        follower = self.followers[replica_id]
        news = follower.log_start_offset != log_start_offset
        follower.log_start_offset = log_start_offset
        return news

    def _expand(self, replica_id: int, follower: ReplicaProgress) -> Effects:
        if (
            self.pending_isr is not None
            or self._now_ms < self._refused_until_ms
            or not self._reaches(follower)
            or not self._may_join(replica_id)
        ):
            return ()
        return self._propose(frozenset((*self.isr, replica_id)))

    def _expand_known(self) -> Effects:
        """Brokers became eligible: who is known to be far enough need not fetch again first.

        Only where the broker epoch is known on both sides: what was known of an earlier life of a
        broker says nothing of its disk now (KIP-903).
        """
        for replica, follower in self.followers.items():
            if replica not in self.isr and follower.broker_epoch == self.broker_epochs.get(replica):
                effects = self._expand(replica, follower)
                if effects:
                    return effects
        return ()

    def _propose(self, members: frozenset[int]) -> Effects:
        self.pending_isr = tuple(replica for replica in self.replicas if replica in members)
        followers = self.followers
        self.pending_epochs = tuple(
            followers[member].broker_epoch if member in followers else -1
            for member in self.pending_isr
        )
        return (ProposeIsr(self.pending_isr, self.leader_epoch, self.partition_epoch),)

    def _isr_decided(self, event: IsrChanged) -> Effects:
        if not self.leading or event.partition_epoch <= self.partition_epoch:
            return ()
        self.partition_epoch = event.partition_epoch
        self.pending_isr = None
        self._members(event.replicas, event.isr)
        return self._advance()

    def _isr_refused(self, event: IsrProposalRejected) -> Effects:
        if event.partition_epoch == self.partition_epoch:
            self.pending_isr = None
            self._refused_until_ms = self._now_ms + event.pause_ms
        return self._advance()

    def _lags(self, replica: int) -> bool:
        follower = self.followers.get(replica)
        if follower is None:
            return False
        late = self._now_ms - self.lag_time_max_ms
        behind = follower.log_end_offset != self.log_end_offset and follower.caught_up_ms < late
        deaf = follower.held != self.offered and self._offered_ms < late
        return behind or (self.offered is not None and deaf)

    # Manifests: generations only.

    def _manifest_offered(self, event: ManifestOffered, now_ms: int) -> Effects:
        self.awaits_offer = False
        self.offered, self._offered_ms = event.generation, now_ms
        if event.applied:
            self.published = event.generation
        return self._advance()

    def _manifest_acknowledged(self, event: ManifestAcknowledged | ManifestApplied) -> Effects:
        follower = self.followers.get(event.replica_id)
        if follower is None or event.broker_epoch != follower.broker_epoch:
            return ()
        if 0 < event.number <= follower.last_pull:
            return ()  # it came late, over a connection that was given up, or twice
        follower.held = event.generation
        if isinstance(event, ManifestAcknowledged):
            follower.last_pull = event.number
            follower.complete = event.complete and not follower.went_back
        else:
            follower.applied = event.generation
        if event.replica_id in self.isr:
            return self._advance()
        # Its next fetch may be a long way off: one that has everything asks for nothing (KIP-227).
        effects = _joined(self._expand(event.replica_id, follower), self._advance())
        return _joined(effects, self._expand(event.replica_id, follower))  # what is published now

    def _publish(self) -> Effects:
        offered = self.offered
        if offered is None or self.awaits_members:
            return ()
        for replica, follower in self.followers.items():
            if follower.held != offered and self._holds_back(replica, follower):
                return ()
        return self._publish_held(offered)

    def _publish_held(self, offered: Generation) -> Effects:
        self.published = offered
        applies = self.manifests.step(GenerationPublished(offered), self._now_ms)
        return (ManifestPublished(offered), *self._note(applies, self._now_ms))

    def check_invariants(self) -> None:
        """Raises InvariantViolation for a state that must not exist."""
        self.manifests.check_invariants()
        ends = self._waiting.ends
        wrong = {
            "HW above LEO": self.leading and self.high_watermark > self.log_end_offset,
            "ISR beyond replicas": not self.maximal_isr <= frozenset(self.replicas),
            "leader outside its ISR": self.leading and self.node_id not in self.isr,
            "proposal without leader": self.pending_isr is not None and not self.leading,
            "leader's proposal drops it": (
                self.pending_isr is not None and self.node_id not in self.pending_isr
            ),
            "acks out of order": ends != sorted(ends),
            "ack overdue": bool(ends) and ends[0] <= self.high_watermark,
            "waiters without leader": bool(ends) and not self.leading,
            "epoch starts above LEO": self.leading
            and self.epoch_start_offset > self.log_end_offset,
        }
        broken = [name for name, is_so in wrong.items() if is_so]
        if broken:
            raise InvariantViolation(f"{'; '.join(broken)}: {self}")


def _joined(first: Effects, then: Effects) -> Effects:
    """Both; the high watermark's movement before all, and once."""
    if not first or not then:
        return first or then
    if then[0] is HIGH_WATERMARK_MOVED:
        return then if first is _MOVED else (*_MOVED, *first, *then[1:])
    return (*first, *then)
