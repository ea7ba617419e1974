"""The leader of one partition as a state machine: progress of replicas, ISR, high watermark, acks.

:meth:`LeaderCore.step` takes an event and returns effects, which the shell performs in order. No
clock, no disk, no log: offsets come in, tokens go out. Methods named after events are the same
without the event object, for the path of every produce request.

What holds (SEMANTICS rules 14, 15, 30, 33; ``Partition.scala``):

- HW = min LEO over the *maximal* ISR and the caught-up, eligible replicas about to join; it never
  goes back, and stands still while the ISR is below the effective minimum,
  min(``min.insync.replicas``, replicas).
- A proposed ISR counts in both directions until it is decided: the maximal ISR is the union of the
  confirmed and the proposed one. An unknown outcome stays proposed.
- A replica enters the ISR with LEO >= HW and >= start of the leader's epoch, as an unfenced broker
  with the right broker epoch, having applied the manifest that the leader last published in this
  epoch.
- A member leaves when it was not caught up, or did not acknowledge the manifest offered, for
  ``replica.lag.time.max.ms``.
- Manifests are identities only; None until there are any.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from kept.storage.errors import (
    InvariantViolation,
    KeptError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)

Token = Hashable
"""Stands for somebody who waits; means nothing to the core."""

Identity = Hashable
"""A manifest's identity (epoch, generation), compared for equality only."""

UNKNOWN_OFFSET: Final = -1


# Events.


@dataclass(frozen=True, slots=True)
class Elected:
    """This node leads: from the image. The high watermark is what it knew as replica."""

    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_end_offset: int
    high_watermark: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Appended:
    """Batches up to ``log_end_offset`` are in the log and readable."""

    log_end_offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A follower asked for ``log_end_offset``: it has everything below."""

    replica_id: int
    log_end_offset: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class CommitKnown:
    """Everything below ``offset`` is committed, because a published manifest covers it."""

    offset: int


@dataclass(frozen=True, slots=True)
class IsrDecided:
    """The image has another ISR (or replicas) in the same leader epoch."""

    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IsrRefused:
    """The controller said no to the proposal made at that partition epoch; it will not happen."""

    partition_epoch: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class CommitAwaited:
    """Somebody waits until HW >= ``end_offset``."""

    token: Token
    end_offset: int


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """Somebody stopped waiting."""

    token: Token


@dataclass(frozen=True, slots=True)
class MinIsrChanged:
    """``min.insync.replicas`` of the topic."""

    min_insync_replicas: int


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """Which brokers may join an ISR: unfenced, not shutting down, of the right epoch."""

    eligible: frozenset[int]


@dataclass(frozen=True, slots=True)
class ManifestOffered:
    """The leader holds this manifest durably. ``applied``: it had applied it before its term."""

    identity: Identity
    now_ms: int
    applied: bool = False


@dataclass(frozen=True, slots=True)
class ManifestHeld:
    """A replica acknowledged a manifest in the leader's epoch."""

    replica_id: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class ManifestApplied:
    """A replica has applied a manifest."""

    replica_id: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class Resigned:
    """This node does not lead any more."""


Event = (
    Elected
    | Appended
    | Fetched
    | CommitKnown
    | IsrDecided
    | IsrRefused
    | Ticked
    | CommitAwaited
    | WaitEnded
    | MinIsrChanged
    | BrokersChanged
    | ManifestOffered
    | ManifestHeld
    | ManifestApplied
    | Resigned
)


# Effects.


