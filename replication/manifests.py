"""Following the leader's compaction: what one replica knows of manifests, as a state machine.

:meth:`ManifestCore.step` takes an event and returns effects, which the shell performs in order. It
is a part of :class:`.partition_core.PartitionCore`, which knows the ISR and says when a manifest is
published, and sits beside :class:`.follower.FollowerCore`, which knows whether the logs agree.
Bodies of manifests are the shell's; here they are names, compared for equality only.

What holds (rules 13 to 16, 19, 30); the letters are the counterexamples that each check
answers, and tests/replication/manifests plays them:

- *Held*: made durable before it is acknowledged; the next pull acknowledges, so there is no message
  to lose. One store is under way at a time, and an election waits for it: a late one would change
  what a leader holds behind its back.
- *Published*: held by confirmed and proposed ISR (C1); the leader core counts. Nobody applies
  before (C2, C14).
- *A new leader* finishes what it holds, published or not, before it computes, swaps or admits
  anybody (C3, C4, C5). If it has applied that already, it counts as published.
- *A follower* takes whatever the leader of its epoch holds if it differs (C9). It applies what that
  leader called published in answer to a request sent after a fetch that did not diverge (C11), with
  log end >= b (C6, C10). That the *request* must say so, and not the time of the answer, matters:
  only then has everything below b come from a leader that had applied nothing newer.
- It keeps two: the newest it holds, and the newest that its leader called published, so that a
  pending one stops nothing.
- *Complete*: when it asked for what it holds, its log reached the end of that, had applied what its
  leader had (or was complete for it), and the leader, which had made the manifest in this epoch,
  had not published it. So nothing below that end went before it was here. Where nothing is applied
  yet that is not known of a log that Apache Kafka compacted. Such a replica enters
  the ISR before it has applied the manifest (C16). A cut below the end takes that away.
- The high watermark is raised to b before anything is applied (C13).
- *Lost*: a replica whose file of what it holds is damaged (at a start, or when it is to be applied)
  asks its leader. As leader it offers
  nothing and admits nobody, for what it held may have been published; somebody else should lead. If
  it is the whole ISR, it begins anew with a base, like an unclean leader: all that was ever
  acknowledged is in its log.
- An apply cannot be taken back once a segment is in place; elections and cuts wait for its end.
- *Unclean*: the leader forgets what it holds and makes a base generation (C15a, b); the mark is the
  controller's, so that it is made also by one that is elected again (C15c). A cut below the
  applied b clears the mark.
- *Missing*: a survivor that is not in the log. The replica says from then on that it holds nothing
  and has applied nothing, so that its leader drops it from the ISR, and proposes it no more. The
  log is cut there, and fetched again, once the leader has answered such a pull that the replica is
  neither a member nor proposed: what the image says of that may be old (C17).

What the shell owes: nothing that a manifest covers is deleted by anything else meanwhile; events in
the order in which things happened; a :class:`.manifests_events.TruncationCompleted` before the log
is used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kept.replication.events import (
    CommitAdvanced,
    ManifestAcknowledged,
    ManifestApplied,
    ManifestLost,
    ManifestOffered,
)
from kept.replication.manifests_events import (
    ApplyAborted,
    ApplyCompleted,
    ApplyManifest,
    BaseGenerationCreated,
    CancelApply,
    ClearApplied,
    ClearComplete,
    CreateBaseGeneration,
    DiscardPass,
    DivergenceChecked,
    Effects,
    Event,
    GenerationPublished,
    ManifestDamaged,
    ManifestRef,
    ManifestStored,
    ManifestStoreFailed,
    MarkManifestLost,
    NoteManifest,
    PassCompleted,
    PullFailed,
    PullRequest,
    PullRequestReceived,
    PullResponse,
    PullResponseReceived,
    ReportMissing,
    RetryTriggered,
    StartedFollowing,
    StartedLeading,
    StoreManifest,
    TruncateLog,
    TruncationCompleted,
)
from kept.storage.errors import (
    FencedLeaderEpoch,
    InvariantViolation,
    NotLeaderOrFollower,
    UnknownLeaderEpoch,
)
from kept.storage.types import MAX_INT64

UNCUT: Final = MAX_INT64


class ManifestRole(Enum):
    """What the replica is."""

    NONE = "none"
    FOLLOWER = "follower"
    LEADER = "leader"


@dataclass(slots=True)
class ManifestCore:
    """One replica. Fields are read by the shell and moved only by events.

    ``held`` and ``applied`` are durable, and come from the disk at a start; ``lost``: they could
    not be read. ``complete``, durable, too: the log had everything below the end of ``held``, which
    is not applied yet, before anybody acted on that. ``adopted``: the log directory was Apache
    Kafka's, which compacted each replica on its own. ``published``: by this leader in this epoch;
    ``leader_published``: by the leader that is followed, to be applied. ``has_offered``: this
    leader has offered what it holds. ``in_flight``: the pull that has no response yet. ``cut_to``:
    lowest end of the log since the apply under way began. ``replaces``: of this epoch, and lost:
    the base that is made gets another name.
    """

    node_id: int
    held: ManifestRef | None = None
    applied: ManifestRef | None = None
    lost: bool = False
    complete: bool = False
    adopted: bool = False
    role: ManifestRole = ManifestRole.NONE
    leader_epoch: int = -1
    published: ManifestRef | None = None
    has_offered: bool = False
    unclean: bool = False
    alone: bool = False
    leader_published: ManifestRef | None = None
    synced: bool = False
    in_flight: PullRequest | None = None
    storing: StoreManifest | None = None
    applying: ManifestRef | None = None
    making_base: bool = False
    replaces: ManifestRef | None = None
    missing: int | None = None
    cut_to: int = UNCUT
    pulls: int = 0
    _published_after_store: ManifestRef | None = None
    _cut_while_storing: int = UNCUT

    def step(self, event: Event, now_ms: int) -> Effects:  # noqa: ARG002
        """Take one event; returns what the shell must do, in order."""
        match event:
            case PullRequestReceived():
                return self.receive_pull(event.request)
            case PullResponseReceived():
                return self._receive_pull_response(event)
            case PullFailed():
                if event.request == self.in_flight:
                    self.in_flight = None
                return ()
            case ManifestStored():
                return self._stored(event.held)
            case ManifestStoreFailed():
                self.storing = None
                return self._offer_if_known()
            case DivergenceChecked():
                return self._synced(event)
            case TruncationCompleted():
                return self._cut(event.log_end_offset, event.log_start_offset)
            case GenerationPublished():
                return self._published(event)
            case ApplyCompleted():
                return self._applied(event.manifest)
            case ApplyAborted():
                return self._apply_ended(event)
            case PassCompleted():
                return self._pass_done(event)
            case RetryTriggered():
                return self._apply_next()
            case ManifestDamaged():
                return self._damaged(event)
            case StartedLeading():
                return self._leads(event)
            case StartedFollowing():
                return self._follows(event)
            case BaseGenerationCreated():
                return self._base_made(event.manifest)

    def tick(self, now_ms: int) -> Effects:  # noqa: ARG002
        """Nothing follows from time alone."""
        return ()

    # Roles.

    def _begin(self, role: ManifestRole, leader_epoch: int) -> Effects:
        """Nothing that was pulled in another epoch counts in this one."""
        if leader_epoch < self.leader_epoch:
            raise InvariantViolation(f"leader epoch {leader_epoch} after {self.leader_epoch}")
        self.role, self.leader_epoch = role, leader_epoch
        self.published = None
        self.has_offered = self.making_base = self.unclean = False
        self.missing = self.replaces = None
        self._void_pulls()
        return () if self.applying is None else (CancelApply(self.applying),)

    def _void_pulls(self) -> None:
        self.leader_published = self._published_after_store = self.in_flight = None
        self.synced = False

    def _leads(self, event: StartedLeading) -> Effects:
        effects: Effects = ()
        if self.role is not ManifestRole.LEADER or event.leader_epoch != self.leader_epoch:
            effects = self._begin(ManifestRole.LEADER, event.leader_epoch)
            self.unclean = event.unclean
        self.alone = event.alone
        return effects + self._offer_if_known()

    def _follows(self, event: StartedFollowing) -> Effects:
        if self.role is ManifestRole.FOLLOWER and event.leader_epoch == self.leader_epoch:
            return ()
        return self._begin(ManifestRole.FOLLOWER, event.leader_epoch)

    # Leader.

    def _offer_if_known(self) -> Effects:
        """Offer what is held, once it is known what that is."""
        waits = self.storing is not None or self.applying is not None or self.making_base
        unknown = self.lost and not (self.unclean or self.alone)
        if self.role is not ManifestRole.LEADER or self.has_offered or waits or unknown:
            return ()
        if (self.unclean or self.lost) and not self._made_in_this_epoch():
            self.making_base = True
            self._hold_nothing()
            return (CreateBaseGeneration(self.leader_epoch, self.replaces),)
        self.has_offered = True
        if self.held == self.applied:
            self.published = self.held
        return (self._offer(),)

    def _made_in_this_epoch(self) -> bool:
        """It led in this epoch before a restart, and made its base then."""
        held = self.held
        return held is not None and held == self.applied and held.leader_epoch == self.leader_epoch

    def _base_made(self, base: ManifestRef) -> Effects:
        if not self.making_base:
            return ()
        self.making_base = self.lost = False
        self.held = self.applied = base
        return (NoteManifest(CommitAdvanced(base.end_offset)), *self._offer_if_known())

    def _offer(self) -> NoteManifest:
        generation = None if self.held is None else self.held.generation
        return NoteManifest(ManifestOffered(generation, applied=self.held == self.applied))

    @property
    def may_compute(self) -> bool:
        """A pass may begin: all that there is was published in this epoch, and is applied here."""
        idle = self.storing is None and self.applying is None
        return self.has_offered and idle and self.held == self.applied == self.published

    def _pass_done(self, event: PassCompleted) -> Effects:
        """A pass during which epoch or applied generation changed is thrown away (rule 13)."""
        same = event.leader_epoch == self.leader_epoch and event.based_on == self.applied
        if not (same and self.may_compute):
            return (DiscardPass(event.manifest),)
        if self.applied is not None and event.manifest.end_offset < self.applied.end_offset:
            raise InvariantViolation(f"{event.manifest} ends below {self.applied}")
        return self._store(StoreManifest(event.manifest, None, complete=True))

    def _published(self, event: GenerationPublished) -> Effects:
        held = self.held
        if not self.has_offered or held is None or held.generation != event.generation:
            return ()
        self.published = held
        return self._apply_next()

    def receive_pull(self, request: PullRequest) -> Effects:
        """Count what a follower acknowledges; :meth:`pull_response` follows.

        Raises FencedLeaderEpoch, UnknownLeaderEpoch, NotLeaderOrFollower (also while it is not
        known yet what this leader holds).
        """
        if request.leader_epoch < self.leader_epoch:
            raise FencedLeaderEpoch(f"epoch {request.leader_epoch}, now it is {self.leader_epoch}")
        if request.leader_epoch > self.leader_epoch:
            raise UnknownLeaderEpoch(f"epoch {request.leader_epoch}, here {self.leader_epoch}")
        if not self.has_offered:
            raise NotLeaderOrFollower("this node does not lead, or not yet")
        replica, broker_epoch, number = request.replica_id, request.broker_epoch, request.number
        effects: Effects = ()
        if request.synced:
            applied = None if request.applied is None else request.applied.generation
            effects = (NoteManifest(ManifestApplied(replica, applied, broker_epoch, number)),)
        held = None if request.held is None else request.held.generation
        complete = request.complete and request.synced
        said = ManifestAcknowledged(replica, held, broker_epoch, complete, number)
        return (*effects, NoteManifest(said))

    def pull_response(self, request: PullRequest, *, outside_isr: bool = False) -> PullResponse:
        """The response to a request that was counted by :meth:`receive_pull`."""
        published = self.published if _covers(request, self.published) else None
        sent = dict.fromkeys(m for m in (self.held, published) if m and m not in request.has)
        return PullResponse(
            self.held, published, tuple(sent), self._is_complete(request), outside_isr
        )

    def _is_complete(self, request: PullRequest) -> bool:
        """Whether a replica has everything below the end of what is held here, and nobody has acted
        on that: it was made in this epoch, so that no other leader has, and is not published.
        """
        held = self.held
        if held is None or held == self.published or held.leader_epoch != self.leader_epoch:
            return False
        before = request.applied == self.applied and not self._compacted_alone
        before = before or (request.complete and request.held == self.applied)
        return before and request.synced and request.log_end_offset >= held.end_offset

    @property
    def _compacted_alone(self) -> bool:
        """No manifest was applied to the log yet, and it may have been compacted all the same."""
        return self.adopted and self.applied is None

    # Follower.

    def start_pull(self, log_end_offset: int, broker_epoch: int = -1) -> PullRequest | None:
        """What to ask the leader now; None while an answer or a store is outstanding.

        A request that is given up is to be followed by :class:`.manifests_events.PullFailed`.
        """
        if (
            self.role is not ManifestRole.FOLLOWER
            or self.in_flight is not None
            or self.storing is not None
        ):
            return None
        self.pulls += 1
        claims = self.missing is None
        has = dict.fromkeys(m for m in (self.held, self.leader_published, self.applied) if m)
        self.in_flight = PullRequest(
            self.node_id,
            broker_epoch,
            self.leader_epoch,
            self.pulls,
            self.held if claims else None,
            self.applied if claims else None,
            self.synced,
            log_end_offset,
            tuple(has),
            self.complete and claims,
        )
        return self.in_flight

    def _receive_pull_response(self, event: PullResponseReceived) -> Effects:
        """Answers count for the request that is waited for; every change of role voids it."""
        if event.request != self.in_flight:
            return ()
        self.in_flight = None
        response = event.response
        if self.missing is not None:
            return (TruncateLog(self.missing),) if response.outside_isr else ()
        published = response.published if self._accepts_published(event.request, response) else None
        accepts = self._accepts_held(response.held)
        held = response.held if accepts else self.held
        if not accepts and published in (None, self.held, self.leader_published, self.applied):
            self.leader_published = published
            return self._apply_next()
        self.leader_published, self._published_after_store = None, published
        complete = self.complete
        if accepts:
            sound = not (self.lost or self._compacted_alone)
            complete = response.complete and sound
        beside = None if published in (held, self.applied) else published
        return self._store(StoreManifest(held, beside, complete))

    def _accepts_published(self, request: PullRequest, response: PullResponse) -> bool:
        return _covers(request, response.published)

    def _accepts_held(self, offered: ManifestRef | None) -> bool:
        return offered != self.held or self.lost

    def _store(self, effect: StoreManifest) -> Effects:
        self.storing, self._cut_while_storing = effect, UNCUT
        return (effect,)

    def _stored(self, held: ManifestRef | None) -> Effects:
        complete = self.storing is not None and self.storing.complete
        self.complete = complete and held != self.applied
        self.storing = None
        self.held, self.lost = held, False
        effects = self._clear_complete(self._cut_while_storing)
        if self.has_offered:
            return (*effects, self._offer())
        self.leader_published, self._published_after_store = self._published_after_store, None
        return effects + (self._offer_if_known() or self._apply_next())

    def _clear_complete(self, log_end_offset: int) -> Effects:
        """The log was cut: what comes below the end of what is held may have gaps from now on."""
        held = self.held
        if not self.complete or held is None or log_end_offset >= held.end_offset:
            return ()
        self.complete = False
        return (ClearComplete(held),)

    def _hold_nothing(self) -> None:
        self.held = self.applied = None
        self.complete = False

    def _synced(self, event: DivergenceChecked) -> Effects:
        if self.role is ManifestRole.FOLLOWER and event.leader_epoch == self.leader_epoch:
            if not event.agreed:
                self._void_pulls()
            self.synced = event.agreed
        return ()

    def _cut(self, log_end_offset: int, log_start_offset: int) -> Effects:
        self._void_pulls()
        # What is missing may lie below the log start: a log that is empty there lacks nothing.
        if self.missing is not None and log_end_offset <= max(self.missing, log_start_offset):
            self.missing = None
        self._cut_while_storing = min(self._cut_while_storing, log_end_offset)
        effects = self._clear_complete(log_end_offset)
        if self.applying is not None:
            self.cut_to = min(self.cut_to, log_end_offset)
            effects += (CancelApply(self.applying),)
        applied = self.applied
        if applied is not None and log_end_offset < applied.end_offset:
            self.applied = None
            effects += (ClearApplied(applied),)
        return effects

    # Applying.

    def _apply_next(self) -> Effects:
        """Both roles: apply what is published, if it is not applied."""
        target = self.published if self.role is ManifestRole.LEADER else self.leader_published
        busy = self.applying is not None or self.storing is not None or self.missing is not None
        if target is None or target == self.applied or busy:
            return ()
        self.applying, self.cut_to = target, UNCUT
        return (NoteManifest(CommitAdvanced(target.end_offset)), ApplyManifest(target))

    def _applied(self, manifest: ManifestRef) -> Effects:
        if manifest != self.applying:
            raise InvariantViolation(f"{manifest} was applied, not {self.applying}")
        self.applying = None
        if self.cut_to < manifest.end_offset:
            self.applied = None
            return (ClearApplied(manifest), *self._offer_if_known())
        self.applied = manifest
        if self.held == manifest:
            self.complete = False
        return self._offer_if_known() or self._apply_next()

    def _apply_ended(self, event: ApplyAborted) -> Effects:
        self.applying = None
        if event.missing is None or self.leader_published != event.manifest:
            return self._offer_if_known()
        self.missing, self.in_flight = event.missing, None
        return (ReportMissing(event.manifest, event.missing),)

    def _damaged(self, event: ManifestDamaged) -> Effects:
        """A follower has it sent once more: with all that it holds, for a start would not know
        either. A leader that is the whole ISR begins anew, as after such a start.
        """
        manifest, busy = event.manifest, self.applying is not None or self.storing is not None
        if busy or manifest not in (self.held, self.leader_published):
            return ()
        if self.role is not ManifestRole.LEADER:
            self.leader_published = self._published_after_store = self.in_flight = None
            self._hold_nothing()
            self.lost = True
            return (MarkManifestLost(),)
        if not (event.alone and self.has_offered and self.held != self.applied):
            return ()
        self.replaces = manifest if manifest.leader_epoch == self.leader_epoch else None
        self.published, self.has_offered, self.lost, self.alone = None, False, True, True
        return (NoteManifest(ManifestLost()), *self._offer_if_known())

    def check_invariants(self) -> None:
        """Raises InvariantViolation for a state that must not exist."""
        leading, following = self.role is ManifestRole.LEADER, self.role is ManifestRole.FOLLOWER
        named = (self.held, self.applied)
        wrong = {
            "leader_published, but it does not follow": (
                self.leader_published is not None and not following
            ),
            "leader_published before the logs agreed": (
                self.leader_published is not None and not self.synced
            ),
            "lacks a record, but does not follow": self.missing is not None and not following,
            "pulls, but it does not follow": self.in_flight is not None and not following,
            "pulls in another epoch": (
                self.in_flight is not None and self.in_flight.leader_epoch != self.leader_epoch
            ),
            "offered without leading": self.has_offered and not leading,
            "published before it was offered": self.published is not None and not self.has_offered,
            "published what it does not have": (
                self.published is not None and self.published not in named
            ),
            "applies what nobody published": (
                self.has_offered and self.applying is not None and self.applying != self.published
            ),
            "offered while a base is made": self.has_offered and self.making_base,
            "complete for what it does not hold, or has applied": (
                self.complete and self.held in (None, self.applied)
            ),
        }
        broken = [name for name, is_so in wrong.items() if is_so]
        if broken:
            raise InvariantViolation(f"{'; '.join(broken)}: {self}")


def _covers(request: PullRequest, published: ManifestRef | None) -> bool:
    """The follower's log agreed with its leader's, and reached the manifest's end, when it sent
    ``request``.
    """
    return (
        published is not None and request.synced and request.log_end_offset >= published.end_offset
    )
