"""Events, effects and messages of :class:`kept.replication.manifests.ManifestCore`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kept.replication.events import (
    CommitKnown,
    ManifestApplied,
    ManifestHeld,
    ManifestLost,
    ManifestOffered,
)
from kept.storage.types import Generation


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest by its generation, which alone makes two equal. ``end_offset``: the rules' *b*."""

    generation: Generation
    end_offset: int = field(compare=False)

    @property
    def leader_epoch(self) -> int:
        """Of the leader that made it."""
        return self.generation.leader_epoch


# Messages between replicas: the bodies travel beside them.


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A follower asks the leader of ``leader_epoch``, and acknowledges ``held`` with it.

    ``synced``: a fetch in this epoch did not diverge; only then do ``applied`` and what the leader
    says of publication count. ``log_end_offset``: as it was when this was sent. ``has``: manifests
    whose bodies need not be sent.
    """

    replica_id: int
    broker_epoch: int
    leader_epoch: int
    number: int
    held: ManifestRef | None
    applied: ManifestRef | None
    synced: bool
    log_end_offset: int
    has: tuple[ManifestRef, ...]


@dataclass(frozen=True, slots=True)
class PullResponse:
    """``held``: the leader's newest; ``published``: its newest published in this epoch.

    ``bodies``: which of the two come with it.
    """

    held: ManifestRef | None
    published: ManifestRef | None
    bodies: tuple[ManifestRef, ...]


# Events.


@dataclass(frozen=True, slots=True)
class Leads:
    """This node leads from now on. ``unclean``: the controller's mark of the partition (rule 19).

    Follows ``Elected(awaits_offer=True)`` in the same turn. ``alone``: the ISR is this node; the
    event is repeated in the same epoch when that changes.
    """

    leader_epoch: int
    unclean: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Follows:
    """The image names another leader, or none, or only another ISR."""

    leader_epoch: int
    in_isr: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """``FollowerCore.agreed`` after an answer to a fetch in that epoch."""

    leader_epoch: int
    agreed: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """The log now ends there; ``log_start_offset``: where it starts, if all of it went."""

    log_end_offset: int
    log_start_offset: int = 0


@dataclass(frozen=True, slots=True)
class PullReceived:
    """A follower pulls from this leader; ``ManifestCore.pull_response`` makes the response.

    Raises FencedLeaderEpoch, UnknownLeaderEpoch, NotLeaderOrFollower.
    """

    request: PullRequest


@dataclass(frozen=True, slots=True)
class Pulled:
    """The leader answered; the bodies named are at hand."""

    request: PullRequest
    response: PullResponse


@dataclass(frozen=True, slots=True)
class PullFailed:
    """There will be no answer to that request."""

    request: PullRequest


@dataclass(frozen=True, slots=True)
class Stored:
    """:class:`Store` was done, durably."""

    held: ManifestRef | None


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """:class:`Store` was not done: what was held is still held."""


@dataclass(frozen=True, slots=True)
class PassDone:
    """A pass made ``manifest``, begun in ``leader_epoch`` when ``based_on`` was applied."""

    manifest: ManifestRef
    leader_epoch: int
    based_on: ManifestRef | None


@dataclass(frozen=True, slots=True)
class Published:
    """The leader core says so (``ManifestPublished``)."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Applied:
    """All segments of the manifest are in place, and the mark says so, durably."""

    manifest: ManifestRef


@dataclass(frozen=True, slots=True)
class ApplyEnded:
    """Nothing was put into place. ``missing``: a survivor that is not in the log."""

    manifest: ManifestRef
    missing: int | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """Try again what failed."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """The file of a manifest cannot be read, or is gone.

    ``alone``: this leader is the whole ISR, and has asked for nobody else: whoever acknowledged
    what it holds is no member, and whoever joins must have applied what comes instead.
    """

    manifest: ManifestRef
    alone: bool = False


@dataclass(frozen=True, slots=True)
class BaseMade:
    """The base generation is durable, and counts as applied (rule 19)."""

    manifest: ManifestRef


Event = (
    Leads
    | Follows
    | Synced
    | Cut
    | PullReceived
    | Pulled
    | PullFailed
    | Stored
    | StoreFailed
    | PassDone
    | Published
    | Applied
    | ApplyEnded
    | Retried
    | Damaged
    | BaseMade
)


# Effects.


@dataclass(frozen=True, slots=True)
class NoteManifest:
    """For the :class:`kept.replication.partition_core.PartitionCore` that this is a part of, at
    once; no shell sees it.
    """

    event: ManifestOffered | ManifestLost | ManifestHeld | ManifestApplied | CommitKnown


@dataclass(frozen=True, slots=True)
class AnnounceManifest:
    """This leader has something for its followers: tell them to pull."""


@dataclass(frozen=True, slots=True)
class Store:
    """Make ``held`` durable, and keep the body of ``published`` beside it.

    Their bodies are in the response, from a pass, or here already. ``published`` is written first,
    then ``held`` by one rename: a crash leaves what was held before or this. :class:`Stored`
    follows.
    """

    held: ManifestRef | None
    published: ManifestRef | None


@dataclass(frozen=True, slots=True)
class Discard:
    """Throw away the result of a pass."""

    manifest: ManifestRef


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring the log to this manifest; :class:`Applied` or :class:`ApplyEnded` follows.

    The high watermark, raised by the effect before this one, is checkpointed first (rule 12).
    """

    manifest: ManifestRef


@dataclass(frozen=True, slots=True)
class CancelApply:
    """Stop it if no segment is in place yet, else finish it; the answer is still owed."""

    manifest: ManifestRef


@dataclass(frozen=True, slots=True)
class MakeBase:
    """Forget all manifests; make durable one in which every record below the log end survives,
    with ``clean_to`` at the log start. :class:`BaseMade` follows.

    ``replaces``: one of the same epoch, that must not have the base's name.
    """

    leader_epoch: int
    replaces: ManifestRef | None = None


@dataclass(frozen=True, slots=True)
class ClearApplied:
    """The log was cut below the end of ``manifest``: durably, nothing is applied (rule 19)."""

    manifest: ManifestRef


@dataclass(frozen=True, slots=True)
class MarkLost:
    """Durably, nothing is applied, and what is held is not known: the leader is to be asked."""


@dataclass(frozen=True, slots=True)
class ReportMissing:
    """A record that the leader has is not here: corruption, or the trace of an unclean election."""

    manifest: ManifestRef
    offset: int


@dataclass(frozen=True, slots=True)
class CutLog:
    """Cut the log there and fetch again; :class:`Cut` follows."""

    offset: int


Effect = (
    NoteManifest
    | AnnounceManifest
    | Store
    | Discard
    | Apply
    | CancelApply
    | MakeBase
    | ClearApplied
    | MarkLost
    | ReportMissing
    | CutLog
)
Effects = tuple[Effect, ...]