@dataclass(frozen=True, slots=True)
class HighWatermarkMoved:
    """Consumers may read up to here. Only :meth:`LeaderCore.step` returns it."""

    high_watermark: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell a waiter: committed, or why not."""

    token: Token
    error: type[KeptError] | None


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """Ask the controller for another ISR, compare-and-set on the partition epoch."""

    isr: tuple[int, ...]
    leader_epoch: int
    partition_epoch: int


@dataclass(frozen=True, slots=True)
class ManifestPublished:
    """Every replica that holds back HW has the manifest: the leader may swap, and says so."""

    identity: Identity


Effect = HighWatermarkMoved | Acknowledge | ProposeIsr | ManifestPublished
Effects = tuple[Effect, ...]


@dataclass(slots=True)
class Follower:
    """What the leader knows of another replica.

    ``log_end_offset``: UNKNOWN_OFFSET until it fetches in this epoch. ``caught_up_ms``: when it
    last had all that the leader had at that time.
    """

    log_end_offset: int = UNKNOWN_OFFSET
    caught_up_ms: int = 0
    fetched_ms: int = 0
    end_at_fetch: int = UNKNOWN_OFFSET
    held: Identity = None
    applied: Identity = None


@dataclass(slots=True)
class LeaderCore:
    """One partition's leader. Fields are read by the shell and moved only by events.

    ``alone``: it leads, and there is no other replica: HW is LEO.
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
    log_end_offset: int = 0
    high_watermark: int = 0
    epoch_start_offset: int = 0
    followers: dict[int, Follower] = field(default_factory=dict)
    eligible: frozenset[int] = frozenset()
    offered: Identity = None
    published: Identity = None
    _offered_ms: int = 0
    _now_ms: int = 0
    alone: bool = False
    _waiting: deque[tuple[int, int, Token]] = field(default_factory=deque)
    _waited: int = 0

    def step(self, event: Event) -> Effects:
        """Take one event; returns what the shell must do, in order."""
        before = self.high_watermark
        effects = self._dispatch(event)
        if self.high_watermark != before and self.leading:
            return (HighWatermarkMoved(self.high_watermark), *effects)
        return effects

    def _dispatch(self, event: Event) -> Effects:
        match event:
            case Elected():
                return self.elected(event)
            case Appended():
                return self.appended(event.log_end_offset)
            case Fetched():
                return self.fetched(event.replica_id, event.log_end_offset, event.now_ms)
            case CommitKnown():
                self.high_watermark = max(self.high_watermark, event.offset)
                return self._acknowledge()
            case IsrDecided():
                return self._isr_decided(event)
            case IsrRefused():
                return self._isr_refused(event)
            case Ticked():
                return self._ticked(event.now_ms)
            case CommitAwaited():
                return self.commit_awaited(event.token, event.end_offset)
            case WaitEnded():
                return self._wait_ended(event.token)
            case MinIsrChanged():
                self.min_insync_replicas = event.min_insync_replicas
                return self._advance()
            case BrokersChanged():
                self.eligible = event.eligible
                return self._advance()
            case ManifestOffered() | ManifestHeld() | ManifestApplied():
                return self._manifest(event)
            case Resigned():
                return self.resigned()

    # Leadership.

    def elected(self, event: Elected) -> Effects:
        """Begin a term (or a new one right after the last)."""
        if event.leader_epoch < self.leader_epoch:
            raise InvariantViolation(f"leader epoch {event.leader_epoch} after {self.leader_epoch}")
        if event.leader_epoch == self.leader_epoch and self.leading:
            return self._isr_decided(IsrDecided(event.partition_epoch, event.replicas, event.isr))
        known = self.high_watermark if self.leading else 0
        self.high_watermark = max(known, event.high_watermark)
        self.leading = True
        self.leader_epoch = event.leader_epoch
        self.partition_epoch = event.partition_epoch
        self.epoch_start_offset = event.log_end_offset
        self.log_end_offset = event.log_end_offset
        self.pending_isr = None
        self.offered = self.published = None
        self._now_ms = event.now_ms
        self.followers = {}
        self._members(event.replicas, event.isr)
        return self._advance()

    def _members(self, replicas: tuple[int, ...], isr: tuple[int, ...]) -> None:
        self.replicas, self.isr = replicas, isr
        self.followers = {
            replica: self.followers.get(replica) or Follower(caught_up_ms=self._now_ms)
            for replica in replicas
            if replica != self.node_id
        }
        self.alone = not self.followers and isr == (self.node_id,)

    def resigned(self, error: type[KeptError] = NotLeaderOrFollower) -> Effects:
        """End the term: who waits hears ``error``."""
        self.leading = self.alone = False
        self.pending_isr = None
        self.followers = {}
        effects = tuple(Acknowledge(token, error) for _, _, token in self._waiting)
        self._waiting.clear()
        return effects

    # High watermark and acks.

    @property
    def effective_min_isr(self) -> int:
        """Members that the ISR must have for acks=all."""
        return min(self.min_insync_replicas, len(self.replicas))

    @property
    def below_min_isr(self) -> bool:
        """acks=all is refused and HW stands still."""
        return not self.alone and len(self.isr) < self.effective_min_isr

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Confirmed and proposed members together."""
        return frozenset(self.isr) | frozenset(self.pending_isr or ())

    def appended(self, log_end_offset: int) -> Effects:
        """The log is readable up to ``log_end_offset``."""
        self.log_end_offset = log_end_offset
        if self.alone:
            self.high_watermark = max(self.high_watermark, log_end_offset)
            return self._acknowledge() if self._waiting else ()
        return self._advance()

    def commit_awaited(self, token: Token, end_offset: int) -> Effects:
        """Somebody waits for ``end_offset``; answered at once when HW is there."""
        if not self.leading:
            return (Acknowledge(token, NotLeaderOrFollower),)
        if self.high_watermark >= end_offset:
            return (self._acknowledgement(token),)
        self._waited += 1
        entry = (end_offset, self._waited, token)
        if not self._waiting or self._waiting[-1][0] <= end_offset:
            self._waiting.append(entry)
        else:
            insort(self._waiting, entry, key=lambda waiter: waiter[:2])
        return ()

    def _wait_ended(self, token: Token) -> Effects:
        self._waiting = deque(waiter for waiter in self._waiting if waiter[2] != token)
        return ()

    def _acknowledgement(self, token: Token) -> Acknowledge:
        return Acknowledge(token, NotEnoughReplicasAfterAppend if self.below_min_isr else None)

    def _acknowledge(self) -> Effects:
        effects: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= self.high_watermark:
            effects.append(self._acknowledgement(self._waiting.popleft()[2]))
        return tuple(effects)

    def _holding_back(self) -> frozenset[int]:
        """The replicas whose LEO bounds HW: the maximal ISR, and who is about to join it."""
        joining = (
            replica
            for replica, follower in self.followers.items()
            if self._caught_up(follower) and self._may_join(replica)
        )
        return self.maximal_isr.union(joining)

    def _caught_up(self, follower: Follower) -> bool:
        if follower.log_end_offset == UNKNOWN_OFFSET:
            return False
        at_the_end = follower.log_end_offset == self.log_end_offset
        return at_the_end or self._now_ms - follower.caught_up_ms <= self.lag_time_max_ms

    def _may_join(self, replica: int) -> bool:
        """Rules 15 and 30, but for the offsets."""
        return (
            replica in self.eligible
            and self.published == self.offered
            and self.followers[replica].applied == self.published
        )

    def _advance(self) -> Effects:
        """Move HW as far as the replicas allow, then answer who waited, then publish."""
        if not self.leading:
            return ()
        if not self.below_min_isr:
            lowest = self.log_end_offset
            for replica in self._holding_back():
                if replica != self.node_id:
                    follower = self.followers.get(replica)
                    known = UNKNOWN_OFFSET if follower is None else follower.log_end_offset
                    lowest = min(lowest, known)
            self.high_watermark = max(self.high_watermark, lowest)
        return self._acknowledge() + self._publish()

    # Followers and the ISR.

    def fetched(self, replica_id: int, log_end_offset: int, now_ms: int) -> Effects:
        """A follower's fetch, accepted: not diverging, in range, in this epoch."""
        follower = self.followers.get(replica_id)
        if follower is None:
            raise NotLeaderOrFollower(f"broker {replica_id} is no replica: {self.replicas}")
        self._now_ms = max(self._now_ms, now_ms)
        if log_end_offset >= self.log_end_offset:
            follower.caught_up_ms = max(follower.caught_up_ms, now_ms)
        elif follower.end_at_fetch != UNKNOWN_OFFSET and log_end_offset >= follower.end_at_fetch:
            follower.caught_up_ms = max(follower.caught_up_ms, follower.fetched_ms)
        follower.log_end_offset = log_end_offset
        follower.end_at_fetch = self.log_end_offset
        follower.fetched_ms = now_ms
        return self._expand(replica_id, follower) + self._advance()

    def _expand(self, replica_id: int, follower: Follower) -> Effects:
        if (
            self.pending_isr is not None
            or replica_id in self.isr
            or follower.log_end_offset < max(self.high_watermark, self.epoch_start_offset)
            or not self._may_join(replica_id)
        ):
            return ()
        return self._propose(frozenset((*self.isr, replica_id)))

    def _propose(self, members: frozenset[int]) -> Effects:
        self.pending_isr = tuple(replica for replica in self.replicas if replica in members)
        return (ProposeIsr(self.pending_isr, self.leader_epoch, self.partition_epoch),)

    def _isr_decided(self, event: IsrDecided) -> Effects:
        if not self.leading or event.partition_epoch <= self.partition_epoch:
            return ()
        self.partition_epoch = event.partition_epoch
        self.pending_isr = None
        self._members(event.replicas, event.isr)
        return self._advance()

    def _isr_refused(self, event: IsrRefused) -> Effects:
        if event.partition_epoch == self.partition_epoch:
            self.pending_isr = None
        return self._advance()

    def _ticked(self, now_ms: int) -> Effects:
        self._now_ms = max(self._now_ms, now_ms)
        effects: Effects = ()
        if self.leading and self.pending_isr is None:
            staying = frozenset(replica for replica in self.isr if not self._lags(replica))
            if staying != frozenset(self.isr):
                effects = self._propose(staying)
        return effects + self._advance()

    def _lags(self, replica: int) -> bool:
        follower = self.followers.get(replica)
        if follower is None:
            return False
        late = self._now_ms - self.lag_time_max_ms
        behind = follower.log_end_offset != self.log_end_offset and follower.caught_up_ms < late
        deaf = follower.held != self.offered and self._offered_ms < late
        return behind or (self.offered is not None and deaf)

    # Manifests: identities only.

    def _manifest(self, event: ManifestOffered | ManifestHeld | ManifestApplied) -> Effects:
        if isinstance(event, ManifestOffered):
            self.offered, self._offered_ms = event.identity, event.now_ms
            if event.applied:
                self.published = event.identity
            return self._advance()
        follower = self.followers.get(event.replica_id)
        if follower is None:
            return ()
        if isinstance(event, ManifestHeld):
            follower.held = event.identity
        else:
            follower.held = follower.applied = event.identity
        return self._advance()

    def _publish(self) -> Effects:
        if self.offered is None or self.offered == self.published:
            return ()
        for replica in self._holding_back():
            follower = self.followers.get(replica)
            if follower is not None and follower.held != self.offered:
                return ()
        self.published = self.offered
        return (ManifestPublished(self.offered),)

    def check_invariants(self) -> None:
        """Raises InvariantViolation for a state that must not exist."""
        ends = [waiter[0] for waiter in self._waiting]
        wrong = {
            "HW above LEO": self.high_watermark > self.log_end_offset,
            "ISR beyond replicas": not self.maximal_isr <= frozenset(self.replicas),
            "leader outside its ISR": self.leading and self.node_id not in self.isr,
            "proposal without leader": self.pending_isr is not None and not self.leading,
            "leader's proposal drops it": (
                self.pending_isr is not None and self.node_id not in self.pending_isr
            ),
            "acks out of order": ends != sorted(ends),
            "ack overdue": bool(ends) and ends[0] <= self.high_watermark,
            "waiters without leader": bool(ends) and not self.leading,
            "epoch starts above LEO": self.epoch_start_offset > self.log_end_offset,
        }
        broken = [name for name, is_so in wrong.items() if is_so]
        if broken:
            raise InvariantViolation(f"{'; '.join(broken)}: {self}")
